"""Rules on a run's metrics: loss, gradient norm, loss scale. Each gets one value per step, in order.

Deviations are measured against the median and the spread (median absolute deviation) of the previous steps, without
outliers. The loss level is judged by differences of block medians: the spread of a falling loss would hide any shift.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from fsdp_pretrain import statistics
from fsdp_pretrain.config.operations import HealthSection
from fsdp_pretrain.config.sections import SMALLEST_SCALE
from fsdp_pretrain.run.step_record import HealthFinding, LossSum
from fsdp_pretrain.severity import Severity

from . import limits

_LAST, _ENOUGH = 5, 3
"""A spike is at least `_ENOUGH` high losses among the last `_LAST`."""
_BLOCK = 16  # steps of a block, whose median loss is one value
_BLOCKS = 32  # blocks kept
_JOINED = 4  # blocks whose median is the level
_CHANGES = 128  # block-to-block changes kept for the noise of the level
_LEVEL_NOISE, _SOURCE_NOISE = 5.0, 8.0
_OF_MEDIAN = 1.25
"""Standard error of a median relative to that of a mean, for normal values."""
_NORM_FLOOR = 0.05
_BLOWN_UP, _BLOWN_NORM = 10.0, 20.0


class HealthIncident:
    """The state of one kind of incident: open or not. It ends after `quiet` steps without a new occurrence."""

    def __init__(self, key: str, quiet: int = 0) -> None:
        self.key, self._quiet = key, quiet
        self.severity: Severity | None = None  # the highest since it opened; None: not open
        self.last = 0  # step of the last occurrence

    @property
    def serious(self) -> bool:
        """Whether it is open and above INFO."""
        return self.severity is not None and self.severity > Severity.INFO

    def seen(self, severity: Severity, step: int, summary: str) -> list[HealthFinding]:
        """Called when it occurred; returns a finding if it is new or worse than before."""
        self.last = step
        if self.severity is not None and severity <= self.severity:
            return []
        self.severity = severity
        return [HealthFinding(key=self.key, severity=severity, summary=summary)]

    def carried(self) -> list[HealthFinding]:
        """A finding for the beginning of a segment, if the incident is open."""
        if self.severity is None:
            return []
        return [HealthFinding(key=self.key, severity=self.severity, summary=f"open, last seen at step {self.last}")]

    def settle(self, step: int, summary: str) -> list[HealthFinding]:
        """Called when it did not occur; returns a finding if it ends now."""
        if self.severity is None or step - self.last < self._quiet:
            return []
        ended, self.severity = HealthFinding(key=self.key, severity=self.severity, summary=summary, resolved=True), None
        return [ended]


class RecentValues:
    """The last `size` values without outliers; `floor` is the smallest spread."""

    def __init__(self, size: int, floor: float) -> None:
        self._values: deque[float] = deque(maxlen=size)
        self._floor, self._enough = floor, max(8, size // 4)

    def add(self, value: float) -> None:
        self._values.append(value)

    def relearn(self, values: Iterable[float]) -> None:
        """Treat these as the usual values from now on."""
        self._values.clear()
        self._values.extend(values)

    @property
    def median(self) -> float:
        return median(self._values)

    def deviation(self, value: float) -> float | None:
        """How many spreads a value is above the median; None with too few values."""
        return statistics.score(value, self._values, self._floor) if len(self._values) >= self._enough else None


class LossLevel:
    """The level of a loss: the median of the medians of some blocks.

    Attributes:
        value: the level; NaN with too few blocks.
        rise: how far it is above its best; 0 with too few blocks.
        best: the step around which it was best.
        noise: standard deviation of the level, from differences of neighbouring blocks; 0 with too few.
    """

    def __init__(self) -> None:
        self.value, self.rise, self.best, self.noise = math.nan, 0.0, 0, 0.0
        self._block: list[float] = []
        self._medians: deque[tuple[int, float]] = deque(maxlen=_BLOCKS)  # with the last step of the block before
        self._changes: deque[float] = deque(maxlen=_CHANGES)
        self._begun = 0  # step before the block

    def add(self, step: int, loss: float) -> bool:
        """Add the loss of a step; returns whether that gives a new level."""
        if not self._block:
            self._begun = step - 1
        self._block.append(loss)
        if len(self._block) < _BLOCK:
            return False
        self._medians.append((self._begun, median(self._block)))
        self._block.clear()
        medians = [value for _, value in self._medians]
        if len(medians) > 1:
            self._changes.append(medians[-1] - medians[-2])
        if len(medians) < 2 * _JOINED:
            return False
        self.noise = _OF_MEDIAN * statistics.spread(self._changes)[1] / math.sqrt(2 * _JOINED)
        levels = [median(medians[at : at + _JOINED]) for at in range(len(medians) - _JOINED + 1)]
        self.value, lowest = levels[-1], min(levels)
        self.rise, self.best = self.value - lowest, self._medians[levels.index(lowest)][0]
        return True


class LossLevelRule:
    """`loss/level`: shifts of the loss that are too small to be spikes."""

    def __init__(self, config: HealthSection) -> None:
        self.limits = config
        self._level = LossLevel()
        self.incident = HealthIncident("loss/level")

    @property
    def noise(self) -> float:
        """See `LossLevel`."""
        return self._level.noise

    def restart(self) -> None:
        """Forget the levels."""
        self._level = LossLevel()

    def step(self, step: int, loss: float) -> list[HealthFinding]:
        """Add the loss of a step."""
        level = self._level
        if not level.add(step, loss):
            return []
        limit = self.limits.tolerance * max(limits.LEVEL, _LEVEL_NOISE * level.noise)
        text = f"the level of the loss is {level.value:.4f}, {level.rise:.3f} above its best"
        if level.rise > limit:
            text = f"{text}, around step {level.best} (limit {limit:.3f})"
            return self.incident.seen(Severity.WARN, step, text)
        return self.incident.settle(step, text) if level.rise < limit / 2 else []


class SourceLossRule:
    """`loss/source/NAME`: the level of one source's loss rises, and that of the others does not."""

    def __init__(self, config: HealthSection) -> None:
        self.limits = config
        self._levels: dict[str, LossLevel] = {}
        self.incidents: dict[str, HealthIncident] = {}

    def step(self, step: int, sources: Mapping[str, LossSum], shares: Mapping[str, float]) -> list[HealthFinding]:
        """Add the losses of a step, by source; one without targets does not count. `shares`: the planned ones."""
        findings = list[HealthFinding]()
        for name in [name for name in self._levels if shares and not shares.get(name)]:
            del self._levels[name]
            if name in self.incidents:
                findings += self.incidents[name].settle(step, f"{name} is not read any more")
        new = [
            name
            for name, loss in sources.items()
            if math.isfinite(loss.mean) and self._levels.setdefault(name, LossLevel()).add(step, loss.mean)
        ]
        for name in new if len(self._levels) > 1 else ():
            findings += self._judge(step, name, self._levels[name])
        return findings

    def _judge(self, step: int, name: str, level: LossLevel) -> list[HealthFinding]:
        incident = self.incidents.setdefault(name, HealthIncident(f"loss/source/{name}"))
        others = median(other.rise for other in self._levels.values() if other is not level)
        limit = self.limits.tolerance * max(limits.SOURCE, _SOURCE_NOISE * level.noise)
        text = f"the loss of {name} is {level.value:.3f}, {level.rise:.3f} above its best"
        if level.rise > limit and others < level.rise / 2:
            text += f" around step {level.best}, and the other sources' is not (limit {limit:.3f}); `fsdp-eval samples "
            return incident.seen(Severity.WARN, step, f"{text}RUN --step {step}` shows its documents")
        return incident.settle(step, text) if level.rise < limit / 2 else []


