"""Attention masks: which keys a query attends to, in the form that each kernel needs.

One rule covers all: a token attends to itself and earlier tokens of its slot, and to the slot's prefix. A slot is a
document, or one of several packed samples of an objective; without slots a sample is one slot, and without a prefix
attention is causal. Where blocks have a window of w tokens, it is to the w - 1 tokens before and to itself only.

The forms are `None` (causal over the sample), a dense tensor for `scaled_dot_product_attention` and `scaled_attention`,
or a block mask for `flex_attention`, which skips masked blocks. A mask is built once per micro-batch, from lengths,
never from token values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from fsdp_pretrain.config.model import AnyModel, LlamaModel
from fsdp_pretrain.errors import ConfigError

Backend = Literal["sdpa", "flex"]
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""score, batch, head, query, key -> score; see `flex_attention`."""
_BLOCK = 128
"""Positions in a block of a block mask, the default of `flex_attention`."""
Mask = Tensor | BlockMask | None
"""None: causal. bool [B or 1, 1, S, S]: True where a query (row) attends to a key (column). float [B or 1, heads, S,
S]: added to the scores. Or a BlockMask."""


@dataclass(frozen=True)
class Slots:
    """The slots of a micro-batch.

    Attributes:
        lengths: int [B, D], in order, zero-padded; each row sums to S.
        prefix: int [B, D], tokens at the start of each slot that all its tokens attend to; None: 0.
    """

    lengths: Tensor
    prefix: Tensor | None = None

    def ids(self, length: int) -> Tensor:
        """Index of each position's slot: int64 [B, S]."""
        ends = self.lengths.cumsum(1)
        positions = torch.arange(length, device=ends.device).expand(ends.shape[0], -1)
        return torch.searchsorted(ends, positions.contiguous(), right=True)

    def positions(self, length: int) -> Tensor:
        """Positions that restart at 0 in each slot: int64 [B, S].

        A document continued from an earlier sample also starts at 0, since the model cannot see its earlier part.
        """
        starts = self.lengths.cumsum(1) - self.lengths
        return torch.arange(length, device=starts.device) - starts.gather(1, self.ids(length))

    def in_prefix(self, length: int) -> Tensor:
        """Whether each position is in its slot's prefix: bool [B, S]."""
        if self.prefix is None:
            return torch.zeros(self.lengths.shape[0], length, dtype=torch.bool, device=self.lengths.device)
        return self.positions(length) < self.prefix.gather(1, self.ids(length))


@dataclass(frozen=True)
class Visible:
    """An explicit mask, for inputs other than consecutive text: continuations that share a context, or a cache of keys.

    Attributes:
        keys: bool [B, S, T], True where a query attends to a key.
        query_positions, key_positions: int64 [B, S] and [B, T], for ALiBi.
    """

    keys: Tensor
    query_positions: Tensor
    key_positions: Tensor


def attention_mask(slots: Slots | Visible | None, x: Tensor, backend: Backend, window: int | None = None) -> Mask:
    """The mask for hidden states `x [B, S, H]`; `window`: tokens that a token sees, None: all."""
    length = x.shape[1]
    if isinstance(slots, Visible):
        keys = slots.keys
        if window is not None:
            keys = keys & (slots.query_positions.unsqueeze(2) - slots.key_positions.unsqueeze(1) < window)
        return keys.unsqueeze(1)
    window = None if window is None or window >= length else window
    if slots is None and window is None:
        return None
    if backend == "flex":
        slots = slots or Slots(torch.full((len(x), 1), length, device=x.device))
        return block_mask(slots, length, window)
    return dense_mask(slots, length, x.device, window)


def dense_mask(slots: Slots | None, length: int, device: torch.device, window: int | None = None) -> Tensor:
    """The mask as a tensor: bool [B or 1, 1, S, S]."""
    visible = torch.ones(1, length, length, dtype=torch.bool, device=device).tril()
    if slots is not None:
        ids = slots.ids(length)
        visible = (visible | slots.in_prefix(length).unsqueeze(1)) & (ids.unsqueeze(2) == ids.unsqueeze(1))
    if window is not None:
        visible = visible.triu(1 - window)
    return visible.unsqueeze(1)


