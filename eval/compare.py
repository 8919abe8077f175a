"""Two evaluations compared document by document. No torch here.

The difference of two scores over the same documents is far more certain than each score: what makes a document hard
makes it hard for both. Its standard error is that of the mean of the differences of the documents' influences on the
two scores (see `eval.intervals`; for means these are the differences of their values). Evaluations that cannot be
paired are compared by their own intervals, and the reason is given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from fsdp_pretrain.checkpoint.store import directory_name
from fsdp_pretrain.errors import ConfigError, UserError
from fsdp_pretrain.record import state_files
from fsdp_pretrain.record.arguments import check_begun
from fsdp_pretrain.record.files import RunDir

from . import sample_files
from .attempt import ConfidenceInterval, Results
from .intervals import (
    Array,
    Form,
    agresti_min,
    are_shares,
    as_array,
    change,
    form_of,
    ratio_interval,
    standard_error,
    unpaired,
)
from .sample_files import Document, Value

Judgement = Literal["better", "worse", "higher", "lower", "no difference", "unknown"]


class ScoreDifference(BaseModel):
    """One metric of a task: B minus A.

    Attributes:
        a, b: scores over the documents that were compared.
        unpaired: why the documents were not compared one by one; "" if they were.
        documents: that both have; better, worse, equal: how many of them are so in B (if nobody says which is good,
            better is higher).
        verdict: `better` or `worse` (`higher` or `lower` if nobody says which is good) where the 95% interval excludes
            0; else `no difference`. `unknown` without a standard error.
    """

    task: str
    metric: str
    a: float
    b: float
    difference: float
    stderr: float | None = None
    interval: ConfidenceInterval | None = None
    unpaired: str = ""
    documents: int | None = None
    better: int | None = None
    worse: int | None = None
    equal: int | None = None
    verdict: Judgement = "unknown"


class EvaluationComparison(BaseModel):
    """Of two evaluations; `left_out` are tasks that only one of them has."""

    a: str
    b: str
    differences: list[ScoreDifference]
    left_out: list[str]


@dataclass(frozen=True)
class TaskResults:
    """One task of an evaluation: the results that hold it, and their directory."""

    task: str
    results: Results
    folder: Path

    @property
    def metrics(self) -> dict[str, tuple[float, float | None, ConfidenceInterval | None]]:
        """Score, standard error and interval by metric."""
        return {row[1]: row[2:] for row in self.results.metrics() if row[0] == self.task}

    def samples(self) -> dict[str, dict[Document, Value]]:
        """Values of every document by metric. Raises UserError."""
        name = self.results.samples.get(self.task)
        if name is None:
            raise ConfigError(f"no samples were kept with the results of step {self.results.step}")
        return sample_files.read(self.folder / Path(name).name)


@dataclass(frozen=True)
class EvaluationSide:
    """All tasks evaluated at one step of a run, or in one results file."""

    name: str
    tasks: dict[str, TaskResults]


def sides(words: Sequence[str]) -> tuple[EvaluationSide, EvaluationSide]:
    """What `RUN A B` names, or `A B`, where A and B are steps of the run, results files or directories of results.

    Raises:
        ConfigError: something else is given, or there are no such results.
    """
    if len(words) not in (2, 3):
        raise ConfigError(
            f"{len(words)} arguments name no two evaluations", remedy="fsdp-eval compare RUN STEP STEP, or two results"
        )
    run = RunDir(Path(words[0])) if len(words) == 3 else None
    if run is not None:
        check_begun(run)
    first, second = (_side(word, run) for word in words[-2:])
    return first, second


def _side(word: str, run: RunDir | None) -> EvaluationSide:
    if run is not None and word.isdecimal():
        name, paths = f"step {int(word)}", sorted((run.evals / directory_name(int(word))).glob("*/results.json"))
    else:
        name, path = word, Path(word)
        paths = [path] if path.is_file() else sorted([*path.glob("results.json"), *path.glob("*/results.json")])
    if not paths:
        steps = (
            sorted({int(path.parent.parent.name[5:]) for path in run.evals.glob("step-*/*/results.json")})
            if run
            else []
        )
        known = f" (there are: {', '.join(map(str, steps))})" if steps else ""
        raise ConfigError(f"there are no results of {name}{known}", remedy="fsdp-eval watch RUN, or run --out FILE")
    tasks: dict[str, TaskResults] = {}
    read = [(path, results) for path in paths if (results := state_files.read(path, Results)) is not None]
    for path, results in sorted(read, key=lambda item: item[1].time):  # the newest, if several have a task
        tasks |= {task: TaskResults(task, results, path.parent) for task in results.scores}
    return EvaluationSide(name, tasks)


def compare(a: EvaluationSide, b: EvaluationSide, *, tasks: Sequence[str] | None = None) -> EvaluationComparison:
    """Every metric that both sides have, of all tasks or the given ones. Raises ConfigError if there is none."""
    both = [task for task in a.tasks if task in b.tasks]
    missing = [task for task in tasks or [] if task not in both]
    if missing or not both:
        what = f"task {', '.join(missing)}" if missing else "a task"
        raise ConfigError(
            f"{a.name} and {b.name} do not both have {what} (A: {', '.join(a.tasks)}; B: {', '.join(b.tasks)})"
        )
    chosen = tasks or both
    return EvaluationComparison(
        a=a.name,
        b=b.name,
        differences=[row for task in chosen for row in _differences(a.tasks[task], b.tasks[task])],
        left_out=[] if tasks else sorted({*a.tasks} ^ {*b.tasks}),
    )


def _differences(a: TaskResults, b: TaskResults) -> Iterator[ScoreDifference]:
    reason = _unlike(a, b)
    samples: tuple[dict[str, dict[Document, Value]], ...] = ({}, {})
    if not reason:
        try:
            samples = a.samples(), b.samples()
        except UserError as problem:
            reason = problem.cause
    up = b.results.higher_is_better.get(a.task, {})
    for metric, (score, stderr, interval) in a.metrics.items():
        if metric not in b.metrics:
            continue
        other, its_stderr, its_interval = b.metrics[metric]
        higher = up.get(metric, up.get(metric.partition("/")[0]))
        found = None
        if not reason:
            found = _paired(samples[0].get(metric, {}), samples[1].get(metric, {}), score, other, higher)
        if isinstance(found, _Paired):
            row = ScoreDifference(task=a.task, metric=metric, **vars(found))
        else:
            row = ScoreDifference(
                task=a.task,
                metric=metric,
                a=score,
                b=other,
                difference=other - score,
                stderr=None if stderr is None or its_stderr is None else math.hypot(stderr, its_stderr),
                interval=None
                if interval is None or its_interval is None
                else unpaired(score, interval, other, its_interval),
                unpaired=reason or found or "",
            )
        yield row.model_copy(update={"verdict": _verdict(row.interval, higher)})


def _unlike(a: TaskResults, b: TaskResults) -> str:
    """Why the same document is not the same question on both sides; "" if it is."""
    for what, of in (
        ("few-shot examples", lambda x: x.results.num_fewshot.get(x.task)),
        ("versions of the task", lambda x: x.results.versions.get(x.task)),
        ("options of generating answers", lambda x: x.results.gen_kwargs.get(x.task)),
    ):
        if of(a) != of(b):
            return f"other {what}: {of(a)} and {of(b)}"
    return ""


@dataclass(frozen=True)
class _Paired:
    a: float
    b: float
    difference: float
    stderr: float | None
    interval: ConfidenceInterval | None
    documents: int
    better: int
    worse: int
    equal: int


def _paired(
    a: dict[Document, Value], b: dict[Document, Value], score_a: float, score_b: float, higher: bool | None
) -> _Paired | str:
    """The difference over the documents that both have; the reason if there is none."""
    form = form_of([*a.values()], score_a)
    if form is None or form != form_of([*b.values()], score_b):
        return "the score is no mean or ratio of its documents' values"
    common = [document for document in a if document in b]
    x, y = as_array([a[document] for document in common]), as_array([b[document] for document in common])
    if x is None or y is None or x.ndim != y.ndim:
        return "they have no document in common"
    first, second = form.score(x), form.score(y)
    influence = [form.influence(of) * (score if form.exponential else 1) for of, score in ((x, first), (y, second))]
    gains = _by_document(form, y) - _by_document(form, x)
    more, less = int((gains > 0).sum()), int((gains < 0).sum())
    if are_shares(form, x) and are_shares(form, y):
        interval: ConfidenceInterval | None = agresti_min(more, less, len(common))
    else:
        interval = _interval(form, x, y)
    return _Paired(
        a=first,
        b=second,
        difference=second - first,
        stderr=standard_error(influence[1] - influence[0]),
        interval=interval,
        documents=len(common),
        better=less if higher is False else more,
        worse=more if higher is False else less,
        equal=len(common) - more - less,
    )


def _interval(form: Form, x: Array, y: Array) -> ConfidenceInterval | None:
    """Of the difference of the scores of n paired documents; None of fewer than two."""
    stderr = standard_error(form.influence(y) - form.influence(x))
    if stderr is None:
        return None
    if x.ndim == 2 and (x[:, 1] == y[:, 1]).all():
        ends = sorted(form.factor * end for end in ratio_interval(y[:, 0] - x[:, 0], x[:, 1]))
        found = ConfidenceInterval(low=ends[0], high=ends[1], method="fieller")
    else:
        found = ConfidenceInterval.normal(form.level(y) - form.level(x), stderr)
    return change(form.score(x), found.low, found.high) if form.exponential else found


def _by_document(form: Form, x: Array) -> Array:
    """The level of every document alone."""
    return form.factor * (x if x.ndim == 1 else x[:, 0] / x[:, 1])


def _verdict(interval: ConfidenceInterval | None, higher: bool | None) -> Judgement:
    if interval is None:
        return "unknown"
    if interval.low <= 0 <= interval.high:
        return "no difference"
    up = interval.low > 0
    if higher is None:
        return "higher" if up else "lower"
    return "better" if up == higher else "worse"


def render(found: EvaluationComparison) -> str:
    """For people."""
    lines = [f"A: {found.a}, B: {found.b}; differences are B - A, with 95% intervals"]
    for row in found.differences:
        error = "" if row.stderr is None else f" ± {row.stderr:.4f}"
        error += "" if row.interval is None else f"  {row.interval}"
        lines.append(
            f"  {row.task:24} {row.metric:16} {row.a:.4f} -> {row.b:.4f}  {row.difference:+.4f}{error}  {row.verdict}"
        )
        if row.unpaired:
            lines.append(f"    unpaired, so a rough comparison: {row.unpaired}")
        else:
            lines.append(
                f"    paired over {row.documents} documents: {row.better} better, {row.worse} worse, {row.equal} equal"
            )
    lines += [f"  only one of them has {', '.join(found.left_out)}"] if found.left_out else []
    return "\n".join(lines)
