"""The part that all model families share: embed, run the blocks, normalise, then logits or loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp_pretrain.config.model import AnyModel, LlamaModel
from fsdp_pretrain.config.sections import Recompute

from .attention import Attention
from .cache import LayerCache
from .layers import FeedForward, Initial
from .loss import ChunkKernels, compiled_kernels, token_losses
from .masks import Backend, Mask, Slots, Visible, attention_mask, dense_mask

Reader = Callable[[Tensor, Tensor], Tensor]
"""(normalised hidden states [B, S, H], output matrix [V, H]) -> whatever the caller computes from both."""
PositionLosses = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""As `Decoder.position_losses`."""


class Embedding(nn.Embedding):
    """The embedding table, possibly tied to the output matrix, with gradient shrink (GLM-130B).

    Only the backward pass changes; outputs are bit-identical. Set the attributes between steps.

    Attributes:
        shrink: factor of the table's gradient; 1 is off.
        shrink_head: also scale the gradient that comes through the logits.
    """

    shrink = 1.0
    shrink_head = True

    def forward(self, tokens: Tensor) -> Tensor:
        return scale_gradient(super().forward(tokens), self.shrink)

    def as_head(self) -> Tensor:
        """The table [V, H] as output matrix."""
        return scale_gradient(self.weight, self.shrink if self.shrink_head else 1.0)


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """`x` unchanged; its gradient is multiplied by `factor`."""
    out: Tensor = x if factor == 1.0 else _ScaleGradient.apply(x, factor)  # type: ignore[no-untyped-call]
    return out


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class Head(nn.Linear):
    """An untied output matrix [V, H], as a module, so that FSDP gathers and reduces it apart from the embedding."""

    def __init__(self, config: AnyModel) -> None:
        super().__init__(config.hidden, config.rows, bias=False)

    def forward(
        self,
        x: Tensor,
        labels: Tensor | None = None,
        losses: PositionLosses = token_losses,
        *,
        with_normalisers: bool = False,
        read: Reader | None = None,
    ) -> Tensor:
        return output(x, self.weight, labels, losses, with_normalisers=with_normalisers, read=read)


def output(
    x: Tensor,
    weight: Tensor,
    labels: Tensor | None,
    losses: PositionLosses,
    *,
    with_normalisers: bool,
    read: Reader | None,
) -> Tensor:
    """The result of `Decoder.forward` from the normalised hidden states `x [B, S, H]` and the output matrix [V, H]."""
    if read is not None:
        return read(x, weight)
    if labels is None:
        return nn.functional.linear(x, weight)
    values, normalisers = losses(x, weight, labels)
    # FSDP hooks the output; a view, or one of two outputs of a Function, would be fragile there.
    return torch.stack((values, normalisers)) if with_normalisers else values.clone()


