"""Standard errors and 95% intervals of scores from the values of their documents.

A score is a function of its documents' values. The three that lm-eval's metrics use are known here: the mean, exp of
minus the mean, and functions of a ratio of sums (log-likelihood over bytes). Which one a metric is, is told by which
reproduces its score; of others (f1, BLEU) nothing is said.

The first-order change of such a score when a document is added is that document's influence u_i. The standard error is
that of a mean of the u_i (the delta method). For a ratio R = sum(a) / sum(b), u_i = (a_i - R b_i) / mean(b): Cochran,
Sampling Techniques (1977), theorem 2.5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .attempt import Z95, ConfidenceInterval
from .sample_files import Value

Array = NDArray[np.float64]
_CLOSE = 1e-9
"""Relative difference from a score."""


@dataclass(frozen=True)
class Estimate:
    """A score of n documents, and their influences, float64 [n] with mean 0."""

    score: float
    influence: Array

    @property
    def stderr(self) -> float | None:
        return standard_error(self.influence)


Form = Callable[[Array], Estimate]
"""From the values of n documents, float64 [n] or [n, 2], to the score."""


def _mean(x: Array) -> Estimate:
    return Estimate(float(x.mean()), x - x.mean())


def _perplexity(x: Array) -> Estimate:
    value = math.exp(-x.mean())
    return Estimate(value, -value * (x - x.mean()))


def _ratio(x: Array) -> Estimate:
    a, b = x[:, 0], x[:, 1]
    ratio = float(a.sum() / b.sum())
    return Estimate(ratio, (a - ratio * b) / b.mean())


def _bits(x: Array) -> Estimate:
    ratio = _ratio(x)
    return Estimate(-ratio.score / math.log(2), -ratio.influence / math.log(2))


def _ratio_perplexity(x: Array) -> Estimate:
    ratio = _ratio(x)
    value = math.exp(-ratio.score)
    return Estimate(value, -value * ratio.influence)


_FORMS: dict[int, tuple[Form, ...]] = {1: (_mean, _perplexity), 2: (_bits, _ratio_perplexity, _ratio)}


def form_of(values: Sequence[Value], score: float) -> Form | None:
    """The form that gives this score from these values; None if none does."""
    x = as_array(values)
    if x is None:
        return None
    with np.errstate(all="ignore"):
        for form in _FORMS[x.ndim]:
            try:
                found = form(x).score
            except OverflowError:
                continue
            if math.isclose(found, score, rel_tol=_CLOSE, abs_tol=1e-12):
                return form
    return None


def as_array(values: Sequence[Value]) -> Array | None:
    """float64 [n] or [n, 2]; None if they are of both kinds, or none."""
    if not values or len({isinstance(value, tuple) for value in values}) > 1:
        return None
    return np.array(values, dtype=np.float64)


def standard_error(influence: Array) -> float | None:
    """Of the mean of n independent values; None of fewer than two."""
    n = len(influence)
    return float(influence.std(ddof=1) / math.sqrt(n)) if n > 1 else None


def are_shares(form: Form | None, x: Array) -> bool:
    """Whether a score is a share of documents: a mean of values that are all 0 or 1."""
    return form is _mean and bool(np.isin(x, (0.0, 1.0)).all())


def estimate(values: Sequence[Value], score: float) -> tuple[float, ConfidenceInterval] | None:
    """Standard error and 95% interval of a score; None if they do not follow from the values.

    Of a share of documents, the interval is Wilson's, which is right near 0 and 1 too; else score ± 1.96 errors.
    """
    x, form = as_array(values), form_of(values, score)
    stderr = form(x).stderr if form is not None and x is not None else None
    if x is None or stderr is None:
        return None
    shares = are_shares(form, x)
    return stderr, wilson(int(x.sum()), len(x)) if shares else ConfidenceInterval.normal(score, stderr)


def wilson(successes: int, n: int) -> ConfidenceInterval:
    """95% interval of a share: Wilson, J. Am. Stat. Assoc. 22 (1927) 209."""
    share, z2 = successes / n, Z95**2
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return ConfidenceInterval(low=max(0.0, middle - half), high=min(1.0, middle + half), method="wilson")


def agresti_min(better: int, worse: int, n: int) -> ConfidenceInterval:
    """95% interval of the difference of two shares of the same n documents, `better` and `worse` of which changed.

    Half a document is added to each cell of the 2 x 2 table: Agresti and Min, Statistics in Medicine 24 (2005) 729.
    Without that, five documents that all improve would be certain proof.
    """
    b, c, total = better + 0.5, worse + 0.5, n + 2
    difference = (b - c) / total
    half = Z95 * math.sqrt((b + c) - (b - c) ** 2 / total) / total
    return ConfidenceInterval(low=max(-1.0, difference - half), high=min(1.0, difference + half), method="agresti-min")
