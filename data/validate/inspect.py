"""What `fsdp-data inspect` shows: a corpus, or one of its documents."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data.corpus.corpus import Corpus
from fsdp_pretrain.errors import DataError

from .report import decode_any


@dataclass(frozen=True)
class ShownDocument:
    """A document: its shard, number there, tokens and text."""

    shard: str
    number: int
    tokens: int
    text: str


def document(corpus: Corpus, wanted: int) -> ShownDocument:
    """Document `wanted`, counted over all shards; only its block is read.

    Raises:
        DataError: there is no such document, or the corpus is damaged.
    """
    shards, table = corpus.manifest.shards, corpus.blocks
    ends = np.cumsum([shard.documents for shard in shards])
    if not 0 <= wanted < sum(shard.documents for shard in shards):
        raise DataError(f"there is no document {wanted}: the corpus has {sum(shard.documents for shard in shards)}")
    index = int(ends.searchsorted(wanted, "right"))
    number = wanted - (int(ends[index]) - shards[index].documents)
    inside = (table[:, 0] == index) & (table[:, 1] <= number) & (number < table[:, 1] + table[:, 2])
    ids = list[int]()  # a document of no block is empty
    for block in np.flatnonzero(inside).tolist():
        lengths, at = corpus.lengths(block).astype(np.int64), number - int(table[block, 1])
        begin = int(lengths[:at].sum())
        ids = corpus.tokens(block, begin, begin + int(lengths[at])).tolist()
    return ShownDocument(shards[index].name, number, len(ids), decode_any(ids, corpus.tokenizer()))
