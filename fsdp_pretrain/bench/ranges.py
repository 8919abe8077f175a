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
