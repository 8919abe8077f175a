"""Reads the evaluations of a run: scores from its journal, with 95% intervals, and texts from the results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fsdp_pretrain.eval.results import Results
from fsdp_pretrain.eval.uncertainty import interval
from fsdp_pretrain.run import journal, lineage, state_files
from fsdp_pretrain.run.files import RunDir, seconds_of
from fsdp_pretrain.run.lines import Lines, Position


@dataclass(frozen=True)
class ScorePoint:
    """A score of a checkpoint.

    Attributes:
        error: standard error; None if it is not known.
        interval: 95% interval; the score itself without an error.
        left: whether the checkpoint was left behind by a rollback.
    """

    at: Position
    value: float
    error: float | None
    interval: tuple[float, float]
    left: bool


def newest_texts(run: RunDir, entries: list[dict[str, Any]]) -> Results | None:
    """The newest results with continuations of `eval.prompts` that the journal's `entries` keep, or None."""
    kept = {
        (entry["step"], entry.get("committed")) for entry in journal.of_kind(lineage.drop_abandoned(entries), "eval")
    }
    for path in sorted(run.evals.glob("step-*/*/results.json"), reverse=True):
        results = state_files.view(path, Results)
        if results is not None and results.texts and (results.step, results.committed) in kept:
            return results
    return None


def read_scores(entries: list[dict[str, Any]], lines: Lines) -> dict[tuple[str, str], list[ScorePoint]]:
    """The scores in a journal by (task, metric), in the order of their steps."""
    by_metric: dict[tuple[str, str], list[ScorePoint]] = {}
    kept = {id(entry) for entry in lineage.drop_abandoned(entries)}
    for entry in sorted(journal.of_kind(entries, "eval"), key=lambda entry: int(entry["step"])):
        scores = {
            str(task): {str(name): float(value) for name, value in row.items() if isinstance(value, int | float)}
            for task, row in entry["scores"].items()
            if isinstance(row, dict)
        }
        facts = {"step": entry["step"], "time": entry["time"], "committed": entry.get("committed")}
        at = lines.locate(entry["step"], seconds_of(facts["committed"] or entry["time"]))
        for task, metric, value, stderr in Results(tokens=0, scores=scores, seconds=0.0, **facts).metrics():
            documents = entry.get("documents", {}).get(task)
            among = (value, value) if stderr is None else interval(metric, value, stderr, documents)
            by_metric.setdefault((task, metric), []).append(ScorePoint(at, value, stderr, among, id(entry) not in kept))
    return by_metric