class GradientNormRule:
    """`gradient/norm`: unusually high gradient norms. A single one is benign, so it is INFO."""

    def __init__(self, config: HealthSection) -> None:
        self.limits = config
        self._past = RecentValues(limits.WINDOW, _NORM_FLOOR)
        self._recent: deque[tuple[float, bool]] = deque(maxlen=limits.PATIENCE)
        self.incident = HealthIncident("gradient/norm", limits.QUIET)
        self.ratio = 1.0  # of the last norm to the typical one

    def step(self, step: int, norm: float) -> list[HealthFinding]:
        """Add the norm of a step, which must be finite and not 0."""
        value = math.log(norm)
        deviation = self._past.deviation(value)
        if deviation is None:
            self._past.add(value)
            return []
        high = deviation > self.limits.tolerance * limits.NORM
        self._recent.append((value, high))
        self.ratio = math.exp(value - self._past.median)
        if not high:
            self._past.add(value)
            return self.incident.settle(step, f"the gradient norm is {norm:.3g}")
        marks = [high for _, high in self._recent]
        if len(marks) == self._recent.maxlen and all(marks):  # the new normal
            self._past.relearn(value for value, _ in self._recent)
        last = marks[-10:]
        text = f"gradient norm {norm:.3g}, {self.ratio:.1f} times the usual one"
        often = sum(last) >= 3 or last[-2:] == [True, True]
        return self.incident.seen(Severity.WARN if often else Severity.INFO, step, text)


class _Recent(NamedTuple):
    """A step as `LossSpikeRule` sees it."""

    step: int
    loss: float
    deviation: float
    norm_ratio: float


