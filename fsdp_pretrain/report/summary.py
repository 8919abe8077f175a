"""What a person looks for first: state, progress, loss, newest verified checkpoint, goodput, open alarms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fsdp_pretrain.record.lines import Line
from fsdp_pretrain.units import human_count, human_time
from fsdp_pretrain.watchdog.status import Verified

from .gather import RunRecord

LEVELS = {0: "ok", 1: "warn", 2: "alert"}


@dataclass(frozen=True)
class Fact:
    """A fact in the header: a name, a value, and what to know about it. `level`: ok, warn or alert."""

    name: str
    value: str
    more: str = ""
    level: str = "ok"


def about(record: RunRecord) -> str:
    """What is trained on what, as the newest start that trained said."""
    segments = {start.segment for start in record.history.starts if start.steps.count}
    starts = [entry for entry in record.entries if entry["kind"] == "start"]
    trained = [entry for entry in starts if entry.get("segment") in segments] or starts
    return trained[-1]["text"] if trained else ""


def problems(record: RunRecord) -> list[tuple[str, str]]:
    """What `status` finds, worst first: (level, text)."""
    return [(LEVELS[level], text) for level, text in sorted(record.status.problems, key=lambda each: -each[0])]


def progress(record: RunRecord) -> tuple[float, int | None]:
    """Steps of the kept line, and those of the whole run, if they are known."""
    return _last(record.lines.kept, "step") or 0.0, record.status.status.total_steps


def facts(record: RunRecord) -> Iterator[Fact]:
    """Step, tokens, loss, checkpoint, goodput, alarms."""
    found, kept, account = record.status, record.lines.kept, record.account
    step, total = progress(record)
    if step:
        yield Fact("Step", f"{step:,.0f}", f"{step / total:.1%} of {total:,}" if total else "")
        yield Fact(
            "Tokens", human_count(_last(kept, "trained") or 0), f"{human_count(account.tokens_lost)} more were lost"
        )
    if (loss := _last(kept, "loss")) is not None:
        measured = [(name.partition("/")[2], _last(kept, name)) for name in kept.columns if name.startswith("heldout/")]
        more = ", ".join(f"held-out {name} {value:.4f}" for name, value in measured if value is not None)
        yield Fact("Loss", f"{loss:.4f}", more)
    pace = found.status.iteration_seconds
    if found.running and pace and step and total:
        yield Fact("To go", human_time((total - step) * pace), f"at {pace:.3g}s a step")
    yield _checkpoint(found.verified_checkpoint, step)
    count = len(account.incidents)
    wall, pace_of_day = human_time(account.wall_seconds), human_count(account.tokens_per_day)
    interrupted = f"{count} interruption{'s' * (count != 1)}"
    yield Fact("Goodput", f"{account.goodput:.1%}", f"of {wall}, {pace_of_day} tokens a day, {interrupted}")
    yield _alarms(found.alarms)


def _checkpoint(newest: Verified | None, step: float) -> Fact:
    if newest is None:
        return Fact("Verified checkpoint", "none", level="warn")
    behind = max(0, round(step) - newest.step)
    more = f"{behind:,} steps behind, {human_time(newest.age_seconds)} old"
    return Fact("Verified checkpoint", f"step {newest.step:,}", more)


def _alarms(found: list[dict[str, Any]]) -> Fact:
    """Those that somebody should know of are counted."""
    serious = [alarm for alarm in found if alarm["severity"] != "INFO"]
    level = 2 if any(alarm["severity"] == "CRIT" for alarm in serious) else min(1, len(serious))
    keys = [*(alarm["key"] for alarm in serious)]
    keys += [f"{alarm['key']} (for information)" for alarm in found if alarm not in serious]
    return Fact("Open alarms", str(len(serious)), ", ".join(keys), LEVELS[level])


def _last(line: Line, name: str) -> float | None:
    """The last finite value of a column."""
    column = line.columns.get(name, np.zeros(0))
    values = column[np.isfinite(column)]
    return float(values[-1]) if len(values) else None