def block_mask(slots: Slots, length: int, window: int | None = None) -> BlockMask:
    """The mask for `flex_attention`, computed from the slots at the ends of each block, without a tensor [S, S]."""
    ids, prefix = slots.ids(length), slots.in_prefix(length)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        del head
        seen = (ids[batch, query] == ids[batch, key]) & ((key <= query) | prefix[batch, key])
        return seen if window is None else seen & (query - key < window)

    starts = torch.arange(0, length, _BLOCK, device=ids.device)
    first, last = ids[:, starts], ids[:, (starts + _BLOCK - 1).clamp(max=length - 1)]
    first_key, last_key = first.unsqueeze(1), last.unsqueeze(1)  # of every block of keys; below, of queries
    shared = (first_key <= last.unsqueeze(2)) & (last_key >= first.unsqueeze(2))
    earlier = torch.ones(len(starts), len(starts), dtype=torch.bool, device=ids.device).tril(-1)
    own = torch.eye(len(starts), dtype=torch.bool, device=ids.device)
    ahead = F.pad(prefix, (0, -length % _BLOCK)).view(len(prefix), -1, _BLOCK).any(2).unsqueeze(1)
    full = earlier & (first_key == last.unsqueeze(2))  # ids ascend: all keys and queries are of one slot
    if window is not None:
        between = starts.unsqueeze(1) - starts  # of the first query and the first key
        shared, full = shared & (between - _BLOCK + 1 < window), full & (between + _BLOCK - 1 < window)
    partial = shared & (earlier | own | ahead) & ~full
    mask: BlockMask = BlockMask.from_kv_blocks(*_listed(partial), *_listed(full), _BLOCK, visible, (length, length))
    return mask


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """bool [B, queries, keys] -> number of True keys, int32 [B, 1, queries], and the keys, True ones first."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32).unsqueeze(1), order.to(torch.int32).unsqueeze(1)


def alibi_slopes(heads: int) -> list[float]:
    """ALiBi slopes (arXiv 2108.12409): 2^(-8i/n), n the largest power of two up to `heads`; further heads use every
    second slope of 2n."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    return slopes + [2 ** (-4 * i / power) for i in range(1, 2 * (heads - power), 2)]


def alibi_score_mod(heads: int) -> ScoreMod:
    """ALiBi as a `score_mod` of `flex_attention`; it computes the slopes itself, so nothing is read from memory."""
    power = 2 ** math.floor(math.log2(heads))

    def add(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        del batch
        further = -4 * (2 * (head - power) + 1) / power
        exponent = torch.where(head < power, -8 * (head + 1) / power, further)
        return score + torch.exp2(exponent) * (key - query)

    return add


def add_alibi(visible: Tensor, heads: int, dtype: torch.dtype, distance: Tensor | None = None) -> Tensor:
    """A bias for the scores from a boolean mask, with ALiBi: [B or 1, heads, S, T] of `dtype`.

    Args:
        visible: bool [B or 1, 1, S, T].
        distance: position of the key minus that of the query, int64 [B or 1, 1, S, T]: 0 or less where causal. None:
            queries and keys are both at 0 to S - 1.
    """
    if distance is None:
        places = torch.arange(visible.shape[-1], device=visible.device)
        distance = places.unsqueeze(0) - places.unsqueeze(1)
    # A plain copy to the device would make the host wait for it.
    slopes = torch.tensor(alibi_slopes(heads)).to(visible.device, non_blocking=True)
    bias = slopes.view(1, heads, 1, 1) * distance
    return bias.masked_fill(~visible, -math.inf).to(dtype)


def choose_backend(setting: str, model: AnyModel, device: torch.device) -> Backend:
    """The backend for masked attention. Raises ConfigError if `setting` is `flex`, which cannot be used here.

    Args:
        setting: `parallel.attention`.
    """
    obstacles = _flex_obstacles(model, device)
    if setting == "flex" and obstacles:
        raise ConfigError(
            f"parallel.attention = flex cannot be used: {'; '.join(obstacles)}",
            remedy="use parallel.attention = auto, which uses dense masks where flex cannot be used",
        )
    return "flex" if setting == "flex" or (setting == "auto" and not obstacles) else "sdpa"


def _flex_obstacles(model: AnyModel, device: torch.device) -> list[str]:
    obstacles = []
    if device.type != "cuda":
        obstacles.append(f"flex_attention has no backward pass on {device.type}")
    if model.head_dim < 16:
        obstacles.append(f"its kernels need a head size of at least 16, not {model.head_dim}")
    if not isinstance(model, LlamaModel):
        if model.dropout:
            obstacles.append("it has no dropout of attention probabilities")
        if model.scores != "fused":
            obstacles.append(f"model.scores = {model.scores} is computed step by step")
    return obstacles
