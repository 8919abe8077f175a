"""What tests see of a watched run from outside: its record, its alarms, its processes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

WATCHED = {"enabled": True, "interval": "0.2 s", "hang": {"soft": "2 s", "hard": "5 s", "save_soft": "4 s"}}
"""A watchdog that is quick about it."""


def family(pid: int) -> list[int]:
    """All descendants of a process."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def until(condition: Callable[[], Any], timeout: float = 60, what: str = "") -> Any:
    """Poll until a condition holds; its value."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout}s: {what}"
        time.sleep(0.02)
    return value


def steps(run: Path) -> int:
    """Steps in the newest segment's record."""
    found = sorted((run / "segments").glob("*/metrics.jsonl"))
    return found[-1].read_text().count("\n") if found else 0


def alarms(run: Path, key: str | None = None) -> list[dict[str, Any]]:
    """Transitions of an alarm, or of all of them, oldest first."""
    try:
        lines = (run / "watchdog/alarms.jsonl").read_text().splitlines()
    except OSError:
        return []
    return [alarm for alarm in map(json.loads, lines) if key in (None, alarm["key"])]


def agents(run: Path) -> list[int]:
    """Agents of a run."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "fsdp_pretrain.watchdog.agent" in command and str(run) in command:
            found.append(process.pid)
    return found


def intent(run: Path) -> Any:
    """What the newest start said of its end."""
    for path in sorted((run / "segments").glob("*/exit_intent.json"), reverse=True):
        return json.loads(path.read_text())
    return None
