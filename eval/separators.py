"""Separator probe: whether the model predicts separators where the corpora should have them.

It measures four probabilities: `end`: a separator after a whole held-out document; `second`: another separator right
after it; `inside`: a separator at places inside documents; `repeat`: the same token again, at these places. Corpora
should have exactly one separator after every document, so none after a separator and none inside. A model that has
learned nothing predicts a separator everywhere, as often as there are separators, or its previous token again (tied
embeddings do at first), so the bounds are multiples of both.

The probe needs likelihoods of tokens that no text contains, so it cannot be a task of lm-eval. It is deterministic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import exp, log, log2, sqrt
from typing import TYPE_CHECKING

import numpy as np

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.sections import PROBE
from fsdp_pretrain.data.corpus.corpus import Corpus
from fsdp_pretrain.data.packing.opening import cache_use
from fsdp_pretrain.errors import DataError

from .results import RefusedError, Verdict

if TYPE_CHECKING:
    from .checkpoints import EvaluatedModel
    from .harness import CheckpointLM

NAME = PROBE
_DOCUMENTS, _PLACES = 32, 4
_SECOND, _EARLY, _LATE = 3.0, 0.3, 0.1
"""Bound of `second`: times the rate of separators or of repeats, and what is added, before `_ENOUGH` were trained and
from then on. Models of clean data reached 0.24 for a while before they knew what follows one."""
_INSIDE, _MARGIN = 5.0, 0.05
"""Bound of `inside`: times the rate, and what is added."""
_ERRORS = 2.0
"""Standard errors by which a mean must be above its bound."""
_ABSENT, _ENOUGH = 0.1, 10_000
"""Share of the rate below which the model does not know the separator; separators that must have been trained first."""


@dataclass(frozen=True)
class Probed:
    """The result of the probe: scores, with standard errors as `METRIC_stderr`, over `documents` documents."""

    scores: dict[str, float]
    documents: int
    verdict: Verdict


@dataclass(frozen=True)
class Subject:
    """A model to probe, the checkpoint or folder it was read from, and the token ids of held-out documents."""

    model: CheckpointLM
    source: EvaluatedModel
    documents: list[list[int]]

    @property
    def length(self) -> int:
        """Most tokens of context: two fewer than in training, so that `[gMASK]` and `sop` of GLM fit."""
        return self.source.length - 2

    def last_token(self, texts: Sequence[list[int]]) -> list[float]:
        """Probability of the last token of each text, given the tokens before.

        With a GLM model it is computed as the last token of the text's second half: few training samples teach the
        first token after `[gMASK]`, which may be any token.
        """
        if self.source.objective.kind == "causal":
            return [exp(score) for score, _ in self.model.score_tokens([(text, len(text) - 1) for text in texts])]
        jobs = [(part, max(1, (len(text) - 1) // 2)) for text in texts for part in (text, text[:-1])]
        scores = [score for score, _ in self.model.score_tokens(jobs)]
        return [exp(min(whole - rest, 0.0)) for whole, rest in zip(scores[::2], scores[1::2], strict=True)]


def separator_probe(subject: Subject) -> Probed:
    """Run the probe: probabilities of a separator, and a verdict on the training data.

    Of documents longer than the model's length, only the end is read. Raises RefusedError if there are no held-out
    documents.
    """
    size, eod = min(_DOCUMENTS, len(subject.documents)), subject.source.tokenizer.eod
    if not size:
        raise RefusedError(f"{NAME} needs held-out documents", remedy="set eval.heldout")
    chosen = [subject.documents[len(subject.documents) * number // size] for number in range(size)]
    windows = [[eod, *ids][-(subject.length - 1) :] for ids in chosen]
    ends = subject.last_token([[*window, eod] for window in windows])
    seconds = subject.last_token([[*window, eod, eod] for window in windows])
    places = [(window, at) for window in windows for at in evenly(_PLACES, 2, len(window))]
    insides = subject.last_token([[*window[:at], eod] for window, at in places])
    repeats = subject.last_token([[*window[:at], window[at - 1]] for window, at in places])
    scores = means({"end": ends, "second": seconds, "inside": insides, "repeat": repeats})
    config = subject.source.trained
    ok, text = _judge(subject, scores, None if config is None else separator_rates(config), windows)
    return Probed(scores, len(windows), Verdict(probe=NAME, ok=ok, text=text))


def separator_rates(config: Config) -> tuple[float, float] | None:
    """The lowest and the highest rate of separators per token, from the manifests of a run's sources.

    Sources of prompts with answers are left out. None if a corpus cannot be read here.
    """
    rates: list[float] = []
    for source in config.data.sources:
        try:
            manifest = Corpus(source.path, cache=cache_use(config)).manifest
        except DataError:
            return None
        if not manifest.pairs:
            rates.append(manifest.documents / (manifest.tokens + manifest.documents * (1 - manifest.carried)))
    return (min(rates), max(rates)) if rates else None


def _judge(
    subject: Subject, scores: dict[str, float], rates: tuple[float, float] | None, windows: list[list[int]]
) -> tuple[bool | None, str]:
    end, second, inside = (scores.get(name, 0.0) for name in ("end", "second", "inside"))
    least, most = (0.0, inside) if rates is None else rates
    trained = subject.source.tokens * least
    bound = _SECOND * max(most, scores.get("repeat", 0.0)) + (_EARLY if trained < _ENOUGH else _LATE)
    numbers = f"P(separator) is {end:.2g} where documents end, {second:.2g} after a separator, {inside:.2g} inside text"
    if rates is not None:
        numbers += f"; the corpora have {' to '.join(dict.fromkeys(f'{rate:.2g}' for rate in rates))} per token"
    if second - _ERRORS * scores.get("second_stderr", 0.0) > bound:
        return False, f"separators are doubled in the training data: {numbers}"
    usual = True if second < max(end, inside) / 2 else None  # None: it treats all places alike so far
    if rates is None:
        return usual, f"{numbers}; judged without the corpora, which are not here"
    if inside - _ERRORS * scores.get("inside_stderr", 0.0) > _INSIDE * most + _MARGIN:
        return False, f"separators stand inside the documents of the training data: {numbers}"
    if max(end, inside) < _ABSENT * least and trained >= _ENOUGH and _has_learned(subject, windows):
        return False, f"the model does not know the separator, after some {trained:.2g} of them: {numbers}"
    return usual, numbers


def _has_learned(subject: Subject, windows: list[list[int]]) -> bool:
    """Whether the model predicts the held-out documents better than token frequencies would."""
    counts = Counter(chain.from_iterable(window[1:] for window in windows))
    bits = -sum(times * log2(times / counts.total()) for times in counts.values())
    scored = subject.model.score_tokens([(window, 1) for window in windows])
    return -sum(score for score, _ in scored) / log(2) < bits


def means(columns: dict[str, list[float]]) -> dict[str, float]:
    """Mean and standard error of independent values, by metric; a metric without values is left out."""
    scores: dict[str, float] = {}
    for name, values in columns.items():
        if values:
            scores[name] = float(np.mean(values))
        if len(values) > 1:
            scores[f"{name}_stderr"] = float(np.std(values, ddof=1)) / sqrt(len(values))
    return scores


def evenly(count: int, begin: int, end: int) -> list[int]:
    """At most `count` different integers of [begin, end), evenly spread and, if possible, away from both ends."""
    return sorted(
        {begin + (end - begin) * (2 * number + 1) // (2 * count) for number in range(count)} & {*range(begin, end)}
    )
