"""Standard errors of scores from the values of their documents.

Two kinds of scores have them: the mean of the values, and bits per byte, a ratio of sums (log-likelihood over bytes).
A metric is of the kind that reproduces its score. Other metrics (f1, perplexities) get no standard error.

The first-order change of such a score when a document is added is that document's influence u_i. The standard error is
that of a mean of the u_i (the delta method). For a ratio R = sum(a) / sum(b), u_i = (a_i - R b_i) / mean(b): Cochran,
Sampling Techniques (1977), theorem 2.5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .sample_files import Value

Array = NDArray[np.float64]
Z95 = 1.96
"""Standard errors on either side of the mean of a normal distribution that hold 95% of it."""
_TO_BITS = -1 / math.log(2)
_CLOSE = 1e-9
"""Relative difference at which two scores count as equal."""


def as_array(values: Sequence[Value], score: float | None = None) -> Array | None:
    """Values of a mean, float64 [n], or numerators and denominators of bits per byte, [n, 2].

    None if there are none, if they are of both kinds, or if they do not give the `score`.
    """
    if not values or len({isinstance(value, tuple) for value in values}) > 1:
        return None
    x = np.array(values, dtype=np.float64)
    if x.ndim == 2:
        x[:, 0] *= _TO_BITS
    with np.errstate(all="ignore"):
        fits = score is None or math.isclose(score_of(x), score, rel_tol=_CLOSE, abs_tol=1e-12)
    return x if fits else None


def score_of(x: Array) -> float:
    """The score of all documents together."""
    return float(x.mean() if x.ndim == 1 else x[:, 0].sum() / x[:, 1].sum())


def by_document(x: Array) -> Array:
    """The score of every document alone."""
    return x if x.ndim == 1 else x[:, 0] / x[:, 1]


def influence(x: Array) -> Array:
    """The influence of every document on the score: [n], with mean 0."""
    if x.ndim == 1:
        return x - score_of(x)
    influences: Array = (x[:, 0] - score_of(x) * x[:, 1]) / x[:, 1].mean()
    return influences


def interval(metric: str, score: float, error: float, documents: int | None) -> tuple[float, float]:
    """The 95% interval of a score with this standard error.

    A score between 0 and 1 other than bits per byte or a perplexity has Wilson's (Journal of the American Statistical
    Association 22, 1927), which stays between 0 and 1: that of a share of as many documents as give this standard
    error, or, where the error is 0, of all `documents`.
    """
    if "per_byte" in metric or "perplexity" in metric or not 0 <= score <= 1:
        return score - Z95 * error, score + Z95 * error
    n = score * (1 - score) / error**2 + 1 if error else documents or math.inf
    squared = Z95**2 / n
    middle = (score + squared / 2) / (1 + squared)
    half = math.sqrt(squared * (score * (1 - score) + squared / 4)) / (1 + squared)
    return middle - half, middle + half


def standard_error(influences: Array) -> float | None:
    """The standard error of the mean of n independent values; None if there are fewer than two."""
    n = len(influences)
    return float(influences.std(ddof=1) / math.sqrt(n)) if n > 1 else None
