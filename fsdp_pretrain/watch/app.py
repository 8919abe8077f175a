"""The live view: pages that follow in the background, drawn about once a second and at every key."""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.text import Text

from fsdp_pretrain.errors import UserError
from fsdp_pretrain.record.files import RunDir
from fsdp_pretrain.units import human_time
from fsdp_pretrain.watchdog.notify.alarms import Alarm
from fsdp_pretrain.watchdog.notify.operator import acknowledge

from . import fleet, run_page
from .fleet import FleetFollower, FleetRow
from .following import RunFollower, RunView
from .run_page import PageChoice
from .terminal import Terminal

_SECONDS = 1.0
_SILENT = 5.0
"""Seconds without an answer of the storage until that is shown."""


class Background:
    """Calls `poll` about once a second in a thread, so that storage that hangs does not stop the keys."""

    def __init__(self, poll: Callable[[], tuple[Any, bool]], changed: Callable[[], None]) -> None:
        self._poll, self._changed = poll, changed
        self._ended = threading.Event()
        self._answered = time.monotonic()
        self._failure: BaseException | None = None
        self.found: Any = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self.found, whole = self._poll()
            except BaseException as error:
                self._failure = error
                self._changed()
                return
            self._answered = time.monotonic()
            self._changed()
            self._ended.wait(_SECONDS if whole else 0.01)

    @property
    def silence(self) -> str:
        """That the storage does not answer, if so. Raises what the thread raised."""
        if self._failure is not None:
            raise self._failure
        silent = time.monotonic() - self._answered
        return f"the storage has not answered for {human_time(silent)}" if silent > _SILENT else ""

    def end(self) -> None:
        self._ended.set()


class LivePage(ABC):
    """What is on the screen."""

    background: Background

    @abstractmethod
    def lines(self, width: int, height: int) -> list[Text]:
        """The page now."""

    @abstractmethod
    def press(self, key: str) -> LivePage | None:
        """React to a key; a page to open on top of this one."""


class RunScreen(LivePage):
    """A run; its alarms can be acknowledged."""

    def __init__(self, run: RunDir, changed: Callable[[], None], *, below: bool = False) -> None:
        self._run, self._changed = run, changed
        self._keys = f"{run_page.KEYS}  Esc all runs" if below else run_page.KEYS
        self._choice = PageChoice(footer=self._keys)
        self._asked: Alarm | None = None
        self._said, self._said_at = "", -math.inf
        self.background = Background(RunFollower(run).poll, changed)

    def lines(self, width: int, height: int) -> list[Text]:
        """The page now, with what was asked or said at the bottom."""
        silence, view = self.background.silence, self.background.found
        if view is None:
            return _waiting(f"reading {self._run.path}", silence, height)
        if silence:
            view = replace(view, problem=silence)
        said = self._said if time.monotonic() - self._said_at < 10 * _SECONDS else ""
        asked = f"acknowledge {self._asked.key}? y yes, any other key no" if self._asked is not None else ""
        place = min(self._choice.selected, max(0, len(view.alarms) - 1))
        keys = self._keys.replace("z zoom", f"z {_zoomed(self._choice)}")
        choice = replace(self._choice, selected=place, footer=asked or said or keys)
        return run_page.render(view, choice, width, height)

    def press(self, key: str) -> LivePage | None:
        """Zoom, select an alarm, acknowledge it after a question."""
        view: RunView | None = self.background.found
        alarms = view.alarms if view is not None else []
        choice = self._choice
        if self._asked is not None:
            alarm, self._asked = self._asked, None
            if key == "y":
                self._acknowledge(alarm.key)
        elif key == "z":
            self._choice = replace(choice, zoom=choice.zoom + 1)
        elif key in ("up", "k", "down", "j"):
            step = 1 if key in ("down", "j") else -1
            self._choice = replace(choice, selected=max(0, min(len(alarms) - 1, choice.selected + step)))
        elif key == "a":
            waiting = [alarm for alarm in alarms[choice.selected :][:1] if alarm.state == "open"]
            self._asked = waiting[0] if waiting else None
            if self._asked is None:
                self._say("no alarm is open and unacknowledged here")
        return None

    def _acknowledge(self, key: str) -> None:
        """In a thread: the run directory may hang."""

        def act() -> None:
            try:
                acknowledge(self._run, key)
                self._say(f"the watchdog acknowledges {key} within seconds, or when the run starts again")
            except UserError as error:
                self._say(error.cause)

        self._say(f"acknowledging {key} ...")
        threading.Thread(target=act, daemon=True).start()

    def _say(self, text: str) -> None:
        self._said, self._said_at = text, time.monotonic()
        self._changed()


def _zoomed(choice: PageChoice) -> str:
    return "zoom: all steps" if choice.shown is None else f"zoom: last {choice.shown:_} steps"


class FleetScreen(LivePage):
    """All runs under a directory."""

    def __init__(self, directory: Path, changed: Callable[[], None]) -> None:
        self._directory, self._changed = directory, changed
        self._selected = 0
        self.background = Background(FleetFollower(directory).poll, changed)

    def lines(self, width: int, height: int) -> list[Text]:
        silence, rows = self.background.silence, self.background.found
        if rows is None:
            return _waiting(f"looking for runs in {self._directory}", silence, height)
        self._selected = max(0, min(self._selected, len(rows) - 1))
        return fleet.render(self._directory, rows, width, height, self._selected, silence or fleet.KEYS)

    def press(self, key: str) -> LivePage | None:
        rows: list[FleetRow] = self.background.found or []
        if key in ("up", "k", "down", "j"):
            self._selected += 1 if key in ("down", "j") else -1
        place = self._selected if key == "enter" else int(key) - 1 if key in "123456789" else len(rows)
        return RunScreen(RunDir(Path(rows[place].path)), self._changed, below=True) if place < len(rows) else None


def _waiting(text: str, silence: str, height: int) -> list[Text]:
    return [Text(f"{text} ..."), Text(silence, "bold red"), *[Text()] * (height - 2)]


def once(run: RunDir, width: int) -> list[Text]:
    """The page of a run as it is now."""
    follower, whole = RunFollower(run), False
    while not whole:
        view, whole = follower.poll()
    return run_page.render(view, PageChoice(selected=-1), width, None)


def show(path: Path, *, fleet_of_runs: bool) -> None:
    """Show a run, or all runs under a directory, until the person leaves."""
    with Terminal() as terminal:
        first: LivePage = FleetScreen(path, terminal.wake) if fleet_of_runs else RunScreen(RunDir(path), terminal.wake)
        pages = [first]
        while pages:
            terminal.paint(pages[-1].lines(*terminal.size))
            for key in terminal.wait(2 * _SECONDS):  # what follows wakes it earlier
                if key == "q":
                    return
                if key == "escape" and len(pages) > 1:
                    pages.pop().background.end()
                elif (opened := pages[-1].press(key)) is not None:
                    pages.append(opened)
