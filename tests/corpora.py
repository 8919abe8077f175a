"""Corpora of random ids, with a tokenizer of whole words to match."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from fsdp_pretrain.data.corpus.shards import ShardWriter, token_dtype
from fsdp_pretrain.data.corpus.writing import write_corpus
from fsdp_pretrain.data.text.tokenizer import EOD, Tokenizer

_VOCABULARY = 32_000
_SHARDS = 4


def word_tokenizer(path: Path, vocabulary: dict[str, int]) -> Tokenizer:
    """A tokenizer of whole words, one of which is the separator `EOD`, written to `path`."""
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=min(set(vocabulary) - {EOD})))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # splits the separator if a text contains it
    model.add_special_tokens([EOD])
    model.save(str(path))
    return Tokenizer.load(path)


def synthetic_corpus(directory: Path, tokens: int, *, block_tokens: int) -> None:
    """A corpus of random ids in documents of log-normal length, median 400, with a word-level tokenizer to match."""
    words = {f"w{number}": number for number in range(1, _VOCABULARY)}
    (directory / "shards").mkdir()
    tokenizer = word_tokenizer(directory / "words.json", {EOD: 0, **words})
    rng, dtype, entries = np.random.default_rng(1), token_dtype(_VOCABULARY), []
    for number in range(_SHARDS):
        with ShardWriter(directory / "shards" / f"shard-{number}", dtype) as writer:
            written = 0
            while written < tokens // _SHARDS:
                length = max(1, int(rng.lognormal(np.log(400), 1.2)))
                writer.append(rng.integers(1, _VOCABULARY, length).astype(dtype))
                written += length
            entries.append(writer.finish())
    write_corpus(directory, tokenizer, entries, dtype, {}, block_tokens=block_tokens)


def random_corpus(
    path: Path, tokenizer: Tokenizer, shards: Sequence[Sequence[int]], *, pairs: bool = False, **options: Any
) -> Path:
    """A corpus of random documents with these lengths, by shard; `options` are those of `write_corpus`."""
    (path / "shards").mkdir(parents=True)
    dtype, rng, entries = np.dtype("<u2"), np.random.default_rng(1), []
    words = np.setdiff1d(np.arange(tokenizer.vocab_size), [tokenizer.eod, *tokenizer.specials]).astype(dtype)
    for number, lengths in enumerate(shards):
        with ShardWriter(path / f"shards/shard-{number}", dtype) as writer:
            writer.extend(rng.choice(words, sum(lengths)), lengths)
            entries.append(writer.finish())
    write_corpus(path, tokenizer, entries, dtype, {}, pairs=pairs, **options)
    return path
