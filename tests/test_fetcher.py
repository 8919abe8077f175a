"""The fetcher of a node as a process: blocks come in time and once, whoever is killed and whatever fails."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from corpora import random_corpus
from laboratory import tiny
from sight import until
from watch import Watch

from fsdp_pretrain import fetcher_status
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.data.fetch import room
from fsdp_pretrain.data.fetch.process import NodeFetching
from fsdp_pretrain.data.packing.opening import open_packer, open_skips
from fsdp_pretrain.data.packing.packer import Packer
from fsdp_pretrain.data.packing.position import Position
from fsdp_pretrain.data.text.tokenizer import Tokenizer
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.fetcher_status import FetcherStatus
from fsdp_pretrain.ranks import RankInfo
from fsdp_pretrain.watchdog.detectors.corpus_storage import CorpusStorageDetector

LENGTH, LANES, BATCH = 16, 3, 16


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, shared_corpus: Path) -> Path:
    """400k tokens in a hundred blocks."""
    lengths = [random.Random(number).choices([2, 5, 17, 60], k=6000) for number in range(3)]
    tokenizer = Tokenizer.load(shared_corpus / "tokenizer")
    return random_corpus(tmp_path_factory.mktemp("remote") / "corpus", tokenizer, lengths, block_tokens=4000)


class Node:
    """The ranks of a node, as its fetcher sees them: they read and publish their positions in this process."""

    def __init__(
        self,
        path: Path,
        corpus: Path,
        cache: Path,
        size: str,
        *,
        name: str = "run",
        steps: int = 2600,
        **sections: dict[str, Any],
    ) -> None:
        self.run = path / name
        (self.run / "storage").mkdir(parents=True)
        values = tiny(
            name,
            self.run,
            f"file://{corpus}",
            data={"sequence_length": LENGTH, "lanes": LANES, "cache": {"dir": str(cache), "size": size}},
            train={"duration": f"{steps} steps", "global_batch": f"{BATCH} samples"},
            checkpoint={"every": "500 steps"},
            **sections,
        )
        self.config = Config.model_validate(values)
        self.position, self.pages = Position(), path / f"{name}-pages"

    def start(self) -> None:
        first, second = (RankInfo(rank, 2, rank, 2) for rank in range(2))
        self.fetching = NodeFetching(self.config, self.pages, first)
        self.packer = open_packer(self.config, self.fetching.status)
        others = NodeFetching(self.config, self.pages, second)
        self._built = [one.begin(self.position) for one in (self.fetching, others)]

    @property
    def pid(self) -> int:
        return int(until(lambda: self.fetching.helper.process).pid)

    def train(self, steps: int) -> list[int]:
        """The digest of each step."""
        found = []
        for _ in range(steps):
            packed = self.packer.pack(self.position.cursor, BATCH)
            self.position = self.position.advance(self.config.schedule.batch, open_skips(self.config))
            for built in self._built:
                built(self.position)
            found.append(packed.digest)
        return found

    @property
    def status(self) -> FetcherStatus:
        return until(lambda: fetcher_status.read(self.fetching.status))  # type: ignore[no-any-return]


@pytest.fixture
def nodes(tmp_path: Path, corpus: Path) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(size: str = "170KB", **options: Any) -> Node:
        made.append(Node(tmp_path, options.pop("corpus", corpus), tmp_path / "cache", size, **options))
        made[-1].start()
        return made[-1]

    yield make
    for node in made:
        node.fetching.close()


def local(corpus: Path, steps: int) -> list[int]:
    packer = Packer([("text", corpus, 1.0)], LENGTH, seed=1234, lanes=LANES)
    return [packer.pack(step * BATCH, BATCH).digest for step in range(steps)]


@pytest.mark.promise("remote-corpora")
def test_a_killed_fetcher_is_started_again_and_goes_on(nodes: Any, corpus: Path, tmp_path: Path) -> None:
    """It needs no state, and not even the cache: the same samples as from files. It ends with its rank."""
    # Reads wait a third of the timeout: 20 s are too short for a start on a busy machine.
    node = nodes(parallel={"timeout": "180 s"})
    found = node.train(200)
    killed = node.pid
    os.kill(killed, signal.SIGKILL)
    for block in present(tmp_path):
        block.unlink()
    found += node.train(250)
    assert found == local(corpus, 450)
    assert not node.status.problem and node.pid != killed
    process = node.fetching.helper.process
    node.fetching.close()
    until(lambda: process.poll() is not None)


def present(path: Path) -> list[Path]:
    return [block for block in path.glob("cache/*/blocks/*") if block.name.isdecimal()]


def test_a_cache_below_the_working_set_is_refused(nodes: Any) -> None:
    node = nodes("100KB")
    with pytest.raises(ConfigError, match=r"data\.cache\.size is 100KB, but a node uses 1\d\d KiB of blocks at a time"):
        room.check(node.config, node.packer)


def test_a_cache_is_of_one_run_at_a_time(
    nodes: Any, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second run is refused, with the name of the first; once that has ended, it may begin."""
    monkeypatch.setattr("fsdp_pretrain.data.fetch.process._LOCK_SECONDS", 0.2)
    first = nodes(name="first")
    second = Node(tmp_path, corpus, tmp_path / "cache", "170KB", name="second")
    with pytest.raises(ConfigError, match=r"data\.cache\.dir = .*/cache is in use by the run .*/first"):
        second.start()
    assert first.train(5) == local(corpus, 5)
    first.fetching.close()
    second.start()
    assert second.train(5) == local(corpus, 5)
    second.fetching.close()


