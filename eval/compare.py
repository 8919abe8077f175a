"""Two evaluations compared document by document. No torch here.

The difference of two scores over the same documents is far more certain than each score: what makes a document hard
makes it hard for both (see `eval.intervals.paired`). Of evaluations that cannot be paired, the scores are shown and the
reason.
"""

from __future__ import annotations

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
from .intervals import Array, Form, as_array, form_of, paired
from .results import ConfidenceInterval, Results
from .sample_files import Document, Value

Values = dict[Document, Value]
Judgement = Literal["better", "worse", "no difference", "unknown"]


class ScoreDifference(BaseModel):
    """One metric of a task: B minus A.

    Attributes:
        a, b: scores over the documents that were compared.
        unpaired: why the documents were not compared one by one; "" if they were.
        documents: that both have; better, worse, equal: how many of them are so in B. A higher score is better unless
            the task says otherwise.
        verdict: `better` or `worse` where the 95% interval excludes 0, else `no difference`; `unknown` without an
            interval.
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
    """Of two evaluations, over the tasks that both have."""

    a: str
    b: str
    differences: list[ScoreDifference]


@dataclass(frozen=True)
class TaskResults:
    """One task of an evaluation: the results that hold it, and their directory."""

    task: str
    results: Results
    folder: Path

    @property
    def scores(self) -> dict[str, float]:
        """By metric."""
        return {name: value for name, value in self.results.scores[self.task].items() if not name.endswith("_stderr")}

    def samples(self) -> dict[str, Values]:
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
    )


def _differences(a: TaskResults, b: TaskResults) -> Iterator[ScoreDifference]:
    reason, before, after = _unlike(a, b), dict[str, Values](), dict[str, Values]()
    if not reason:
        try:
            before, after = a.samples(), b.samples()
        except UserError as problem:
            reason = problem.cause
    up = b.results.higher_is_better.get(a.task, {})
    for metric in (name for name in a.scores if name in b.scores):
        higher = up.get(metric, up.get(metric.partition("/")[0], True))
        found: ScoreDifference | str = reason
        if not reason:
            found = _paired(a, b, metric, before.get(metric, {}), after.get(metric, {}), higher)
        if isinstance(found, str):
            one, other = a.scores[metric], b.scores[metric]
            yield ScoreDifference(task=a.task, metric=metric, a=one, b=other, difference=other - one, unpaired=found)
        else:
            yield found.model_copy(update={"verdict": _verdict(found.interval, higher)})


def _paired(
    a: TaskResults, b: TaskResults, metric: str, before: Values, after: Values, up: bool
) -> ScoreDifference | str:
    """The difference over the documents that both have; the reason if there is none. `up`: higher is better."""
    form = form_of([*before.values()], a.scores[metric])
    if form is None or form != form_of([*after.values()], b.scores[metric]):
        return "the score is no mean or ratio of its documents' values"
    common = [document for document in before if document in after]
    x, y = as_array([before[document] for document in common]), as_array([after[document] for document in common])
    if x is None or y is None or x.ndim != y.ndim:
        return "they have no document in common"
    stderr, interval = paired(form, x, y)
    gains = (_by_document(form, y) - _by_document(form, x)) * (1 if up else -1)
    better, worse = int((gains > 0).sum()), int((gains < 0).sum())
    return ScoreDifference(
        task=a.task,
        metric=metric,
        a=form.score(x),
        b=form.score(y),
        difference=form.score(y) - form.score(x),
        stderr=stderr,
        interval=interval,
        documents=len(common),
        better=better,
        worse=worse,
        equal=len(common) - better - worse,
    )


def _by_document(form: Form, x: Array) -> Array:
    """The level of every document alone."""
    return form.factor * (x if x.ndim == 1 else x[:, 0] / x[:, 1])


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


def _verdict(interval: ConfidenceInterval | None, higher: bool) -> Judgement:
    if interval is None:
        return "unknown"
    if interval.low <= 0 <= interval.high:
        return "no difference"
    return "better" if (interval.low > 0) == higher else "worse"


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
            lines.append(f"    not comparable document by document: {row.unpaired}")
        else:
            lines.append(
                f"    paired over {row.documents} documents: {row.better} better, {row.worse} worse, {row.equal} equal"
            )
    return "\n".join(lines)
