"""Time the packer: `fsdp-data bench [CORPUS]`, on a given corpus and filesystem or on a synthetic one.

One process, one thread. A first pass over the corpus warms the page cache, so that the result does not depend on the
disk; `--cold` leaves it out, which shows what a training process sees at first.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import tokenizers

from data.corpus.cached import CacheUse
from data.corpus.corpus import BLOCK_TOKENS, write_corpus
from data.corpus.fetched import require_room, scratch_directory
from data.corpus.shards import ShardWriter, token_dtype
from data.packing.packer import Packer
from data.text.tokenizer import EOD, Tokenizer
from fsdp_pretrain.remote import Location, Url

_VOCABULARY = 32_000
_SHARDS = 4


def bench(
    corpus: Location | None,
    *,
    tokens: int,
    sequence_length: int,
    batch: int,
    seconds: float,
    warm: bool,
    scratch: Path | None = None,
) -> dict[str, float]:
    """Time opening, random samples and sequential packing in three rounds of `seconds`, in batches of `batch` samples.

    `corpus` None makes a synthetic one of `tokens` tokens; one by URL is read through a cache in `scratch`. `warm`
    reads every block once first. Returns figures by name, with units in the names. Raises DataError if `corpus` is no
    corpus.
    """
    with ExitStack() as stack:
        if corpus is None:
            corpus = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fsdp-data-bench-")))
            synthetic_corpus(corpus, tokens)
        started = time.perf_counter()
        room = stack.enter_context(scratch_directory(scratch)) if isinstance(corpus, Url) else None
        cache = CacheUse(room, 1 << 62) if room is not None else None
        packer = Packer([("bench", corpus, 1.0)], sequence_length, seed=1, lanes=256, cache=cache)
        opened = time.perf_counter() - started
        if warm:
            opened_corpus = packer.corpora["bench"]
            if room is not None and isinstance(corpus, Url):
                require_room(room, [int(opened_corpus.copies[corpus].corpus.sizes.sum())], 1)
            for number in range(len(opened_corpus.blocks)):
                opened_corpus.block(number)
        rates = [_sequential(packer, batch, seconds) for _ in range(3)]
        epoch = int(packer.epoch_samples["bench"])  # random samples, different in every run:
        drawn = [
            timed(packer, sample_index) for sample_index in np.random.default_rng().integers(0, epoch, 1000).tolist()
        ]
        return {
            "tokens": packer.corpora["bench"].manifest.tokens,
            "sequence_length": sequence_length,
            "batch": batch,
            "open_ms": opened * 1e3,
            "random_sample_ms_median": statistics.median(drawn) * 1e3,
            "random_sample_ms_p99": float(np.quantile(drawn, 0.99)) * 1e3,
            "random_sample_ms_max": max(drawn) * 1e3,
            "tokens_per_second_best": max(rates),
            "tokens_per_second_worst": min(rates),
            "state_bytes": len(json.dumps({"cursor": 2**62, "consumed": 2**62})),
        }


def _sequential(packer: Packer, batch: int, seconds: float) -> float:
    """Tokens per second of packing int64 batches in training order."""
    first, started = 0, time.perf_counter()
    while (took := time.perf_counter() - started) < seconds:
        packer.pack(first, batch)
        first += batch
    return first * packer.length / took


def timed(packer: Packer, sample_index: int) -> float:
    started = time.perf_counter()
    packer.pack(sample_index, 1)
    return time.perf_counter() - started


def word_tokenizer(path: Path, vocabulary: dict[str, int]) -> Tokenizer:
    """A tokenizer of whole words, one of which is the separator `EOD`, written to `path`."""
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=min(set(vocabulary) - {EOD})))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # splits the separator if a text contains it
    model.add_special_tokens([EOD])
    model.save(str(path))
    return Tokenizer.load(path)


def synthetic_corpus(directory: Path, tokens: int, *, block_tokens: int = BLOCK_TOKENS) -> None:
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


def render(figures: dict[str, float]) -> str:
    shown = (f"{value:_}" if isinstance(value, int) else f"{value:_.3f}" for value in figures.values())
    return "\n".join(f"{name.replace('_', ' '):28} {text}" for name, text in zip(figures, shown, strict=True))