class Decoder(nn.Module, ABC):
    """Base of the families.

    A family supplies its blocks (`block`), the final norm (`final_norm`), the embedding (`embed_tokens`), further
    inputs of its blocks (`context`) and its initialisation (`initial`). The first two use only `config`. The output
    matrix is `head`, or the embedding table if tied: access it only inside `forward`, where FSDP has gathered it. The
    order of modules determines the order of parameters, and so of sums over them.
    """

    config: Any

    def __init__(self, config: AnyModel) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.rows, config.hidden)
        self.blocks = nn.ModuleList(self.block(layer) for layer in range(config.layers))
        self.norm = self.final_norm()
        self.head = None if config.tied_head else Head(config)
        self._recompute_every = 0
        self._uses_dropout = config.uses_dropout
        self.two_dimensions = config.two_dimensions
        self.backend: Backend = "sdpa"
        self._loss_kernels: ChunkKernels | None = None
        self._scales_scores = not isinstance(config, LlamaModel) and config.scores != "fused"

    @abstractmethod
    def block(self, index: int) -> nn.Module:
        """A new block: hidden states [B, S, H] and what `context` gives -> hidden states."""

    @abstractmethod
    def final_norm(self) -> nn.Module:
        """The norm between the last block and the output matrix."""

    def set_recompute(self, recompute: Recompute) -> None:
        """Set which activations the backward pass computes again, see `parallel.recompute`."""
        self._recompute_every = 0 if recompute == "feed-forward" else recompute
        for module in self.modules():
            if isinstance(module, FeedForward):
                module.recomputes = recompute == "feed-forward"
                module.draws = self._uses_dropout

    def compile_parts(self) -> None:
        """Compile every block, each into one graph, and the kernels of the loss."""
        for block in self.blocks:
            block.compile(fullgraph=True)  # a graph break would only be slow, and go unnoticed
        self._loss_kernels = compiled_kernels()

    def embed_tokens(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Tokens int64 [B, S], and their positions int64 [S], [B, S] or [B, 2, S] -> embeddings [B, S, H]."""
        del positions
        out: Tensor = self.embedding(tokens)
        return out

    @abstractmethod
    def context(self, positions: Tensor) -> tuple[object, ...]:
        """Further positional arguments of each block, after hidden state and mask; `positions` as in `embed_tokens`."""

    @contextmanager
    def caching(self, capacity: int) -> Iterator[list[LayerCache]]:
        """Let forward passes in the `with` block add their keys and values to a cache, which later passes attend to.

        The passes need a `Visible` mask whose keys are all tokens so far.

        Args:
            capacity: room for this many tokens per sequence.

        Yields:
            The caches of all layers.
        """
        attentions = [module for module in self.modules() if isinstance(module, Attention)]
        for attention in attentions:
            attention.cache = LayerCache(capacity)
        try:
            yield [attention.cache for attention in attentions if attention.cache is not None]
        finally:
            for attention in attentions:
                attention.cache = None

    def mask(self, slots: Slots | Visible | None, x: Tensor) -> Mask:
        """The attention mask for hidden states `x [B, S, H]`; dense if scores are scaled."""
        if self._scales_scores and not isinstance(slots, Visible):
            return dense_mask(slots, x.shape[1], x.device)
        return attention_mask(slots, x, self.backend)

    def contexts(self, slots: Slots | Visible | None, x: Tensor, positions: Tensor) -> list[tuple[object, ...]]:
        """The arguments of each block after the hidden states `x`."""
        return [(self.mask(slots, x), *self.context(positions))] * self.config.layers

    @abstractmethod
    def initial(self, name: str) -> Initial:
        """The initialisation of the parameter `name`. Raises KeyError if no rule covers it."""

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        slots: Slots | Visible | None = None,
        positions: Tensor | None = None,
        *,
        with_normalisers: bool = False,
        read: Reader | None = None,
    ) -> Tensor:
        """Logits, or the loss per position, or the result of `read`.

        Args:
            tokens: int64 [B, S].
            labels: int64 [B, S], the token to predict at each position (`loss.IGNORE`: none), or None.
            slots: see `masks`; None is causal over the whole sample.
            positions: int64 [B, S], or [B, 2, S] if two-dimensional, each less than S; None is 0..S-1.
            with_normalisers: also return the log-normalisers of the softmax.
            read: called with the last hidden states and the output matrix, which FSDP gathers only for the call; its
                result is returned instead.

        Returns:
            With labels: fp32 [B, S] natural-log cross-entropy, zero where ignored, or [2, B, S] with the
            log-normalisers second; else logits [B, S, V].
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed_tokens(tokens, positions)
        contexts = self.contexts(slots, x, positions)
        for index, (block, context) in enumerate(zip(self.blocks, contexts, strict=True)):
            if self._recompute_every and index % self._recompute_every == 0 and self.training:
                x = checkpoint(block, x, *context, use_reentrant=False, preserve_rng_state=self._uses_dropout)
            else:
                x = block(x, *context)
        x = self.norm(x)
        options: dict[str, Any] = {"with_normalisers": with_normalisers, "read": read}
        if self.head is None:
            return output(x, self.embedding.as_head(), labels, self.position_losses, **options)
        out: Tensor = self.head(x, labels, self.position_losses, **options)
        return out

    def position_losses(self, x: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of every position, and the log-normalisers for the z-loss: a family may have another loss.

        Args:
            x: normalised hidden states [B, S, H].
            weight: output matrix [V, H], which exists only during the call.
            labels: int64 [B, S], `loss.IGNORE` where there is no target.

        Returns:
            fp32 [B, S], fp32 [B, S], both zero where ignored.
        """
        return token_losses(x, weight, labels, self._loss_kernels)

    def count_parameters(self) -> int:
        """Number of parameters; tied ones count once. Works on the meta device."""
        return sum(parameter.numel() for parameter in self.parameters())
