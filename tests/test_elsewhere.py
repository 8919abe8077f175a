"""Training from a corpus in object storage, as a user meets it: two nodes with a cache each, and everything that fails."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from corpora import random_corpus, word_tokenizer
from object_store import NODE, Faults, ObjectStore
from sight import CALM, PATIENCE, WATCHED, alarms, until

from fsdp_pretrain.config.schedule import BatchSchedule
from fsdp_pretrain.data.packing.loader import Loader
from fsdp_pretrain.data.packing.packer import Packer
from fsdp_pretrain.data.text.tokenizer import EOD

VOCABULARY, LENGTH, LANES, BLOCK, SHARDS = 64, 64, 8, 16_000, 16
NODES = ("node-0", "node-1")
MODEL = {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "ffn": 32, "vocab": VOCABULARY}


def digests(corpus: Path, batch: int, count: int) -> list[str]:
    """`data_digest` of the first steps of a run that reads a corpus from a local disk."""
    packer = Packer([("text", corpus, 1.0)], LENGTH, seed=1234, lanes=LANES)
    loader = Loader(packer, BatchSchedule(batch), rank=0, world=1, micro_batch=batch, prefetch=0)
    return [f"{step.digest % 2**64:016x}" for step in itertools.islice(loader, count)]


class Elsewhere:
    """Runs of a laboratory that read a corpus by URL, on two nodes with a local disk each."""

    def __init__(self, lab: Any, store: ObjectStore, tokens: int) -> None:
        words = {EOD: 0, **{f"w{number}": number for number in range(1, VOCABULARY)}}
        tokenizer = word_tokenizer(lab.path / "words.json", words)
        lengths = [np.random.default_rng(n).integers(100, 900, tokens // SHARDS // 500).tolist() for n in range(SHARDS)]
        self.lab, self.store, self.run = lab, store, lab.path / "run"
        self.corpus = random_corpus(lab.path / "corpus", tokenizer, lengths, block_tokens=BLOCK)
        self.url, self.disk = store.put_folder(self.corpus, "corpus"), lab.path / "disk"
        self.bytes = {
            name: (self.corpus / f"shards/shard-{name}").stat().st_size for name in (f"{n}.bin" for n in range(SHARDS))
        }

    def config(
        self, steps: int, *, batch: int, size: int, name: str = "run", place: object = None, **data: Any
    ) -> Path:
        """A run of so many steps; `place` is where it reads the corpus, by default the URL."""
        sections = {
            "model": MODEL,
            "data": {
                "sequence_length": LENGTH,
                "lanes": LANES,
                "sources": [{"name": "text", "path": str(place or self.url)}],
                "cache": {"dir": str(self.disk / "cache"), "size": f"{size}B"},
                **data,
            },
            "train": {"duration": f"{steps} steps", "global_batch": f"{batch} samples", "micro_batch": batch // 4},
            "parallel": {"timeout": "300 s"},
            "checkpoint": {"every": "5 steps"},
            "watchdog": {**WATCHED, "hang": {"soft": "100 s", "hard": "200 s"}, "pace": CALM},
        }
        made: Path = self.lab.config(name, **sections)
        return made

    def start(self, config: Path) -> Any:
        return self.lab.start(config, ranks=4, nodes=2)

    def reach(self, step: int, job: Any) -> None:
        """Wait for a step of a running job."""

        def there() -> bool:
            assert all(code is None for code in job.codes()), job.output()
            return newest_step(self.run) >= step

        until(there, 10 * PATIENCE, what=lambda: f"step {step}\n{job.output()}")

    def fetcher(self, node: str) -> psutil.Process:
        """The fetcher of a node."""

        def find() -> psutil.Process | None:
            for process in psutil.process_iter(["cmdline"]):
                with contextlib.suppress(psutil.Error):
                    own = str(self.lab.path) == process.environ().get("NODE_DISK", "").removesuffix("/disk")
                    if (
                        own
                        and "fsdp_pretrain.data.fetch" in (process.info["cmdline"] or [])
                        and process.environ().get(NODE) == node
                    ):
                        return process
            return None

        found: psutil.Process = until(find, what=f"the fetcher of {node}")
        return found


def newest_step(run: Path) -> int:
    """The last step of the record."""
    for path in sorted((run / "segments").glob("*/metrics.jsonl"), reverse=True):
        with contextlib.suppress(IndexError, ValueError):
            return int(json.loads(path.read_text().splitlines()[-1])["step"])
    return 0


@pytest.fixture
def elsewhere(lab: Any, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`elsewhere(tokens)`: a corpus of that size in object storage."""
    if os.geteuid():
        pytest.skip("disks of their own need root")
    monkeypatch.setenv("EXECUTE_FIRST", str(Path(__file__).with_name("apart.py")))
    monkeypatch.setenv("NODE_DISK", str(lab.path / "disk"))
    return lambda tokens: Elsewhere(lab, object_store, tokens)


