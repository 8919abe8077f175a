"""What a test watches: detectors of storage on a clock of its own, or a run under a fast watchdog."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import records
from processes import ROOT
from sight import until

from fsdp_pretrain.run.files import RunDir, now
from fsdp_pretrain.run.step_record import StepRecord
from fsdp_pretrain.units import Progress
from fsdp_pretrain.watchdog.detectors.base import Detector
from fsdp_pretrain.watchdog.detectors.checkpoint_age import CheckpointAgeDetector
from fsdp_pretrain.watchdog.detectors.checkpoint_saves import SaveDetector
from fsdp_pretrain.watchdog.detectors.checkpoint_store import StoreWatch
from fsdp_pretrain.watchdog.detectors.disk_space import CheckpointSpaceDetector
from fsdp_pretrain.watchdog.detectors.judged import Judged
from fsdp_pretrain.watchdog.detectors.periodic import THREADS
from fsdp_pretrain.watchdog.notify.alarms import Alarm, Alarms


class Watch:
    """Detectors, the changes of their alarms, and a clock that only the test moves. Probes are real: after a move they
    get time to answer."""

    def __init__(self, path: Path) -> None:
        self.alarms = Alarms(path / "alarms.jsonl", lambda alarm: self.changes.append(alarm))
        self.changes: list[Alarm] = []
        self.now, self._before = 1000.0, set(threading.enumerate())
        self.detectors: list[Detector] = []

    def _looking(self) -> int:
        """How many probes are under way."""
        return sum(thread.name.startswith(THREADS) for thread in set(threading.enumerate()) - self._before)

    def advance(self, seconds: float = 0.0, hanging: int = 0) -> None:
        """Move the clock, and wait until only `hanging` probes are under way, and what their answers led to."""
        self.now += seconds
        quiet = 0

        def settled() -> bool:
            nonlocal quiet
            for detector in self.detectors:
                detector.tick(self.now)
            quiet = quiet + 1 if self._looking() <= hanging else 0
            return quiet == 6  # a pass starts a probe, one takes its answer, which may ask for another probe

        until(settled, what=lambda: f"the answers of {self._looking()} probes", every=0.002)

    def transitions(self) -> list[tuple[str, str, str]]:
        return [(alarm.key, alarm.severity.name, alarm.state) for alarm in self.changes]


def record(step: int, seconds: float = 1.0, data: float = 0.0) -> StepRecord:
    return records.step_record(step, seconds={"iteration": seconds, "data": data, "checkpoint": 0.0})


class Checkpoints:
    """What watches the checkpoints of a run, its second start."""

    def __init__(
        self,
        watch: Watch,
        run: Path,
        every: str = "100 steps",
        reached: Callable[[], int] = int,
        pids: Callable[[], list[int]] = list,
        judged: Judged | None = None,
    ) -> None:
        for name in ("segments", "control"):
            (run / name).mkdir(parents=True, exist_ok=True)
        place, alarms = RunDir(run), watch.alarms
        self.saves = SaveDetector(alarms, 2, place)
        self.space = CheckpointSpaceDetector(alarms, 2, place.checkpoints)
        self.age = CheckpointAgeDetector(
            alarms,
            2,
            place,
            every=lambda _: Progress.parse(every),
            longest_save=self.saves.longest_save,
            reached=reached,
            pids=pids,
        )
        judges = [self.saves, self.space, self.age]
        watch.detectors = [*judges, StoreWatch(alarms, place, judges, judged)]


def write_journal(run: Path, *entries: dict[str, Any]) -> None:
    with (run / "journal.jsonl").open("a") as file:
        file.writelines(json.dumps({"time": now(), "text": "", "segment": 2, **entry}) + "\n" for entry in entries)


NOISE = {"gradient", "loss", "pace", "straggler", "memory", "data-wait", "blind"}
Transitions = list[tuple[str, str]]
CRIT_AND_RESOLVED: Transitions = [("CRIT", "open"), ("CRIT", "resolved")]


class Watched:
    """A run with a fast watchdog, and ranks that can be given a fault."""

    def __init__(self, lab: Any, helpers: Any, run_command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lab, self.helpers, self._command, self._patch = lab, helpers, run_command, monkeypatch
        self.run: Path = lab.path / "run"
        self.ranks = 1

    def configure(self, *, ranks: int = 1, watchdog: dict[str, Any] | None = None, **sections: dict[str, Any]) -> None:
        """Settings that every start of the run shares."""
        changes = {"enabled": True, **(watchdog or {})}
        checkpoint = {"every": "20 steps", "retry": "0.1 s", "max_failures": 1000, **sections.pop("checkpoint", {})}
        train = {"duration": "100000 steps", "micro_batch": 8 // ranks}
        self.ranks = ranks
        self._config = self.lab.config(train=train, checkpoint=checkpoint, watchdog=changes, **sections)

    def start(self, *overrides: str, trap: dict[str, Any] | None = None, fault: dict[str, Any] | None = None) -> Any:
        """Start it, without a fault or with one of storage (see traps.py) or of another kind (see faults.py)."""
        for name, content, file in (("TRAP", trap, "traps.py"), ("FAULT", fault, "faults.py")):
            if content is not None:
                self._patch.setenv(name, json.dumps(content))
                self._patch.setenv("EXECUTE_FIRST", str(ROOT / "tests" / file))
        job = self.lab.start(self._config, f"run.dir={self.run}", *overrides, ranks=self.ranks)
        for name in ("TRAP", "FAULT", "EXECUTE_FIRST"):
            self._patch.delenv(name, raising=False)
        return job

    def stop(self, job: Any) -> None:
        """Ask it to stop; it saves and exits with 75."""
        job.kill(0, signal.SIGTERM)
        self.ends(job, 75)

    def ends(self, job: Any, code: int) -> None:
        """Wait for an exit code, and for the end of the watchdog."""
        assert job.wait() == [code] * self.ranks, job.output()[-3000:]
        self.helpers.wait_for(lambda: not self.helpers.agents(self.run), what="the end of the watchdog")
        self.is_consistent()

    def until(self, key: str, state: str = "open", severity: str = "") -> dict[str, Any]:
        """Wait for a state of an alarm; the transition."""

        def standing() -> Any:
            alarm = (self.helpers.alarms(self.run, key) or [{}])[-1]
            return alarm if alarm.get("state") == state and severity in ("", alarm["severity"]) else None

        def missed() -> str:
            return f"{key} {state} {severity}, which has {self.transitions(key)}"

        found: dict[str, Any] = self.helpers.wait_for(standing, what=missed)
        return found

    def reaches(self, steps: int, more: bool = False) -> None:
        """Wait for a step, or for that many more."""
        begin = self.step if more else 0
        self.helpers.wait_for(lambda: self.step >= begin + steps, what=f"step {begin} + {steps}")

    @property
    def step(self) -> int:
        records = sorted(self.run.glob("segments/*/metrics.jsonl"))
        last = records[-1].read_bytes().rpartition(b"\n")[0].rpartition(b"\n")[2] if records else b""
        return json.loads(last)["step"] if last else 0

    def saved(self) -> list[int]:
        """Steps of the verified checkpoints on storage."""
        names = (path.parent.name for path in (self.run / "checkpoints").glob("step-*/verified.json"))
        return sorted(int(name[5:]) for name in names if re.fullmatch(r"step-\d{8}", name))

    def transitions(self, key: str) -> Transitions:
        """Severity and state of every transition of an alarm."""
        return [(alarm["severity"], alarm["state"]) for alarm in self.helpers.alarms(self.run, key)]

    def warnings(self) -> set[str]:
        """Keys of all alarms of WARN or worse, except those typical of a tiny model or a busy machine."""
        found = {alarm["key"] for alarm in self.helpers.alarms(self.run) if alarm["severity"] != "INFO"}
        return {key for key in found if key.partition("/")[0] not in NOISE}

    def is_consistent(self) -> None:
        """Every transition is valid and in the journal; every second is in one state; nothing half-written is left."""
        changes = [(a["key"], a["severity"], a["state"]) for a in self.helpers.alarms(self.run)]
        for key in {key for key, _, _ in changes}:
            mine = self.transitions(key)
            assert all(one != next_ for one, next_ in pairwise(mine)), (key, mine)
        by_trainer = {entry["key"] for entry in self.helpers.journal(self.run, "health")}  # these are no alarms there
        entries = [e for e in self.helpers.journal(self.run, "alarm") if e["key"] not in by_trainer]
        changes = [alarm for alarm in changes if alarm[0] not in by_trainer]
        assert sorted((e["key"], e["severity"], e["state"]) for e in entries) == sorted(changes)
        done = self._command("fsdp_pretrain.cli", "goodput", self.run, "--json")
        found = json.loads(done.stdout)
        assert sum(found["states"].values()) == pytest.approx(found["wall_seconds"], rel=1e-3)
        assert not list((self.run / "checkpoints").glob("*.writing-*"))
        verified = self._command("fsdp_pretrain.cli", "checkpoints", self.run, "verify")
        assert verified.returncode == 0, verified.stdout

    def learned_as(self, whole: list[Any]) -> None:
        """The curve is that of an undisturbed run."""
        losses = self.helpers.losses(self.run)
        assert [step for step, _, _ in losses] == list(range(1, len(losses) + 1))
        assert losses[: len(whole)] == whole[: len(losses)]
