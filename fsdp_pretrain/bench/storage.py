"""What the cache of remote storage saves and costs: `python -m fsdp_pretrain.bench CONFIG --storage`.

On a synthetic corpus with the configuration's samples, batches and lanes: the bytes that two ways of evicting fetch
over two epochs, by the real order of blocks; batches of the loader from the corpus as a directory and, in alternating
turns, by URL through a cache that has it all; the time from an empty cache to the first batch.
"""

from __future__ import annotations

import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

from data.bench import synthetic_corpus
from data.corpus.cached import CacheUse
from data.fetch import working_set
from data.fetch.forecast import Forecast
from data.fetch.replacement import simulate
from data.packing.loader import Loader
from data.packing.packer import Packer
from data.packing.position import Position
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.schedule import BatchSchedule
from fsdp_pretrain.config.skips import Skips
from fsdp_pretrain.remote import Url
from fsdp_pretrain.units import human_bytes

from .ranges import median_range, show_range

TOKENS, BLOCK_TOKENS = 20_000_000, 16_000
_NAME = "bench"
_ENOUGH = 2**40


def measure(config: Config, *, rounds: int, steps: int) -> dict[str, Any]:
    """Compare policies, and time the loader.

    Args:
        rounds: of timing.
        steps: of a turn.
    """
    with tempfile.TemporaryDirectory(prefix="fsdp-pretrain-bench-") as folder:
        corpus = Path(folder) / "corpus"
        corpus.mkdir()
        synthetic_corpus(corpus, TOKENS, block_tokens=BLOCK_TOKENS)
        url, cache = Url(f"file://{corpus}"), CacheUse(Path(folder) / "cache", _ENOUGH)
        # The first one imports what reading by URL needs.
        cold = [
            _first_batch(config, url, CacheUse(Path(folder) / f"cold-{number}", _ENOUGH))
            for number in range(rounds + 1)
        ]
        local = [_first_batch(config, corpus, None) for _ in range(rounds)]
        return {
            "tokens": TOKENS,
            "block_tokens": BLOCK_TOKENS,
            **_policies(config, _packer(config, corpus, None)),
            "first_batch_seconds": median_range(cold[1:]),
            "first_batch_local_seconds": median_range(local),
            **_loaders(config, corpus, url, cache, rounds=rounds, steps=steps),
        }


def _packer(config: Config, place: Path | Url, cache: CacheUse | None) -> Packer:
    data = config.data
    return Packer([(_NAME, place, 1.0)], data.sequence_length, seed=data.seed, lanes=data.lanes, cache=cache)


def _batches(config: Config) -> BatchSchedule:
    return BatchSchedule(config.schedule.batch.full)


def _loader(config: Config, packer: Packer) -> Loader:
    return Loader(packer, _batches(config), rank=0, world=1, micro_batch=config.train.micro_batch, prefetch=0)


def _policies(config: Config, packer: Packer) -> dict[str, Any]:
    """Bytes that Belady's choice and the least recently used one fetch in two epochs of one node, as shares of them."""
    blocks = packer.corpora[_NAME].blocks
    sizes = {_NAME: blocks[:, 4] * 2 + blocks[:, 2] * 4}
    samples = int(2 * packer.epoch_samples[_NAME])
    batches = _batches(config)
    forecast = Forecast(packer, batches, Skips(), Position(), world=1, ranks=range(1), until=samples)
    trace = working_set.record(packer, forecast, sizes, -(-samples // batches.full))
    live, whole = working_set.measure(packer, trace), int(trace.sizes.sum())
    capacities = {"half of it": live // 2, "working set": live, "twice": 2 * live, "half of the corpus": whole // 2}
    return {
        "working_set_bytes": live,
        "working_set_predicted": working_set.predict(
            packer, sizes, world=1, ranks=range(1), batch=batches.full, samples=samples
        ),
        "corpus_bytes": whole,
        "fetched": {
            name: {
                "cache_bytes": capacity,
                "belady": simulate(trace, capacity, "belady") / (2 * whole),
                "lru": simulate(trace, capacity, "lru") / (2 * whole),
            }
            for name, capacity in capacities.items()
        },
    }


def _first_batch(config: Config, place: Path | Url, cache: CacheUse | None) -> float:
    """Seconds from nothing to the first batch."""
    started = time.perf_counter()
    next(_loader(config, _packer(config, place, cache)))
    return time.perf_counter() - started


def _loaders(config: Config, corpus: Path, url: Url, cache: CacheUse, *, rounds: int, steps: int) -> dict[str, Any]:
    """Processor seconds of a step's batch, and of the cached one relative to the local one."""
    epoch = int(_packer(config, corpus, None).epoch_samples[_NAME]) // config.schedule.batch.full
    for _ in islice(_loader(config, _packer(config, url, cache)), epoch + 1):
        pass  # all blocks are in the cache now
    loaders = {
        "local": _loader(config, _packer(config, corpus, None)),
        "cached": _loader(config, _packer(config, url, cache)),
    }
    used: dict[str, list[float]] = {"local": [], "cached": []}
    for number in range(rounds + 1):
        for name in sorted(loaders, reverse=bool(number % 2)):
            started = time.process_time()
            for _ in islice(loaders[name], steps):
                pass
            used[name].append((time.process_time() - started) / steps)
    ratios = [cached / local for cached, local in zip(used["cached"], used["local"], strict=True)]
    return {
        "loader_processor_seconds": median_range(used["local"][1:]),
        "cached_loader_ratio": median_range(ratios[1:]),
    }


def render(result: dict[str, Any]) -> str:
    """The results as text for people."""
    live, predicted = result["working_set_bytes"], result["working_set_predicted"]
    lines = [
        f"{result['tokens']:_} tokens in blocks of {result['block_tokens']:_}, {human_bytes(result['corpus_bytes'])}; "
        f"working set {human_bytes(live)}, predicted {predicted / live:.3f} of it",
        "  fetched in two epochs, as a share of the corpus read twice:",
        f"    {'cache':<20} {'bytes':>10} {'Belady':>8} {'LRU':>8}",
    ]
    lines += [
        f"    {name:<20} {human_bytes(row['cache_bytes']):>10} {row['belady']:>8.3f} {row['lru']:>8.3f}"
        for name, row in result["fetched"].items()
    ]
    return "\n".join(
        [
            *lines,
            f"  first batch          {show_range(result['first_batch_seconds'])}s from an empty cache, "
            f"{show_range(result['first_batch_local_seconds'])}s from a directory",
            f"  batches of a step    {show_range(result['loader_processor_seconds'])} processor seconds from a "
            f"directory; through a full cache {show_range(result['cached_loader_ratio'])} of that",
        ]
    )
