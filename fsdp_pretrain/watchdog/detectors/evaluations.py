"""Watches for evaluations that hang, by their claims: they run beside training, in workers anywhere. No torch."""

from __future__ import annotations

from pathlib import Path

from fsdp_pretrain.config.operations import StorageSection
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.units import human_time
from fsdp_pretrain.watchdog.notify.alarms import Alarms
from fsdp_pretrain.watchdog.probes.client import PeriodicProbe, ProbeServer

from .base import Detector


class EvaluationDetector(Detector):
    """Opens `evaluation/STEP` when an evaluation takes longer than the deadline in its worker's claim.

    The worker dumps its own stacks and finally ends the evaluation; this reports it even when the worker is stopped.
    """

    def __init__(self, alarms: Alarms, section: StorageSection, probes: ProbeServer, run: Path) -> None:
        super().__init__(alarms)
        every, deadline = section.interval.value, section.deadline.value
        self._probe = PeriodicProbe(probes, "evaluations", every=every, deadline=deadline, evals=str(run / "evals"))
        self._seen: dict[str, float] = {}

    def tick(self, now: float) -> None:
        """Start a due probe, and judge the answer of an earlier one. Durations use the monotonic clock."""
        answer = self._probe.tick(now)
        if answer is None or answer.error is not None:
            return
        claims = answer.value["claims"]
        self._seen = {claim["token"]: self._seen.get(claim["token"], now) for claim in claims}
        late = [claim for claim in claims if now - self._seen[claim["token"]] > claim["deadline"]]
        for claim in late:
            self.open(
                f"evaluation/{claim['step']}",
                Severity.WARN,
                f"the evaluation of step {claim['step']} ({claim['tasks']}) on {claim['host']}, pid {claim['pid']}, "
                f"takes longer than {human_time(claim['deadline'])}",
                "training is not affected; there are no scores of this checkpoint, and it is not deleted",
                f"see watchdog/stacks/evaluation-{claim['step']:08d}.txt; it is ended after three times as long, "
                "which is one of its eval.attempts",
                step=claim["step"],
                facts={name: claim[name] for name in ("host", "pid", "deadline", "tasks")},
            )
        keys = {f"evaluation/{claim['step']}" for claim in late}
        self.resolve_others("evaluation", keys, "it has ended; the journal says how")
