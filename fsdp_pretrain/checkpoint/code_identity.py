"""Whether two starts of a run have the same code: compares what `witness` found. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping

from .manifest import PartIdentity

_TOLERANCE = 1e-4
"""Largest relative difference of the numbers of equal code: kernels of processors differ in the last digits, 1e-6."""


def other_code(stored: Mapping[str, PartIdentity], current: Mapping[str, PartIdentity], key: str) -> str | None:
    """How a part computes something else than its stored witness, in words; None if it does not, or is another part."""
    was, is_ = stored.get(key), current.get(key)
    if was is None or is_ is None or was.part != is_.part or same_numbers(was.witness, is_.witness):
        return None
    pairs = zip(is_.witness, was.witness, strict=False)
    now, before = next((pair for pair in pairs if not same_numbers([pair[0]], [pair[1]])), (math.nan, math.nan))
    return (
        f"{key}: the code of {is_.part} ({is_.source}) computes something else than the code that trained "
        f"({was.source}): on fixed input {now:.6g} instead of {before:.6g}"
    )


def new_sources(stored: Mapping[str, PartIdentity], current: Mapping[str, PartIdentity]) -> dict[str, str]:
    """The parts whose source changed, and which compute what they computed, each as `old -> new`."""
    sources = {}
    for key, is_ in current.items():
        was = stored.get(key)
        if was is None or was.part != is_.part or was.source == is_.source or other_code(stored, current, key):
            continue
        sources[key] = f"{was.source} -> {is_.source}"
    return sources


def same_numbers(ours: list[float], theirs: list[float]) -> bool:
    return len(ours) == len(theirs) and all(
        math.isclose(a, b, rel_tol=_TOLERANCE, abs_tol=1e-6) for a, b in zip(ours, theirs, strict=True)
    )
