"""The samples of one forward pass."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .objectives import IGNORE


@dataclass(slots=True)
class MicroBatch:
    """One forward pass of one rank."""

    tokens: Tensor
    """int64 [b, S + 1]; the inputs are `tokens[:, :-1]`. Under blank infilling the last column is padding."""
    labels: Tensor | None
    """int64 [b, S]; None: `tokens[:, 1:]`, all of which are learned."""
    lengths: Tensor | None
    """int32 [b, D], lengths of documents, or of slots under blank infilling, zero-padded; None if not needed."""
    sources: Tensor
    """int64 [b], source of each sample."""
    prefix: Tensor | None = None
    """int32 [b, D], length of each slot's prefix, which all tokens of the slot see; None if causal."""
    positions: Tensor | None = None
    """int64 [b, S], or [b, 2, S] if positions have two dimensions; None: 0 to S - 1."""

    @property
    def targets(self) -> int:
        """Number of tokens to predict."""
        if self.labels is None:
            return self.tokens.shape[0] * (self.tokens.shape[1] - 1)
        return int((self.labels != IGNORE).sum())