@pytest.mark.promise("remote-corpora")
def test_a_run_from_a_bucket_is_the_run_from_a_disk(lab: Any, object_store: ObjectStore, helpers: Any) -> None:
    """On one node, past the end of an epoch, through a cache for a part of the corpus, with failed and wrong answers."""
    there, batch, total = Elsewhere(lab, object_store, 300_000), 256, 20
    whole = sum(there.bytes.values())
    object_store.faults = Faults(objects="corpus/shards", failing=0.05, corrupt=0.01, seed=3)
    configs = [
        there.config(total, batch=batch, size=whole * 4 // 5, lanes=2),
        there.config(total, batch=batch, size=whole, name="local", place=there.corpus, lanes=2),
    ]
    settings = ("watchdog.enabled=false", "checkpoint.every='100 steps'")
    for config in configs:  # one after the other: a cache is of one run at a time
        job = lab.start(config, *settings, ranks=2)
        assert job.wait() == [0, 0], job.output()
    runs = [helpers.metrics(run) for run in (there.run, lab.path / "local")]
    facts = [[(line["step"], line["data_digest"], line["loss"]) for line in run] for run in runs]
    assert facts[0] == facts[1] and len(facts[0]) == total
    assert {"failing", "corrupt"} <= {request.fault for request in object_store.log}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_epochs_through_a_small_cache_and_every_fault(elsewhere: Any, helpers: Any) -> None:
    """A corpus through a cache for a part of it: ranks and fetchers are killed, requests throttled, 5% fail, 1% come
    corrupted, some cut. The data is that of a local run, and no node fetches a byte more than 1.1 times per epoch."""
    tokens, batch, part = 4_000_000, 512, 3
    there = elsewhere(tokens)
    store, whole = there.store, sum(there.bytes.values())
    windows = 2 * (whole // 2 + tokens // 500) // LENGTH
    total = windows // batch
    config = there.config(total, batch=batch, size=whole // part)
    usual = Faults(objects="corpus/shards", failing=0.05, corrupt=0.01, cut=0.005)
    store.faults = usual
    job = there.start(config)
    events = {
        total // 10: lambda: there.fetcher("node-0").kill(),
        total // 5: lambda: setattr(store, "faults", Faults(objects="corpus/shards", failing=0.6, status=429)),
        total // 5 + 5: lambda: setattr(store, "faults", usual),
        total // 3: lambda: job.kill(3),
        total // 2: lambda: there.fetcher("node-1").kill(),
        total * 2 // 3: lambda: job.kill(0),
    }
    for step, act in events.items():
        there.reach(step, job)
        act()
        if step in (total // 3, total * 2 // 3):
            job.wait_or_kill(5)
            job = there.start(config)
    assert job.wait(20 * PATIENCE) == [0] * 4, job.output()

    trained = helpers.metrics(there.run)
    assert [line["step"] for line in trained] == list(range(1, total + 1))
    assert [line["data_digest"] for line in trained] == digests(there.corpus, batch, total)
    assert {request.fault for request in store.log} >= {"failing", "corrupt", "cut"}
    for node in NODES:
        fetched = sum(store.bytes_read(f"corpus/shards/shard-{name}", node) for name in there.bytes)
        assert whole < fetched < 1.1 * 2 * whole, (node, fetched / whole)
        # Not what a killed fetcher left half-written, which goes after an hour.
        held = sum(path.stat().st_size for path in (there.disk / node / "cache").rglob("blocks/[0-9]*"))
        assert held <= whole // part


def cached(there: Elsewhere) -> int:
    """Bytes of blocks in the emptier cache."""
    held = dict.fromkeys(NODES, 0)
    for node in NODES:
        for path in (there.disk / node / "cache").rglob("blocks/[0-9]*"):
            with contextlib.suppress(FileNotFoundError):
                held[node] += path.stat().st_size
    return min(held.values())


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.promise("remote-corpora")
def test_storage_that_is_away_and_comes_back_in_time(elsewhere: Any, helpers: Any) -> None:
    """Training goes on from the cache, an alarm names the object within a minute, and no restart is needed."""
    there, batch, total = elsewhere(2_000_000), 128, 200  # half of the cache holds the first 64
    size = sum(there.bytes.values()) // 2
    job = there.start(there.config(total, batch=batch, size=size, read_timeout="140 s"))
    there.reach(5, job)
    until(lambda: cached(there) > 0.4 * size)  # in the first steps, ranks may be where the fetcher is
    there.store.faults, before = Faults(refuse=True), newest_step(there.run)
    alarm = until(lambda: [found for found in alarms(there.run) if found["key"].startswith("corpus-storage/")], 60)[0]
    assert f"{there.url}/shards/shard-" in json.dumps(alarm)
    there.reach(before + 2, job)  # the alarm may come before the next step has ended
    there.store.faults = Faults()
    assert job.wait(10 * PATIENCE) == [0] * 4, job.output()
    assert [line["data_digest"] for line in helpers.metrics(there.run)] == digests(there.corpus, batch, total)
    assert len(list((there.run / "segments").iterdir())) == 1
