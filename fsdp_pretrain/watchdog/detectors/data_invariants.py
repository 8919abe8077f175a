"""Checks the training data, step by step, from the metrics records.

Invariants are exact and also find a defect present from the first step; comparisons find changes.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable

from fsdp_pretrain.run.step_record import StepRecord
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.watchdog.notify.alarms import AlarmSink

from .base import Detector

_TOLERATED = 0.01
"""Share of the documents of one step that may break an invariant."""
_CLEAN_STEPS = 100
"""Steps in a row without a fault that end its alarm, so that the next one is reported again."""
_SHARE_STEPS, _SHARE_SCORE, _LEAST_SHARE = 100, 6.0, 0.02
"""Warn if over so many steps a source's share differs from the plan by so many deviations, and by at least this."""
_REMEMBERED = 100_000
"""Number of data digests kept to notice repeated batches."""
_FAR, _FAR_STEPS, _FAR_LEAST = 5.0, 3, 2
"""Deviations from which a batch is far; of so many steps, so many must be far for a warning."""
_COUNTED = ("data-specials", "data-separators", "data-cursor", "data-repeated", "data-quarantined")
"""Alarms that end after clean steps."""
_EFFECTS = {
    "data-specials": "the model learns doubled separators",
    "data-separators": "the model does not learn where documents end",
    "data-cursor": "samples are trained twice or left out",
    "data-repeated": "samples are trained twice",
    "data-share": "the mixture is not the one that was configured",
    "data-quarantined": "they are left out of the loss; at {most:.2g} of all stretches the run stops",
    "data-distance": "the ids may be shifted, or the text is of another kind",
}


class DataInvariantDetector(Detector):
    """Alarms `data-specials`, `data-separators`, `data-share/SOURCE`, `data-repeated`, `data-cursor`,
    `data-quarantined` and `data-distance`.

    Args:
        causal: whether every token is a target, so that targets are distributed over the sources like samples.
        max_quarantined: share of quarantined documents at which the trainer stops.
        before: returns the kept record of a step, to continue from after a restart; None if there is none.
    """

    def __init__(
        self,
        alarms: AlarmSink,
        *,
        causal: bool,
        max_quarantined: float,
        before: Callable[[int], StepRecord | None] = lambda step: None,
    ) -> None:
        super().__init__(alarms)
        self._causal, self._max_quarantined, self._before = causal, max_quarantined, before
        self._digests: dict[str, int] = {}
        self._clean = Counter[str]()
        self._shares: deque[tuple[float, dict[str, float], dict[str, float]]] = deque(maxlen=_SHARE_STEPS)
        self._stretches = self._quarantined = 0
        self._far: deque[bool] = deque(maxlen=_FAR_STEPS)

    def learn(self, record: StepRecord) -> None:
        """Learn from a record that was judged: the one before it is not looked for, which would take long."""
        self.last = self.last or record
        super().learn(record)

    def step(self, record: StepRecord) -> None:
        """Judge a record, and compare it with earlier ones."""
        last = self._before(record.step - 1) if self.last is None else self.last
        super().step(record)
        self._clean.update(_COUNTED)
        self._judge_separators(record)
        if last is not None:
            self._judge_cursor(record, last)
            self._digests.setdefault(last.data_digest, last.step)
        self._judge_repeats(record)
        self._judge_shares(record)
        self._judge_quarantined(record)
        self._judge_distance(record)
        for key in _COUNTED:
            if self._clean[key] >= _CLEAN_STEPS:
                self.resolve(key, f"nothing was wrong in the last {_CLEAN_STEPS} steps")

    def _wrong(self, severity: Severity, key: str, summary: str) -> None:
        self._clean[key] = 0
        effect = _EFFECTS[key.partition("/")[0]].format(most=self._max_quarantined)
        remedy = f"see `fsdp-pretrain where RUN --step {self.at} --text`, and run `fsdp-data validate` on the sources"
        self.open(key, severity, f"step {self.at}: {summary}", effect, remedy)

    # ------------------------------------------------------------------ invariants

    def _judge_separators(self, record: StepRecord) -> None:
        documents, separators, adjacent = record.documents, record.separators, record.adjacent_specials
        if adjacent > _TOLERATED * documents:
            text = f"{adjacent} special tokens are next to another, where {documents} documents end"
            self._wrong(Severity.CRIT, "data-specials", text)
        if abs(separators - documents) > _TOLERATED * max(1, documents):
            self._wrong(Severity.CRIT, "data-separators", f"{separators} separators in {documents} documents")

    def _judge_cursor(self, record: StepRecord, last: StepRecord) -> None:
        """The cursor must advance by at least the batch; skipped samples advance it further."""
        continues = record.step == last.step + 1 and record.consumed == last.consumed + record.batch
        if not continues or record.cursor - record.batch < last.cursor:
            text = (
                f"{record.batch} samples up to {record.cursor:_} ({record.consumed:_} consumed), after step "
                f"{last.step} had come to {last.cursor:_} ({last.consumed:_} consumed)"
            )
            self._wrong(Severity.CRIT, "data-cursor", text)

    def _judge_repeats(self, record: StepRecord) -> None:
        known = self._digests.get(record.data_digest, record.step)
        if known != record.step:
            self._wrong(Severity.CRIT, "data-repeated", f"the same batch as in step {known}")
        self._digests[record.data_digest] = record.step
        if len(self._digests) > _REMEMBERED:
            del self._digests[next(iter(self._digests))]

    # ------------------------------------------------------------------ comparisons

    def _judge_shares(self, record: StepRecord) -> None:
        """Compare the targets of every source with the plan, over 100 steps."""
        if not self._causal:
            return
        self._shares.append((record.batch, record.mixture, record.ramps.shares))
        samples = sum(batch for batch, _, _ in self._shares)
        for name in record.ramps.shares:
            planned = sum(batch * plan.get(name, 0.0) for batch, _, plan in self._shares) / samples
            actual = sum(batch * share.get(name, 0.0) for batch, share, _ in self._shares) / samples
            allowed = max(_LEAST_SHARE, _SHARE_SCORE * math.sqrt(planned * (1 - planned) / samples))
            text = f"{actual:.1%} of the last {len(self._shares)} steps came from {name}, planned are {planned:.1%}"
            if abs(actual - planned) > allowed + record.batch / samples:  # a plan may change within a batch
                self._wrong(Severity.WARN, f"data-share/{name}", text)
            elif len(self._shares) == _SHARE_STEPS:
                self.resolve(f"data-share/{name}", text)

    def _judge_quarantined(self, record: StepRecord) -> None:
        self._stretches += record.documents + record.batch  # a document may span several samples
        self._quarantined += record.quarantined
        if record.quarantined:
            share = self._quarantined / max(1, self._stretches)
            severity = Severity.WARN if share > self._max_quarantined / 10 else Severity.INFO
            text = f"{self._quarantined} of {self._stretches} stretches of documents failed the packer's checks"
            self._wrong(severity, "data-quarantined", text)

    def _judge_distance(self, record: StepRecord) -> None:
        far = record.data_distance
        if far is None:
            return
        self._far.append(far > _FAR)
        if sum(self._far) >= _FAR_LEAST:
            text = f"its tokens are {far:.0f} deviations away from those of the run's first steps"
            self._wrong(Severity.WARN, "data-distance", text)
        elif not any(self._far):
            self.resolve("data-distance", "tokens are as in the run's first steps again")