class LossSpikeRule:
    """`loss/spike`: unusually high losses. INFO: one; WARN: several in a few steps; CRIT: the loss does not recover."""

    def __init__(self, config: HealthSection) -> None:
        self.limits = config
        self._past = RecentValues(limits.WINDOW, limits.FLOOR)
        self._last: deque[_Recent] = deque(maxlen=_LAST)
        self._since: deque[float] = deque(maxlen=_BLOCK)  # the last losses, since the spike began if it is one
        self.incident = HealthIncident("loss/spike", limits.QUIET)
        self.start = 0  # first step of the incident
        self._warned: int | None = None  # step of the warning, until the loss recovers or its time is over
        self._before = math.nan  # median loss before the spike

    def restart(self) -> None:
        """Forget the losses; an open incident ends when it is quiet."""
        self._past.relearn(())
        self._last.clear()
        self._warned = None

    def step(self, step: int, loss: float, level: LossLevelRule, norm: GradientNormRule) -> list[HealthFinding]:
        """Add the loss of a step, after `norm` got its gradient norm."""
        deviation = self._past.deviation(loss)
        if deviation is None:
            self._past.add(loss)
            return []
        self._last.append(_Recent(step, loss, deviation, norm.ratio))
        self._since.append(loss)
        findings = []
        if deviation > self._spike:
            self.incident.last = step
            findings = self._high(step, loss, deviation)
        else:
            self._past.add(loss)
        if self._warned is not None:
            findings += self._judge(step, level, norm)
        ended = self.incident.settle(step, f"the loss is {loss:.4f} again, quiet for {limits.QUIET} steps")
        if ended:
            self._warned = None
        return findings + ended

    @property
    def _spike(self) -> float:
        return self.limits.tolerance * limits.SPIKE

    def _high(self, step: int, loss: float, deviation: float) -> list[HealthFinding]:
        high = [recent for recent in self._last if recent.deviation > self._spike]
        text = f"loss {loss:.4f}, {deviation:.1f} spreads above the median {self._past.median:.4f}"
        if len(high) >= _ENOUGH and self._warned is None:
            if not self.incident.serious:
                self.start, self._before = high[0].step, self._past.median
            self._warned = step
            self._since = deque((recent.loss for recent in self._last if recent.step >= high[0].step), maxlen=_BLOCK)
            return self.incident.seen(Severity.WARN, step, f"{text}, since step {self.start}")
        if self.incident.severity is None:
            self.start = step
        outlier = deviation > self.limits.tolerance * limits.OUTLIER
        return self.incident.seen(Severity.INFO, step, text) if outlier else []

    def _judge(self, step: int, level: LossLevelRule, norm: GradientNormRule) -> list[HealthFinding]:
        """After the warning, judge whether the loss has recovered within its time."""
        assert self._warned is not None
        waited, now = step - self._warned, median(self._since)
        blown = [recent.deviation > _BLOWN_UP and recent.norm_ratio > _BLOWN_NORM for recent in self._last]
        over = waited >= limits.PATIENCE
        due = over or (norm.incident.serious and waited >= limits.PATIENCE_WITH_NORM)
        high = now > self._before + self.limits.tolerance * max(limits.RISE, 5 * level.noise)
        findings = []
        if sum(blown) >= _ENOUGH or (due and high):
            text = f"the loss has not come back since step {self.start}: {now:.4f}, before {self._before:.4f}"
            findings = self.incident.seen(Severity.CRIT, step, text)
        if findings or over:
            self._warned = None
            if high:  # without a rollback, this is the new normal
                self._past.relearn(self._since)
        return findings


class LossScaleRule:
    """`scale/collapse`: the fp16 loss scale collapses. A decrease from too high an initial value does not count."""

    def __init__(self) -> None:
        self._scales: deque[float] = deque(maxlen=_BLOCKS * _BLOCK)
        self._good, self._settled = 0, False
        self.at_min = 0  # steps in a row that overflowed at the smallest scale
        self.incident = HealthIncident("scale/collapse", limits.QUIET)

    def step(self, step: int, scale: float, overflow: bool) -> list[HealthFinding]:
        """Add the loss scale of a step, and whether it overflowed."""
        self.at_min = self.at_min + 1 if overflow and scale <= SMALLEST_SCALE else 0
        self._good = 0 if overflow else self._good + 1
        self._settled |= self._good >= 20
        if not self._settled:
            return []
        self._scales.append(scale)
        last, best = list(self._scales)[-21:], max(self._scales)
        halvings = sum(after < before for before, after in pairwise(last))
        if halvings >= limits.HALVINGS or scale <= best / 64:
            text = f"loss scale {scale:g}, halved {halvings} times in 20 steps, {best:g} before"
            return self.incident.seen(Severity.CRIT, step, text)
        return self.incident.settle(step, f"loss scale {scale:g}")
