"""Reads one document of a corpus, for `fsdp-data inspect`."""

from __future__ import annotations

import numpy as np

from fsdp_pretrain.data.corpus.corpus import Corpus
from fsdp_pretrain.errors import DataError

from .report import decode_any


def document(corpus: Corpus, wanted: int) -> tuple[str, str]:
    """The place and the text of document number `wanted`, counted over all shards. Only its block is read.

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
    ids = list[int]()  # a document that is in no block is empty
    for block in np.flatnonzero(inside).tolist():
        lengths, at = corpus.lengths(block).astype(np.int64), number - int(table[block, 1])
        begin = int(lengths[:at].sum())
        ids = corpus.tokens(block, begin, begin + int(lengths[at])).tolist()
    place = f"{shards[index].name}, document {number}: {len(ids)} tokens"
    return place, decode_any(ids, corpus.tokenizer())
