"""What a replay means, in words: data, state, numerics, or a device? No torch.

One replay rules some causes out; the verdict says which are left, and which replay tells them apart.

- The same state, samples, settings and kernels on the same machines give the same bits. If they do not, a device or
  other code is the cause; if they do, it is neither.
- What comes again with another precision or other kernels of attention is not of those; what does not, is.
- What comes with another batch is of the state; what comes with another state is of the batch.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from fsdp_pretrain.lineage.provenance import ShownSample
from fsdp_pretrain.units import human_time

from .comparison import StepComparison

Finding = Literal[
    "reproducible", "device", "rounding", "unlike", "numerics", "data or state", "data", "state", "undecided",
    "other samples", "other settings",
]  # fmt: skip
"""`rounding`: differences within `health.limits.REPLAY_TOLERANCE`. `unlike`: larger ones, other circumstances."""
_SHOWN_STEPS = 40


class SuspectSample(ShownSample):
    """A sample of a bad step, and its mean loss before that step; None: not finite."""

    loss: float | None


class ReplayReport(BaseModel):
    """A replay and what it means.

    Attributes:
        run, segment: whose steps were replayed.
        start: step of the checkpoint.
        asked: number of steps that were asked for; the record may have ended before.
        changed: what was asked to be different, as `key: old -> new`; `batch_of` is a change too.
        batch_of: see `ReplayRequest`.
        unlike: circumstances that were not as then, so that equal bits cannot be expected.
        tolerance: relative difference of losses that they may cause.
        steps: the replayed steps.
        due_bad: why the recorded step after the checkpoint stands out, where its batch was not replayed.
        finding, verdict: of `judge`, filled in afterwards; as are the next two.
        next: commands that tell the remaining causes apart.
        suspects: samples of the first bad step, highest loss first.
        seconds: it took.
    """

    run: str
    segment: int
    start: int
    asked: int = 0
    changed: list[str]
    batch_of: int | None
    unlike: list[str]
    tolerance: float
    steps: list[StepComparison]
    due_bad: str
    finding: Finding = "undecided"
    verdict: str = ""
    next: list[str] = []
    suspects: list[SuspectSample] = []
    seconds: float = 0.0

    @property
    def equal(self) -> bool:
        return not any(step.differs for step in self.steps)

    @property
    def bad_step(self) -> StepComparison | None:
        """The first step that stands out in the record; else the first that does so now."""
        bad = [step for step in self.steps if step.recorded_bad] or [step for step in self.steps if step.bad]
        return bad[0] if bad else None


def judge(report: ReplayReport) -> ReplayReport:
    """The report with its verdict, and what to replay next."""
    step = report.bad_step
    if other := next((each for each in report.steps if "samples" in each.differs), None):
        found: tuple[Finding, str] = (
            "other samples",
            f"step {other.batch_of} was trained on other tokens than were read now: the corpora, or how they are "
            "packed, have changed since, so nothing else can be said",
        )
    elif report.batch_of is not None:
        found = _judge_batch(report, report.steps[0])
    elif other := next((each for each in report.steps if "settings" in each.differs), None):
        found = (
            "other settings",
            f"step {other.step} was trained with other settings than its start recorded (learning rate "
            f"{other.recorded_lr:g}, here {other.lr:g}), so nothing else can be said",
        )
    elif report.changed:
        found = _judge_changed(report, step)
    else:
        found = _judge_same(report, step)
    return report.model_copy(update={"finding": found[0], "verdict": found[1], "next": _next(report, found[0])})


def _judge_same(report: ReplayReport, bad: StepComparison | None) -> tuple[Finding, str]:
    """Nothing was changed."""
    if report.equal:
        text = f"{_count(report)} equal to the bit: the run is reproducible, and no device fault is in these numbers"
        if bad is None:
            return "reproducible", text
        return "reproducible", (
            f"{text}. Step {bad.step} is bad again ({bad.bad or bad.recorded_bad}), so the cause is the data, the "
            "state or the numerics"
        )
    first = next(each for each in report.steps if each.differs)
    again = _again(bad)
    if not report.unlike:
        return "device", (
            f"step {first.step} came out differently ({', '.join(first.differs)}) from the same state, samples, "
            f"settings and software{again}: a device computed wrongly, in the run or now. Replay again: the side that "
            "repeats itself is sound; `fsdp-pretrain doctor` checks the hardware"
        )
    why = f"; equal bits could not be expected: {'; '.join(report.unlike)}"
    if max(each.distance for each in report.steps) <= report.tolerance and (bad is None or bad.bad):
        return "rounding", f"the losses differ by at most {_largest(report):.1e} of their values{again}{why}"
    return "unlike", f"from step {first.step} on the replay is not as recorded{again}{why}"


def _judge_changed(report: ReplayReport, bad: StepComparison | None) -> tuple[Finding, str]:
    """With another precision or other kernels of attention."""
    what = " and ".join(map(_changed, report.changed))
    if bad is None:
        return "undecided", (
            f"no step stands out, in the record or with {what}; the losses differ by at most {_largest(report):.1e} of "
            "their values"
        )
    if not bad.recorded_bad:
        return "numerics", f"step {bad.step} is bad only with {what} ({bad.bad}): it is the numerics of that"
    if bad.bad:
        return "data or state", (
            f"step {bad.step} is bad again with {what} ({bad.bad}): it is not the numerics of what was changed, but "
            "the data or the state"
        )
    return "numerics", (
        f"step {bad.step} was bad ({bad.recorded_bad}) and is not with {what}: it is the numerics, not the data"
    )


def _judge_batch(report: ReplayReport, step: StepComparison) -> tuple[Finding, str]:
    """With the batch of another step."""
    place = f"the state of step {report.start}"
    if step.recorded_bad:
        if step.bad:
            return "data", f"the batch of step {step.batch_of} is bad for {place} too ({step.bad}): it is the data"
        return "state", (
            f"the batch of step {step.batch_of} was bad there ({step.recorded_bad}) and is not for {place}: not the "
            "data alone, but the state it came to, or the numerics there"
        )
    if step.bad:
        if report.due_bad:
            return "state", (
                f"{place} is bad with the batch of step {step.batch_of} too ({step.bad}), as with its own "
                f"({report.due_bad}): it is the state"
            )
        return "undecided", f"the batch of step {step.batch_of} is bad for {place} ({step.bad}), and was not in the run"
    if report.due_bad:
        return "data", (
            f"{place} is fine with the batch of step {step.batch_of}, and was bad with its own ({report.due_bad}): it "
            f"is the batch of step {report.start + 1}, or numerics that only it meets"
        )
    return "undecided", f"neither the batch of step {step.batch_of} nor {place} stands out, together or in the record"


def _next(report: ReplayReport, finding: Finding) -> list[str]:
    """Commands that narrow the cause down."""
    bad = report.bad_step
    if bad is None or not bad.recorded_bad or finding in ("other samples", "other settings", "device"):
        return []
    command = f"fsdp-pretrain replay {report.run} --from {report.start}"
    window = f"{command} --steps {bad.step - report.start}" if report.batch_of is None else command
    asked = " ".join(report.changed)
    found = []
    if finding in ("reproducible", "rounding", "unlike"):
        found = [f"{window} --precision fp32", f"{window} --attention math"]
    elif finding == "numerics":
        found = [f"{window} --precision fp32"] if "precision" not in asked else [f"{window} --attention math"]
    elif finding == "data or state":
        other = f"{window} --attention math" if "attention" not in asked else f"{window} --precision fp32"
        found = [other] if len(report.changed) < 2 else []
        earlier = report.start if bad.step > report.start + 1 else "EARLIER_STEP"
        found.append(f"fsdp-pretrain replay {report.run} --from {earlier} --batch-of {bad.batch_of}")
    elif finding == "data":
        found = [f"fsdp-pretrain where {report.run} --step {bad.batch_of} --text"]
    return found


def _again(bad: StepComparison | None) -> str:
    if bad is None:
        return ""
    if not bad.recorded_bad:
        return f", and step {bad.step} is bad only now ({bad.bad})"
    return f", and step {bad.step} is {'bad again' if bad.bad else 'not bad now'} (recorded: {bad.recorded_bad})"


def _changed(text: str) -> str:
    key, _, values = text.partition(": ")
    old, _, new = values.partition(" -> ")
    return f"{key} {new} instead of {old}"


def _count(report: ReplayReport) -> str:
    return "the step is" if len(report.steps) == 1 else f"all {len(report.steps)} steps are"


def _largest(report: ReplayReport) -> float:
    return max(each.distance for each in report.steps)


# ---------------------------------------------------------------------- for people


def render(report: ReplayReport) -> str:
    """The report as text."""
    last = report.steps[-1].step
    steps = f"step {last}" if len(report.steps) == 1 else f"steps {report.start + 1} to {last}"
    lines = [
        f"{steps} of segment {report.segment} of {report.run}, replayed in "
        f"{human_time(report.seconds)}" + (f" with {'; '.join(report.changed)}" if report.changed else "")
    ]
    if len(report.steps) < report.asked:
        lines.append(f"  {len(report.steps)} of the {report.asked} steps that were asked for: the record ends there")
    lines.append(f"  {'step':>8} {'loss':>10} {'recorded':>10} {'norm':>10} {'recorded':>10} {'lr':>10}  compared")
    for each in report.steps[:_SHOWN_STEPS]:
        values = (each.loss, each.recorded_loss, each.grad_norm, each.recorded_grad_norm)
        shown = " ".join(f"{'not finite' if value is None else format(value, '.6g'):>10}" for value in values)
        said = "equal to the bit" if not each.differs else f"differs: {', '.join(each.differs)}"
        said += f"; batch of step {each.batch_of}" if each.batch_of != each.step else ""
        said += f"; recorded: {each.recorded_bad}" if each.recorded_bad else ""
        said += f"; replayed: {each.bad}" if each.bad else ""
        lines.append(f"  {each.step:>8} {shown} {each.lr:>10.4g}  {said}")
    if len(report.steps) > _SHOWN_STEPS:
        lines.append(f"  {len(report.steps) - _SHOWN_STEPS} more in replay.json")
    lines.append(f"{report.finding}: {report.verdict}")
    lines += ["its samples with the highest losses, just before the step:"] if report.suspects else []
    for sample in report.suspects:
        loss = "not finite" if sample.loss is None else f"{sample.loss:.4f}"
        lines.append(f"  sample {sample.index}, loss {loss}, rank {sample.rank}, source {sample.source}")
        lines += [f"  {line}" for piece in sample.pieces[:3] for line in piece.lines()]
        lines += [f"    and {len(sample.pieces) - 3} more"] if len(sample.pieces) > 3 else []
    lines += [f"next: {command}" for command in report.next]
    return "\n".join(lines)
