"""One document of a corpus, for `fsdp-data inspect`."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from data.corpus.cached import CacheUse
from data.corpus.corpus import Corpus
from data.corpus.fetched import scratch_directory
from data.corpus.manifest import CorpusManifest
from fsdp_pretrain.errors import DataError
from fsdp_pretrain.remote import Location, Url

from .report import decode_any


@dataclass(frozen=True)
class ShownDocument:
    """A document: its shard, number there, tokens and text."""

    shard: str
    number: int
    tokens: int
    text: str


def document(place: Location, manifest: CorpusManifest, wanted: int) -> ShownDocument:
    """Document `wanted`, counted over all shards. Of a corpus by URL only its block is fetched.

    Raises:
        DataError: there is no such document, or the corpus is damaged; RemoteError.
    """
    ends = np.cumsum([shard.documents for shard in manifest.shards])
    documents = int(ends[-1]) if len(ends) else 0
    if not 0 <= wanted < documents:
        raise DataError(f"there is no document {wanted}: the corpus has {documents}")
    index = int(ends.searchsorted(wanted, "right"))
    shard = manifest.shards[index]
    number = wanted - (int(ends[index]) - shard.documents)
    with ExitStack() as stack:
        if isinstance(place, Url):
            room = stack.enter_context(scratch_directory(None))
            corpus = Corpus(place, cache=CacheUse(room, 1 << 62))
            tokens = _from_block(corpus, index, number)
        else:
            corpus = Corpus(place)
            tokens = corpus.shard(index).document(number)
        text = decode_any(tokens.tolist(), corpus.tokenizer())
        return ShownDocument(shard.name, number, len(tokens), text)


def _from_block(corpus: Corpus, shard: int, number: int) -> npt.NDArray[Any]:
    """A document from the block that holds it; those of no block are empty."""
    table = corpus.blocks
    inside = (table[:, 0] == shard) & (table[:, 1] <= number) & (number < table[:, 1] + table[:, 2])
    for row in np.flatnonzero(inside).tolist():
        lengths, at = corpus.lengths(row).astype(np.int64), number - int(table[row, 1])
        begin = int(lengths[:at].sum())
        return corpus.tokens(row, begin, begin + int(lengths[at]))
    return np.zeros(0, dtype=np.dtype(corpus.manifest.dtype))
