"""A simulated corpus of any size, and what a training process needs on it: `fsdp-data bench --simulate 2T`.

Everything but the content is real: the manifest with all shards, the full block table, and for every shard an index of
document lengths and a token file of full size. The token files are sparse (they read as token 0) and the shards are
hard links to a few distinct ones, so 2T tokens need 150 MB of disk.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import xxhash
from tqdm import tqdm

from data.corpus.corpus import build_blocks, write_corpus
from data.corpus.shards import Shard, encode_index
from data.fetch import working_set
from data.fetch.costs import REQUESTS, epoch_reads
from data.fetch.forecast import Forecast
from data.fetch.needs import Needs
from data.packing.packer import Packer
from data.packing.position import Position
from data.text.tokenizer import EOD
from fsdp_pretrain.config.schedule import BatchSchedule, share_of
from fsdp_pretrain.config.skips import Skips

from .bench import timed, word_tokenizer

_DTYPE = np.dtype("<u2")
_VARIANTS = 64
_MEDIAN, _SPREAD = 450, 1.26
"""Of the log-normal document lengths; the mean is about 1,000 tokens."""
_RANKS, _RATE, _AHEAD = 8, 10_000, 1800
"""Of a node; tokens per second of a rank; seconds of training that a fetcher looks ahead."""
_MOST_RANKS, _FIRST_STEPS = 1024, 20


def simulated_corpus(directory: Path, tokens: int, shards: int) -> None:
    """Write a corpus of about `tokens` tokens in `shards` shards, sparse."""
    (directory / "shards").mkdir(parents=True)
    variants = [
        _variant(directory / f"shards/variant-{number}", number, tokens // shards)
        for number in tqdm(range(min(_VARIANTS, shards)), desc="lengths", unit="shard", leave=False)
    ]
    entries, blocks = [], []
    for number in range(shards):
        entry, rows = variants[number % len(variants)]
        for suffix in (".bin", ".idx"):
            os.link(directory / f"shards/{entry['name']}{suffix}", directory / f"shards/shard-{number:05d}{suffix}")
        entries.append({**entry, "name": f"shard-{number:05d}"})
        blocks.append(rows + np.array([number, 0, 0, 0, 0]))
    tokenizer = word_tokenizer(directory / "tokenizer.json", {"w0": 0, EOD: 1})  # sparse files hold token 0
    write_corpus(directory, tokenizer, entries, _DTYPE, {}, blocks=np.concatenate(blocks))


def simulate(tokens: int, shards: int, *, sequence_length: int, world: int) -> dict[str, float]:
    """Measure what a training process needs on a simulated corpus, and check how `world` ranks share it.

    Returns figures by name, with units in the names.

    Raises:
        AssertionError: two ranks share a sample, or one is left out: a bug.
    """
    with tempfile.TemporaryDirectory(prefix="fsdp-data-simulate-") as folder:
        corpus = Path(folder) / "corpus"
        simulated_corpus(corpus, tokens, shards)
        before, worked, started = _memory(), time.process_time(), time.perf_counter()
        packer = Packer([("simulated", corpus, 1.0)], sequence_length, seed=1, lanes=256)
        opened = time.perf_counter() - started
        packer.pack(0, 1)
        first, worked = time.perf_counter() - started, time.process_time() - worked
        index_memory = _memory() - before
        samples, rng = int(packer.epoch_samples["simulated"]), np.random.default_rng(1)
        cold = [timed(packer, sample_index) for sample_index in rng.integers(0, samples, 300).tolist()]
        near = int(rng.integers(0, samples - 3000))
        warm = [timed(packer, near + ahead) for ahead in range(3000)][1000:]
        started = time.perf_counter()
        steps = check_shares(packer, samples, world, rng)
        manifest = packer.corpora["simulated"].manifest
        return {
            "tokens": manifest.tokens,
            "documents": manifest.documents,
            "shards": len(manifest.shards),
            "blocks": len(packer.corpora["simulated"].blocks),
            "samples_per_epoch": samples,
            "open_ms": opened * 1e3,
            "first_sample_ms": first * 1e3,
            "first_sample_cpu_ms": worked * 1e3,
            "index_memory_mb": index_memory / 1e6,
            "random_sample_ms_median": float(np.median(cold)) * 1e3,
            "random_sample_ms_p99": float(np.quantile(cold, 0.99)) * 1e3,
            "sequential_sample_ms_median": float(np.median(warm)) * 1e3,
            "process_memory_mb": (_memory() - before) / 1e6,
            "state_bytes": len(json.dumps({"cursor": samples, "consumed": samples})),
            "ranks": world,
            "proved_steps": steps,
            "proof_seconds": time.perf_counter() - started,
            **fetching(packer, sequence_length),
        }


def check_shares(packer: Packer, samples: int, world: int, rng: np.random.Generator, steps: int = 20) -> int:
    """Check that the ranks' shares of global batches, at random places and across the end of the epoch, are exact.

    The shares must be the batch, in order, without overlap, and the batch's samples must start at different places of
    the epoch's stream, a whole number of windows apart. Returns the number of steps checked.
    """
    source, size = packer._sources[0], 4 * world
    total, length = source.epoch_length, packer.length
    starts = [0, max(0, samples - size // 2), *rng.integers(0, max(1, samples - size), steps - 2).tolist()]
    for cursor in starts:
        shares = [share_of(cursor, size, rank, world) for rank in range(world)]
        dealt = [sample_index for share in shares for sample_index in share]
        assert dealt == list(range(cursor, cursor + size)), "the shares are not the global batch"
        places = [epoch * total + offset for epoch, offset in map(source.start_of, dealt)]
        assert len(set(places)) == size, "two samples lie at the same place"
        assert not any(place % length for place in places), "a sample does not start at a window"
    return len(starts)


def fetching(packer: Packer, sequence_length: int) -> dict[str, float]:
    """What the fetcher of a node would need if the corpus were in remote storage, on 16 and on 128 nodes.

    Batches of 8M tokens, and 10,000 tokens per second and rank: half an hour is fetched ahead.
    """
    corpus, stream = packer.corpora["simulated"], packer.streams[0]
    sizes = corpus.blocks[:, 4] * _DTYPE.itemsize + corpus.blocks[:, 2] * 4
    batch, found = -(-8_000_000 // sequence_length // _MOST_RANKS) * _MOST_RANKS, dict[str, float]()
    for nodes in (16, 128):
        ranks, epoch = nodes * _RANKS, corpus.manifest.tokens / (nodes * _RANKS * _RATE)
        before, started = _memory(), time.process_time()
        forecast = Forecast(packer, BatchSchedule(batch), Skips(), Position(), world=ranks, ranks=range(_RANKS))
        needs = Needs(packer, forecast, {0: corpus.manifest.fingerprint})
        needs.extend(_FIRST_STEPS, math.inf)
        needs.look_far()
        first = time.process_time() - started
        needs.extend(int(_AHEAD * ranks * _RATE / (batch * sequence_length)), math.inf)
        reads = epoch_reads(stream, sizes, 1 / nodes)
        found |= {
            f"fetcher_{nodes}_nodes_start_cpu_ms": first * 1e3,
            f"fetcher_{nodes}_nodes_half_hour_cpu_ms": (time.process_time() - started) * 1e3,
            f"fetcher_{nodes}_nodes_memory_mb": (_memory() - before) / 1e6,
            f"fetcher_{nodes}_nodes_working_set_mb": working_set.predict(
                packer,
                {"simulated": sizes},
                world=nodes,
                ranks=range(1),
                batch=batch,
                samples=int(packer.epoch_samples["simulated"]),
            )
            / 1e6,
            f"fetcher_{nodes}_nodes_mb_per_second_and_node": reads.bytes / epoch / 1e6,
            f"fetcher_{nodes}_nodes_requests_per_day": nodes * REQUESTS * reads.blocks * 86400 / epoch,
        }
    return found


def _memory() -> int:
    """Bytes of this process's own memory, without pages of mapped files, which all ranks of a node share."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - getattr(memory, "shared", 0))


def _variant(prefix: Path, seed: int, tokens: int) -> tuple[dict[str, Any], npt.NDArray[np.int64]]:
    """One shard: (its manifest entry, its rows of the block table as shard 0)."""
    rng = np.random.default_rng(seed)
    lengths = np.maximum(1, rng.lognormal(np.log(_MEDIAN), _SPREAD, 2 * tokens // _MEDIAN)).astype(np.int64)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), tokens)) + 1]
    total, index = int(lengths.sum()), encode_index(lengths.astype("<i4"), _DTYPE)
    with prefix.with_suffix(".bin").open("wb") as file:
        file.truncate(total * _DTYPE.itemsize)
    prefix.with_suffix(".idx").write_bytes(index)
    entry = {
        "name": prefix.name,
        "documents": len(lengths),
        "tokens": total,
        "bytes": total * _DTYPE.itemsize,
        "bin_xxh3": "0" * 32,  # zeros, never compared
        "idx_xxh3": xxhash.xxh3_128(index).hexdigest(),
    }
    return entry, build_blocks([Shard(prefix)])
