"""Standard errors and 95% intervals of scores from the values of their documents.

A score is a function of its documents' values. Those that lm-eval's metrics use are known here: a mean, a ratio of sums
(log-likelihood over bytes or words), and exp of minus either (perplexities). Which one a metric is, is told by which
reproduces its score; of others (f1, BLEU) nothing is said.

The first-order change of a mean or ratio when a document is added is that document's influence u_i. The standard error
is that of a mean of the u_i (the delta method). For a ratio R = sum(a) / sum(b), u_i = (a_i - R b_i) / mean(b):
Cochran, Sampling Techniques (1977), theorem 2.5. Perplexities have their intervals on the logarithmic scale.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .results import Z95, ConfidenceInterval
from .sample_files import Value

Array = NDArray[np.float64]
_CLOSE = 1e-9
"""Relative difference from a score."""
_LARGEST = math.log(sys.float_info.max)


@dataclass(frozen=True)
class Form:
    """How a score follows from its documents' values, float64 [n] or [n, 2].

    Its level is `factor` times their mean, or the ratio of the sums of both columns. The score is the level, or exp of
    it if `exponential`.
    """

    factor: float = 1.0
    exponential: bool = False

    def level(self, x: Array) -> float:
        return self.factor * float(x.mean() if x.ndim == 1 else x[:, 0].sum() / x[:, 1].sum())

    def influence(self, x: Array) -> Array:
        """Of every document on the level: [n], with mean 0."""
        found: Array = self.factor * x - self.level(x)
        if x.ndim == 2:
            found = (self.factor * x[:, 0] - self.level(x) * x[:, 1]) / x[:, 1].mean()
        return found

    def score(self, x: Array) -> float:
        return exp(self.level(x)) if self.exponential else self.level(x)

    def is_share(self, x: Array) -> bool:
        """Whether the score is a share of the documents: all values are 0 or 1."""
        return self == Form() and x.ndim == 1 and bool(np.isin(x, (0, 1)).all())


_FORMS = {1: (Form(), Form(-1, exponential=True)), 2: (Form(-1 / math.log(2)), Form(-1, exponential=True), Form())}


def exp(x: float) -> float:
    """The exponential, at most the largest float."""
    return math.exp(min(x, _LARGEST))


def form_of(values: Sequence[Value], score: float) -> Form | None:
    """The form that gives this score from these values; None if none does."""
    x = as_array(values)
    if x is None:
        return None
    with np.errstate(all="ignore"):
        fitting = (form for form in _FORMS[x.ndim] if math.isclose(form.score(x), score, rel_tol=_CLOSE, abs_tol=1e-12))
        return next(fitting, None)


def as_array(values: Sequence[Value]) -> Array | None:
    """float64 [n] or [n, 2]; None if they are of both kinds, or none."""
    if not values or len({isinstance(value, tuple) for value in values}) > 1:
        return None
    return np.array(values, dtype=np.float64)


def standard_error(influence: Array) -> float | None:
    """Of the mean of n independent values; None of fewer than two."""
    n = len(influence)
    return float(influence.std(ddof=1) / math.sqrt(n)) if n > 1 else None


def estimate(values: Sequence[Value], score: float) -> tuple[float | None, ConfidenceInterval] | None:
    """Standard error and 95% interval of a score; None if they do not follow from the values.

    Of a share of documents, the interval is Wilson's, which is right near 0 and 1 too, and for one document, which has
    no standard error. Of a perplexity, it is exp of level ± 1.96 errors; else score ± 1.96 errors.
    """
    x, form = as_array(values), form_of(values, score)
    if x is None or form is None:
        return None
    stderr = standard_error(form.influence(x))
    if form.is_share(x):
        return stderr, wilson(float(x.sum()), len(x))
    if stderr is None:
        return None
    if form.exponential:
        level = form.level(x)
        low, high = exp(level - Z95 * stderr), exp(level + Z95 * stderr)
        return score * stderr, ConfidenceInterval(low=low, high=high, method="log")
    return stderr, ConfidenceInterval.normal(score, stderr)


def paired(form: Form, x: Array, y: Array) -> tuple[float | None, ConfidenceInterval | None]:
    """Standard error and 95% interval of `form.score(y) - form.score(x)` over the same n documents; None if unknown.

    That of a perplexity is of the factor between the two, as a difference from the first.
    """
    if form.is_share(x) and form.is_share(y):
        interval = agresti_min(int((y > x).sum()), int((y < x).sum()), len(x))
        return standard_error(y - x), interval
    stderr = standard_error(form.influence(y) - form.influence(x))
    if stderr is None:
        return None, None
    of_level = ConfidenceInterval.normal(form.level(y) - form.level(x), stderr)
    if not form.exponential:
        return stderr, of_level
    before, after = form.score(x), form.score(y)
    low, high = before * (exp(of_level.low) - 1), before * (exp(of_level.high) - 1)
    change = standard_error(after * form.influence(y) - before * form.influence(x))
    return change, ConfidenceInterval(low=low, high=high, method="log")


def wilson(successes: float, n: int) -> ConfidenceInterval:
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
