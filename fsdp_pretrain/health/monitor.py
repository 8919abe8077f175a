"""Verdicts on a run's metrics: what to report, what not to save, when to roll back, when to stop.

`Health` is a pure function of the metrics records of a start and the last records before it. Every rank passes the
same records to it after the same steps, so all ranks reach the same verdict without communication.

Rank 0 writes the findings into the step's record, as its list `health` (see `step_record.HealthFinding`), and those
above INFO into the journal, as kind `health`. An incident opens (`resolved` false), may be reported again with a higher
severity, and ends (`resolved` true). The first record of a start repeats the open incidents; all others are over. The
watchdog turns them into alarms. Actions are journaled too: a skipped step as `health-skip`, a rollback as
`health-rollback`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.data.packing.position import Position
from fsdp_pretrain.run.step_record import HealthFinding, LossSum, StepRecord
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.train.observer import RollbackRequest, Verdict

from . import limits
from .rules import GradientNormRule, HealthIncident, LossLevelRule, LossScaleRule, LossSpikeRule, SourceLossRule

HISTORY = 640
"""Number of records before a start that its first verdicts need."""

_NEAR = 20
"""Window, in steps, in which non-finite steps are counted."""

_MAX_OVERFLOWS_AT_MIN = 10
"""Consecutive overflows allowed at the smallest loss scale; more are not caused by the data."""

_ADVICE = (
    "look at the samples named in the journal (`fsdp-pretrain where`); then lower optimizer.lr or train.grad_clip, or "
    "go back further with `fsdp-pretrain rollback RUN --to STEP --skip-steps A:B --set key=value`"
)


@dataclass(frozen=True)
class ExpectedSteps:
    """The records of an earlier segment for the steps that this start repeats."""

    records: Mapping[int, StepRecord]  # by step
    segment: int  # number of the segment that wrote them
    exact: bool  # whether the loss must be the same to the bit


class Health:
    """The health state of a run.

    Args:
        history: the last `HISTORY` records of the kept line before this start, oldest first.
        expected: records of the next steps, if they were trained before.
    """

    def __init__(
        self, config: Config, history: Iterable[StepRecord] = (), expected: ExpectedSteps | None = None
    ) -> None:
        self._config, self._schedule = config.health, config.schedule
        self._spike = LossSpikeRule(config.health)
        self._level = LossLevelRule(config.health)
        self._norm = GradientNormRule(config.health)
        self._sources = SourceLossRule(config.health)
        self._scale = LossScaleRule()
        self._nonfinite = HealthIncident("loss/nonfinite")
        self._zero_gradient = HealthIncident("learning/gradient")
        self._same_loss = HealthIncident("learning/loss")
        self._same_parameters = HealthIncident("learning/parameters")
        self._rate = HealthIncident("learning/rate")
        self._replicas = HealthIncident("replicas/parameters")
        self._replay = HealthIncident("replay/step")
        self._skipped: deque[int] = deque()  # numbers of the last non-finite steps
        self._cursors: deque[tuple[int, int]] = deque(maxlen=2 * HISTORY)  # (step, samples read)
        self._losses: deque[LossSum] = deque(maxlen=3)
        self._plan: tuple[Mapping[str, float], int] = {}, 0  # shares and length of the samples with comparable losses
        self._digest: str | None = None  # of the parameters, at the last comparison
        self._updates = 0  # optimiser steps since then
        self._expected: ExpectedSteps | None = None
        self._carried: list[HealthFinding] = []
        for record in history:
            self.step(record)
        # Loss and norm statistics carry over; these incidents ended with the last start.
        ended = (self._nonfinite, self._zero_gradient, self._same_loss, self._same_parameters, self._rate)
        for incident in ended:
            incident.severity = None
        self._skipped.clear()
        self._digest = None
        rules = [rule.incident for rule in (self._spike, self._level, self._norm, self._scale)]
        incidents = [*rules, *self._sources.incidents.values()]
        self._carried = [finding for incident in incidents for finding in incident.carried()]
        self._expected = expected

    def reconfigure(self, config: Config) -> None:
        """Continue with a configuration in which only the timeline differs."""
        self._schedule = config.schedule

    @property
    def suspicion(self) -> str | None:
        """Why a checkpoint made now should not be trusted; None if it can be."""
        if self._spike.incident.serious:
            return f"loss/spike since step {self._spike.start}"
        return f"scale/collapse at step {self._scale.incident.last}" if self._scale.incident.serious else None

    @property
    def clean_until(self) -> tuple[float, ...]:
        """Upper bounds on the step of a checkpoint to roll back to now, best first."""
        if self._spike.incident.severity is None:
            return (math.inf,)
        return self._spike.start - limits.DISTANCE, self._spike.start - 1

    def step(self, record: StepRecord) -> Verdict:
        """Judge a step by its record. Call once per step, in order."""
        self._cursors.append((record.step, record.cursor))
        verdict, self._carried = Verdict(self._carried), []
        self._judge_finite(record, verdict)
        if record.loss_scale is not None:
            verdict.findings += self._scale.step(record.step, record.loss_scale, record.overflow)
            self._judge_scale(record, verdict)
        if record.is_finite:
            self._judge_loss(record, verdict)
        self._judge_learning(record, verdict)
        self._judge_change(record, verdict)
        self._judge_replicas(record, verdict)
        self._judge_replay(record, verdict)
        if verdict.error is not None:
            verdict.rollback = None
        return verdict

    def _judge_loss(self, record: StepRecord, verdict: Verdict) -> None:
        loss, norm = record.loss.mean, record.grad_norm
        self._follow_plan(record.ramps.shares, record.sequence_length)
        verdict.findings += self._level.step(record.step, loss)
        verdict.findings += self._norm.step(record.step, norm) if norm else []
        verdict.findings += self._sources.step(record.step, record.sources, record.ramps.shares)
        spike = self._spike.step(record.step, loss, self._level, self._norm)
        verdict.findings += spike
        lasts = any(finding.severity is Severity.CRIT and not finding.resolved for finding in spike)
        if lasts and self._config.rollback:
            verdict.rollback = self._request_rollback(self._spike.incident.key, spike[-1].summary, self._spike.start)

    def _follow_plan(self, shares: Mapping[str, float], length: int) -> None:
        """Compare the loss anew where another mixture or length of samples is planned: it has another loss."""
        before, longest = self._plan
        moved = sum(abs(shares.get(name, 0.0) - before.get(name, 0.0)) for name in {*shares, *before}) / 2
        if moved > limits.SHARES or length != longest:
            if longest:
                self._spike.restart()
                self._level.restart()
            self._plan = shares, length

    def _request_rollback(self, key: str, cause: str, start: int) -> RollbackRequest:
        """A rollback request that covers the incident from step `start` until now."""
        step, cursor = self._cursors[-1]
        before, read = self._cursors[-min(2, len(self._cursors))]
        margin = limits.MARGIN
        batch = (cursor - read) // max(1, step - before)  # lines of the record may be missing
        earlier = (read for at, read in reversed(self._cursors) if at < start - margin)
        return RollbackRequest(
            key=key,
            cause=cause,
            start=start,
            end=step,
            first=next(earlier, self._cursors[0][1]),
            stop=cursor + margin * batch,
            target=start - limits.DISTANCE,
        )

    # ------------------------------------------------------------------ numbers that are not finite

    def _judge_finite(self, record: StepRecord, verdict: Verdict) -> None:
        """Judge steps with non-finite loss or gradients; fp16 overflows with a finite loss are left to the scaler."""
        step = record.step
        if record.is_finite or (record.overflow and math.isfinite(record.loss.mean)):
            if not self._skipped or step - self._skipped[-1] > _NEAR:
                verdict.findings += self._nonfinite.settle(step, "steps are finite again")
            return
        what = f"step {step}: loss {record.loss.mean}, gradient norm {record.grad_norm}: not finite"
        rank = record.nonfinite_rank
        what += f" (the loss of rank {rank})" if rank is not None else ""
        self._skipped.append(step)
        near = [old for old in self._skipped if step - old < _NEAR]
        row = next((n for n in range(1, len(near)) if near[-1 - n] != step - n), len(near))
        if row < limits.NONFINITE_IN_A_ROW and len(near) < limits.NONFINITE_IN_20:
            verdict.findings += self._nonfinite.seen(Severity.WARN, step, f"{what}; it was skipped")
            return
        cause = f"{len(near)} of the last {_NEAR} steps were not finite, the last {row} in a row; {what}"
        verdict.findings += self._nonfinite.seen(Severity.CRIT, step, cause)
        if not self._config.rollback:
            verdict.fail(cause, "they were skipped; the weights did not change", _ADVICE)
            return
        rollback = self._request_rollback(self._nonfinite.key, cause, near[-row] if row > 1 else near[0])
        cursor = dict(self._cursors).get(step - 1)
        before = None if cursor is None else Position(step - 1, record.consumed - record.batch, cursor)
        verdict.rollback = replace(rollback, before=before, rank=rank)

    def _judge_scale(self, record: StepRecord, verdict: Verdict) -> None:
        """Judge overflows that continue although the loss scale is at its minimum."""
        if self._scale.at_min >= _MAX_OVERFLOWS_AT_MIN:
            verdict.fail(
                f"step {record.step}: {self._scale.at_min} steps in a row overflowed at the smallest loss scale",
                effect="no scale helps: the values themselves are not finite in fp16, and every step would be skipped",
                remedy="look at the loss and the gradient norm before; a lower learning rate or bf16 may help",
            )

    # ------------------------------------------------------------------ nothing is learned

    def _judge_learning(self, record: StepRecord, verdict: Verdict) -> None:
        """Judge a constant loss, a gradient of 0, or a learning rate other than planned."""
        step = record.step
        self._losses.append(record.loss)
        same = len(self._losses) == 3 and all(loss == record.loss for loss in self._losses) and record.is_finite
        if same:
            text = f"three steps in a row have exactly the loss {record.loss.mean!r}"
            verdict.findings += self._same_loss.seen(Severity.CRIT, step, text)
        else:
            verdict.findings += self._same_loss.settle(step, "the loss changes again")
        if record.grad_norm == 0:
            text = "the gradient norm is 0: nothing is learned"
            verdict.findings += self._zero_gradient.seen(Severity.CRIT, step, text)
        elif record.is_finite:
            verdict.findings += self._zero_gradient.settle(step, "there are gradients again")
        plan = self._schedule.lr_at(record.consumed)
        if not math.isclose(record.lr, plan, rel_tol=1e-6):
            text = f"the learning rate was {record.lr:.6g}, planned {plan:.6g}"
            verdict.findings += self._rate.seen(Severity.WARN, step, text)
        else:
            verdict.findings += self._rate.settle(step, "the learning rate is as planned")

    def _judge_change(self, record: StepRecord, verdict: Verdict) -> None:
        """Judge parameters that stay the same although the optimiser took steps."""
        sums = record.replicas
        if sums is not None:
            if self._digest == sums.digest and self._updates >= 2:
                text = f"{self._updates} optimiser steps changed no parameter"
                verdict.findings += self._same_parameters.seen(Severity.CRIT, record.step, text)
            elif self._digest is not None and self._digest != sums.digest:
                verdict.findings += self._same_parameters.settle(record.step, "the parameters change")
            self._digest, self._updates = sums.digest, 0
        if not record.skipped and record.lr > 0:
            self._updates += 1

    # ------------------------------------------------------------------ what must be equal

    def _judge_replicas(self, record: StepRecord, verdict: Verdict) -> None:
        """Judge replicas that hold different parameters before a step."""
        if record.replicas is None or not record.replicas.differing:
            return
        ranks = ", ".join(map(str, record.replicas.differing))
        self._mismatch(
            self._replicas,
            record.step,
            f"before step {record.step} the replicas hold different parameters: ranks {ranks} do not agree",
            effect="replicas average the gradients of different models; this was not saved. Checkpoints since the last "
            "comparison may hold either",
            remedy="`fsdp-pretrain doctor` on the hosts of these ranks; go back to a checkpoint before the last "
            "comparison with `fsdp-pretrain rollback`",
            verdict=verdict,
        )

    def _judge_replay(self, record: StepRecord, verdict: Verdict) -> None:
        """Judge whether a repeated step reproduces its first record."""
        step = record.step
        if self._expected is None or (old := self._expected.records.get(step)) is None:
            return
        before = f"segment {self._expected.segment} recorded"
        if old.data_digest != record.data_digest:
            self._mismatch(
                self._replay,
                step,
                f"step {step} trained on the batch {record.data_digest}; {before} {old.data_digest}",
                effect="the data does not continue where it stopped: samples would be repeated or lost",
                remedy="restore the corpora as they were; if it is intended, set health.stop_on_mismatch = false",
                verdict=verdict,
            )
            return
        was, is_ = old.loss.mean, record.loss.mean
        if (old.loss, old.grad_norm) == (record.loss, record.grad_norm):
            return
        text = f"step {step} has the loss {is_!r}; {before} {was!r}"
        difference = abs(is_ - was) / max(abs(was), 1e-12)
        if not difference <= limits.REPLAY_TOLERANCE and math.isfinite(was):
            self._mismatch(
                self._replay,
                step,
                f"{text}: a relative difference of {difference:.2g}",
                effect="the state is not the one that was saved, or the machines compute differently",
                remedy="`fsdp-pretrain doctor` on the hosts; if it is expected, set health.stop_on_mismatch = false",
                verdict=verdict,
            )
        elif self._expected.exact:
            text += ": the same mesh and software should give the same bits"
            verdict.findings += self._replay.seen(Severity.WARN, step, text)

    def _mismatch(
        self, incident: HealthIncident, step: int, text: str, *, effect: str, remedy: str, verdict: Verdict
    ) -> None:
        """Report something that should be equal and is not, and end the run if configured."""
        verdict.findings += incident.seen(Severity.CRIT, step, text)
        if self._config.stop_on_mismatch:
            verdict.fail(text, effect, remedy)
