"""Verdicts on the numbers of a run: what to tell, what not to save, when to go back, when to stop. No torch.

`Health` is a pure function of the metrics records of a start (and of the last ones before it). Every rank feeds it the
same records after the same steps, so all ranks come to the same verdict without a word between them.

Rank 0 writes what was found into the record of the step, as its list `health` (see `health_rules.Finding`), and what is
more than INFO into the journal, as kind `health`. An incident of one key begins (`resolved` false), may get worse (once
more, with a higher severity), and ends (`resolved` true); the first record of a start repeats those that go on, and
whatever else was open before is over. The watchdog makes alarms of that. What was done is in the journal too: a step
that was not trained as `health-skip`, a rollback as `health-rollback`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from .config import Config
from .errors import NumericError, UserError
from .health_rules import Incident, Level, Norm, Scale, Spike
from .record.step_record import Finding, LossSum, StepRecord
from .severity import Severity

HISTORY = 640
"""Records before a start that its first verdicts need."""

_NEAR = 20
"""Steps among which those that are not finite are counted."""

_MAX_OVERFLOWS_AT_MIN = 10
"""So many steps in a row may overflow at the smallest loss scale: more are no accident of the data."""


@dataclass(frozen=True)
class Retreat:
    """Go back to before an incident, and do not train its samples again.

    Attributes:
        key: of the incident.
        cause: one sentence.
        start, end: its first and last step.
        first, stop: the samples [first, stop) of those steps and of the margins around them.
        target: the checkpoint to go back to should be of no later step than this.
        before: of steps that were not finite, (cursor, consumed) before the last; None of others.
        rank: the one whose loss was not finite then, if it was one alone.
        repeats: whether that step was not finite again when it was repeated; None if it was not repeated.
    """

    key: str
    cause: str
    start: int
    end: int
    first: int
    stop: int
    target: int
    before: tuple[int, int] | None = None
    rank: int | None = None
    repeats: bool | None = None


@dataclass(frozen=True)
class Judgement:
    """What a record led to.

    Attributes:
        findings: to be told.
        retreat: go back.
        error: end the run with this.
    """

    findings: list[Finding] = field(default_factory=list)
    retreat: Retreat | None = None
    error: UserError | None = None


@dataclass(frozen=True)
class Expected:
    """What the start before recorded of the steps that this one repeats.

    Attributes:
        records: by step.
        segment: that made them.
        exact: the loss must be the same to the bit.
    """

    records: Mapping[int, StepRecord]
    segment: int
    exact: bool


class Health:
    """The state of a run's numbers.

    Args:
        config: the run.
        history: the last `HISTORY` records of the kept line before this start, oldest first.
        expected: of the steps to come, if they were trained before.
    """

    def __init__(self, config: Config, history: Iterable[StepRecord] = (), expected: Expected | None = None) -> None:
        self._config, self._schedule = config.health, config.schedule
        self._spike, self._level, self._norm = Spike(config.health), Level(config.health), Norm(config.health)
        self._scale = Scale(config.health, config.train.loss_scale.min)
        self._nonfinite, self._zero, self._stuck, self._still, self._rate, self._replicas, self._replay = map(
            Incident,
            (
                "loss/nonfinite",
                "learning/gradient",
                "learning/loss",
                "learning/parameters",
                "learning/rate",
                "replicas/parameters",
                "replay/step",
            ),
        )
        self._skipped: deque[int] = deque()
        self._cursors: deque[tuple[int, int]] = deque(maxlen=2 * HISTORY)
        self._losses: deque[LossSum] = deque(maxlen=3)
        self._parameters: tuple[str, int] | None = None
        self._expected: Expected | None = None
        self._carried: list[Finding] = []
        for record in history:
            self.step(record)
        # Losses and norms have a past; what led to the last end of the run has been answered by that.
        for incident in (self._nonfinite, self._zero, self._stuck, self._still, self._rate):
            incident.severity = None
        self._skipped.clear()
        self._parameters = None
        rules = (self._spike, self._level, self._norm, self._scale)
        self._carried = [finding for rule in rules for finding in rule.incident.carried()]
        self._expected = expected

    @property
    def suspicion(self) -> str | None:
        """Why a checkpoint made now should not be trusted; None if it can be."""
        if self._spike.incident.serious:
            return f"loss/spike since step {self._spike.start}"
        return f"scale/collapse at step {self._scale.incident.last}" if self._scale.incident.serious else None

    @property
    def clean_until(self) -> tuple[float, ...]:
        """The newest clean checkpoints up to each of these steps are the ones that a rollback now would go to."""
        if self._spike.incident.severity is None:
            return (math.inf,)
        return self._spike.start - self._config.distance.value, self._spike.start - 1

    def step(self, record: StepRecord) -> Judgement:
        """Judge a step by its record; in order, once each."""
        self._cursors.append((record.step, record.cursor))
        finite = record.is_finite
        found, retreat, error = self._judge_finite(record, finite)
        if record.loss_scale is not None:
            found += self._scale.step(record.step, record.loss_scale, record.overflow)
            error = error or self._judge_scale(record)
        if finite:
            loss, norm = record.loss.mean, record.grad_norm
            found += self._level.step(record.step, loss)
            found += self._norm.step(record.step, norm) if norm else []
            spike = self._spike.step(record.step, loss, self._level, self._norm)
            found += spike
            lasts = any(finding.severity is Severity.CRIT and not finding.resolved for finding in spike)
            if lasts and self._config.rollback:
                retreat = retreat or self._retreat(self._spike.incident.key, spike[-1].summary, self._spike.start)
        found += self._judge_learning(record, finite)
        for more, wrong in (self._judge_replicas(record), self._judge_replay(record)):
            found, error = found + more, error or wrong
        carried, self._carried = self._carried, []
        return Judgement(carried + found, None if error else retreat, error)

    def _retreat(self, key: str, cause: str, start: int) -> Retreat:
        """From the incident of these steps until now."""
        step, cursor = self._cursors[-1]
        margin, earlier = self._config.margin.value, dict(self._cursors)
        batch = cursor - earlier.get(step - 1, cursor)
        first = max(min(earlier), start - margin - 1)
        return Retreat(
            key, cause, start, step, earlier[first], cursor + margin * batch, start - self._config.distance.value
        )

    # ------------------------------------------------------------------ numbers that are none

    def _judge_finite(self, record: StepRecord, finite: bool) -> tuple[list[Finding], Retreat | None, UserError | None]:
        """Steps whose loss or gradients were not finite; those of fp16 whose loss was are the loss scale's business."""
        step = record.step
        if finite or (record.overflow and math.isfinite(record.loss.mean)):
            recent = self._skipped and step - self._skipped[-1] <= _NEAR
            return [] if recent else self._nonfinite.settle(step, "steps are finite again"), None, None
        what = f"step {step}: loss {record.loss.mean}, gradient norm {record.grad_norm}: not finite"
        rank = record.nonfinite_rank
        what += f" (the loss of rank {rank})" if rank is not None else ""
        if not record.skipped:
            error = NumericError(
                what,
                effect=f"weights after step {step - 1} are spoilt and were not saved",
                remedy="look at this step's data and the learning rate; a restart continues from the last checkpoint",
            )
            return self._nonfinite.seen(Severity.CRIT, step, what), None, error.on_all_ranks()
        self._skipped.append(step)
        near = [old for old in self._skipped if step - old < _NEAR]
        row = next((n for n in range(1, len(near)) if near[-1 - n] != step - n), len(near))
        if row < self._config.nonfinite_in_a_row and len(near) < self._config.nonfinite_in_20:
            return self._nonfinite.seen(Severity.WARN, step, f"{what}; it was skipped"), None, None
        cause = f"{len(near)} of the last {_NEAR} steps were not finite, the last {row} in a row; {what}"
        found = self._nonfinite.seen(Severity.CRIT, step, cause)
        if self._config.rollback:
            retreat = self._retreat(self._nonfinite.key, cause, near[-row] if row > 1 else near[0])
            cursor = dict(self._cursors).get(step - 1)
            before = None if cursor is None else (cursor, record.consumed - record.batch)
            return found, replace(retreat, before=before, rank=rank), None
        error = NumericError(cause, effect="they were skipped, the weights are those before", remedy=_ADVICE)
        return found, None, error.on_all_ranks()

    def _judge_scale(self, record: StepRecord) -> UserError | None:
        """Overflows that go on where the scale cannot fall any more."""
        if self._scale.at_min < _MAX_OVERFLOWS_AT_MIN:
            return None
        return NumericError(
            f"step {record.step}: {self._scale.at_min} steps in a row overflowed at the smallest loss scale",
            effect="no scale helps: the values themselves are not finite in fp16, and every step would be skipped",
            remedy="look at the loss and the gradient norm before; a lower learning rate or bf16 may help",
        ).on_all_ranks()

    # ------------------------------------------------------------------ learning that is none

    def _judge_learning(self, record: StepRecord, finite: bool) -> list[Finding]:
        """The same loss again and again, no gradient, another learning rate than planned, parameters that stay."""
        step, found = record.step, list[Finding]()
        self._losses.append(record.loss)
        same = len(self._losses) == 3 and all(loss == record.loss for loss in self._losses) and finite
        text = f"three steps in a row have the loss {record.loss.mean!r} to the bit"
        found += (
            self._stuck.seen(Severity.CRIT, step, text) if same else self._stuck.settle(step, "the loss changes again")
        )
        if record.grad_norm == 0:
            found += self._zero.seen(Severity.CRIT, step, "the gradient norm is 0: nothing is learned")
        elif finite:
            found += self._zero.settle(step, "there are gradients again")
        plan = self._schedule.lr_at(record.consumed)
        if not math.isclose(record.lr, plan, rel_tol=1e-6):
            found += self._rate.seen(Severity.WARN, step, f"the learning rate was {record.lr:.6g}, planned {plan:.6g}")
        else:
            found += self._rate.settle(step, "the learning rate is as planned")
        return found + self._judge_change(record)

    def _judge_change(self, record: StepRecord) -> list[Finding]:
        """Parameters that are the same although the optimiser took steps."""
        found, sums = list[Finding](), record.replicas
        if sums is not None:
            if self._parameters is not None and self._parameters[0] == sums.digest and self._parameters[1] >= 2:
                text = f"{self._parameters[1]} optimiser steps changed no parameter"
                found = self._still.seen(Severity.CRIT, record.step, text)
            elif self._parameters is not None and self._parameters[0] != sums.digest:
                found = self._still.settle(record.step, "the parameters change")
            self._parameters = sums.digest, 0
        if self._parameters is not None and not record.skipped and record.lr > 0:
            self._parameters = self._parameters[0], self._parameters[1] + 1
        return found

    # ------------------------------------------------------------------ what must be equal

    def _judge_replicas(self, record: StepRecord) -> tuple[list[Finding], UserError | None]:
        """Replicas that hold different parameters at the beginning of a step."""
        sums = record.replicas
        if not sums or not sums.differing:
            return [], None
        ranks = ", ".join(map(str, sums.differing))
        text = f"before step {record.step} the replicas hold different parameters: ranks {ranks} do not agree"
        return self._mismatch(
            self._replicas,
            record.step,
            text,
            effect="replicas average the gradients of different models; this was not saved. Checkpoints since the last "
            "comparison may hold either",
            remedy="`fsdp-pretrain doctor` on the hosts of these ranks; go back to a checkpoint before the last "
            "comparison with `fsdp-pretrain rollback`",
        )

    def _judge_replay(self, record: StepRecord) -> tuple[list[Finding], UserError | None]:
        """Steps that a start repeats must give what was recorded of them."""
        step = record.step
        if self._expected is None or (old := self._expected.records.get(step)) is None:
            return [], None
        before = f"segment {self._expected.segment} recorded"
        if old.data_digest != record.data_digest:
            return self._mismatch(
                self._replay,
                step,
                f"step {step} trained on the batch {record.data_digest}; {before} {old.data_digest}",
                effect="the data is not continued where it was left: samples would be repeated or lost",
                remedy="restore the corpora as they were; if the change is meant, say so with health.stop_on_mismatch",
            )
        was, is_ = old.loss.mean, record.loss.mean
        if (old.loss, old.grad_norm) == (record.loss, record.grad_norm):
            return [], None
        text = f"step {step} has the loss {is_!r}; {before} {was!r}"
        difference = abs(is_ - was) / max(abs(was), 1e-12)
        if not difference <= self._config.replay_tolerance and math.isfinite(was):
            return self._mismatch(
                self._replay,
                step,
                f"{text}: a relative difference of {difference:.2g}",
                effect="the state is not the one that was saved, or the machines compute something else",
                remedy="`fsdp-pretrain doctor` on the hosts; health.replay_tolerance is the limit",
            )
        if not self._expected.exact:
            return [], None
        return self._replay.seen(
            Severity.WARN, step, f"{text}: the same mesh and software should give the same bits"
        ), None

    def _mismatch(
        self, incident: Incident, step: int, text: str, *, effect: str, remedy: str
    ) -> tuple[list[Finding], UserError | None]:
        error = NumericError(text, effect=effect, remedy=remedy).on_all_ranks()
        return incident.seen(Severity.CRIT, step, text), error if self._config.stop_on_mismatch else None


_ADVICE = (
    "look at the samples named in the journal (`fsdp-pretrain where`); then lower optimizer.lr or train.grad_clip, or "
    "go back further with `fsdp-pretrain rollback RUN --to STEP --skip-steps A:B --set key=value`"
)
