"""Separator probe: does the model put separators where the contract of the corpora puts them?

`end`: probability of a separator after a whole held-out document; `second`: of another one right after it; `inside`: at
places that are no ends; `repeat`: of the token before again, at the same places. The contract is: exactly one separator
after every document, so none after a separator and none inside. A model that has learned nothing expects a separator
everywhere as often as there are separators, or its previous token again (tied embeddings do at first), which is why
the bounds are multiples of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from math import log
from statistics import fmean

from .attempt import Verdict
from .contract import Contract, read_contract
from .probe import Probed, Subject, evenly, means

_NAME = "separator_probe"
_DOCUMENTS, _PLACES = 32, 4
_SECOND, _EARLY, _LATE = 3.0, 0.3, 0.1
"""Bound of `second`: times the rate of separators or of repeats, and what is added, before `_ENOUGH` were trained and
from then on. Models of clean data reached 0.24 for a while before they knew what follows one."""
_INSIDE, _MARGIN = 5.0, 0.05
"""Bound of `inside`: times the rate, and what is added."""
_ERRORS = 2.0
"""Standard errors by which a mean must be above its bound."""
_ABSENT, _ENOUGH = 0.1, 10_000
"""Times the rate, below which the model knows no separator; how many must have been trained to say so."""
_MARK = 0.2
"""Added to the bound of the probability of a separator beside an unknown one."""


@dataclass(frozen=True)
class _Mark:
    """A token that nearly all training documents begin or end with, and no held-out document contains."""

    token: int
    ends: bool
    probability: float


def separator_probe(subject: Subject) -> Probed:
    """Probabilities of a separator, and a verdict on the training data. Documents longer than the model's length are
    represented by their ends."""
    windows = [_window(subject, ids) for ids in subject.chosen(_DOCUMENTS)]
    eod = subject.tokenizer.eod
    ends = subject.last_token([[*window, eod] for window in windows])
    seconds = subject.last_token([[*window, eod, eod] for window in windows])
    places = [(window, at) for window in windows for at in evenly(_PLACES, 2, len(window))]
    insides = subject.last_token([[*window[:at], eod] for window, at in places])
    repeats = subject.last_token([[*window[:at], window[at - 1]] for window, at in places])
    scores = means({"end": ends, "second": seconds, "inside": insides, "repeat": repeats})
    config = subject.judged.trained
    contract = None if config is None else read_contract(config, subject.tokenizer.vocab_size)
    ok, text = _judge(subject, scores, contract, windows)
    return Probed(scores, len(windows), verdict=Verdict(probe=_NAME, ok=ok, text=text))


def _window(subject: Subject, ids: list[int]) -> list[int]:
    """A separator and a document, or its end."""
    return [subject.tokenizer.eod, *ids][-(subject.length - 1) :]


def _judge(
    subject: Subject, scores: dict[str, float], contract: Contract | None, windows: list[list[int]]
) -> tuple[bool | None, str]:
    end, second, inside = (scores.get(name, 0.0) for name in ("end", "second", "inside"))
    least = second - _ERRORS * scores.get("second_stderr", 0.0)
    rate = inside if contract is None else contract.most
    trained = 0.0 if contract is None else subject.judged.tokens * contract.least
    bound = _SECOND * max(rate, scores.get("repeat", 0.0)) + (_EARLY if trained < _ENOUGH else _LATE)
    numbers = f"P(separator) is {end:.2g} where documents end, {second:.2g} after a separator, {inside:.2g} inside text"
    if contract is not None:
        numbers += f"; the corpora have {_rate(contract)} per token"
    if least > bound:
        return False, f"separators are doubled in the training data: {numbers}"
    if contract is None:
        return _usual(end, second, inside), f"{numbers}; judged without the corpora, which are not here"
    for mark in _marks(subject, contract, windows):
        if mark.probability > _SECOND * contract.most + _MARK:
            return False, _say(subject, mark)
    if inside - _ERRORS * scores.get("inside_stderr", 0.0) > _INSIDE * contract.most + _MARGIN:
        return False, f"separators stand inside the documents of the training data: {numbers}"
    unknown = max(end, inside) < _ABSENT * contract.least
    if unknown and trained >= _ENOUGH and _learned(subject, contract, windows):
        return False, f"the model does not know the separator, after some {trained:.2g} of them: {numbers}"
    return _usual(end, second, inside), numbers


def _usual(end: float, second: float, inside: float) -> bool | None:
    """Whether the model has learned that no separator follows one; None: it treats all places alike so far."""
    return True if second < max(end, inside) / 2 else None


def _rate(contract: Contract) -> str:
    least, most = f"{contract.least:.2g}", f"{contract.most:.2g}"
    return least if least == most else f"{least} to {most}"


def _marks(subject: Subject, contract: Contract, windows: list[list[int]]) -> list[_Mark]:
    """Tokens that may be separators under an id that the contract does not know, with the probability of what stands
    beside them in training: the separator after one that ends documents; one that begins them after the separator."""
    eod, known = subject.tokenizer.eod, {subject.tokenizer.eod, *chain(*subject.documents)}
    found = []
    for tokens, ends in ((contract.first - known, False), (contract.last - known, True)):
        for token in sorted(tokens):
            pair = [token, eod] if ends else [eod, token]
            found.append(_Mark(token, ends, fmean(subject.last_token([[*window, *pair] for window in windows]))))
    return found


def _say(subject: Subject, mark: _Mark) -> str:
    name = f"token {mark.token}, {subject.tokenizer.decode([mark.token])!r},"
    place, beside = ("ends", "a separator after it") if mark.ends else ("begins", "it after a separator")
    return (
        f"{name} {place} nearly all training documents and is in no held-out one, as if it were a second separator: "
        f"the model expects {beside} with probability {mark.probability:.2g}"
    )


def _learned(subject: Subject, contract: Contract, windows: list[list[int]]) -> bool:
    """Whether the model predicts the held-out documents better than token frequencies do."""
    scored = subject.model.score_tokens([(window, 1) for window in windows])
    return -sum(score for score, _ in scored) / log(2) < sum(contract.bits(window[1:]) for window in windows)
