"""Median and range of repeated measurements. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def median_range(values: Sequence[float]) -> list[float]:
    """Median, least, most."""
    return [statistics.median(values), min(values), max(values)]


def show_range(found: Sequence[float], digits: int = 3) -> str:
    """`1.83 [1.70 to 2.33]`, from `median_range`."""
    middle, least, most = (f"{value:.{digits}g}" for value in found)
    return f"{middle} [{least} to {most}]"


def show_percent(found: Sequence[float]) -> str:
    """`0.181 [0.164 to 0.189]%`, from `median_range` of shares."""
    return f"{show_range([100 * part for part in found])}%"
