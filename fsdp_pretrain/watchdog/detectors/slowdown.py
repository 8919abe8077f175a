"""Detects slowdowns within a start and since earlier ones, and stragglers, from the step times of the record.

The first steps of a start, and those with a save, an evaluation or anything else beside them, do not count, and neither
does the time of the held-out loss. A planned change of batch or sequence length restarts the baseline.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from fsdp_pretrain.run import state_files
from fsdp_pretrain.run.step_record import StepRecord, StepSeconds
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.statistics import spread
from fsdp_pretrain.watchdog.notify.alarms import AlarmSink

from .base import Detector
from .cusum import PaceChange, PaceCusum

_SETTLE = 20
"""Number of first steps of a start that are not judged."""
_WORSE, _WORSE_SECONDS = 0.10, 1800.0
"""A slowdown by this share for so many seconds is critical."""
_RESTART = 0.03
"""A slowdown of this share against the best earlier start on as many ranks is reported after a restart."""
_STRAGGLER = 0.02
"""Share by which the own time of a straggler exceeds the median of all ranks; own time excludes waiting for ranks."""
_AFTER = 3
"""Number of steps after a disturbed one that are not judged either."""
_AMONG, _OVER_TIME, _KNOWN, _KEPT = 6, 3, 7, 16
"""Deviations above the others, among ranks and from window to window, that make a straggler; independent changes
needed to estimate the latter, and windows kept for it."""
_FIRST, _BEST = 64, 512
"""Steps after a restart that are compared, and steps whose median counts as the best of a start."""
_RECENT = 16
"""Number of last steps whose parts are compared with those of the first steps."""


Windows = dict[int, tuple[str, int, float]]
"""By rank: its host, the number of its last window of steps, its own seconds of a typical step of it."""


@dataclass(frozen=True)
class BestPace:
    """The best median of step times, in seconds, of the starts of one size, and its hosts."""

    seconds: float
    hosts: list[str]


class SlowdownDetector(Detector):
    """Opens `pace` when steps are slower than early in this start, `pace/restart` when slower than in earlier ones.

    Args:
        path: `pace.json`, the best medians of earlier starts.
        hosts: the hosts of this start.
    """

    def __init__(self, alarms: AlarmSink, path: Path, hosts: Sequence[str]) -> None:
        super().__init__(alarms)
        self._path, self._hosts = path, sorted(set(hosts))
        self._pace = PaceCusum()
        self._steps = 0
        self._wait = 0
        self._clean = deque[float](maxlen=_BEST)
        self._first = list[StepSeconds]()
        self._recent = deque[StepSeconds](maxlen=_RECENT)
        self._shape = ""
        self._best = state_files.view(path, dict[str, BestPace]) or {}
        self._slow_since: float | None = None

    def figures(self) -> dict[str, Any]:
        """Present step time relative to the baseline; None while that is being learned."""
        return {"step_drift": self._pace.ratio}

    def step(self, record: StepRecord) -> None:
        """Judge a step if it is clean."""
        super().step(record)
        self._steps += 1
        disturbed = record.seconds.checkpoint > 0 or record.beside or record.skipped
        self._wait = _AFTER if disturbed else max(0, self._wait - 1)
        if self._steps <= _SETTLE or disturbed or self._wait:
            return
        shape = f"{record.world or 0} ranks, {record.batch} x {record.sequence_length}"
        if shape != self._shape:
            self._shape, self._slow_since = shape, None
            self._clean.clear()
            self._first.clear()
            self._recent.clear()
            self.resolve("pace", "another batch or sequence length: compared from here on")
        self._recent.append(record.seconds)
        if len(self._first) < _FIRST:
            self._first.append(record.seconds)
        change = self._pace.add(record.step, record.seconds.training, shape)
        if change is not None:
            self._report(change)
        self._remember(record.seconds.training)

    def tick(self, now: float) -> None:
        """Raise the severity of a slowdown that lasts."""
        if not self._pace.slow:
            self._slow_since = None
            return
        self._slow_since = self._slow_since or now
        ratio = self._pace.ratio or 1.0
        if ratio - 1 >= _WORSE and now - self._slow_since > _WORSE_SECONDS:
            self.open("pace", Severity.CRIT, f"steps still take {ratio - 1:.1%} longer")

    def _report(self, change: PaceChange) -> None:
        if change.kind != "slower":
            self.resolve("pace", "steps take as long as at the beginning again, or less")
        else:
            first, now = _typical(self._first), _typical(self._recent)
            part = max(now, key=lambda name: now[name] - first[name])
            self.open(
                "pace",
                Severity.WARN,
                f"steps take {change.ratio - 1:.1%} longer than at the beginning of this start, since about step "
                f"{change.since:_}; what grew most is {part}: {first[part]:.3g} s -> {now[part]:.3g} s",
                "the run will end later; nothing is lost",
                "look for an alarm `straggler`, other jobs on the storage or the network, and the clocks of the "
                "devices; `fsdp-pretrain doctor` compares nodes when the job is stopped",
                facts={"ratio": change.ratio, "since": change.since, "part": part},
            )

    # ------------------------------------------------------------------ earlier starts

    def _remember(self, seconds: float) -> None:
        """Compare the first clean steps with the best of earlier starts; keep the best of this one."""
        self._clean.append(seconds)
        if len(self._clean) < _FIRST:
            return
        typical, best = median(self._clean), self._best.get(self._shape)
        if best is not None and len(self._clean) == _FIRST:
            self._compare(typical / best.seconds, best)
        if self._steps % _FIRST == 0 and (best is None or typical < best.seconds):
            self._best[self._shape] = BestPace(typical, self._hosts)
            with contextlib.suppress(OSError):
                known = {shape: asdict(value) for shape, value in self._best.items()}
                state_files.write(self._path, known)

    def _compare(self, ratio: float, best: BestPace) -> None:
        if ratio - 1 < _RESTART:
            self.resolve("pace/restart", "as fast as before the restart")
            return
        new = sorted(set(self._hosts) - set(best.hosts))
        self.open(
            "pace/restart",
            Severity.WARN,
            f"steps take {ratio - 1:.1%} longer than in the best earlier start of this size, "
            + (f"new since then: {', '.join(new)}" if new else "on the same hosts"),
            "the run will end later; nothing is lost",
            "`fsdp-pretrain doctor` compares nodes when the job is stopped",
            facts={"ratio": ratio, "new": new, "gone": sorted(set(best.hosts) - set(self._hosts))},
        )


def _typical(steps: Collection[StepSeconds]) -> dict[str, float]:
    """The median of each part of some steps, in seconds."""
    parts = {
        "waiting for data": "data",
        "computing": "forward_backward",
        "the optimiser": "optimizer",
        "other": "other",
    }
    return {name: median(getattr(step, part) for step in steps) for name, part in parts.items()}


class StragglerDetector(Detector):
    """Opens `straggler/...` for a rank, or a whole host, that repeatedly needs more own time than the others.

    All ranks wait for the slowest, so wall time says nothing; own time does. A straggler exceeds the median of all by
    more than the noise among ranks and between windows, in three of the last four windows. With few ranks only the
    latter noise is available; it is estimated from changes, so that a rank that stays slow does not hide itself. A
    reported straggler stays one until it is at most `_STRAGGLER` above the median, even if the noise grows.
    A host of which half of the ranks are slow has one alarm, until none of them is.

    `windows`: returns the last window of every rank.
    """

    def __init__(self, alarms: AlarmSink, windows: Callable[[], Windows]) -> None:
        super().__init__(alarms)
        self._windows = windows
        self._ratios: dict[int, list[float]] = {}
        self._reported = set[int]()
        self._window = 0

    def tick(self, now: float) -> None:
        """Judge a window once all ranks have measured it."""
        windows = {rank: window for rank, window in self._windows().items() if window[1]}
        numbers = {number for _, number, _ in windows.values()}
        if len(windows) < 2 or len(numbers) != 1 or numbers == {self._window}:
            return
        self._window = numbers.pop()
        own = {rank: value for rank, (_, _, value) in windows.items() if value > 0}
        if len(own) < 2:
            return
        typical = median(own.values())
        ratios = {rank: value / typical - 1 for rank, value in own.items()}
        self._ratios = {rank: [*self._ratios.get(rank, []), ratio][-_KEPT:] for rank, ratio in ratios.items()}
        among = spread(list(ratios.values()))[1] if len(own) > 2 else 0.0
        slow = self._slow(max(_STRAGGLER, _AMONG * among))
        if slow is not None:
            self._reported = slow
            self._report(slow, {rank: host for rank, (host, _, _) in windows.items()}, ratios)

    def _slow(self, bound: float) -> set[int] | None:
        """The ranks above the bound, and above the noise between windows, in three of the last four windows, and those
        reported before that are still slower; None while the noise is unknown."""
        changes = {rank: [b - a for a, b in pairwise(known)] for rank, known in self._ratios.items()}
        pooled = [change for own in changes.values() for change in own]
        if len(pooled) * (len(changes) - 1) < _KNOWN * len(changes):  # the ratios of n ranks have n - 1 degrees
            return None
        noise = {rank: max(spread(pooled)[1], spread(own)[1] if own else 0.0) for rank, own in changes.items()}
        bounds = {
            rank: _STRAGGLER if rank in self._reported else max(bound, _OVER_TIME * noise[rank] / math.sqrt(2))
            for rank in self._ratios
        }
        return {rank for rank, known in self._ratios.items() if sum(ratio > bounds[rank] for ratio in known[-4:]) >= 3}

    def _report(self, slow: set[int], hosts: dict[int, str], ratios: dict[int, float]) -> None:
        stragglers: dict[str, tuple[str, float]] = {}
        reported = self.alarms.open_keys()
        for host in {hosts[rank] for rank in slow}:
            here = [rank for rank, name in hosts.items() if name == host]
            guilty = sorted(slow.intersection(here))
            key, is_half = f"straggler/{host}", len(here) > 1 and 2 * len(guilty) >= len(here)
            if key in reported or (is_half and len(set(hosts.values())) > 1):  # it stays one alarm until it is over
                worst = max(ratios[rank] for rank in guilty)
                stragglers[key] = (f"{len(guilty)} of {len(here)} ranks of {host} need", worst)
            else:
                stragglers |= {f"straggler/rank-{r}": (f"rank {r} ({host}) needs", ratios[r]) for r in guilty}
        for key, (who, ratio) in stragglers.items():
            self.open(
                key,
                Severity.CRIT if ratio >= 0.10 else Severity.WARN,
                f"{who} {ratio:.1%} more time of its own for a step than the others, in three of four windows",
                "all ranks wait for the slowest",
                "check clocks, temperature and other processes there; take the host out at the next stop",
                facts={"ratio": ratio, "window": self._window},
            )
        for rank in slow:
            if (key := f"straggler/{hosts[rank]}") in stragglers:
                self.resolve(f"straggler/rank-{rank}", f"its host is reported instead: {key}")
        self.resolve_others("straggler", stragglers, "as fast as the others again")
