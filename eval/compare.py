"""Two evaluations compared document by document.

The difference of two scores over the same documents is far more certain than each score, since a hard document is hard
for both. If the documents cannot be paired, the scores are shown with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from fsdp_pretrain.errors import ConfigError, UserError
from fsdp_pretrain.run import state_files

from . import sample_files
from .results import Results
from .sample_files import Document, Value
from .uncertainty import Z95, as_array, by_document, influence, score_of, standard_error

Values = dict[Document, Value]
Judgement = Literal["better", "worse", "no difference", "unknown"]
_ENOUGH = 10
"""Documents that a verdict needs: five that all improve prove nothing, though their standard error is small."""


class ScoreDifference(BaseModel):
    """One metric of a task: B minus A.

    Attributes:
        a, b: scores over the documents that were compared.
        unpaired: why the documents were not compared one by one; "" if they were.
        documents: number of documents that both have.
        better, worse, equal: how many of them are so in B. A higher score is better unless the task says otherwise.
        verdict: `better` or `worse` where the difference is more than 1.96 standard errors, else `no difference`;
            `unknown` without a standard error, or of fewer than ten documents.
    """

    task: str
    metric: str
    a: float
    b: float
    difference: float
    stderr: float | None = None
    unpaired: str = ""
    documents: int | None = None
    better: int | None = None
    worse: int | None = None
    equal: int | None = None
    verdict: Judgement = "unknown"


class EvaluationComparison(BaseModel):
    """The comparison of two evaluations, A and B, over the tasks that both have."""

    a: str
    b: str
    differences: list[ScoreDifference]


@dataclass(frozen=True)
class TaskResults:
    """One task of an evaluation: the results that it is part of, and their directory."""

    task: str
    results: Results
    folder: Path

    @property
    def scores(self) -> dict[str, float]:
        """The score of each metric."""
        return {name: value for name, value in self.results.scores[self.task].items() if not name.endswith("_stderr")}

    def samples(self) -> dict[str, Values]:
        """Values of every document by metric. Raises UserError."""
        name = self.results.samples.get(self.task)
        if name is None:
            raise ConfigError(f"no values of single documents were kept for {self.task} of step {self.results.step}")
        return sample_files.read(self.folder / Path(name).name)


@dataclass(frozen=True)
class EvaluationSide:
    """All tasks evaluated at one step of a run, or in one results file."""

    name: str
    tasks: dict[str, TaskResults]


def read_side(path: Path) -> EvaluationSide:
    """The tasks in a results file, or in a directory of results: that of a step or of a task set in `RUN/evals`.

    Raises:
        ConfigError: there are no results.
    """
    paths = [path] if path.is_file() else sorted([*path.glob("results.json"), *path.glob("*/results.json")])
    if not paths:
        raise ConfigError(
            f"there are no results in {path}", remedy="name RUN/evals/step-N, or what `run --out FILE` has written"
        )
    tasks: dict[str, TaskResults] = {}
    read = [(file, results) for file in paths if (results := state_files.read(file, Results)) is not None]
    for file, results in sorted(read, key=lambda item: item[1].time):  # the newest, if several have a task
        tasks |= {task: TaskResults(task, results, file.parent) for task in results.scores}
    return EvaluationSide(str(path), tasks)


def compare(a: EvaluationSide, b: EvaluationSide, *, tasks: Sequence[str] | None = None) -> EvaluationComparison:
    """Compare every metric that both sides have, of all or the given tasks. Raises ConfigError if there is none."""
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
        paired: ScoreDifference | str = reason
        if not reason:
            paired = _paired(a, b, metric, before.get(metric, {}), after.get(metric, {}), higher)
        if isinstance(paired, str):
            one, other = a.scores[metric], b.scores[metric]
            yield ScoreDifference(task=a.task, metric=metric, a=one, b=other, difference=other - one, unpaired=paired)
        else:
            yield paired


def _paired(
    a: TaskResults, b: TaskResults, metric: str, before: Values, after: Values, up: bool
) -> ScoreDifference | str:
    """The difference over the documents that both have, or why there is none. `up`: a higher score is better."""
    if any(as_array([*values.values()], side.scores[metric]) is None for side, values in ((a, before), (b, after))):
        return "the score is no mean or ratio of its documents' values"
    common = [document for document in before if document in after]
    x, y = as_array([before[document] for document in common]), as_array([after[document] for document in common])
    if x is None or y is None or x.ndim != y.ndim:
        return "they have no document in common"
    gains = (by_document(y) - by_document(x)) * (1 if up else -1)
    better, worse = int((gains > 0).sum()), int((gains < 0).sum())
    difference, stderr = score_of(y) - score_of(x), standard_error(influence(y) - influence(x))
    verdict: Judgement = "no difference"
    if stderr is None or len(common) < _ENOUGH:
        verdict = "unknown"
    elif abs(difference) > Z95 * stderr:
        verdict = "better" if (difference > 0) == up else "worse"
    return ScoreDifference(
        task=a.task,
        metric=metric,
        a=score_of(x),
        b=score_of(y),
        difference=difference,
        stderr=stderr,
        documents=len(common),
        better=better,
        worse=worse,
        equal=len(common) - better - worse,
        verdict=verdict,
    )


def _unlike(a: TaskResults, b: TaskResults) -> str:
    """Why the same document is not the same question on both sides; "" if it is."""
    for what, setting in (
        ("few-shot examples", lambda x: x.results.num_fewshot.get(x.task)),
        ("versions of the task", lambda x: x.results.versions.get(x.task)),
        ("options of generating answers", lambda x: x.results.gen_kwargs.get(x.task)),
    ):
        if setting(a) != setting(b):
            return f"other {what}: {setting(a)} and {setting(b)}"
    return ""


def render(comparison: EvaluationComparison) -> str:
    """A comparison as text for people."""
    lines = [f"A: {comparison.a}, B: {comparison.b}; differences are B - A ± standard error"]
    for row in comparison.differences:
        error = "" if row.stderr is None else f" ± {row.stderr:.4f}"
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
