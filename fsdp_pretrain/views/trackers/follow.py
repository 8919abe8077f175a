"""Followers: `python -m fsdp_pretrain.views.trackers.follow RUN NAME [--once]` writes the view of a run in one tracker.

Training starts a follower for each tracker in the configuration, and an evaluation that ends after training one with
`--once`. A follower writes the view from the beginning and then adds new values, until its standard input closes, when
training ends. A failure of it is one entry in the journal and does not affect training. The functions for training
import no tracker and never raise.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from fsdp_pretrain.errors import BusyError, ConfigError, UserError
from fsdp_pretrain.helper_process import start_helper
from fsdp_pretrain.processes import exit_now
from fsdp_pretrain.run import journal, run_id
from fsdp_pretrain.run.files import RunDir, make_directory
from fsdp_pretrain.run.lock import Lease, drop_if_dead

from .points import RecordStream
from .run_facts import read_facts
from .sink import SINKS, check_installed, is_installed, place, wanted

Followers = dict[str, "subprocess.Popen[bytes]"]
"""The followers of a run, by the name of the tracker."""
STUCK_SECONDS = 120.0
"""Seconds without progress after which a tracker is taken to hang."""
_NICENESS = 10
"""Followers yield to training."""
_CHUNK, _POLL_SECONDS, _FINISH_SECONDS, _WAIT_SECONDS = 200, 2.0, 20.0, 60.0


# ---------------------------------------------------------------- for training and evaluations


def start_followers(run: RunDir, *flags: str) -> Followers:
    """Start the followers of a run. One that cannot be started is an entry in the journal."""
    followers = Followers()
    for name in filter(is_installed, wanted(run)):
        try:
            make_directory(_folder(run))
            module, log = "fsdp_pretrain.views.trackers.follow", _folder(run) / "log"
            followers[name] = start_helper(module, str(run.path), name, *flags, log=log, nice=_NICENESS)
        except OSError as error:
            _report(run, name, f"could not be started: {error}")
    return followers


def finish_followers(run: RunDir, followers: Followers) -> None:
    """Let the followers catch up and end; leave those running that take too long. Records those that were killed."""
    for follower in followers.values():
        with contextlib.suppress(OSError):
            if follower.stdin is not None:
                follower.stdin.close()
    until = time.monotonic() + _FINISH_SECONDS
    for name, follower in followers.items():
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = follower.wait(max(0.0, until - time.monotonic()))
            if code < 0:
                _report(run, name, f"killed by signal {-code}")


def catch_up(run: RunDir) -> None:
    """Bring the wanted views up to date with what was just added to the record, unless a follower does."""
    finish_followers(run, start_followers(run, "--once"))


def _folder(run: RunDir) -> Path:
    """The directory with the leases and the log of the followers."""
    return run.path / "trackers"


def _report(run: RunDir, name: str, reason: str) -> None:
    """Add an entry to the journal: a view is no longer written."""
    with contextlib.suppress(UserError, OSError):
        repair = f"rebuild it with `fsdp-pretrain track RUN --to {name}`"
        text = f"the view in {name} stopped, training continues: {reason}; {repair}"
        journal.add(run, "tracker-stopped", text, tracker=name)


# ---------------------------------------------------------------- writing a view


def write_view(run: RunDir, name: str, progress: Callable[[int], object], last: Callable[[], bool]) -> tuple[Path, int]:
    """Write a view, then what is added to the record, until `last` returned True and nothing new came. The caller holds
    the lease of the view.

    `progress` is called with the number of steps and evaluations so far, `last` before each round. Returns the path to
    open, and that number. Raises any error of the tracker.
    """
    facts = read_facts(run)
    view = SINKS[name](place(run, name), facts)
    stream = RecordStream(run, details=bool(facts.config.get("record", {}).get("details")))
    identity, count = view.watched.stat().st_ino, 0
    more = True
    while more:
        more = not last()
        if view.watched.stat().st_ino != identity:
            raise OSError(f"{view.watched} was replaced")
        points = stream.read()
        while chunk := list(itertools.islice(points, _CHUNK)):
            view.write(chunk)
            count, more = count + len(chunk), True
            progress(count)
        progress(count)
    view.close(read_facts(run))
    return view.opened, count


def rebuild(run: RunDir, name: str, progress: Callable[[int], object]) -> tuple[Path, int]:
    """Write the view of a run in a tracker from the whole record; see `write_view`.

    Raises:
        BusyError: another process writes it.
        ConfigError: the tracker is not installed, the run was never started, or the view cannot be written.
    """
    check_installed([name])
    if not run.config.is_file():
        raise ConfigError(f"there is nothing to show: {run.path} was never started")
    try:
        held = _hold(run, name)
        if held is None:
            raise BusyError(
                f"another process writes the view of {run.path} in {name}",
                remedy="none is needed: it brings the view up to date, also after the end of the run",
            )
        try:
            return write_view(run, name, progress, lambda: True)
        finally:
            held.release()
    except (ConfigError, BusyError):
        raise
    except Exception as error:
        raise ConfigError(
            f"cannot write {place(run, name)}: {type(error).__name__}: {error}",
            remedy="make it writable; if it is damaged, or another program holds it, move it away and repeat the "
            "command: the record has everything in it",
        ) from None


def _hold(run: RunDir, name: str) -> Lease | None:
    """Take the lease of the writer of a view; None if another process holds it."""
    path = _folder(run) / f"{name}.lease.json"
    make_directory(path.parent)
    while (free := drop_if_dead(path)) is None:  # not known yet whether a process on another host lives
        time.sleep(1.0)
    return Lease.take(path, purpose=f"the writer of the view in {name}") if free else None


class _Heart:
    """Ends this process, with an entry in the journal, if it does not beat for `STUCK_SECONDS`."""

    def __init__(self, run: RunDir, name: str) -> None:
        self._run, self._name, self._beaten = run, name, time.monotonic()
        threading.Thread(target=self._check, daemon=True).start()

    def beat(self, count: int = 0) -> None:
        self._beaten = time.monotonic()

    def _check(self) -> None:
        while time.monotonic() - self._beaten < STUCK_SECONDS:
            time.sleep(1.0)
        _report(self._run, self._name, f"it did not answer for {STUCK_SECONDS:.0f}s")
        exit_now(1)


def main(arguments: list[str]) -> None:
    """Run a follower."""
    run, name, once = RunDir(Path(arguments[0])), arguments[1], "--once" in arguments[2:]
    if (identifier := run_id.read(run.path)) is not None:
        run_id.bind(run.path, identifier)
    heart, begun = _Heart(run, name), time.monotonic()

    def last() -> bool:
        heart.beat()
        return once or bool(select.select([sys.stdin], [], [], _POLL_SECONDS)[0])

    try:
        while (
            held := _hold(run, name)
        ) is None:  # by the follower of an earlier start, or one that also writes the new points
            if last() and time.monotonic() - begun > _WAIT_SECONDS:
                return
            time.sleep(_POLL_SECONDS)
        write_view(run, name, heart.beat, last)
        held.release()
    except BaseException as error:  # trackers raise anything
        _report(run, name, f"{type(error).__name__}: {error}".splitlines()[0])
        exit_now(1)


if __name__ == "__main__":
    main(sys.argv[1:])
    exit_now(0)
