"""Which documents are held out: a function of their text alone.

A document is held out if the 64-bit xxh3 of its text (UTF-8, after repair; of a prompt with an answer, the prompt) is
below the share of 2^64. So equal texts are treated the same, whatever the file, the order or the number of parts, and a
larger share includes all documents of a smaller one. xxh3's values have been fixed since xxHash 0.8.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

import xxhash

_SPACE = 1 << 64


def text_digest(text: str) -> int:
    """The hash that decides, from 0 to 2^64 - 1."""
    return xxhash.xxh3_64_intdigest(text.encode())


def parse_percent(text: str) -> Fraction:
    """The exact share in a text such as `0.1%`. Raises ValueError."""
    match = re.fullmatch(r"\s*([0-9]{1,3}(?:\.[0-9]{1,12})?)\s*%\s*", text)
    if match is None or not 0 < Fraction(match[1]) < 100:
        raise ValueError(f"{text!r} is not a share such as 0.1%")
    return Fraction(match[1]) / 100


@dataclass(frozen=True)
class Holdout:
    """A share of all documents; `str` gives it as it was written, such as `0.1%`."""

    written: str
    bound: int
    """Digests below it are held out."""

    @classmethod
    def parse(cls, text: str) -> Holdout:
        """The share in a text such as `0.1%`. Raises ValueError."""
        return cls(text.replace(" ", ""), int(parse_percent(text) * _SPACE))

    def __str__(self) -> str:
        return self.written

    def takes(self, text: str) -> bool:
        """Whether a document is held out."""
        return text_digest(text) < self.bound
