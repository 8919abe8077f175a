"""Watches one start on one node: forwards requests, and makes sure that it ends when it should."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from fsdp_pretrain.config.operations import LaunchSection
from fsdp_pretrain.errors import Exit
from fsdp_pretrain.run import exit_intent
from fsdp_pretrain.run.files import RunDir

from .outcome import ended_hosts, hosts_of, segment_of
from .torchrun import Torchrun

_POLL, _READ_EVERY = 0.1, 1.0  # seconds
END_SECONDS = 60.0
"""Seconds for processes to end after SIGTERM before they are killed, and for a node to continue after another ended."""


class TorchrunWatch:
    """Watches a torchrun to its end.

    A separate thread reads the run directory: its file system may hang, and requests must not.

    Args:
        before: returns the number of the newest segment before this start, or of the newest that it restored.
        host: name of this host; None if it is the only one.
    """

    def __init__(
        self, run: RunDir, settings: LaunchSection, child: Torchrun, before: Callable[[], int], host: str | None
    ) -> None:
        self._run, self._settings, self._host = run, settings, host
        self._child, self._before = child, before
        self._others_ended = self._ends_well = False
        self._kill_at: float | None = None
        self._since: dict[str, float] = {}

    def run(self, take_signal: Callable[[], tuple[int, bool] | None], on_read: Callable[[], None]) -> int:
        """Wait until torchrun and its ranks are gone; returns torchrun's exit code.

        Args:
            take_signal: returns a signal to pass on to the ranks and whether to end at once, or None.
            on_read: called by a thread about every second.
        """
        child, done = self._child, threading.Event()
        reader = threading.Thread(target=self._read_run_dir, args=(done, on_read), daemon=True)
        reader.start()
        try:
            next_count = 0.0
            while (code := child.poll()) is None:
                asked = take_signal()
                if asked is not None:
                    self._forward(*asked)
                if time.monotonic() >= next_count:
                    next_count = time.monotonic() + _READ_EVERY
                    self._note("rank gone", child.has_lost_ranks)
                    self._note("other nodes ended", self._others_ended)
                if self._overdue():
                    child.kill()
                time.sleep(_POLL)
        except BaseException:
            child.kill()
            raise
        finally:
            done.set()
        if not child.wait_for_ranks(END_SECONDS):
            child.kill()
        reader.join(_READ_EVERY)
        return code

    def _forward(self, number: int, at_once: bool) -> None:
        now = time.monotonic()
        if at_once:
            self._kill_at = now
        elif self._child.ask_to_stop(number):
            self._kill_at = self._kill_at or now + self._settings.stop_timeout.value
        else:  # no ranks yet, so nothing to save
            self._kill_at = now

    def _note(self, what: str, holds: bool) -> None:
        """Remember since when a condition holds after which torchrun should end soon."""
        if holds:
            self._since.setdefault(what, time.monotonic())
        else:
            self._since.pop(what, None)

    def _overdue(self) -> bool:
        """Whether torchrun's time is up. A run that ends in order gets longer, to finish writing."""
        patience = self._settings.stop_timeout.value if self._ends_well else END_SECONDS
        limits = [since + patience for since in self._since.values()]
        limits += [] if self._kill_at is None else [self._kill_at]
        return any(time.monotonic() >= limit for limit in limits)

    def _read_run_dir(self, done: threading.Event, on_read: Callable[[], None]) -> None:
        while not done.wait(_READ_EVERY):
            with suppress(OSError):  # of a network file system that comes back
                on_read()
                self._look()

    def _look(self) -> None:
        """Read how this start ends. Raises OSError."""
        before = self._before()
        segment = segment_of(self._run, before, self._host)
        if segment <= before or not (self._run.segment(segment) / "environment.json").exists():
            return
        intent = exit_intent.read(self._run.segment(segment))
        # Ranks that end as they agreed may be writing; those that the watchdog gives up are not.
        agreed = None if intent is None or intent.by is not None else intent.code
        self._ends_well = agreed in (Exit.COMPLETE, Exit.RESUME)
        others = hosts_of(self._run, segment) - {self._host}
        self._others_ended = self._host is not None and bool(ended_hosts(self._run, segment) & others)
