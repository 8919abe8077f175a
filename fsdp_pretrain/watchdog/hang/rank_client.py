"""A rank's side of the watchdog: its page, its stack dumps, and on one rank per node the agent process.

Nothing here can make a rank wait or fail: a rank without a working watchdog continues. The agent is started before the
rendezvous, so that a hang there is noticed too, and restarted if it was killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import os
import select
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.errors import StorageError
from fsdp_pretrain.heartbeat import Heartbeat, Phase
from fsdp_pretrain.helper_process import HelperProcess
from fsdp_pretrain.processes import is_same_process
from fsdp_pretrain.ranks import RankInfo
from fsdp_pretrain.remote import Location
from fsdp_pretrain.run import run_id

from .deadlines import latest
from .flight_recorder import enable
from .page import Page, read
from .rank_monitor import requests_of

_ROOT = f"{Path(__file__).parents[3]}/".encode("ascii", "backslashreplace").decode()
"""Path prefix of this project's files in stack dumps."""
_INTERVAL = 1.0
AGENT = "fsdp_pretrain.watchdog.agent"
"""The module that the agent of a node runs."""
_OF_ALL_NODES = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


class PageHeartbeat(Heartbeat):
    """The heartbeat of a watched rank, written into its page.

    `reading`: the files that are being read, by identity of the reading thread, the longest read first.
    """

    def __init__(self, config: Config, ranks: RankInfo, reading: Mapping[int, Location]) -> None:
        self._reading = reading
        pages = folder(config.run.dir)
        pages.mkdir(parents=True, exist_ok=True)
        self._stacks = (pages / f"rank-{ranks.rank}.stacks").open("w", encoding="utf-8")
        self._stacks.write(f"main 0x{threading.main_thread().ident:016x} {_ROOT}\n")
        self._stacks.flush()
        # Before the page exists: whoever sees it may ask. See `Rank.ask_stack` and `Rank.force_stack`.
        self._requests = _fifo(requests_of(pages, ranks.rank))
        faulthandler.register(signal.SIGUSR2, file=self._stacks, all_threads=True, chain=False)
        watchdog = config.watchdog
        enable(pages, latest(watchdog.hang) if watchdog.act else None)
        self._page = Page(pages / f"rank-{ranks.rank}.page", rank=ranks.rank, segment=0)
        # Bound directly, without a call in between, so a beat takes under 1 us.
        self.beat, self.measured = self._page.beat, self._page.measured  # type: ignore[method-assign]
        threading.Thread(target=self._stay_alive, name="watchdog-alive", daemon=True).start()
        self._agent = AgentProcess(config, pages, ranks) if ranks.local_rank == 0 else None

    def _stay_alive(self) -> None:
        requests = select.poll()
        requests.register(self._requests, select.POLLIN)
        while True:
            self._page.alive(str(next(iter([*self._reading.values()]), "")).encode())
            if requests.poll(_INTERVAL * 1000):
                os.read(self._requests, 1 << 12)
                faulthandler.dump_traceback(self._stacks, all_threads=True)

    def step(self, step: int) -> None:
        self._page.step(step)

    def set_segment(self, segment: int) -> None:
        if self._agent is not None:
            self._agent.pass_run_id()
        self._page.set_segment(segment)

    def reconfigure(self, config: Config) -> None:
        if self._agent is not None:
            self._agent.reconfigure(config)

    def close(self) -> None:
        self._page.beat(Phase.END)


def _fifo(path: Path) -> int:
    """A new named pipe, open for reading; it has a writer too, so that it never looks closed."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return os.open(path, os.O_RDWR | os.O_NONBLOCK)


class AgentSettings(NamedTuple):
    """The settings of an agent."""

    config: str
    """Configuration of the run, as TOML."""
    pages: str
    """Folder of the pages of this node's ranks, which are `first` to `stop` - 1."""
    first: int
    stop: int
    node: int
    """Number of this node, of `nodes`."""
    nodes: int
    launcher: int
    """Process id of torchrun."""
    attempt: str
    """What all nodes of a start have in common."""
    restarts: int = 0


class AgentProcess:
    """The agent process of this node, managed by the rank that starts it."""

    def __init__(self, config: Config, pages: Path, ranks: RankInfo) -> None:
        here, nodes = ranks.of_node, ranks.world // ranks.local_world
        attempt = ":".join(os.environ.get(name, "") for name in _OF_ALL_NODES)
        launcher = os.getppid()
        self._run = config.run.dir
        self._settings = AgentSettings(
            config.to_toml(), str(pages), here.start, here.stop, ranks.node, nodes, launcher, attempt
        )
        self.pass_run_id()
        self._helper = self._start()

    def _start(self) -> HelperProcess:
        """Start the agent. It writes to this process's output until it has a log."""
        words = (str(self._run), f"node-{self._settings.node}")
        return HelperProcess(AGENT, *words, settings=self._settings)

    def pass_run_id(self) -> None:
        """Write the id of the run directory beside the pages once known; the agent writes nothing there before."""
        known = run_id.bound_to(self._run)
        if known is not None:
            with contextlib.suppress(StorageError):
                run_id.assign(Path(self._settings.pages), known)

    def reconfigure(self, config: Config) -> None:
        """Restart the agent if its configuration changed. It has no state to lose, since no segment is known yet."""
        if config.to_toml() != self._settings.config:
            self._settings = self._settings._replace(config=config.to_toml())
            self._helper.close(0.0)
            self._helper = self._start()


def folder(run: Path) -> Path:
    """The folder of this attempt's pages: in memory, shared by all ranks of a node, new for every attempt."""
    names = (*_OF_ALL_NODES, "TORCHELASTIC_RESTART_COUNT")
    attempt = [str(run), socket.gethostname(), str(os.getppid()), *(os.environ.get(name, "") for name in names)]
    if "MASTER_PORT" not in os.environ:
        attempt.append(str(os.getpid()))
    digest = hashlib.sha256("\n".join(attempt).encode()).hexdigest()[:16]
    return root() / digest


def root() -> Path:
    """The folder for the pages of all runs of this user, in memory if possible."""
    shared = Path("/dev/shm")
    base = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    return base / f"fsdp-pretrain-{os.getuid()}"


def sweep(base: Path, spare: Path) -> None:
    """Remove folders of killed agents whose ranks have all ended, except `spare`."""
    for pages in base.iterdir() if base.is_dir() else ():
        try:
            beats = filter(None, [read(path) for path in pages.glob("*.page")])
            old = time.time() - pages.stat().st_mtime > 60
        except OSError:  # another agent is removing it
            continue
        if pages != spare and old and not any(is_same_process(beat.pid, beat.started) for beat in beats):
            shutil.rmtree(pages, ignore_errors=True)
