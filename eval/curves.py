"""Probes whose curves move early in training: copying, arithmetic, and what the model remembers. They judge nothing.

Copying and induction: a random sequence twice. A model with induction heads predicts the second copy (Olsson et al.,
2022, "In-context learning and induction heads").
"""

from __future__ import annotations

from itertools import chain, product, takewhile
from math import exp, log

import numpy as np

from .intervals import wilson
from .probe import Job, Probed, Subject, means

_SEQUENCES, _HALF, _PLACES = 16, 256, 8
_EXAMPLES = ("2+3=5", "7-4=3", "9+8=17", "1+6=7", "6-6=0")
"""Of the arithmetic prompt; not asked again."""
_QUESTIONS = 50


def copy_probe(subject: Subject) -> Probed:
    """Bits per token of a random sequence and of its copy, and how often greedy decoding continues the copy.

    The tokens are drawn, with a fixed seed, from those of the held-out documents. Scores: `first_bits`, `second_bits`,
    `gain_bits` (the difference), `accuracy` (of single tokens of the second copy, after at least a quarter of it).
    """
    pool, half = np.array(list(chain(*subject.chosen(1 << 30)))), min(_HALF, (subject.length - 1) // 2)
    draw, eod = np.random.default_rng(0), subject.tokenizer.eod
    once = [[eod, *draw.choice(pool, half).tolist()] for _ in range(subject.capped(_SEQUENCES))]
    first = _bits(subject, [(tokens, 1) for tokens in once], half)
    second = _bits(subject, [([*tokens, *tokens[1:]], 1 + half) for tokens in once], half)
    ends = sorted({half // 4 + (half - half // 4) * number // _PLACES for number in range(_PLACES)})
    asked: list[Job] = [([*tokens, *tokens[1 : end + 2]], 1 + half + end) for tokens in once for end in ends]
    greedy = [float(same) for _, same in subject.model.score_tokens(asked)]
    hits = [sum(greedy[at : at + len(ends)]) / len(ends) for at in range(0, len(greedy), len(ends))]
    gains = [one - two for one, two in zip(first, second, strict=True)]
    scores = means({"first_bits": first, "second_bits": second, "gain_bits": gains, "accuracy": hits})
    sure = {"accuracy": wilson(sum(hits), len(hits))}  # wide: as if the tokens of a sequence were one
    return Probed(scores, len(once), {"gain_bits": True, "accuracy": True}, intervals=sure)


def _bits(subject: Subject, jobs: list[Job], tokens: int) -> list[float]:
    return [-score / log(2) / tokens for score, _ in subject.model.score_tokens(jobs)]


def arithmetic_probe(subject: Subject) -> Probed:
    """Single-digit sums and differences after five examples, the likeliest of all answers that occur.

    Scores: `accuracy`, and `probability` of the right answer among all (19 for a sum, 10 for a difference).
    """
    questions = _questions()
    size = subject.capped(_QUESTIONS)
    chosen = [questions[len(questions) * number // size] for number in range(size)]
    jobs, owners = list[Job](), list[int]()
    for number, (question, _, answers) in enumerate(chosen):
        prompt = "\n".join((*_EXAMPLES, question))
        encoded = subject.tokenizer.encode([prompt, *(f"{prompt}{answer}\n" for answer in answers)])
        same = takewhile(lambda column: len(set(column)) == 1, zip(*encoded, strict=False))
        first = len(list(same))  # for all answers, so that all score the same text
        jobs += [([subject.tokenizer.eod, *tokens], 1 + first) for tokens in encoded[1:]]
        owners += [number] * len(answers)
    scored = [score for score, _ in subject.model.score_tokens(jobs)]
    hits, shares, at = list[float](), list[float](), 0
    for _, truth, answers in chosen:
        row = scored[at : at + len(answers)]
        best = max(row)
        hits.append(float(answers[row.index(best)] == truth))
        shares.append(exp(row[answers.index(truth)] - best) / sum(exp(score - best) for score in row))
        at += len(answers)
    scores, sure = means({"accuracy": hits, "probability": shares}), {"accuracy": wilson(sum(hits), len(hits))}
    return Probed(scores, size, {"accuracy": True, "probability": True}, intervals=sure)


def _questions() -> list[tuple[str, int, range]]:
    """(question, answer, all answers), sums and differences mixed in a fixed order."""
    sums = [(f"{a}+{b}=", a + b, range(19)) for a, b in product(range(10), repeat=2)]
    differences = [(f"{a}-{b}=", a - b, range(10)) for a, b in product(range(10), repeat=2) if a >= b]
    known = {example.partition("=")[0] + "=" for example in _EXAMPLES}
    left = [question for question in (*sums, *differences) if question[0] not in known]
    order = np.random.default_rng(0).permutation(len(left))
    return [left[number] for number in order.tolist()]
