"""What tests see of a watched run from outside: its record, its alarms, its processes."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

WATCHED = {"enabled": True, "interval": "0.2 s", "hang": {"soft": "2 s", "hard": "5 s", "save_soft": "4 s"}}
"""A watchdog that is quick about it."""
PATIENT = {**WATCHED, "hang": {"soft": "60 s", "hard": "120 s"}}
"""The same where nothing hangs: a busy machine may keep all ranks from running for some seconds."""
CALM = {"enabled": False, "window": 10**6}
"""`watchdog.pace` where nothing is to be slow: steps on a busy machine are now and then."""
PATIENCE = 180.0
"""Seconds that tests wait for what takes a few: the machine may have other work to do."""


def family(pid: int) -> list[int]:
    """All descendants of a process."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def rank_of(pid: int) -> int | None:
    """Number of the rank that a process is; None of any other, which may have ended meanwhile."""
    try:
        number = psutil.Process(pid).environ().get("RANK")
    except psutil.NoSuchProcess:
        return None
    return None if number is None else int(number)


def until(
    condition: Callable[[], Any],
    timeout: float = PATIENCE,
    what: Callable[[], str] | str = "",
    every: float = 0.02,
) -> Any:
    """Poll until a condition holds; its value. Tests wait for other processes and threads in this way only.

    Args:
        what: is waited for, or a function that says it with what there is instead.
        every: seconds between two looks.
    """
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout}s: {what() if callable(what) else what or condition}"
        time.sleep(every)
    return value


def seeded(seed: int | None = None) -> random.Random:
    """The generator of a test that is random, a new one without a seed. A failure shows its seed; `TEST_SEED` repeats
    it."""
    seed = int(os.environ.get("TEST_SEED", random.SystemRandom().randrange(10**6) if seed is None else seed))
    print(f"random with seed {seed} (again: TEST_SEED={seed})")
    return random.Random(seed)


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


def hang(run: Path, **facts: Any) -> dict[str, Any]:
    """Wait until a hang is told with these facts; the transition. An earlier one may be of a machine that was busy, or
    have told less."""
    return until(  # type: ignore[no-any-return]
        lambda: [
            alarm
            for alarm in alarms(run, "hang")
            if alarm["state"] == "open" and facts.items() <= alarm["facts"].items()
        ],
        what=lambda: f"a hang with {facts}, but {alarms(run)}; the start ended with {intent(run)}",
    )[-1]


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
