"""Building blocks shared by the model families: feed-forward layers, rotary positions, initialisation rules.

Tensors are `x [B, S, H]` (batch, sequence, hidden). Modules are built on the meta device and hold no buffers, so
that nothing but parameters needs a value after `to_empty`; parameters get theirs from `Decoder.initial`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Normal:
    """Initialise with N(0, std^2)."""

    std: float


@dataclass(frozen=True)
class Constant:
    """Initialise every element with `value`."""

    value: float


Initial = Normal | Constant


def residual_std(std: float, layers: int) -> float:
    """Standard deviation of the projections that write to the residual stream: std / sqrt(2 * layers) (GPT-2)."""
    return std / math.sqrt(2 * layers)


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))`, no biases; `ffn` is the width of gate and up."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class GeluMLP(nn.Module):
    """`down(gelu_tanh(up(x)))` with biases, the tanh approximation as in GPT-2 and Megatron."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, ffn)
        self.down = nn.Linear(ffn, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        out: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return out


def rotary_table(positions: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary position embedding (RoFormer, arXiv 2104.09864), always fp32.

    Args:
        positions: integer positions [S] or [B, S].
        head_dim: size of a head, even.
        base: base of the geometric series of wave lengths.

    Returns:
        cos, sin, each [(B,) S, 1, head_dim / 2], ready to broadcast over heads.
    """
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions.float().unsqueeze(-1) * base**-exponent
    return angles.cos().unsqueeze(-2), angles.sin().unsqueeze(-2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of each head ("rotate-half" pairing, i with i + d/2) in fp32; keeps dtype and shape.

    Args:
        x: [B, S, heads, d].
        cos, sin: from `rotary_table`.
    """
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
