"""Float8 products in the linear layers of the blocks, through torchao (`train.precision = "bf16+fp8"`).

Each product scales its operands, tensor by tensor, to float8 (e4m3, e5m2 for gradients of outputs) and returns bf16.
Parameters, gradients, communication and optimiser are those of bf16; embedding, norms, attention and output matrix
compute in bf16.
"""

from __future__ import annotations

import torch
from torch import nn

from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.models import Decoder

_MULTIPLE = 16
"""The kernels take sizes that are multiples of this."""
_CAPABILITY = (8, 9)
"""The first CUDA compute capability with float8: Ada, Hopper and later."""


def use_float8(model: Decoder, device: torch.device, *, emulate: bool = False) -> None:
    """Replace the linear layers of all blocks; names and shapes of parameters stay.

    Args:
        model: a model on the meta device, not compiled or sharded yet.
        emulate: whether to compute with rounded bf16 values, on any device: slow, for tests.

    Raises:
        ConfigError: the device has no float8, a size is not a multiple of 16, or torchao is missing.
    """
    if not emulate:
        _check_device(device)
    check_sizes(model)
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise ConfigError(
            f'train.precision = "bf16+fp8" needs torchao: {error}',
            remedy="pip install torchao, in the version that its table names for your torch, or use bf16",
        ) from None
    for block in model.blocks:
        convert_to_float8_training(block, config=Float8LinearConfig(emulate=emulate))


def check_sizes(model: Decoder) -> None:
    """Raise ConfigError if a linear layer of the blocks has a size that the kernels do not take."""
    odd = [
        f"{name} ({layer.in_features} to {layer.out_features})"
        for name, layer in model.blocks[0].named_modules()
        if isinstance(layer, nn.Linear) and (layer.in_features % _MULTIPLE or layer.out_features % _MULTIPLE)
    ]
    if odd:
        raise ConfigError(
            f"float8 products take sizes that are multiples of {_MULTIPLE}, unlike those of {', '.join(odd)}",
            remedy='change the shape, or use train.precision = "bf16"',
        )


def no_float8(device: str) -> ConfigError:
    """The error for a device without float8."""
    return ConfigError(
        f'train.precision = "bf16+fp8" needs a GPU with float8 (NVIDIA Ada, Hopper or later), which {device} is not',
        remedy='use train.precision = "bf16"',
    )


def _check_device(device: torch.device) -> None:
    if device.type != "cuda":
        raise no_float8("a CPU")
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < _CAPABILITY:
        raise no_float8(torch.cuda.get_device_name(device))
