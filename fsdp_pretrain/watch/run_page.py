"""The page of one run: its sections, laid out for the size of the terminal."""

from __future__ import annotations

from dataclasses import dataclass

from rich.text import Text

from . import sections
from .following import RunView

_WIDE, _NARROWEST = 140, 40
_CURVES = (
    ("loss", "loss", "cyan"),
    ("grad_norm", "gradient norm", "magenta"),
    ("tokens_per_second", "tokens/s", "blue"),
)
ZOOM = (None, 10_000, 1_000, 100)
"""Steps that the curves show, by how often `z` was pressed; None: all."""
KEYS = "q quit  z zoom  a acknowledge  ↑↓ select an alarm"


@dataclass(frozen=True)
class PageChoice:
    """What the person has chosen on the page."""

    zoom: int = 0
    selected: int = 0
    footer: str = KEYS

    @property
    def shown(self) -> int | None:
        return ZOOM[self.zoom % len(ZOOM)]


def render(view: RunView, choice: PageChoice, width: int, height: int | None) -> list[Text]:
    """The page in `height` lines; None: as many as it needs, without keys, for a file."""
    width = max(width, _NARROWEST)
    lines = _wide(view, choice, width, height) if width >= _WIDE else _narrow(view, choice, width, height)
    if height is not None:
        lines = [*lines[: height - 1], *[Text()] * (height - 1 - len(lines)), Text(choice.footer, "reverse")]
        lines[-1].pad_right(max(0, width - lines[-1].cell_len))
    for line in lines:
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis")
    return lines


def _head(view: RunView, width: int) -> list[Text]:
    return [
        sections.title(view, width),
        sections.progress(view, width),
        sections.numbers(view, width),
        *sections.troubles(view, 3),
    ]


def _narrow(view: RunView, choice: PageChoice, width: int, height: int | None) -> list[Text]:
    head, shown, half = _head(view, width), choice.shown, (width - 2) // 2
    facts = [
        sections.step_parts(view, width),
        sections.heldout(view, width),
        *sections.checkpoints(view, width, 1),
        *sections.evaluations(view, 1),
        sections.time_spent(view, width),
        *sections.alarms(view.alarms, choice.selected, width, 3),
    ]
    room = 25 if height is None else height - 1 - len(head) - len(facts)
    small = 3 if room >= 11 else 2 if room >= 8 else 0
    entries = max(2, min(6, room // 4)) if room >= 6 else max(0, room - 4)
    large = max(0, min(16, room - small - entries - 1))
    curves = sections.chart(view, *_CURVES[0], (width, large), shown) if large >= 2 else []
    if curves:
        curves.append(sections.axis(view, width, shown))
    if small:
        one, other = (sections.chart(view, *each, (half, small), shown) for each in _CURVES[1:])
        curves += sections.beside(one, other, half)
    used = len(head) + len(curves) + len(facts)
    return [*head, *curves, *facts, *sections.chronicle(view.entries, 8 if height is None else height - 1 - used)]


def _wide(view: RunView, choice: PageChoice, width: int, height: int | None) -> list[Text]:
    head, shown = _head(view, width), choice.shown
    alarms = sections.alarms(view.alarms, choice.selected, width, 5)
    room = 40 if height is None else height - 1 - len(head) - len(alarms)
    entries = max(3, min(12, room // 4))
    left = int(width * 0.55)
    right = width - left - 2
    each = max(3, (room - entries - 2) // 3)
    first = max(3, room - entries - 2 - 2 * each)
    curves: list[Text] = []
    for (column, name, ink), rows in zip(_CURVES, (first, each, each), strict=True):
        curves += sections.chart(view, column, name, ink, (left, rows), shown)
    curves.append(sections.axis(view, left, shown))
    facts = [
        sections.step_parts(view, right),
        Text(),
        sections.heldout(view, right),
        Text(),
        *sections.checkpoints(view, right, 6),
        Text(),
        *sections.evaluations(view, 6),
        Text(),
        sections.time_spent(view, right),
    ]
    for line in facts:
        line.truncate(right, overflow="ellipsis")
    body = sections.beside(curves, facts[: len(curves)], left)
    used = len(head) + len(body) + len(alarms) + 1
    journal = sections.chronicle(view.entries, entries if height is None else height - 1 - used)
    return [*head, Text(), *body, *alarms, *journal]
