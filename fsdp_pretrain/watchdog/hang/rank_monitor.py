"""Observes the ranks of one node for its agent: pages, processes, stacks."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns

from fsdp_pretrain.heartbeat import Phase

from .collectives import GroupProgress
from .flight_recorder import FlightRecorder
from .page import Beat, Reader, is_exiting, process_state, start_ticks
from .stacks import Dumps, Stack

_WEDGED_AFTER = 5.0
"""Seconds without a beat of the thread that beats every second."""


def requests_of(pages: Path, rank: int) -> Path:
    """The named pipe through which a rank is asked for its stacks."""
    return pages / f"rank-{rank}.requests"


@dataclass(frozen=True)
class RankSnapshot:
    """The position of a rank that makes no progress; sent between nodes."""

    rank: int
    host: str
    pid: int
    step: int  # this and the next two: as on its page
    phase: str
    beats: int
    still: float  # seconds since its last beat
    state: str  # state of the process, a letter of `ps`
    wedged: bool  # whether its interpreter runs no other thread either
    collective: str | None  # name of the collective it waits in, if any
    place: str  # innermost frame, as text
    group: tuple[str, ...]  # equal for ranks that wait for the same thing
    reading: str = ""  # the data file whose read has lasted longest, if any, as of its last sign of life
    # what NCCL's flight recorder says of its process groups, see `find_blocked`; empty without it
    collectives: tuple[GroupProgress, ...] = ()


class Rank:
    """One rank of this node; `pages` is the folder of its page."""

    def __init__(self, number: int, pages: Path) -> None:
        self.number = number
        self._path = pages / f"rank-{number}.page"
        self._reader: Reader | None = None
        self.descriptor: int | None = None
        self.beat: Beat | None = None
        self.gone = False
        self._requests = requests_of(pages, number)
        self.dumps = Dumps(pages / f"rank-{number}.stacks")
        self.stack: Stack | None = None
        self._forced = False
        self.recorder = FlightRecorder(pages, number)

    def read_page(self) -> None:
        """Read the rank's page; the first time, open a pidfd of its process."""
        if self._reader is None:
            try:
                self._reader = Reader(self._path)
            except OSError:
                return
        self.beat = self._reader.read() or self.beat
        if self.descriptor is None and self.beat is not None and not self.gone:
            self._open_pidfd(self.beat)

    def _open_pidfd(self, beat: Beat) -> None:
        try:
            self.descriptor = os.pidfd_open(beat.pid)
        except OSError:
            self.gone = True
            return
        if start_ticks(beat.pid) != beat.started:
            self.close_pidfd()

    def close_pidfd(self) -> None:
        """Close the pidfd, because the process has ended."""
        self.gone = True
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def signal(self, number: int) -> None:
        """Signal the rank's process, never another one that reuses its pid."""
        if self.descriptor is not None:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self.descriptor, number)

    def ask_stack(self) -> None:
        """Request a stack dump from the rank's background thread, which makes it while no other thread runs Python."""
        self.dumps.skip()
        self._forced = False
        with contextlib.suppress(OSError):
            pipe = os.open(self._requests, os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(pipe, b"?")
            finally:
                os.close(pipe)

    def force_stack(self) -> None:
        """Make a signal handler dump the stacks, at C level: for a rank whose interpreter is wedged. In one that runs,
        the handler may meet a frame that changes, and crash (https://github.com/python/cpython/issues/116008). So it is
        done once per question at most."""
        if not self._forced:
            self._forced = True
            self.signal(signal.SIGUSR2)

    @property
    def owes_stack(self) -> bool:
        """Whether it has not answered `ask_stack`, although it lives and is not stopped."""
        return self.descriptor is not None and not self.dumps.text and self.state not in "TX"

    @property
    def state(self) -> str:
        """State of the process, a letter of `ps`; X if it has ended, or never wrote its page."""
        return "X" if self.gone or self.beat is None else process_state(self.beat.pid)

    def snapshot(self) -> RankSnapshot | None:
        """The rank's position, with the latest stack; None if it never wrote its page."""
        beat, stack = self.beat, self.stack
        if beat is None:
            return None
        now, state = monotonic_ns(), self.state
        return RankSnapshot(
            rank=self.number,
            host=socket.gethostname(),
            pid=beat.pid,
            step=beat.step,
            phase=beat.phase.name.lower(),
            beats=beat.beats,
            still=round((now - beat.phase_at) / 1e9, 1),
            state=state,
            wedged=state not in "TX" and (now - beat.alive_at) / 1e9 > _WEDGED_AFTER,
            collective=None if stack is None else stack.collective,
            place="" if stack is None else stack.place,
            group=() if stack is None else stack.group,
            reading="" if stack is None or self._reader is None else self._reader.note().decode(errors="replace"),
            collectives=self.recorder.progress,
        )


class RankMonitor:
    """All ranks of this node; `launcher` is the pid of the process that started them."""

    def __init__(self, numbers: range, pages: Path, launcher: int) -> None:
        self.numbers, self.pages = numbers, pages
        self.all = [Rank(number, pages) for number in numbers]
        self._launcher = launcher
        self._launcher_descriptor: int | None = None  # None: it has ended
        with contextlib.suppress(OSError):
            self._launcher_descriptor = os.pidfd_open(launcher)

    @property
    def launcher_gone(self) -> bool:
        """Whether the launcher has ended, or is about to."""
        return self._launcher_descriptor is None or is_exiting(self._launcher)

    def read_pages(self) -> None:
        for rank in self.all:
            rank.read_page()

    def wait(self, seconds: float) -> list[Rank]:
        """Sleep until the time is over or a rank or the launcher ends. Returns the ranks that ended."""
        poll, watched = select.poll(), {rank.descriptor: rank for rank in self.alive}
        for descriptor in (*watched, self._launcher_descriptor):
            if descriptor is not None:
                poll.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(max(0.0, seconds) * 1000)}
        if self._launcher_descriptor in ready:
            self._launcher_descriptor = None
        ended = [rank for descriptor, rank in watched.items() if descriptor in ready]
        for rank in ended:
            rank.read_page()
            rank.close_pidfd()
        return ended

    @property
    def alive(self) -> list[Rank]:
        return [rank for rank in self.all if rank.descriptor is not None]

    @property
    def beats(self) -> list[Beat]:
        """The last beat of every rank that has a page."""
        return [rank.beat for rank in self.all if rank.beat is not None]

    @property
    def windows(self) -> dict[int, tuple[int, float]]:
        """By rank: number of its last window of steps, and seconds of a typical step without waiting for ranks."""
        return {beat.rank: (beat.window, beat.own) for beat in self.beats}

    def pids(self) -> list[int]:
        return [rank.beat.pid for rank in self.alive if rank.beat is not None]

    def reached(self) -> int:
        """The newest step that any rank has started; 0 before."""
        return max((beat.step for beat in self.beats), default=0)

    @property
    def segment(self) -> int:
        """Segment of the ranks' start; 0 until it is known."""
        return max((beat.segment for beat in self.beats), default=0)

    @property
    def progress(self) -> int:
        """The number of beats of all ranks."""
        return sum(beat.beats for beat in self.beats)

    def still(self) -> float:
        """Seconds since the last beat of any rank; 0 before the first."""
        since = max((beat.phase_at for beat in self.beats), default=0)
        return (monotonic_ns() - since) / 1e9 if since else 0.0

    @property
    def phases(self) -> set[Phase]:
        return {beat.phase for beat in self.beats}

    def snapshots(self) -> list[RankSnapshot]:
        return [snapshot for rank in self.all if (snapshot := rank.snapshot()) is not None]

    def kill(self) -> None:
        """End all ranks at once. SIGKILL ends even stopped and wedged processes; SIGSTOP comes first, so that no rank
        sees another end and records a wrong reason."""
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for rank in self.alive:
                rank.signal(number)
