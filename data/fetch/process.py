"""A rank's side of the node's fetcher: starts the process, and restarts it if it dies."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.data.packing import progress
from fsdp_pretrain.data.packing.packer import Packer
from fsdp_pretrain.data.packing.position import Position
from fsdp_pretrain.errors import ConfigError, DataError, raising
from fsdp_pretrain.fetcher_status import log_folder, status_file
from fsdp_pretrain.files import lock_file
from fsdp_pretrain.helper_process import HelperProcess
from fsdp_pretrain.ranks import RankInfo

from . import room

_END_SECONDS = 5.0
"""Seconds that a fetcher has to end."""
_LOCK_SECONDS = 20.0
"""Seconds to wait for the lock, since a rank of an earlier start may still end."""


class FetcherSettings(NamedTuple):
    """The settings of a fetcher."""

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
        helper: the fetcher, if this rank starts it.

    Raises:
        ConfigError: another run uses the cache.
        DataError: the cache cannot be written.
    """

    def __init__(self, config: Config, pages: Path, ranks: RankInfo) -> None:
        self._config, self._pages, self._page = config, pages, progress.page_of(pages, ranks.rank)
        self.helper: HelperProcess | None = None
        here = ranks.of_node
        self.status = status_file(pages, here.start)
        if ranks.local_rank == 0:
            assert config.data.cache is not None
            self._lock = _lock_cache(config.data.cache.dir, config.run.dir)
            pages.mkdir(parents=True, exist_ok=True)
            for other in here:  # of an earlier start in the same process group
                progress.page_of(pages, other).unlink(missing_ok=True)
            settings = FetcherSettings(config.to_toml(), str(pages), ranks.world, here.start, here.stop)
            log = log_folder(config.run.dir) / f"node-{ranks.node}.log"
            self.helper = HelperProcess("fsdp_pretrain.data.fetch", settings=settings, log=log)

    def check(self, packer: Packer) -> None:
        """Raise ConfigError if the cache is too small for the packer's corpora."""
        if self.helper is not None:
            room.check(self._config, packer)

    def begin(self, start: Position) -> Callable[[Position], None]:
        """Publish where training begins. Returns a function to call with the position after each batch."""
        return progress.begin(self._page, start)

    def close(self) -> None:
        """End the fetcher, if this rank started it, and remove this rank's page."""
        if self.helper is not None:
            self.helper.close(_END_SECONDS)
            self.helper = None
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
    with raising(DataError, f"cannot write to the cache {cache}"):
        cache.mkdir(parents=True, exist_ok=True)
        lock = lock_file(cache / "lock", _LOCK_SECONDS)
        if lock is not None:
            os.truncate(lock, 0)
            os.pwrite(lock, str(run).encode(), 0)
            return lock
        holder = (cache / "lock").read_text(errors="replace")
    raise ConfigError(
        f"data.cache.dir = {cache} is in use by the run {holder}",
        effect="each run would drop the blocks that the other needs",
        remedy="name another directory on a local disk of this node, or wait for the end of that run",
    )