@pytest.mark.slow
def test_what_fails_is_told_and_ends_by_itself(nodes: Any, corpus: Path, tmp_path: Path) -> None:
    """An object that is missing, then damaged: named with the cause; once it is back, training goes on."""
    remote = shutil.copytree(corpus, tmp_path / "remote")
    node = nodes(corpus=remote)
    found = node.train(100)
    whole = {path: path.read_bytes() for path in remote.glob("shards/*.bin")}
    for path in whole:
        path.unlink()
    for block in present(tmp_path):
        block.unlink()
    told = until(lambda: node.status if node.status.problem else None)
    assert "shards/s" in told.problem and "does not exist" in told.problem and told.lasting
    assert node.packer.corpora["text"].cached._use.problem() == told.problem  # what a rank says that gives up
    for path, content in whole.items():
        path.write_bytes(bytes(len(content)))
    os.kill(node.pid, signal.SIGKILL)  # the next try would be in half a minute
    told = until(lambda: node.status if "checksum" in node.status.problem else None)
    assert told.lasting and ".bin" in told.problem
    for path, content in whole.items():
        path.write_bytes(content)
    os.kill(node.pid, signal.SIGKILL)
    assert found + node.train(200) == local(corpus, 300)
    until(lambda: not node.status.problem)


@pytest.mark.slow
def test_a_full_disk_is_told_and_training_goes_on(
    corpus: Path, tmp_path: Path, small_disk: Callable[[str], Path]
) -> None:
    """The cache may hold more than its disk: fewer blocks are kept, and every sample comes."""
    disk = small_disk("1m")
    ballast = disk / "other"
    node = Node(tmp_path, corpus, disk / "cache", "800KB")
    node.start()
    try:
        found = node.train(50)
        until(lambda: sum(block.stat().st_size for block in present(disk)) > 350_000)  # or a step would not fit
        space = os.statvfs(disk)
        ballast.write_bytes(bytes(space.f_bavail * space.f_frsize - (16 << 10)))
        found += node.train(1500)
        assert found == local(corpus, 1550)
        assert sum(block.stat().st_size for block in disk.glob("cache/*/blocks/*")) < 800_000
    finally:
        node.fetching.close()


# ------------------------------------------------------------------ the alarm


@pytest.mark.quick
def test_the_alarm_says_what_fails_and_whether_training_waits(tmp_path: Path) -> None:
    watch, path = Watch(tmp_path), tmp_path / "fetcher-0.json"
    watch.detectors.append(CorpusStorageDetector(watch.alarms, path, "host-3"))
    key = "corpus-storage/host-3"

    def say(found: FetcherStatus, seconds: float = 1.0) -> None:
        replace(found, time=time.time()).write(path)
        watch.advance(seconds)

    well = FetcherStatus(ready=7_200)
    busy = replace(well, problem="s3://b/x: SlowDown", since=time.time())
    say(well)
    say(busy)
    assert watch.transitions() == []  # retries may help within seconds
    say(replace(busy, since=time.time() - 30))
    assert watch.transitions() == [(key, "WARN", "open")]
    assert (
        "s3://b/x: SlowDown" in watch.changes[0].summary
        and "the cache has the next 7_200 steps" in watch.changes[0].summary
    )
    say(replace(busy, since=time.time() - 6900, ready=0))
    assert watch.transitions()[1:] == [(key, "CRIT", "open")] and "training waits" in watch.changes[1].summary
    say(well)
    assert watch.transitions()[2:] == [(key, "CRIT", "resolved")]
    say(replace(well, problem="no access to s3://b/x: expired", since=time.time(), lasting=True))
    assert watch.transitions()[3:] == [(key, "CRIT", "open")]
    say(well)
    replace(well, time=time.time() - 60).write(path)
    watch.advance(31)
    assert watch.transitions()[5:] == [(key, "WARN", "open")] and "has said nothing" in watch.changes[-1].summary
