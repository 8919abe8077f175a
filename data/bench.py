"""How fast the packer is here: `fsdp-data bench [CORPUS]`. On your own corpus and filesystem, or on a synthetic one.

One process, one thread. A first pass over the corpus warms the page cache, so that the figure is the packer's and not
the disk's; without it (`--cold`) it is what a training process would see first.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from .corpus import write_corpus
from .packer import Packer
from .shards import ShardWriter, token_dtype
from .tokenizer import Tokenizer

_VOCABULARY = 32_000
_SHARDS = 4


def bench(
    corpus: Path | None, *, tokens: int, sequence_length: int, batch: int, seconds: float, warm: bool
) -> dict[str, Any]:
    """Time opening, random samples and sequential packing.

    Args:
        corpus: measured; None makes a synthetic one of `tokens` tokens (log-normal document lengths, median 400).
        tokens: see `corpus`.
        sequence_length: tokens per sample.
        batch: samples per call when packing sequentially.
        seconds: how long each of three sequential rounds takes.
        warm: read every shard once before.

    Returns:
        Figures by name, with units in the names.

    Raises:
        DataError: `corpus` is not one.
    """
    with ExitStack() as stack:
        if corpus is None:
            corpus = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fsdp-data-bench-")))
            synthetic_corpus(corpus, tokens)
        started = time.perf_counter()
        packer = Packer([("bench", corpus, 1.0)], sequence_length, seed=1, lanes=256)
        opened = time.perf_counter() - started
        if warm:
            opened_corpus = packer.corpora["bench"]
            for number in range(len(opened_corpus.manifest.shards)):
                opened_corpus.shard(number).tokens.max(initial=0)
        rates, drawn = [_sequential(packer, batch, seconds) for _ in range(3)], _random(packer)
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
    """Tokens per second of int64 batches in the order of training."""
    first, started = 0, time.perf_counter()
    while (took := time.perf_counter() - started) < seconds:
        packer.pack(first, batch)
        first += batch
    return first * packer.length / took


def _random(packer: Packer, draws: int = 1000) -> list[float]:
    """Seconds of single random samples of the first epoch, in draws that do not repeat from run to run."""
    samples = int(packer.epoch_samples["bench"])
    times = []
    for number in np.random.default_rng().integers(0, samples, draws).tolist():
        started = time.perf_counter()
        packer.pack(number, 1)
        times.append(time.perf_counter() - started)
    return times


def synthetic_corpus(directory: Path, tokens: int) -> None:
    """A corpus of random ids in documents of log-normal length, with a word-level tokenizer to match."""
    words = {f"w{number}": number for number in range(1, _VOCABULARY)}
    words_to_ids = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<|endoftext|>": 0, **words}, unk_token="w1"))
    words_to_ids.pre_tokenizer = (
        tokenizers.pre_tokenizers.Whitespace()
    )  # cuts the separator apart, should a text hold it
    words_to_ids.add_special_tokens(["<|endoftext|>"])
    (directory / "shards").mkdir()
    source = directory / "words.json"
    words_to_ids.save(str(source))
    rng, dtype, entries = np.random.default_rng(1), token_dtype(_VOCABULARY), []
    for number in range(_SHARDS):
        with ShardWriter(directory / "shards" / f"shard-{number}", dtype) as writer:
            written = 0
            while written < tokens // _SHARDS:
                length = max(1, int(rng.lognormal(np.log(400), 1.2)))
                writer.append(rng.integers(1, _VOCABULARY, length).astype(dtype))
                written += length
            entries.append(writer.finish())
    write_corpus(directory, Tokenizer.load(source), entries, dtype, {})


def render(figures: dict[str, Any]) -> str:
    """The figures for people."""
    low, high = figures["tokens_per_second_worst"] / 1e6, figures["tokens_per_second_best"] / 1e6
    return "\n".join(
        [
            f"corpus of {figures['tokens']:_} tokens, sequences of {figures['sequence_length']}",
            f"  open           {figures['open_ms']:.2f} ms",
            f"  random sample  {figures['random_sample_ms_median']:.3f} ms median, "
            f"{figures['random_sample_ms_p99']:.3f} p99, {figures['random_sample_ms_max']:.3f} worst of 1000",
            f"  sequential     {low:.1f} to {high:.1f}M tokens/s in batches of {figures['batch']}",
            f"  state          {figures['state_bytes']} bytes",
        ]
    )
