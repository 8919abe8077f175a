"""Intervals that depend on the place in a run: a list of ranges, each with its interval."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from fsdp_pretrain.units import Progress

from .base import Section


class IntervalRange(Section):
    """A range of a run with its interval. Multiples are counted from the start of the run."""

    every: Progress
    """Interval in this range."""
    until: Progress | None = None
    """Last place of the range, which begins where the one before ends. The last range has none."""


def _in_order(value: Any) -> Any:
    if isinstance(value, list) and [part.until is None for part in value] != [False] * (len(value) - 1) + [True]:
        raise ValueError("every range but the last must have an `until`, and the last must have none")
    return value


Every = Annotated[Progress | Annotated[list[IntervalRange], Field(min_length=1)], AfterValidator(_in_order)]
"""One interval, or several with their ranges."""
