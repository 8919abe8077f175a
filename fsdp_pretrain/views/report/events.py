"""Events of a run, for marks on its curves and a table: entries of the journal, and ends that nothing recorded.

The entries of an alarm or health incident are one event, from its opening to its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from fsdp_pretrain.run.files import seconds_of
from fsdp_pretrain.run.goodput import Interruption
from fsdp_pretrain.run.journal import KINDS, KindInfo, Mark, tone
from fsdp_pretrain.run.lineage import LineageNode
from fsdp_pretrain.run.lines import Lines, Position
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.units import human_time

_MOST, _LONGEST = 3000, 600
"""Events in a page, and characters of a text."""


@dataclass(frozen=True)
class Event:
    """One event.

    Attributes:
        at: position of the event, or of its beginning.
        group: one of `journal.GROUPS`, or other.
        kind: kind of its entry in the journal, or `interruption`.
        open: whether it is an incident that has not ended.
    """

    at: Position
    group: str
    kind: str
    text: str
    severity: Severity = Severity.INFO
    mark: Mark = Mark.TABLE
    open: bool = False

    @property
    def marked(self) -> bool:
        """Whether the table shows it at first."""
        return (self.mark > Mark.TABLE and self.group not in ("saves", "evaluations")) or self.severity > Severity.INFO


_SEVERITY = {"bad": Severity.CRIT, "warning": Severity.WARN}


def read_events(
    entries: list[dict[str, Any]], nodes: list[LineageNode], lines: Lines, interruptions: list[Interruption]
) -> tuple[list[Event], int]:
    """The events of a run, oldest first, and how many were left out because there are too many."""
    begun = {node.segment: node.step for node in nodes}
    failures = [stop for stop in interruptions if stop.kind == "failure"]  # rollbacks have an entry of their own
    events = [*_incidents(entries, lines), *(_interruption(stop, lines) for stop in failures)]
    for entry in entries:
        if entry["kind"] not in ("alarm", "health"):
            event = _event(entry, begun, lines)
            if entry["kind"] == "stop" and entry.get("segment") in {stop.segment for stop in failures}:
                event = replace(event, mark=Mark.TABLE)  # it repeats the interruption
            events.append(event)
    chosen = sorted(events, key=lambda event: (event.mark, event.severity, event.at["written"]))[-_MOST:]
    return sorted(chosen, key=lambda event: event.at["written"]), len(events) - len(chosen)


def _event(entry: dict[str, Any], begun: dict[int, int], lines: Lines) -> Event:
    kind, text, step = entry["kind"], entry["text"], entry.get("step")
    group, _, mark, _ = KINDS.get(kind, KindInfo())
    if (step is None and group == "starts") or kind in ("changed", "overrides"):
        step = begun.get(entry.get("segment") or 0)
    severity = _SEVERITY.get(tone(kind, entry.get("code")), Severity.INFO)
    if entry.get("by"):
        text += f" ({entry['by']})"
    mark = max(mark, Mark.STRIP) if severity else mark
    if kind == "changed" and not entry.get("changes"):
        mark = Mark.TABLE
    return Event(lines.locate(step, seconds_of(entry["time"])), group, kind, text[:_LONGEST], severity, mark)


def _incidents(entries: Iterable[dict[str, Any]], lines: Lines) -> Iterator[Event]:
    """One event for each incident, from the entries of its key."""
    running: dict[str, Event] = {}
    for entry in entries:
        if entry["kind"] == "fork":  # what was open before it concerns the run that it came from
            yield from (replace(incident, open=False) for incident in running.values())
            running.clear()
        if entry["kind"] not in ("alarm", "health"):
            continue
        key, at = str(entry.get("key", "?")), lines.locate(entry.get("step"), seconds_of(entry["time"]))
        severity = Severity.__members__.get(str(entry.get("severity")), Severity.INFO)
        summary = str(entry.get("summary") or entry["text"].partition(": ")[2] or entry["text"])[:_LONGEST]
        incident = running.get(key)
        if entry.get("resolved") or entry.get("state") == "resolved":
            if incident is not None:
                over = f"; over after {human_time(max(0.0, at['written'] - incident.at['written']))}"
                yield replace(running.pop(key), open=False, text=incident.text + over)
        elif entry.get("state") == "acknowledged" and incident is not None:
            running[key] = replace(incident, text=f"{incident.text}; acknowledged")
        else:
            incident = incident or Event(at, "alarms", entry["kind"], "", severity, open=True)
            worst = max(severity, incident.severity)
            mark = Mark.LINE if worst is Severity.CRIT else Mark.STRIP
            running[key] = replace(incident, text=f"{key}: {summary}", severity=worst, mark=mark)
    yield from running.values()


def _interruption(stop: Interruption, lines: Lines) -> Event:
    """The event of an end that was not planned."""
    over = f"{human_time(stop.recovery_seconds)} to resume" if stop.over else "training has not resumed"
    text = f"{stop.cause}; {over}"[:_LONGEST]
    return Event(lines.locate(stop.step, stop.time), "ends", "interruption", text, Severity.CRIT, Mark.LINE)
