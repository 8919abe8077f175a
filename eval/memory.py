"""Memory probe: does the model know what it was trained on better than what it was not?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import hypot, log

from data.packing.packer import Piece
from fsdp_pretrain.errors import DataError, UserError
from fsdp_pretrain.lineage.provenance import TrainedStep, trained_step
from fsdp_pretrain.record.files import RunDir

from .attempt import Verdict
from .probe import Job, Probed, Subject, evenly, means

_NAME = "memory_probe"
_STEPS, _SAMPLES = 4, 8
"""Steps of the run, evenly spread up to the checkpoint's, and samples of each: one stretch of a document of each."""
_SHORTEST, _LONGEST = 16, 256
"""Tokens of a stretch."""


@dataclass(frozen=True)
class _Stretch:
    """Tokens of a document from token `start` on."""

    tokens: list[int]
    start: int


def memory_probe(subject: Subject) -> Probed:
    """Bits per token of stretches of trained and of held-out documents, at the same places of their documents.

    Scores: `trained_bits`, `heldout_bits`, `gap_bits` (held-out less trained). Needs the run's record and its corpora;
    without them there are no scores, and the verdict says why.
    """
    documents = [ids for ids in subject.chosen(1 << 30) if ids]
    try:
        trained = list(_trained(subject))
    except UserError as error:
        return _nothing(f"left out: {error.cause}")
    if not trained:
        return _nothing("left out: no stretch of a document is long enough")
    heldout = [_alike(stretch, documents[number % len(documents)]) for number, stretch in enumerate(trained)]
    columns = {"trained_bits": _bits(subject, [stretch.tokens for stretch in trained])}
    scores = means({**columns, "heldout_bits": _bits(subject, heldout)})
    scores["gap_bits"] = scores["heldout_bits"] - scores["trained_bits"]
    if len(trained) > 1:
        scores["gap_bits_stderr"] = hypot(scores["heldout_bits_stderr"], scores["trained_bits_stderr"])
    return Probed(scores, len(trained), {"heldout_bits": False})


def _nothing(reason: str) -> Probed:
    return Probed({}, 0, verdict=Verdict(probe=_NAME, ok=None, text=reason))


def _trained(subject: Subject) -> Iterator[_Stretch]:
    """Stretches that the run learned up to the checkpoint. Raises UserError if it cannot be found out which."""
    checkpoint, trained = subject.judged.checkpoint, subject.judged.trained
    if checkpoint is None or trained is None:
        raise DataError(f"{subject.judged.path} is no checkpoint of a run")
    most = subject.capped(_STEPS * _SAMPLES)
    beside = RunDir(checkpoint.path.parent.parent)
    run = beside if beside.path.joinpath("segments").is_dir() else RunDir(trained.run.dir)  # from a fallback
    steps = sorted({max(1, checkpoint.step * (number + 1) // _STEPS) for number in range(_STEPS)})
    share = -(-most // len(steps))
    found = [stretch for step in steps for stretch in _of_step(trained_step(run, step), subject.length, share)]
    yield from found[:most]


def _of_step(step: TrainedStep, length: int, count: int) -> Iterator[_Stretch]:
    """The longest stretch of a document in each of at most `count` samples of a step."""
    for place in evenly(count, 0, len(step.indices)):
        index = step.indices[place]
        packed = step.packer.pack(index, 1)
        if int(packed.sources[0]) in step.packer.pairs:
            continue
        learned = [piece for piece in step.packer.provenance(index) if not _left_out(piece, packed.ignore)]
        piece = max(learned, key=lambda piece: piece.stop - piece.start, default=None)
        if piece is None or piece.stop - piece.start < _SHORTEST:
            continue
        size = min(piece.stop - piece.start, _LONGEST, length)
        yield _Stretch(packed.tokens[0, piece.position : piece.position + size].tolist(), piece.start)


def _left_out(piece: Piece, ignored: list[tuple[int, int, int]]) -> bool:
    return any(start <= piece.position < stop for _, start, stop in ignored)


def _alike(stretch: _Stretch, document: list[int]) -> list[int]:
    """As many tokens of a document, from the same place or as near as its length allows."""
    begin = max(0, min(stretch.start, len(document) - len(stretch.tokens)))
    return document[begin : begin + len(stretch.tokens)]


def _bits(subject: Subject, stretches: list[list[int]]) -> list[float]:
    """Bits per token of each."""
    jobs: list[Job] = [([subject.tokenizer.eod, *tokens], 1) for tokens in stretches]
    scored = subject.model.score_tokens(jobs)
    return [-score / log(2) / len(tokens) for (score, _), tokens in zip(scored, stretches, strict=True)]
