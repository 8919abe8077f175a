"""A corpus of prompts with answers as an endless stream of samples, each of a few whole pairs.

Documents 2k and 2k + 1 of a shard are a prompt and its answer, as the manifest declares. The stream is constructed as
in `source.py`, with pairs in place of tokens: blocks and the pairs inside each block are permuted, epochs are
concatenated, and a window is the `slots` pairs of a sample. So every pair is in exactly one sample of an epoch.
"""

from __future__ import annotations

import numpy as np

from fsdp_pretrain.data.corpus.corpus import Corpus
from fsdp_pretrain.data.corpus.hashing import key_of, permutation
from fsdp_pretrain.errors import DataError

from .source import Ints, SourceStream, Span


class Pairs(SourceStream):
    """One corpus of prompts with answers: `slots` pairs in a sample, each in `slot` tokens of it. Raises DataError if
    the documents are not all in pairs."""

    def __init__(self, name: str, corpus: Corpus, seed: int, lanes: int, *, slots: int, slot: int) -> None:
        super().__init__(name, corpus, slots, seed, lanes)
        self._slot = slot
        documents = corpus.blocks[:, 2]
        if (documents % 2 != 0).any() or (documents != corpus.blocks[:, 3]).any():
            raise DataError(
                f"{corpus.directory} declares prompts with answers, but its documents are not in pairs of texts",
                effect="answers would follow the wrong prompts",
                remedy="run `fsdp-data prepare` with --answer-field again",
            )
        self.block_lengths = documents // 2
        self.epoch_length = int(self.block_lengths.sum())

    def _order(self, epoch: int, block: int, lengths: Ints) -> Ints:
        pairs = permutation(key_of(self.seed, self.name, epoch, block), len(lengths) // 2)
        return np.stack((2 * pairs, 2 * pairs + 1), axis=1).reshape(-1)

    def blocks_of(self, source_index: int, count: int, *, begin: int = 0) -> list[int]:
        """See `SourceStream.blocks_of`. The stream is counted in pairs, and samples are not cut."""
        return super().blocks_of(source_index, self.length)

    def fill(self, source_index: int, row: Ints, spans: list[Span] | None = None, *, begin: int = 0) -> list[int]:
        """Write a sample: each pair at the start of its slot, prompt and answer each followed by a separator.

        A pair that is too long for a slot is cut: first the prompt, at its end and down to a quarter of the slot, then
        the answer. Places without text and those of separators are not written. `begin` must be 0.

        Returns:
            Positions of the separators, ascending.
        """
        epoch, offset = self.start_of(source_index)
        order, ends = self._epoch(epoch)
        separators: list[int] = []
        for begin in range(0, self.length * self._slot, self._slot):
            if offset == self.epoch_length:
                epoch, offset = epoch + 1, 0
                order, ends = self._epoch(epoch)
            rank = int(ends.searchsorted(offset, "right"))
            block = self._block(epoch, int(order[rank]))
            first = 2 * (offset - (int(ends[rank]) - block.length))
            stops = block.ends[first : first + 2]
            sizes = np.diff(stops, prepend=block.ends[first - 1] if first else 0) - 1
            answer = int(sizes[1])
            prompt = min(int(sizes[0]), max(self._slot // 4, self._slot - answer - 2))
            answer = min(answer, self._slot - prompt - 2)
            at = begin
            for document, size in ((first, prompt), (first + 1, answer)):
                start, _ = block.text(document)
                self.corpus.copy(block.number, [(at, start, start + size)], row)
                if spans is not None:
                    spans.append(Span(block, document, at, start, start + size))
                at += size + 1
                separators.append(at - 1)
            offset += 1
        return separators
