"""Building blocks shared by the model families: feed-forward layers, rotary positions, initialisation rules.

Tensors are `x [B, S, H]` (batch, sequence, hidden). Modules are built on the meta device and have no buffers, so only
parameters need values after `to_empty`; `Decoder.initial` defines them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp_pretrain.config.model import RopeScaling


@dataclass(frozen=True)
class NormalInit:
    """Initialise with N(0, std^2)."""

    std: float


@dataclass(frozen=True)
class Constant:
    """Initialise every element with `value`."""

    value: float


Initial = NormalInit | Constant


def scaled_initial(name: str, std: float, layers: int) -> Initial:
    """N(0, std^2), with std / sqrt(2 * layers) for projections to the residual stream (GPT-2); norms 1, biases 0.

    Raises KeyError if no rule covers a name.
    """
    kind, leaf = f".{name}".split(".")[-2:]
    if leaf == "bias":
        return Constant(0.0)
    if "norm" in kind:
        return Constant(1.0)
    if kind in ("out", "down"):
        return NormalInit(std / math.sqrt(2 * layers))
    if kind in ("embedding", "positions", "head", "query", "key", "value", "gate", "up"):
        return NormalInit(std)
    raise KeyError(name)


class CentredRMSNorm(nn.RMSNorm):
    """RMSNorm whose weights are distances from 1, so that zeros are neutral (Gemma, arXiv 2403.08295); in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).type_as(x)


class FeedForward(nn.Module, ABC):
    """Base of the feed-forward layers.

    Attributes:
        recomputes: whether to keep only the input in training, and to compute all but the last product again in the
            backward pass.
        draws: whether `compute` may draw random numbers, which must then be the same again.
    """

    recomputes = False
    draws = False

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        if self.recomputes and self.training:
            out: Tensor = checkpoint(self.compute, x, use_reentrant=False, preserve_rng_state=self.draws)
            return out
        return self.compute(x)

    @abstractmethod
    def compute(self, x: Tensor) -> Tensor:
        """The layer itself; it may draw random numbers if the model `uses_dropout`."""


class SwiGLU(FeedForward):
    """`down(silu(gate(x)) * up(x))`, no biases; `ffn` is the width of gate and up; `gelu`: tanh-GELU, not SiLU."""

    def __init__(self, hidden: int, ffn: int, *, gelu: bool = False) -> None:
        super().__init__()
        self.activation = nn.GELU(approximate="tanh") if gelu else nn.SiLU()
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def compute(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.activation(self.gate(x)) * self.up(x))
        return out


class GeluMLP(FeedForward):
    """`down(gelu_tanh(up(x)))` with biases and the tanh approximation, as in GPT-2 and Megatron."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, ffn)
        self.down = nn.Linear(ffn, hidden)

    def compute(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return out


class GeGLU(FeedForward):
    """`down(up(x) * gelu(gate(x)))` with biases and the exact (erf) GELU, as in GLM-130B; `ffn` is the width."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, ffn)
        self.gate = nn.Linear(hidden, ffn)
        self.down = nn.Linear(ffn, hidden)

    def compute(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x) * F.gelu(self.gate(x)))
        return out


def rotary_frequencies(size: int, base: float, scaling: RopeScaling | None, device: torch.device) -> Tensor:
    """Rotary embedding's angles per position (RoFormer, arXiv 2104.09864) for `size` dimensions: fp32 [size / 2].

    `scaling` is `linear` (arXiv 2306.15595), `llama3` (the rule of Llama 3.1) or `yarn` (arXiv 2309.00071, 3.2, between
    whole dimensions, as in its code).
    """
    frequencies = 1.0 / base ** (torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "yarn":
        waves = scaling.original_length / (2 * math.pi)
        low, high = (size * math.log(waves / number) / (2 * math.log(base)) for number in (32, 1))
        low, high = max(math.floor(low), 0), min(math.ceil(high), size - 1)
        dimensions = torch.arange(size // 2, device=device, dtype=torch.float32)
        blend = 1 - ((dimensions - low) / max(high - low, 1e-3)).clamp(0, 1)
    else:
        turns = scaling.original_length * frequencies / (2 * math.pi)  # rotations over the original context length
        blend = ((turns - 1) / (4 - 1)).clamp(0, 1)
    return frequencies * (blend + (1 - blend) / scaling.factor)


Rotary = tuple[tuple[Tensor, Tensor], ...]
"""(cosines, sines) per dimension of the positions; each [(B,) S, 1, size / 2], broadcast over heads."""


def rotary_tables(positions: Tensor, frequencies: Tensor, gain: float = 1.0) -> Rotary:
    """Tables for `rotate`, always fp32, for positions [S] or [B, S], or two-dimensional ones [B, 2, S].

    `frequencies`: from `rotary_frequencies` for the head size divided by the number of dimensions. `gain`: factor of
    what is rotated.
    """
    dimensions = positions.unbind(1) if positions.ndim == 3 else (positions,)
    angles = [dimension.float().unsqueeze(-1) * frequencies for dimension in dimensions]
    return tuple((gain * angle.cos().unsqueeze(-2), gain * angle.sin().unsqueeze(-2)) for angle in angles)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate each head of `x` [B, S, heads, d] by its position, in fp32; keeps dtype and shape.

    A head is split into one part per dimension of the positions; in each, element i is paired with i + size / 2
    ("rotate-half").
    """
    turned = []
    for part, (cos, sin) in zip(x.float().chunk(len(rotary), dim=-1), rotary, strict=True):
        a, b = part.chunk(2, dim=-1)
        turned += [a * cos - b * sin, b * cos + a * sin]
    return torch.cat(turned, dim=-1).to(x.dtype)
