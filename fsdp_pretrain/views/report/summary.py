"""A run in three sentences, from its record: what was trained, how it went, and what a person should look at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fsdp_pretrain.run.goodput import headline
from fsdp_pretrain.run.step_columns import Column
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.units import human_count
from fsdp_pretrain.views.gather import RunRecord

from .evaluations import ScorePoint, newest_texts, read_scores

_SHARE = 0.05
"""Share of a run's steps whose mean loss is given for its beginning and its end."""
_LONGEST = 100
"""Characters of a text that are shown."""
_MOST = 3
"""Problems, scores and incidents that are named."""
_SEVERE = {severity.name for severity in Severity if severity > Severity.INFO}


@dataclass(frozen=True)
class Summary:
    """The three sentences, the second in parts; and how the model continues a prompt, if it was asked to."""

    trained: str
    went: list[str]
    look_at: str
    writes: str | None


def summarise(record: RunRecord) -> Summary:
    """The summary of a run that was started."""
    status = record.report.status
    tokens = f"; {human_count(status.tokens)} tokens" if status.tokens else ""
    written = newest_texts(record.run, record.entries)
    texts = [] if written is None else [prompt + text for prompt, text in written.texts.items()]
    samples = [" ⏎ ".join(text.split("\n"))[:_LONGEST] for text in texts]
    attention = "; ".join(_attention(record))
    return Summary(about(record) + tokens, list(_course(record)), attention, samples[0] if samples else None)


def about(record: RunRecord) -> str:
    """The journal text of the newest start that trained: the model, and the hardware it is trained on."""
    segments = {start.segment for start in record.history.starts if start.steps.count}
    starts = [entry for entry in record.entries if entry["kind"] == "start"]
    trained = [entry for entry in starts if entry.get("segment") in segments] or starts
    return str(trained[-1]["text"]).removeprefix(f"{record.name}: ") if trained else ""


def window(steps: int) -> int:
    """Steps over which the loss of a run of so many is averaged."""
    return max(1, round(_SHARE * steps))


def moving_mean(column: Column, length: int) -> Column:
    """Mean of each value and those around it, `length` together, fewer at both ends, leaving out what is not finite."""
    finite, at = np.isfinite(column), np.arange(len(column))
    sums, counts = (np.cumsum(np.insert(part, 0, 0.0)) for part in (np.where(finite, column, 0.0), finite * 1.0))
    first, stop = np.maximum(at - length // 2, 0), np.minimum(at + (length + 1) // 2, len(column))
    with np.errstate(invalid="ignore", divide="ignore"):
        means: Column = (sums[stop] - sums[first]) / (counts[stop] - counts[first])
    return means


def _course(record: RunRecord) -> Iterator[str]:
    """Losses and scores from the beginning to the end, and where the time went."""
    loss = record.lines.kept.columns.get("loss", np.empty(0))
    if len(loss):
        length = window(len(loss))
        first, last = (moving_mean(part, 2 * length)[0] for part in (loss[:length], loss[-length:]))  # of all of it
        among = f" (means of {length} steps)" if length > 1 else ""
        yield f"loss {first:.3f} at first, {last:.3f} now{among}"
    if (heldout := record.report.status.heldout) is not None:
        means_by_name = (
            f"{name} {'unknown' if mean is None else f'{mean:.3f}'}" for name, mean in heldout.loss.items()
        )
        yield f"held-out {', '.join(means_by_name)} after step {heldout.step:_}"
    kept = ((name, [score for score in scores if not score.left]) for name, scores in _scores(record))
    if newest := [(" ".join(name), scores[-1]) for name, scores in kept if scores]:
        yield ", ".join(f"{name} {score.value:.4g}{_error(score)}" for name, score in newest[:_MOST])
    if record.account is not None:
        yield f"goodput {headline(record.account)}"


def _error(score: ScorePoint) -> str:
    """A standard error, as `fsdp-eval` prints it."""
    return "" if score.error is None else f" ± {score.error:.2g}"


def _scores(record: RunRecord) -> list[tuple[tuple[str, str], list[ScorePoint]]]:
    """The scores of tasks, by (task, metric); those of probes are verdicts, which are problems if they are bad."""
    every = read_scores(record.entries, record.lines)
    return [(name, scores) for name, scores in every.items() if not name[0].partition("@")[0].endswith("_probe")]


def _attention(record: RunRecord) -> Iterator[str]:
    """What is wrong now, worst first; the incidents that are over are in the report."""
    problems = [text for _, text in sorted(record.report.problems, key=lambda problem: -problem[0])]
    yield from problems[:_MOST]
    if len(problems) > _MOST:
        yield f"and {len(problems) - _MOST} more: see fsdp-pretrain status"
    if not problems:
        yield "nothing is wrong now" + _incidents(record)


def _incidents(record: RunRecord) -> str:
    """The alarms and incidents that were more than a notice and are over, each named once."""
    until = None
    if record.report.state == "complete" and record.history.starts:
        last = record.history.starts[-1].segment  # the start that completed it; later ones trained nothing
        ends = (at for at, e in enumerate(record.entries) if e["kind"] == "stop" and e.get("segment") == last)
        until = next(ends, None)
    severe = [entry for entry in record.entries[:until] if entry.get("severity") in _SEVERE]
    names = [*dict.fromkeys(str(entry.get("key", "?")) for entry in severe if entry["kind"] in ("alarm", "health"))]
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return f"; over: {', '.join(names[:_MOST])}{more}" if names else ""
