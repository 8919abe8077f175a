"""Beside one start, on one node: passes requests on, and sees to it that the start ends when it should. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..errors import Exit
from ..record.files import RunDir, read_json
from ..watchdog_sections import LaunchSection
from .outcome import ended_hosts, newest_segment
from .torchrun import Torchrun

_POLL, _LOOK = 0.1, 1.0


class Watch:
    """Watches a torchrun to its end.

    Args:
        run: the run directory.
        settings: how long things may take.
        child: the torchrun.
        before: number of the newest segment when it began.
        host: name of this host if there are others; None if it is alone.
    """

    def __init__(self, run: RunDir, settings: LaunchSection, child: Torchrun, before: int, host: str | None) -> None:
        self._run, self._settings, self._child, self._before, self._host = run, settings, child, before, host
        self._segment: int | None = None
        self._kill_at: dict[str, float] = {}
        self._next_look = 0.0

    def run(self, take_signal: Callable[[], tuple[int, bool] | None], on_segment: Callable[[int], None]) -> int:
        """Until torchrun and its ranks are gone; torchrun's exit code.

        Args:
            take_signal: gives a signal to pass on to the ranks and whether to end at once, or None.
            on_segment: called with the number of the start's segment once it is known.
        """
        child, settings = self._child, self._settings
        try:
            while (code := child.poll()) is None:
                asked = take_signal()
                if asked is not None:
                    self._pass_on(*asked)
                if time.monotonic() >= self._next_look:
                    self._next_look = time.monotonic() + min(_LOOK, settings.end_timeout.value / 4)
                    self._look(on_segment)
                if any(time.monotonic() >= at for at in self._kill_at.values()):
                    child.kill()
                time.sleep(_POLL)
        except BaseException:
            child.kill()
            raise
        if not child.wait_for_ranks(settings.end_timeout.value):
            child.kill()
        return code

    def _pass_on(self, number: int, at_once: bool) -> None:
        now = time.monotonic()
        if at_once:
            self._kill_at["asked"] = now
        elif self._child.ask(number):
            self._kill_at.setdefault("asked", now + self._settings.stop_timeout.value)
        else:  # no ranks yet: nothing to save
            self._child.terminate()
            self._kill_at.setdefault("asked", now + self._settings.end_timeout.value)

    def _look(self, on_segment: Callable[[int], None]) -> None:
        """Find the segment; notice ranks that are gone, here or on other nodes, while torchrun goes on."""
        newest = newest_segment(self._run) if self._segment is None else 0
        if newest > self._before and (self._run.segment(newest) / "environment.json").exists():
            self._segment = newest
            on_segment(newest)
        self._expect_end("rank gone", self._child.lost)
        if self._host is not None and self._segment is not None:
            self._expect_end("other nodes ended", bool(ended_hosts(self._run, self._segment) - {self._host}))

    def _expect_end(self, why: str, true: bool) -> None:
        """While something is true, torchrun has `end_timeout` to end; `stop_timeout` if the run ends as it should."""
        if not true:
            self._kill_at.pop(why, None)
        elif why not in self._kill_at:
            patience = self._settings.stop_timeout if self._ends_well() else self._settings.end_timeout
            self._kill_at[why] = time.monotonic() + patience.value

    def _ends_well(self) -> bool:
        path = self._run.segment(newest_segment(self._run)) / "exit_intent.json"
        intent = read_json(path) or {}
        return self._segment is not None and intent.get("code") in (Exit.COMPLETE, Exit.RESUME)
