"""A rank's side of the node's fetcher: starts the process, and starts it again if it dies. No torch."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from data.corpus.cache import take_lock
from data.packing import progress
from data.packing.packer import Packer
from data.packing.position import Position
from data.packing.source import Ints
from fsdp_pretrain.child_process import start_module
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.errors import ConfigError, DataError
from fsdp_pretrain.fetcher_status import record_folder, status_file
from fsdp_pretrain.remote import Url
from fsdp_pretrain.units import human_bytes

from .window import RECOMMENDED, bytes_in_use

_FIRST_PAUSE, _LONGEST_PAUSE, _STEADY_SECONDS, _END_SECONDS = 0.1, 30.0, 60.0, 5.0
_LOCK_SECONDS = 20.0
"""For a rank of an earlier start to end."""


@dataclass(frozen=True)
class FetcherSettings:
    """What a fetcher needs to know.

    Attributes:
        config: of the run, as TOML.
        run: its directory.
        pages: folder in local memory for the ranks' positions and the status.
        node: number of this node.
        world: ranks that split a batch.
        ranks: those of this node.
    """

    config: str
    run: Path
    pages: Path
    node: int
    world: int
    ranks: range

    @property
    def status(self) -> Path:
        return status_file(self.pages, self.ranks.start)

    @property
    def record(self) -> Path:
        return record_folder(self.run) / f"node-{self.node}.jsonl"

    def to_json(self) -> str:
        paths = {"run": str(self.run), "pages": str(self.pages)}
        return json.dumps({**vars(self), **paths, "ranks": [self.ranks.start, self.ranks.stop]})

    @classmethod
    def from_json(cls, text: str) -> FetcherSettings:
        found = json.loads(text)
        return cls(
            **{**found, "run": Path(found["run"]), "pages": Path(found["pages"]), "ranks": range(*found["ranks"])}
        )


class FetcherProcess:
    """The fetcher of this node, as long as the rank that starts it lives or until `close`.

    It writes its record and a log if the run directory has the folder for them.
    """

    def __init__(self, settings: FetcherSettings) -> None:
        self._settings, self._closed = settings, threading.Event()
        self.process: subprocess.Popen[bytes] | None = None
        settings.pages.mkdir(parents=True, exist_ok=True)
        self._tending = threading.Thread(target=self._tend, name="fetcher", daemon=True)
        self._tending.start()

    def _tend(self) -> None:
        """Start it, again and again; a process of its own cannot take the rank down."""
        pause = _FIRST_PAUSE
        while not self._closed.is_set():
            begun = time.monotonic()
            with contextlib.suppress(OSError):
                self.process = self._start()
                self.process.wait()
            pause = _FIRST_PAUSE if time.monotonic() - begun > _STEADY_SECONDS else min(2 * pause, _LONGEST_PAUSE)
            self._closed.wait(pause)

    def _start(self) -> subprocess.Popen[bytes]:
        output = None
        with contextlib.suppress(OSError):  # the run directory is full, or gone
            output = (record_folder(self._settings.run) / f"node-{self._settings.node}.log").open("ab")
        try:
            out = output if output is not None else subprocess.DEVNULL
            process = start_module("data.fetch", stdin=subprocess.PIPE, stdout=out, stderr=out)
        finally:
            if output is not None:
                output.close()
        assert process.stdin is not None
        process.stdin.write(self._settings.to_json().encode() + b"\n")
        process.stdin.flush()  # and kept open: its end tells the fetcher that this process has ended
        return process

    def close(self) -> None:
        """Let it write its record, and end."""
        self._closed.set()
        process = self.process
        if process is None or process.stdin is None:
            return
        with contextlib.suppress(OSError):
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)


class NodeFetching:
    """What a rank has to do with the fetcher of its node; the first rank of the node starts it.

    Args:
        config: of the run.
        pages: folder in local memory, the same for all ranks of the node.
        rank, world: this rank among all.
        local_rank, local_world: this rank among those of the node.
        node: number of the node.

    Attributes:
        status: the file in which the fetcher says what is wrong.

    Raises:
        ConfigError: another run uses the cache; DataError: it cannot be written.
    """

    def __init__(
        self, config: Config, pages: Path, *, rank: int, world: int, local_rank: int, local_world: int, node: int
    ) -> None:
        self._config, self._page = config, progress.page_of(pages, rank)
        ranks = range(rank - local_rank, rank - local_rank + local_world)
        settings = FetcherSettings(config.to_toml(), config.run.dir, pages, node, world, ranks)
        self.status, self._process, self._lock = settings.status, None, -1
        if local_rank == 0:
            assert config.data.cache is not None
            self._lock = lock_cache(config.data.cache.dir, config.run.dir)
            for other in ranks:  # of an earlier start in the same process group
                progress.page_of(pages, other).unlink(missing_ok=True)
            self._process = FetcherProcess(settings)

    def check(self, packer: Packer) -> None:
        """Raise ConfigError if the cache is too small. `packer`: of the run's corpora."""
        if self._process is not None:
            check_size(self._config, packer)

    def begin(self, start: Position) -> Callable[[Position], None]:
        """Tell the fetcher where training begins; returns what is to be called with the position after each batch."""
        return progress.ProgressPage(self._page, start).built

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            os.close(self._lock)
            self._process = None
        self._page.unlink(missing_ok=True)


