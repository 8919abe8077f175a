"""What a probe is given and what it gives. No torch here.

A probe asks a model for likelihoods of tokens that no text contains, or not in this order, so it cannot be a task of
lm-eval. All probes are deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, exp, isfinite, nan, sqrt
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Protocol

from data.text.tokenizer import Tokenizer

from .attempt import ConfidenceInterval, RefusedError, Verdict

if TYPE_CHECKING:
    from .checkpoints import EvaluatedModel

Job = tuple[list[int], int]
"""Tokens, and the first of those to score."""


class TokenScorer(Protocol):
    """A model that scores tokens: `eval.harness.CheckpointLM`."""

    def score_tokens(self, jobs: Sequence[Job], *, quiet: bool = True) -> list[tuple[float, bool]]:
        """(log-likelihood, whether greedy decoding gives it) of tokens[first:], for each (tokens, first)."""


@dataclass(frozen=True)
class Subject:
    """A model to probe.

    Attributes:
        judged: what it was read from.
        documents: token ids of the held-out documents, limited; empty if there are none.
        limit: documents, questions or sequences per probe at most, or the share of them if below 1.
    """

    model: TokenScorer
    judged: EvaluatedModel
    documents: list[list[int]]
    limit: float | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        return self.judged.tokenizer

    @property
    def length(self) -> int:
        """Tokens of context at most: two fewer than in training, so that `[gMASK]` and `sop` of GLM fit."""
        return self.judged.length - 2

    def capped(self, count: int) -> int:
        """`count`, or fewer as `limit` says."""
        return limited(count, self.limit)

    def chosen(self, count: int) -> list[list[int]]:
        """At most `count` of the held-out documents, evenly spread. Raises RefusedError if there are none."""
        if not self.documents:
            raise RefusedError("the probes need held-out documents", remedy="set eval.heldout or pass --heldout FILE")
        size = min(self.capped(count), len(self.documents))
        return [self.documents[len(self.documents) * number // size] for number in range(size)]

    def last_token(self, texts: Sequence[list[int]]) -> list[float]:
        """Probability of the last token of each text, given the others.

        Under the GLM objective the second half of the text is asked for, and the last token in it: few samples teach
        which token is the first after `[gMASK]`, and any token may be.
        """
        if self.judged.objective.kind == "causal":
            return [exp(score) for score, _ in self.model.score_tokens([(text, len(text) - 1) for text in texts])]
        jobs = [(part, max(1, (len(text) - 1) // 2)) for text in texts for part in (text, text[:-1])]
        scores = [score for score, _ in self.model.score_tokens(jobs)]
        return [exp(min(0.0, whole - rest)) for whole, rest in zip(scores[::2], scores[1::2], strict=True)]


@dataclass(frozen=True)
class Probed:
    """What a probe found.

    Attributes:
        scores: by metric, with its standard error as `METRIC_stderr` where there is one.
        documents: documents, sequences or questions used.
        higher_is_better: of the metrics that have a better and a worse.
        intervals: of shares; of other scores, take that of their standard error.
    """

    scores: dict[str, float]
    documents: int
    higher_is_better: dict[str, bool] = field(default_factory=dict)
    verdict: Verdict | None = None
    intervals: dict[str, ConfidenceInterval] = field(default_factory=dict)


def limited(count: int, limit: float | None) -> int:
    """`count`, or `limit` if that is lower, or that share of it, at least 1."""
    return count if limit is None else max(1, ceil(count * limit)) if limit < 1 else min(count, int(limit))


def means(columns: dict[str, Sequence[float]]) -> dict[str, float]:
    """Mean and standard error of independent values, by metric; a metric without values is left out. Both are NaN if a
    value is not finite."""
    scores: dict[str, float] = {}
    for name, values in columns.items():
        finite = all(map(isfinite, values))
        if values:
            scores[name] = fmean(values) if finite else nan
        if len(values) > 1:
            scores[f"{name}_stderr"] = stdev(values) / sqrt(len(values)) if finite else nan
    return scores


def evenly(count: int, begin: int, end: int) -> list[int]:
    """At most `count` different integers of [begin, end), evenly spread, neither end among them if it can be helped."""
    return sorted(
        {begin + (end - begin) * (2 * number + 1) // (2 * count) for number in range(count)} & {*range(begin, end)}
    )
