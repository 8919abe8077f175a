"""Runs that hang, ranks that die, agents and launchers that are killed: what the watchdog sees, says and does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

WATCHED = {"enabled": True, "interval": "0.2 s", "hang": {"soft": "2 s", "hard": "5 s", "save_soft": "4 s"}}


@pytest.fixture
def watched(lab: Any) -> Callable[..., Path]:
    """A configuration of a run long enough to be broken, with a watchdog that is quick about it."""

    def make(name: str = "run", **sections: dict[str, Any]) -> Path:
        sections.setdefault("train", {"duration": "4000 steps"})
        sections.setdefault("checkpoint", {"every": "20 steps"})
        config: Path = lab.config(name, **{"watchdog": WATCHED, **sections})
        return config

    return make


class Elastic:
    """A job under a real torchrun."""

    def __init__(self, config: Path, environment: dict[str, str], *, ranks: int, restarts: int, log: Path) -> None:
        self._log = log.open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            + ["--max-restarts", str(restarts), "-m", "fsdp_pretrain.train", str(config)],
            env=environment,
            stdout=self._log,
            stderr=self._log,
            cwd="/",
            start_new_session=True,
        )

    def close(self) -> None:
        for process in [*family(self.process.pid), self.process.pid]:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()


def family(pid: int) -> list[int]:
    """All descendants of a process."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def until(what: Callable[[], Any], seconds: float = 60.0) -> Any:
    """The first true value of `what`."""
    deadline = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return value


def steps(run: Path) -> int:
    """Steps in the newest segment's record."""
    found = sorted((run / "segments").glob("*/metrics.jsonl"))
    return found[-1].read_text().count("\n") if found else 0


def alarms(run: Path, key: str) -> list[dict[str, Any]]:
    """Transitions of an alarm."""
    try:
        lines = (run / "watchdog/alarms.jsonl").read_text().splitlines()
    except OSError:
        return []
    return [alarm for alarm in map(json.loads, lines) if alarm["key"] == key]


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
    for path in reversed(sorted((run / "segments").glob("*/exit_intent.json"))):
        return json.loads(path.read_text())
    return None


@pytest.fixture
def start(lab: Any, helpers: Any) -> Iterator[Callable[..., Elastic]]:
    """Starts jobs under torchrun."""
    jobs: list[Elastic] = []

    def begin(config: Path, *, ranks: int = 2, restarts: int = 0, **environment: str) -> Elastic:
        log = lab.path / f"torchrun-{len(jobs)}.log"
        jobs.append(Elastic(config, helpers.environment(**environment), ranks=ranks, restarts=restarts, log=log))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.close()


def test_a_stopped_rank_is_named_and_the_job_ended(lab: Any, watched: Callable[..., Path]) -> None:
    """Fault matrix 6: SIGSTOP. Alarm at the soft deadline with the rank, stacks of all, end at the hard one."""
    config, run = watched(), lab.path / "run"
    job = lab.start(config, ranks=2)
    until(lambda: steps(run) > 30)
    stopped = time.monotonic()
    job.kill(1, signal.SIGSTOP)
    alarm = until(lambda: alarms(run, "hang"))[0]
    told = time.monotonic() - stopped
    assert 2.0 <= told <= 4.5, told
    assert alarm["severity"] == "CRIT" and alarm["facts"]["verdict"] == "stopped" and alarm["facts"]["suspects"] == [1]
    assert f"rank 1 ({os.uname().nodename}, pid {job.ranks[1].pid}) is stopped" in alarm["summary"]
    assert job.wait(30) == [-signal.SIGKILL] * 2
    assert 5.0 <= time.monotonic() - stopped <= 9.0
    found = intent(run)
    assert found["code"] == 75 and found["restart"] and found["suspects"] == [1]
    stacks = sorted(path.name for path in (run / "watchdog/stacks").iterdir())
    assert stacks == ["0001-rank-00000.txt", "0001-rank-00001.txt"]
    assert all("most recent call first" in (run / "watchdog/stacks" / name).read_text() for name in stacks)
    until(lambda: not agents(run), 10)
