"""The texts that must not be in a training corpus, as hashes of their n-grams: documents and tasks of evaluation.

A text is divided into passages of about 64 n-grams. An n-gram in several texts counts for the first of them. Memory: 20
to 30 bytes per distinct n-gram, in files that worker processes share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fsdp_pretrain.data.text.ngrams import Hashes, Numbers, ngram_hashes

PASSAGE_GRAMS = 64
LEAST_GRAMS = 6
"""A passage needs half of its n-grams, and so many (of a shorter text: all of them), to count as found: 13 words."""
_BATCH_CHARACTERS = 1_000_000
"""Texts are hashed together up to this size."""
_FILTER_BITS = 32
"""Bits of the filter per n-gram, at least: a hash that is not protected passes with a probability of 3% or less."""


@dataclass(frozen=True)
class ProtectedTexts:
    """The n-grams of all texts that are protected."""

    hashes: Hashes  # uint64 [n-grams], sorted
    passage: npt.NDArray[np.int32]  # int32 [n-grams], the passage of each
    # uint8 [2^k], bits: whether a hash with these first k + 3 bits is among `hashes`. A fast filter
    likely: npt.NDArray[np.uint8]
    needed: Numbers  # int64 [passages], n-grams that must be found
    text: Numbers  # int64 [passages], the text of each
    sizes: Numbers  # int64 [texts], distinct n-grams of each that are in no earlier text
    grams: Numbers  # int64 [texts], all n-grams of each; 0 for a text of fewer than 8 words

    def find(self, hashes: Hashes) -> tuple[Numbers, Numbers]:
        """Which of some hashes are protected: their places, and their numbers among the n-grams."""
        byte, bit = _bits(hashes, len(self.likely))
        places = np.flatnonzero(self.likely[byte] & bit)
        numbers = np.searchsorted(self.hashes, hashes[places])
        found = self.hashes[np.minimum(numbers, len(self.hashes) - 1)] == hashes[places]
        return places[found], numbers[found]

    def save(self, folder: Path) -> None:
        """Write the arrays to a folder."""
        for field in fields(self):
            np.save(folder / f"{field.name}.npy", getattr(self, field.name))

    @classmethod
    def open(cls, folder: Path) -> ProtectedTexts:
        """The arrays of a folder, mapped to memory that processes share."""
        return cls(*(np.asarray(np.load(folder / f"{field.name}.npy", mmap_mode="r")) for field in fields(cls)))


@dataclass(frozen=True)
class Protection:
    """Protected texts, and what they are."""

    texts: ProtectedTexts
    sources: list[tuple[str, int]]  # where the texts come from, in order, and how many
    missing: str = ""  # what is not protected though the run is evaluated on it, as text; empty if all is

    def name(self, text: int) -> str:
        """The place of a text."""
        for source, count in self.sources:
            if text < count:
                return f"{source}, document {text}"
            text -= count
        raise IndexError(text)

    def __str__(self) -> str:
        counts = [f"{count:_} documents of {source}" for source, count in self.sources]
        short = int(np.count_nonzero(self.texts.grams == 0))
        counts += [f"{short:_} of them too short to compare"] if short else []
        return "; ".join([", ".join(counts) or "nothing", *([self.missing] if self.missing else [])])


def protect(texts: Iterable[str]) -> ProtectedTexts:
    """Protect texts."""
    total, hashes_of, texts_of = 0, [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for batch in _batches(texts):
        hashes, text = ngram_hashes(batch)
        hashes_of.append(hashes)
        texts_of.append(text + total)
        total += len(batch)
    hashes, text = np.concatenate(hashes_of), np.concatenate(texts_of)
    distinct, first = np.unique(hashes, return_index=True)
    in_order = np.argsort(first)
    owner = text[first[in_order]]
    sizes = np.bincount(owner, minlength=total)
    count = np.where(sizes > 0, np.maximum(1, sizes // PASSAGE_GRAMS), 0)
    place = np.arange(len(owner)) - (np.cumsum(sizes) - sizes)[owner]
    passage = np.empty(len(owner), dtype=np.int32)
    passage[in_order] = (np.cumsum(count) - count)[owner] + place * count[owner] // sizes[owner]
    passages = np.bincount(passage, minlength=int(count.sum()))
    text_of = np.repeat(np.arange(total), count)
    grams = np.bincount(text, minlength=total)
    needed = np.maximum((passages + 1) // 2, np.minimum(grams, LEAST_GRAMS)[text_of])
    likely = np.zeros(1 << max(16, (_FILTER_BITS * len(distinct) // 8).bit_length()), dtype=np.uint8)
    np.bitwise_or.at(likely, *_bits(distinct, len(likely)))
    return ProtectedTexts(distinct, passage, likely, needed, text_of, sizes, grams)


def _bits(hashes: Hashes, size: int) -> tuple[Hashes, npt.NDArray[np.uint8]]:
    """Where each hash is in a filter of `size` bytes: the number of its byte, and its bit in it."""
    first = hashes >> np.uint64(62 - size.bit_length())
    return first >> np.uint64(3), np.uint8(1) << (first & np.uint64(7)).astype(np.uint8)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch, size = list[str](), 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
