"""Objectives of extensions: what a model learns of the samples that the packer made."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .packer import Packed

if TYPE_CHECKING:  # it needs torch, which reading data does not
    from .batch import MicroBatch


@dataclass(frozen=True)
class ObjectiveContext:
    """What an objective may need to know.

    Attributes:
        vocab: ids of the corpora's tokenizer; those from here to `model_vocab` are free for special tokens.
        eod: id of the document separator.
        seed: `data.seed`, for random choices by `data.corpus.hashing.key_of` and `uniforms`.
        names: the sources, by the numbers in `Packed.sources`.
    """

    vocab: int
    model_vocab: int
    eod: int
    seed: int
    names: Sequence[str]


class OwnObjective(ABC):
    """Base of the objectives of extensions, made from (settings, context)."""

    @abstractmethod
    def __init__(self, settings: Any, context: ObjectiveContext) -> None: ...

    @abstractmethod
    def change(self, batch: MicroBatch, packed: Packed) -> MicroBatch:
        """The samples that are trained, of the same shape.

        A pure function of both: what is drawn depends on `packed.sources` and `packed.source_indices` alone, so that
        every start and mesh learns the same.

        Args:
            batch: the samples as the causal objective has them: `tokens` int64 [b, S + 1]; `labels` int64 [b, S], -100
                where nothing is learned, or None to learn every next token.
            packed: where they come from.
        """