def lock_cache(cache: Path, run: Path) -> int:
    """Hold a cache directory for a run, until the descriptor that is returned is closed, at the latest by the end of
    this process. Two fetchers would drop what the other needs.

    Raises:
        ConfigError: another run uses it; DataError: it cannot be written.
    """
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = os.open(cache / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise DataError(f"cannot write to the cache {cache}: {error.strerror}") from None
    try:
        taken = take_lock(lock, _LOCK_SECONDS)
    except OSError:  # a file system without locks
        return lock
    if not taken:
        holder = os.pread(lock, 4096, 0).decode(errors="replace")
        os.close(lock)
        raise ConfigError(
            f"data.cache.dir = {cache} is in use by the run {holder}",
            effect="each run would drop the blocks that the other needs",
            remedy="name another directory on a local disk of this node, or wait for the end of that run",
        )
    os.truncate(lock, 0)
    os.pwrite(lock, str(run).encode(), 0)
    return lock


def block_sizes(packer: Packer) -> Mapping[str, Ints]:
    """Bytes of the blocks of each source by URL, int64 [blocks], by name."""
    opened = {name: (corpus.directory, corpus.copies) for name, corpus in packer.corpora.items()}
    return {
        name: copies[place].corpus.sizes
        for name, (place, copies) in opened.items()
        if isinstance(place, Url) and place in copies
    }


def check_size(config: Config, packer: Packer) -> None:
    """Raise ConfigError if the cache, or the room on its disk, is smaller than what a node uses at a time.

    Args:
        config: of the run.
        packer: of its corpora.
    """
    cache, sizes = config.data.cache, block_sizes(packer)
    if not sizes or cache is None:
        return
    least = bytes_in_use(packer, sizes, config.schedule.batch.full)
    if cache.size.value < least:
        raise ConfigError(
            f"data.cache.size is {cache.size}, but a node uses {human_bytes(least)} of blocks at a time",
            effect="blocks would be fetched again and again, and training would wait for them",
            remedy=f"set data.cache.size to {human_bytes(RECOMMENDED * least)} or more",
        )
    copies = [copy for corpus in packer.corpora.values() for copy in corpus.copies.values()]
    held = sum(size for copy in copies for _, size in copy.blocks.present().values())
    room = shutil.disk_usage(cache.dir).free + held
    if room < least:
        raise ConfigError(
            f"the disk of data.cache.dir = {cache.dir} has room for {human_bytes(room)}, but a node uses "
            f"{human_bytes(least)} of blocks at a time",
            effect="training would wait for blocks that cannot be kept",
            remedy="free space there, or name another directory",
        )
