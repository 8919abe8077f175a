"""What a page says in HTML: the header, the account of time, events."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable

from fsdp_pretrain.run.files import stamp
from fsdp_pretrain.run.goodput import MEANING, GoodputReport, headline
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.units import human_count, human_time
from fsdp_pretrain.views.gather import RunRecord
from fsdp_pretrain.views.status import facts

from .events import Event, Mark

_LEVELS = ("ok", "warn", "alert")
_SIGNS = {Severity.INFO: "", Severity.WARN: "▲ ", Severity.CRIT: "◆ "}


def header(record: RunRecord, account: GoodputReport) -> str:
    """What a person looks for first."""
    report, status = record.report, record.report.status
    found = sorted(report.problems, reverse=True)
    steps, total, level = status.step or 0, status.total_steps, _LEVELS[report.level]
    bar = f'<progress max="{total}" value="{steps}" aria-label="share of the steps done"></progress>' if total else ""
    problems = "".join(f'<li class="{_LEVELS[level]}">{html.escape(text)}</li>' for level, text in found)
    rows = [*facts(report), ("time", headline(account))]
    return (
        f'<section class="run"><h2>{html.escape(record.name)} '
        f'<span class="state {level}">{html.escape(report.headline)}</span></h2>'
        f'<p class="about">{html.escape(_about(record))}<br><code>{html.escape(str(record.run.path))}</code></p>'
        f'{bar}<dl class="facts">{"".join(_fact(*each) for each in rows)}</dl>'
        + (f'<ul class="problems">{problems}</ul>' if problems else "")
        + "</section>"
    )


def _about(record: RunRecord) -> str:
    """What is trained on what, as the newest start that trained said."""
    segments = {start.segment for start in record.history.starts if start.steps.count}
    starts = [entry for entry in record.entries if entry["kind"] == "start"]
    trained = [entry for entry in starts if entry.get("segment") in segments] or starts
    return str(trained[-1]["text"]) if trained else ""


def _fact(name: str, text: str) -> str:
    """A line of `status`: what stands before the first comma is large."""
    value, _, more = map(html.escape, text.partition(", "))
    return f"<div><dt>{name}</dt><dd>{value}<small>{more}</small></dd></div>"


def account(found: GoodputReport) -> str:
    """The time in each state."""
    rows = []
    for state, seconds in found.states.items():
        if seconds > 0:
            share = seconds / found.wall_seconds
            cells = [("number", human_time(seconds)), ("number", f"{share:.3%}")]
            square, bar = (_bar(f"--s-{state}", width) for width in (12, share * 160))
            meaning = _cells([("meaning", MEANING[state])])
            rows.append(f"<tr><td>{square} {state}</td>{_cells(cells)}<td>{bar}</td>{meaning}</tr>")
    text = f"{human_count(found.tokens)} tokens kept, {human_count(found.tokens_lost)} lost"
    return f'<p class="note">{text}</p>{_table("account", "state #time #share  meaning", rows)}'


def events(found: list[Event], left_out: int, place: int) -> str:
    """All events, the newest first; those that are not marked are hidden. `place`: that of the events."""
    rows = [_event(f"{place} {at}", event) for at, event in reversed([*enumerate(found)])]
    more = f'<p class="note">{left_out:,} more are only in the journal.</p>' if left_out else ""
    return _table("all", "time~(UTC) #step event what", rows) + more


def _event(place: str, event: Event) -> str:
    marked = (event.mark > Mark.TABLE and event.group != "saves") or event.severity > 0
    step = "show" if math.isnan(event.at["step"]) else f"{event.at['step']:,.0f}"
    time = stamp(event.at["written"])[:19].replace("T", " ") if math.isfinite(event.at["written"]) else ""
    level = event.severity.name.lower()
    return (
        f'<tr data-place="{place}" data-group="{event.group}" data-marked="{int(marked)}" '
        f'data-severity="{event.severity:d}"{"" if marked else " hidden"}><td class="tight">{time}</td>'
        f'<td class="number"><button type="button" class="link" title="show it in the curves">{step}</button></td>'
        + _cells(
            [
                (f"tight {level}", f"{_SIGNS[event.severity]}{event.kind}"),
                ("", event.text + " (open)" * event.open),
            ]
        )
        + "</tr>"
    )


def _bar(color: str, width: float) -> str:
    return f'<i class="share" style="background:var({color});width:{width:.0f}px"></i>'


def _cells(cells: Iterable[tuple[str, str]]) -> str:
    return "".join(f'<td class="{kind}">{html.escape(text)}</td>' for kind, text in cells)


def _table(kind: str, heads: str, rows: Iterable[str]) -> str:
    """`heads`: separated by blanks; `#`: of numbers."""
    names = "".join(f'<th scope="col"{" class=number" * head.startswith("#")}>{head.lstrip("#").replace("~", " ")}</th>'
                    for head in heads.split(" "))  # fmt: skip
    return f'<table class="{kind}"><thead><tr>{names}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
