"""The evaluations of a run: scores with 95% intervals, from results.json files and the journal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eval.results import Results
from fsdp_pretrain.record import journal, lineage, state_files
from fsdp_pretrain.record.files import RunDir, seconds_of
from fsdp_pretrain.record.lines import Lines, Position


@dataclass(frozen=True)
class ScorePoint:
    """A score of a checkpoint.

    Attributes:
        low, high: 95% interval; None if it is not known.
        documents: how many were used; None if that is not known.
        left: the checkpoint was left behind by a rollback.
    """

    at: Position
    value: float
    low: float | None
    high: float | None
    documents: int | None
    left: bool


@dataclass(frozen=True)
class Evaluations:
    """All evaluations of a run, oldest first: scores and the better direction by (task, metric)."""

    scores: dict[tuple[str, str], list[ScorePoint]]
    better: dict[tuple[str, str], str]


def read_evaluations(run: RunDir, entries: list[dict[str, Any]], lines: Lines) -> Evaluations:
    """The results of a run, and those that only its journal still has, as after a rollback."""
    read = [state_files.view(path, Results) for path in sorted(run.evals.glob("step-*/*/results.json"))]
    results = [each for each in read if each is not None]
    found = Evaluations({}, {})
    known = [(each, False) for each in results]
    for each, left in sorted([*known, *_journalled(entries, results)], key=lambda pair: pair[0].step):
        at = lines.locate(each.step, seconds_of(each.committed or each.time))
        for task, metric, value, _, interval in each.metrics():
            low, high = (None, None) if interval is None else (interval.low, interval.high)
            score = ScorePoint(at, value, low, high, each.documents.get(task), left)
            found.scores.setdefault((task, metric), []).append(score)
            higher = each.higher_is_better.get(task, {}).get(metric)
            if higher is not None:
                found.better[task, metric] = "higher is better" if higher else "lower is better"
    return found


def _journalled(entries: list[dict[str, Any]], known: list[Results]) -> list[tuple[Results, bool]]:
    """What the journal says of evaluations whose results are gone, and whether they were left behind."""
    there = {pair for each in known for pair in ((each.step, each.committed), (each.step, None))}
    found, kept = [], {id(entry) for entry in lineage.drop_abandoned(entries)}
    for entry in journal.of_kind(entries, "eval"):
        if (entry["step"], committed := entry.get("committed")) in there:
            continue
        scores = {
            str(task): {str(name): float(value) for name, value in row.items() if isinstance(value, int | float)}
            for task, row in entry["scores"].items()
            if isinstance(row, dict)
        }
        facts = {"step": entry["step"], "time": entry["time"], "committed": committed}
        found.append((Results(tokens=0, scores=scores, seconds=0.0, **facts), id(entry) not in kept))
    return found
