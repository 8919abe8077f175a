"""Hashes of the word n-grams of texts, equal whatever the case, accents, white space and punctuation.

A word is a run of letters, digits and marks; a character of a script without spaces (Chinese, Japanese, Thai, ...) is a
word of its own. Everything is vectorised: about 120 MB of text per second and core.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]

GRAM_WORDS = 8
"""Words of an n-gram: a power of two, see `ngram_hashes`."""
_BASE = 0x9E3779B97F4A7C15
_PLANES = 0x32000
"""No letter has a higher code."""
_WITHOUT_SPACES = ((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x2E80, 0xABFF), (0xF900, 0xFAFF))
_IDEOGRAPHS = 0x20000
"""All letters from here on are ideographs."""


def ngram_hashes(texts: Sequence[str]) -> tuple[Hashes, Numbers]:
    """Hashes of all n-grams of texts, in order, and the number of the text that each is in: uint64, int64 [n-grams].

    A word is hashed as a polynomial of its characters, an n-gram as one of its words, both modulo 2^64.
    """
    composed = [unicodedata.normalize("NFC", text) for text in texts]
    joined = "\n".join(["", *composed, ""]).encode("utf-32-le", "surrogatepass")
    values = _values()[np.frombuffer(joined, np.uint32)]
    starts, ends = _words(values)
    powers, inverse = _powers(1 << len(values).bit_length())
    sums = np.cumsum(values * powers[: len(values)])
    hashes = _mixed((sums[ends] - sums[starts - 1]) * inverse[starts])  # characters at starts - 1 may be another word's
    words = np.diff(np.searchsorted(starts, np.cumsum([len(text) + 1 for text in composed])), prepend=0)
    number = np.repeat(np.arange(len(texts)), words)
    for width in (1, 2, 4):
        hashes = hashes[:-width] * np.uint64(pow(_BASE, width, 1 << 64)) + hashes[width:]
    inside = number[: len(hashes)] == number[GRAM_WORDS - 1 :]
    return _mixed(hashes[inside]), number[: len(hashes)][inside]


def _words(values: Hashes) -> tuple[Numbers, Numbers]:
    """First and last place of every word. The first and the last character are no letters."""
    letter, alone = values != 0, (values & np.uint64(1)).astype(bool)
    joins = letter[1:] & letter[:-1] & ~(alone[1:] | alone[:-1])  # places 1, 2, ...: continues a word
    return np.flatnonzero(letter[1:-1] & ~joins[:-1]) + 1, np.flatnonzero(letter[1:-1] & ~joins[1:]) + 1


@lru_cache(maxsize=1)
def _values() -> Hashes:
    """A number for every character, uint64 [codes]: 0 between words, odd if it is a word of its own."""
    folded = np.zeros(0x110000, dtype=np.uint64)
    for code in range(_PLANES):
        character = chr(code)
        if character.isalnum() or unicodedata.category(character)[0] == "M":
            folded[code] = ord(unicodedata.normalize("NFKD", character)[0].casefold()[0])
    values = _mixed(folded * np.uint64(_BASE)) & ~np.uint64(1)
    for first, last in _WITHOUT_SPACES:
        values[first : last + 1] |= np.uint64(1)
    values[_IDEOGRAPHS:] |= np.uint64(1)
    values[folded == 0] = 0
    return values


@lru_cache(maxsize=4)
def _powers(count: int) -> tuple[Hashes, Hashes]:
    """The first powers of the base and of its inverse, modulo 2^64."""
    rows = []
    for base in (_BASE, pow(_BASE, -1, 1 << 64)):
        factors = np.full(count, base, dtype=np.uint64)
        factors[0] = 1
        rows.append(np.cumprod(factors, dtype=np.uint64))
    return rows[0], rows[1]


def _mixed(values: Hashes) -> Hashes:
    """Numbers with all bits spread, one to one (the finalizer of MurmurHash3)."""
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        values = (values ^ (values >> np.uint64(33))) * np.uint64(factor)
    return values ^ (values >> np.uint64(33))
