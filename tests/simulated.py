"""A simulated corpus of any size, real but for its tokens.

Everything but the content is real: the manifest with all shards, the full block table, and for every shard an index of
document lengths and a token file of full size. The token files are sparse (they read as token 0) and the shards are
hard links to a few distinct ones, so 2T tokens need 150 MB of disk.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from corpora import word_tokenizer

from fsdp_pretrain.data.corpus.shards import Shard, encode_index
from fsdp_pretrain.data.corpus.writing import BLOCK_TOKENS, ShardBlocks, write_corpus
from fsdp_pretrain.data.text.tokenizer import EOD

_DTYPE = np.dtype("<u2")
_VARIANTS = 64
_MEDIAN, _SPREAD = 450, 1.26
"""Of the log-normal document lengths; the mean is about 1,000 tokens."""


def simulated_corpus(directory: Path, tokens: int, shards: int) -> None:
    """Write a corpus of about `tokens` tokens in `shards` shards, sparse."""
    (directory / "shards").mkdir(parents=True)
    variants = [
        _variant(directory / f"shards/variant-{number}", number, tokens // shards)
        for number in range(min(_VARIANTS, shards))
    ]
    entries = []
    for number in range(shards):
        entry = variants[number % len(variants)]
        for suffix in (".bin", ".idx"):
            os.link(directory / f"shards/{entry['name']}{suffix}", directory / f"shards/shard-{number:05d}{suffix}")
        entries.append({**entry, "name": f"shard-{number:05d}"})
    tokenizer = word_tokenizer(directory / "tokenizer.json", {"w0": 0, EOD: 1})  # sparse files hold token 0
    write_corpus(directory, tokenizer, entries, _DTYPE, {})


def _variant(prefix: Path, seed: int, tokens: int) -> dict[str, Any]:
    """One shard: its manifest entry, with its blocks."""
    rng = np.random.default_rng(seed)
    lengths = np.maximum(1, rng.lognormal(np.log(_MEDIAN), _SPREAD, 2 * tokens // _MEDIAN)).astype(np.int64)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), tokens)) + 1]
    total, index = int(lengths.sum()), encode_index(lengths.astype("<i4"), _DTYPE)
    with prefix.with_suffix(".bin").open("wb") as file:
        file.truncate(total * _DTYPE.itemsize)
    prefix.with_suffix(".idx").write_bytes(index)
    return {
        "name": prefix.name,
        "documents": len(lengths),
        "tokens": total,
        "bytes": total * _DTYPE.itemsize,
        "bin_xxh3": "0" * 32,  # zeros, never compared
        "idx_xxh3": xxhash.xxh3_128(index).hexdigest(),
        "blocks": ShardBlocks.of(Shard(prefix), BLOCK_TOKENS, 0, pairs=False).to_json(),
    }
