"""What a GPU runs for some functions, on tensors that only have a shape: torch's own operators of a GPU, and their
derivatives. torch built without CUDA would trace its code for CPUs, which keeps more and fuses otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

ATEN = torch.ops.aten


class _RMSNorm(torch.autograd.Function):
    """On a CPU torch takes this operator apart before autograd sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float | None) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            out, scale = ATEN._fused_rms_norm(x, list(weight.shape), weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        d_x, d_weight = ATEN._fused_rms_norm_backward(gradient, x, list(weight.shape), scale, weight, [True, True])
        return d_x, d_weight, None


def _rms_norm(x: Tensor, normalized_shape: Any, weight: Tensor, eps: float | None = None) -> Tensor:
    return _RMSNorm.apply(x, weight, eps)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    assert attn_mask is None and is_causal, "a GPU has other kernels for dense masks"
    return ATEN._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]


def _dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    return torch.native_dropout(x, p, True)[0] if training and p else x


@contextmanager
def of_a_gpu() -> Iterator[None]:
    """Let RMSNorm, attention and dropout be the operators of a GPU."""
    stand_ins = {"rms_norm": _rms_norm, "scaled_dot_product_attention": _attention, "dropout": _dropout}
    with ExitStack() as stack:
        for name, function in stand_ins.items():
            stack.enter_context(patch.object(F, name, function))
        yield
