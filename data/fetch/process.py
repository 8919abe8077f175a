"""A rank's side of the node's fetcher: starts the process, and restarts it if it dies."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.data.packing import progress
from fsdp_pretrain.data.packing.packer import Packer
from fsdp_pretrain.data.packing.position import Position
from fsdp_pretrain.errors import ConfigError, DataError, raising
from fsdp_pretrain.fetcher_status import log_folder, status_file
from fsdp_pretrain.processes import start_helper
from fsdp_pretrain.ranks import RankInfo

from . import room

_PAUSE, _END_SECONDS = 2.0, 5.0
"""Seconds before a fetcher that died is restarted; seconds that it has to end."""
_LOCK_SECONDS, _LOCK_PAUSE = 20.0, 0.05
"""Seconds to wait for the lock, since a rank of an earlier start may still end; seconds between two tries."""


class FetcherSettings(NamedTuple):
    """The settings of a fetcher: the first line of its input, as JSON."""

    config: str
    """Configuration of the run, as TOML."""
    pages: str
    """Folder in local memory for the ranks' positions and the status."""
    world: int
    """Ranks that split a batch; those of this node are `first` to `stop` - 1."""
    first: int
    stop: int


class NodeFetching:
    """A rank's side of its node's fetcher; the first rank of the node starts the process.

    Args:
        pages: folder in local memory, the same for all ranks of the node.

    Attributes:
        status: the fetcher's status file, which has its problems.
        process: the fetcher's process, if this rank has started one.

    Raises:
        ConfigError: another run uses the cache.
        DataError: the cache cannot be written.
    """

    def __init__(self, config: Config, pages: Path, ranks: RankInfo) -> None:
        self._config, self._pages, self._page = config, pages, progress.page_of(pages, ranks.rank)
        self._leads, self._closed = ranks.local_rank == 0, threading.Event()
        self._log = log_folder(config.run.dir) / f"node-{ranks.node}.log"
        self.process: subprocess.Popen[bytes] | None = None
        here = ranks.of_node
        self.status = status_file(pages, here.start)
        if self._leads:
            assert config.data.cache is not None
            self._lock = _lock_cache(config.data.cache.dir, config.run.dir)
            pages.mkdir(parents=True, exist_ok=True)
            for other in here:  # of an earlier start in the same process group
                progress.page_of(pages, other).unlink(missing_ok=True)
            settings = FetcherSettings(config.to_toml(), str(pages), ranks.world, here.start, here.stop)
            threading.Thread(target=self._supervise, args=(settings,), name="fetcher", daemon=True).start()

    def _supervise(self, settings: FetcherSettings) -> None:
        """Start the fetcher, and restart it whenever it ends. As a process it cannot take the rank down."""
        while not self._closed.is_set():
            with contextlib.suppress(OSError):
                text = json.dumps(settings).encode() + b"\n"
                self.process = start_helper("fsdp_pretrain.data.fetch", log=self._log, text=text)
                self.process.wait()
            self._closed.wait(_PAUSE)

    def check(self, packer: Packer) -> None:
        """Raise ConfigError if the cache is too small for the packer's corpora."""
        if self._leads:
            room.check(self._config, packer)

    def begin(self, start: Position) -> Callable[[Position], None]:
        """Publish where training begins. Returns a function to call with the position after each batch."""
        return progress.begin(self._page, start)

    def close(self) -> None:
        """End the fetcher, if this rank started it, and remove this rank's page."""
        if self._leads and not self._closed.is_set():
            self._closed.set()
            if self.process is not None and self.process.stdin is not None:
                with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                    self.process.stdin.close()
                    self.process.wait(_END_SECONDS)
            os.close(self._lock)
            self.status.unlink(missing_ok=True)
        self._page.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty: a watchdog or other ranks still use it
            self._pages.rmdir()


def _lock_cache(cache: Path, run: Path) -> int:
    """Lock a cache directory for a run, since two fetchers would remove blocks that the other needs.

    Returns:
        A descriptor; closing it, or the end of this process, releases the lock.

    Raises:
        ConfigError: another run uses the directory.
        DataError: it cannot be written.
    """
    until = time.monotonic() + _LOCK_SECONDS
    with raising(DataError, f"cannot write to the cache {cache}"):
        cache.mkdir(parents=True, exist_ok=True)
        lock = os.open(cache / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        while time.monotonic() < until:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.truncate(lock, 0)
                os.pwrite(lock, str(run).encode(), 0)
                return lock
            time.sleep(_LOCK_PAUSE)
        holder = os.pread(lock, 4096, 0).decode(errors="replace")
        os.close(lock)
    raise ConfigError(
        f"data.cache.dir = {cache} is in use by the run {holder}",
        effect="each run would drop the blocks that the other needs",
        remedy="name another directory on a local disk of this node, or wait for the end of that run",
    )
