"""Brings one tracker's view of a run up to date with the record. One process at a time does, see `hold`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import Field

from fsdp_pretrain.errors import BusyError, ConfigError
from fsdp_pretrain.record import lease, lineage, state_files
from fsdp_pretrain.record.files import RunDir, make_directory
from fsdp_pretrain.record.lease import Lease, drop_if_dead
from fsdp_pretrain.record.state_files import StateFile

from .points import PointValues, RecordStream
from .run_facts import read_config, read_facts
from .sink import Sink, check_installed, sink

STUCK_SECONDS = 120.0
"""Without a sign of life of a mirror, it hangs."""
_CHUNK = 200
_SAVE_SECONDS, _SILENT_SECONDS, _ASK_SECONDS = 30.0, 90.0, 1.0


class ViewState(StateFile):
    """`RUN/trackers/NAME.json`: which view there is, and how much of the record it shows.

    Attributes:
        place, id: of the view, see `Sink`.
        segment: newest segment of its line.
        offsets: see `RecordStream`.
        closed: its writer finished it, so the offsets are exact; else at least that much is in it.
        failed: why its writer gave up; empty: it did not.
    """

    place: str = ""
    id: str = ""
    segment: int = 0
    offsets: dict[str, int] = Field(default_factory=dict)
    closed: bool = False
    failed: str = ""


def folder(run: RunDir) -> Path:
    """The directory with the states, leases and log of the trackers."""
    return run.path / "trackers"


def _state_file(run: RunDir, name: str) -> Path:
    return folder(run) / f"{name}.json"


def _lease(run: RunDir, name: str) -> Path:
    return folder(run) / f"{name}.lease.json"


def failed(run: RunDir, name: str) -> bool:
    """Whether the last writer of a view gave up."""
    state = state_files.view(_state_file(run, name), ViewState)
    return state is not None and bool(state.failed)


def record_failure(run: RunDir, name: str, reason: str) -> None:
    """Note that the writer of a view gave up. Raises OSError."""
    state = state_files.view(_state_file(run, name), ViewState) or ViewState()
    state_files.write(_state_file(run, name), {**state.model_dump(), "closed": False, "failed": reason})


def is_held(run: RunDir, name: str) -> bool:
    """Whether a process that is known to be alive writes a view."""
    held = lease.read(_lease(run, name))
    return held is not None and lease.is_alive(held) is True


@contextmanager
def hold(run: RunDir, name: str) -> Iterator[bool | None]:
    """Be the one writer of a view for the block (True), if no other process is (False).

    None: it is not known yet whether the other process, on another host, is alive: ask again.
    """
    path = _lease(run, name)
    make_directory(path.parent)
    free = drop_if_dead(path, _SILENT_SECONDS)
    mine = Lease.take(path, purpose=f"the writer of the view in {name}")
    try:
        yield mine is not None or (None if free is None else False)
    finally:
        if mine is not None:
            mine.release()


class Mirror:
    """The view of a run in one tracker. The caller holds it. All methods raise any error of the tracker.

    After a rollback the old view is set aside and a new one begun.

    Args:
        again: write everything again, whatever the view holds.
    """

    def __init__(self, run: RunDir, name: str, *, again: bool = False) -> None:
        made = sink(name)
        self._run, self._file = run, _state_file(run, name)
        self._place = made.place(run, read_config(run).get("record", {})).absolute()  # however the run is named
        made.adopt(run)
        known = state_files.view(self._file, ViewState)
        if known is not None and (known.place != str(self._place) or not known.id):
            known = None
        nodes = lineage.nodes(run)
        head = max((node.segment for node in nodes), default=0)
        if known is not None and any(node.kind in lineage.LEAVING and node.segment > known.segment for node in nodes):
            made.set_aside(self._place, known.id, "left by a rollback")
            known = None
        in_order = known is not None and known.closed and known.segment == head
        fresh = again or known is None or not made.can_continue(self._place, known.id, in_order=in_order)
        self._stream = RecordStream(run, {} if fresh or known is None else known.offsets)
        self._segment = head
        self._sink: Sink = made(self._place, read_facts(run), known.id if known is not None else None, fresh=fresh)
        self._identity = self._sink.watched.stat().st_ino
        self._save()

    @property
    def opened(self) -> Path:
        """See `Sink`."""
        return self._sink.opened

    def sync(self, beat: Callable[[int], object] = lambda count: None) -> int:
        """Add what is new. Returns the number of steps and evaluations. Calls `beat` with that number now and then.

        Raises also OSError, if the view is gone.
        """
        if self._sink.watched.stat().st_ino != self._identity:
            raise OSError(f"{self._sink.watched} was replaced")
        count, points = 0, self._stream.read()
        while chunk := list(itertools.islice(points, _CHUNK)):
            self._sink.write(chunk)
            count += sum(isinstance(point, PointValues) for point in chunk)
            if time.monotonic() - self._saved > _SAVE_SECONDS:
                self._save()
            beat(count)
        return count

    def close(self) -> None:
        """Finish the view."""
        self._sink.close(read_facts(self._run))
        self._save(closed=True)

    def _save(self, *, closed: bool = False) -> None:
        self._saved = time.monotonic()
        shown = {"place": str(self._place), "id": self._sink.id, "segment": self._segment}
        state_files.write(self._file, {**shown, "offsets": self._stream.offsets, "closed": closed})


def is_behind(run: RunDir, name: str) -> bool:
    """Whether the record has more than a view that was closed. Raises UserError."""
    state = state_files.view(_state_file(run, name), ViewState)
    return state is not None and state.closed and any(True for _ in RecordStream(run, state.offsets).read())


def rebuild(run: RunDir, name: str, shown: Callable[[int], object]) -> tuple[Path, int]:
    """Write the view of a run in a tracker from the whole record.

    Args:
        shown: called with the number of steps and evaluations so far.

    Returns:
        What to open, and the number of steps and evaluations.

    Raises:
        BusyError: another process writes it.
        ConfigError: the tracker is not installed, the run was never started, or the view cannot be written.
    """
    check_installed([name])
    if not run.config.is_file():
        raise ConfigError(f"there is nothing to show: {run.path} was never started")
    place = sink(name).place(run, read_config(run).get("record", {}))
    try:
        while drop_if_dead(_lease(run, name), _SILENT_SECONDS) is None:
            time.sleep(_ASK_SECONDS)
        with hold(run, name) as mine:
            if not mine:
                raise BusyError(
                    f"another process writes the view of {run.path} in {name}",
                    remedy="none is needed: it brings the view up to date, also after the end of the run",
                )
            mirror = Mirror(run, name, again=True)
            count = mirror.sync(shown)
            mirror.close()
    except (ConfigError, BusyError):
        raise
    except Exception as error:
        raise ConfigError(
            f"cannot write {place}: {type(error).__name__}: {error}",
            remedy="make it writable; if it is damaged, or another program holds it, move it away and repeat the "
            "command: the record has everything in it",
        ) from None
    return mirror.opened, count
