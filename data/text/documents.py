"""Measures of single documents: duplicates by hash, degenerate text, and whether a tokenizer reproduces the ids.

The thresholds let all real text pass (Python, C, JavaScript, JSON, Markdown, English prose, German and Japanese
manuals; two real and three trained tokenizers); the figures are in `docs/data.md`.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from .tokenizer import Tokenizer

Tokens = npt.NDArray[np.integer]
Indices = npt.NDArray[np.int64]

DUPLICATE_TOKENS = 16
"""Shorter documents repeat naturally and are not compared."""
LONG_TOKENS = 512
"""Documents of at least this length are checked for degenerate text."""
DEGENERATE_SHARE, DEGENERATE_REPEATS, DEGENERATE_BITS = 0.5, 0.98, 0.5
"""Share of one token; share of repeated 13-grams; compressed bits per token. Real text stayed below 0.45, below 0.965,
and above 0.75."""
FOREIGN_AGREEMENT = 0.97
"""Least median agreement of a file's sampled documents with their re-encoding. Right tokenizer: 1; wrong: to 0.95."""
SAMPLE_TOKENS = 256
"""Tokens of a document that are encoded again."""
_WINDOW, _ANCHOR = 192, 8
_JUDGED = 4096
_GRAM = 13


def document_hashes(tokens: Tokens, starts: Indices, ends: Indices) -> npt.NDArray[np.uint64]:
    """xxh3-64 of each document's tokens, uint64 [documents]; 0 for those shorter than `DUPLICATE_TOKENS`. The
    hash is of int32, whatever the dtype of the tokens, so that documents of several corpora can be compared."""
    hashes = np.zeros(len(starts), dtype=np.uint64)
    long = np.flatnonzero(ends - starts >= DUPLICATE_TOKENS)
    if not len(long):
        return hashes
    ids, digest = np.ascontiguousarray(tokens, dtype="<i4"), xxhash.xxh3_64_intdigest
    view, size = ids.view(np.uint8).data, ids.dtype.itemsize
    places = zip((starts[long] * size).tolist(), (ends[long] * size).tolist(), strict=True)
    hashes[long] = np.fromiter((digest(view[begin:end]) for begin, end in places), np.uint64, len(long))
    return hashes


def repeated(hashes: Sequence[npt.NDArray[np.uint64]]) -> tuple[int, npt.NDArray[np.uint64]]:
    """The number of documents that repeat an earlier one, and the hashes that occur more than once.

    Works in 16 parts, so that a second copy of all hashes is never needed at once.
    """
    extra, values = 0, []
    for part in range(16):
        hashes_of_part = np.sort(np.concatenate([h[(h >> np.uint64(60)) == part] for h in hashes]))
        repeats = hashes_of_part[1:][(hashes_of_part[1:] == hashes_of_part[:-1]) & (hashes_of_part[1:] != 0)]
        extra += len(repeats)
        values.append(np.unique(repeats))
    return extra, np.concatenate(values)


def suspects(tokens: Tokens, starts: Indices, ends: Indices) -> Indices:
    """Documents that might be degenerate, judged by two windows of 192 tokens: a fast filter before `degenerate`.

    A document is suspect if the first 8 tokens of each window recur in it (so a passage of up to 184 tokens repeats),
    or if one token has 4 of 10 places.

    Returns:
        Numbers of documents, int64 [suspects].
    """
    long = np.flatnonzero(ends - starts >= LONG_TOKENS)
    if not len(long):
        return long
    lengths = ends[long] - starts[long]
    windows = np.lib.stride_tricks.sliding_window_view(tokens, _WINDOW)
    first, second = windows[starts[long] + lengths // 8], windows[starts[long] + lengths * 5 // 8]
    both = np.flatnonzero(_recurs(first))
    suspect = np.zeros(len(long), dtype=bool)
    suspect[both] = _recurs(second[both])
    places = np.sort(np.concatenate((first[:, ::6], second[:, ::6]), axis=1), axis=1)
    run = places.shape[1] * 2 // 5
    suspect |= (places[:, run:] == places[:, :-run]).any(axis=1)
    return long[suspect]


def _recurs(windows: Tokens) -> npt.NDArray[np.bool_]:
    """Whether the first `_ANCHOR` tokens of each window recur in it; bool [windows]."""
    shifts = _WINDOW - _ANCHOR
    hit = windows[:, 1 : 1 + shifts] == windows[:, :1]
    for place in range(1, _ANCHOR):
        hit &= windows[:, 1 + place : 1 + place + shifts] == windows[:, place : place + 1]
    recurs: npt.NDArray[np.bool_] = hit.any(axis=1)
    return recurs


def degenerate(document: Tokens) -> str:
    """Why a document is degenerate; empty if it is not. Long documents are judged by four parts of 4096 tokens."""
    if len(document) > 4 * _JUDGED:
        at = np.linspace(0, len(document) - _JUDGED, 4).astype(np.int64)
        document = np.concatenate([document[begin : begin + _JUDGED] for begin in at])
    values, counts = np.unique(document, return_counts=True)
    share = counts.max() / len(document)
    grams = len(document) - _GRAM + 1
    keys = document.astype(np.uint64)
    mixed = np.zeros(grams, dtype=np.uint64)
    for place in range(_GRAM):
        mixed = mixed * np.uint64(0x9E3779B97F4A7C15) + keys[place : place + grams] + np.uint64(1)
    repeats = 1 - len(np.unique(mixed)) / grams
    bits = len(zlib.compress(document.tobytes(), 1)) * 8 / len(document)
    if share < DEGENERATE_SHARE and repeats < DEGENERATE_REPEATS and bits > DEGENERATE_BITS:
        return ""
    return (
        f"{share:.1%} is token {int(values[counts.argmax()])}, {repeats:.1%} of its {_GRAM}-grams repeat, "
        f"{bits:.2f} bits per token compressed"
    )


def agreements(samples: Iterable[list[int]], tokenizer: Tokenizer) -> list[float]:
    """Decode and encode token lists; returns for each the share of ids that come back (as a multiset).

    Lists are left out if the tokenizer is lossy, so that it does not reproduce its own output either.
    """
    given = list(samples)
    once = tokenizer.encode([tokenizer.decode(ids) for ids in given])
    twice = tokenizer.encode([tokenizer.decode(ids) for ids in once])
    return [
        _agreement(ids, again)
        for ids, again, third in zip(given, once, twice, strict=True)
        if _agreement(again, third) > 0.99
    ]


def _agreement(one: list[int], other: list[int]) -> float:
    return (Counter(one) & Counter(other)).total() / max(len(one), len(other), 1)
