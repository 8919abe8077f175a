"""What the corpora of a run say about separators: how many there are, and what else begins or ends documents. No torch.

From the manifests, and a sample of the stored documents.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from data.corpus.corpus import Corpus
from data.packing.opening import cache_use
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.errors import DataError

_BLOCKS, _DOCUMENTS, _TOKENS = 16, 256, 4096
"""Looked at in each corpus: documents, in that many blocks; of each so many tokens, and the last one."""
_NEARLY_ALL = 0.9


@dataclass(frozen=True)
class Contract:
    """Separators as the manifests of the sources declare them.

    Attributes:
        least, most: separators per token of the sources, the lowest and the highest.
        first, last: tokens that begin and end nearly all documents of a source, by their ids; carried separators do
            not count.
        counts: int64 [vocabulary], how often each token occurs in the documents looked at.
    """

    least: float
    most: float
    first: frozenset[int]
    last: frozenset[int]
    counts: npt.NDArray[np.int64]

    def bits(self, tokens: Collection[int]) -> float:
        """Bits of tokens under a unigram model of the documents looked at, add-one smoothed."""
        shares = (self.counts + 1) / (self.counts + 1).sum()
        return float(-np.log2(shares[np.fromiter(tokens, dtype=np.int64)]).sum())


def read_contract(config: Config, vocabulary: int) -> Contract | None:
    """The contract of a run's sources, prompts with answers left out; None if a corpus cannot be read here."""
    rates: list[float] = []
    first, last = set[int](), set[int]()
    counts = np.zeros(vocabulary, dtype=np.int64)
    for source in config.data.sources:
        try:
            corpus = Corpus(source.path, source.mirror, cache=cache_use(config))
            manifest = corpus.manifest
            if manifest.pairs:
                continue
            documents, ends = _sample(corpus)
        except DataError:
            return None
        rates.append(manifest.documents / (manifest.tokens + manifest.documents * (1 - manifest.carried)))
        for tokens, found in (([int(ids[0]) for ids in documents], first), (ends, last)):
            token, times = Counter(tokens).most_common(1)[0]
            if times >= _NEARLY_ALL * len(tokens):
                found.add(token)
        whole = np.concatenate(documents).astype(np.int64)
        counts += np.bincount(whole[(whole >= 0) & (whole < vocabulary)], minlength=vocabulary)
    return Contract(min(rates), max(rates), frozenset(first), frozenset(last), counts) if rates else None


def _sample(corpus: Corpus) -> tuple[list[npt.NDArray[np.int_]], list[int]]:
    """The first tokens, and the last one, of documents spread over the corpus, without carried separators and empty
    documents. Raises DataError."""
    manifest, begins, ends = corpus.manifest, list[npt.NDArray[np.int_]](), list[int]()
    numbers = range(0, len(corpus.blocks), -(-len(corpus.blocks) // _BLOCKS))
    for number in numbers:
        lengths = corpus.lengths(number).astype(np.int64)
        size, starts = len(lengths), np.cumsum(lengths) - lengths + (manifest.separators == "leading")
        for document in range(0, size, max(1, size * len(numbers) // _DOCUMENTS)):
            start = int(starts[document])
            stop = start + int(lengths[document]) - manifest.carried
            if stop > start:
                begins.append(corpus.tokens(number, start, min(stop, start + _TOKENS)))
                ends.append(int(corpus.tokens(number, stop - 1, stop)[0]))
    return begins, ends
