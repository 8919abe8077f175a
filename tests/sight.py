"""What tests observe of a watched run from outside: its record, its alarms, its processes."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

WATCHED = {"enabled": True, "hang": {"soft": "2 s", "hard": "5 s"}}
"""With short deadlines."""
PATIENT = {**WATCHED, "hang": {"soft": "60 s", "hard": "120 s"}}
"""For runs without hangs: a busy machine may stop all ranks for some seconds."""
CALM = False
"""`watchdog.pace` for runs without slowdowns: a busy machine slows steps now and then."""
PATIENCE = 180.0
"""Timeout in seconds for what takes a few: the machine may be busy."""


def family(pid: int) -> list[int]:
    """All descendants of a process."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def rank_of(pid: int) -> int | None:
    """The rank of a process; None if it is none, or has ended."""
    try:
        number = psutil.Process(pid).environ().get("RANK")
    except psutil.NoSuchProcess:
        return None
    return None if number is None else int(number)


def lives(pid: int) -> bool:
    """Whether a process is alive; a killed one stays a zombie until it is reaped."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file below a folder but locks, which beat: when it was written, and its bytes."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "lock.json")
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def until(
    condition: Callable[[], Any], timeout: float = PATIENCE, what: Callable[[], str] | str = "", every: float = 0.02
) -> Any:
    """Poll until a condition holds; its value. Tests wait for other processes and threads in this way only.

    Args:
        what: what is waited for, or a function that returns it with the state found instead.
        every: seconds between two checks.
    """
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout}s: {what() if callable(what) else what or condition}"
        time.sleep(every)
    return value


def seeded(seed: int | None = None) -> random.Random:
    """A test's random generator, by default with a new seed. A failure shows the seed; `TEST_SEED` repeats it."""
    seed = int(os.environ.get("TEST_SEED", random.SystemRandom().randrange(10**6) if seed is None else seed))
    print(f"random with seed {seed} (again: TEST_SEED={seed})")
    return random.Random(seed)


def tree(path: Path) -> dict[str, bytes]:
    """Every file with its bytes."""
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def steps(run: Path) -> int:
    """Number of steps in the newest segment's record."""
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
    """Wait until a hang is reported with these facts; the transition. Earlier ones may be due to a busy machine, or
    have fewer facts."""
    return until(  # type: ignore[no-any-return]
        lambda: [
            alarm
            for alarm in alarms(run, "hang")
            if alarm["state"] == "open" and facts.items() <= alarm["facts"].items()
        ],
        what=lambda: f"a hang with {facts}, but {alarms(run)}; the start ended with {intent(run)}",
    )[-1]


def agents(run: Path) -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "fsdp_pretrain.watchdog.agent" in command and str(run) in command:
            found.append(process.pid)
    return found


def intent(run: Path) -> Any:
    """The exit intent of the newest start."""
    for path in sorted((run / "segments").glob("*/exit_intent.json"), reverse=True):
        return json.loads(path.read_text())
    return None
