"""The evaluations of a run: scores with 95% intervals and verdicts, from results.json files and the journal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eval.attempt import Results, Verdict
from fsdp_pretrain.record import journal, lineage, state_files
from fsdp_pretrain.record.files import RunDir, seconds_of

from .curves import Clocks, Lines


@dataclass(frozen=True)
class ScorePoint:
    """A score of a checkpoint.

    Attributes:
        low, high: 95% interval; None if it is not known.
        documents: how many were used; None if that is not known.
        left: the checkpoint was left behind by a rollback.
    """

    at: Clocks
    value: float
    low: float | None
    high: float | None
    documents: int | None
    left: bool


@dataclass(frozen=True)
class ScoreCurve:
    """A metric of a task over the run, oldest first; `better` is which direction is better, None if nobody says."""

    task: str
    metric: str
    better: str | None
    scores: list[ScorePoint]


@dataclass(frozen=True)
class ProbeVerdict:
    """What a probe concluded; see `eval.attempt.Verdict`."""

    at: Clocks
    probe: str
    ok: bool | None
    text: str


@dataclass(frozen=True)
class Evaluations:
    """All evaluations of a run, and the number of results files that cannot be read."""

    curves: list[ScoreCurve]
    verdicts: list[ProbeVerdict]
    damaged: int


def read_evaluations(run: RunDir, entries: list[dict[str, Any]], lines: Lines) -> Evaluations:
    """The results of a run, and those that only its journal still has, as after a rollback."""
    results, damaged = _read(run)
    table: dict[tuple[str, str], list[ScorePoint]] = {}
    better: dict[tuple[str, str], str] = {}
    verdicts: list[ProbeVerdict] = []
    for each, left in sorted([*results, *_journalled(entries, results)], key=lambda pair: pair[0].step):
        at = lines.locate(each.step, seconds_of(each.committed or each.time))
        for task, metric, value, _, interval in each.metrics():
            low, high = (None, None) if interval is None else (interval.low, interval.high)
            score = ScorePoint(at, value, low, high, each.documents.get(task), left)
            table.setdefault((task, metric), []).append(score)
            higher = each.higher_is_better.get(task, {}).get(metric)
            if higher is not None:
                better[task, metric] = "higher" if higher else "lower"
        verdicts += [_verdict(at, verdict) for verdict in each.verdicts]
    curves = [ScoreCurve(*name, better.get(name), scores) for name, scores in sorted(table.items(), key=_order)]
    return Evaluations(curves, verdicts, damaged)


def _order(item: tuple[tuple[str, str], Any]) -> tuple[bool, str, str]:
    (task, metric), _ = item
    return task.endswith("_probe"), task, metric


def _verdict(at: Clocks, verdict: Verdict) -> ProbeVerdict:
    return ProbeVerdict(at, verdict.probe, verdict.ok, verdict.text)


def _read(run: RunDir) -> tuple[list[tuple[Results, bool]], int]:
    paths = sorted(run.evals.glob("step-*/*/results.json"))
    read = [state_files.view(path, Results) for path in paths]
    return [(each, False) for each in read if each is not None], sum(each is None for each in read)


def _journalled(entries: list[dict[str, Any]], known: list[tuple[Results, bool]]) -> list[tuple[Results, bool]]:
    """What the journal says of evaluations whose results are gone, as after a rollback."""
    there = {pair for each, _ in known for pair in ((each.step, each.committed), (each.step, None))}
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
