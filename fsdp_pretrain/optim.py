"""AdamW with a group that does not decay, clipping, and the optimiser's state by parameter name."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .errors import ConfigError
from .sections import OptimizerSection


def parameter_groups(model: nn.Module, patterns: list[str]) -> tuple[list[str], list[str]]:
    """Names of the parameters (that decay, that do not).

    Raises:
        ConfigError: a pattern matches no parameter, so it is not doing what its author thinks.
    """
    names = [name for name, _ in model.named_parameters()]
    # A norm has no bias in some families: a default that matches nothing is fine, one that was written is not.
    defaults = OptimizerSection.model_fields["no_decay"].get_default()
    for pattern in patterns:
        if pattern not in defaults and not any(re.search(pattern, name) for name in names):
            raise ConfigError(
                f"optimizer.no_decay has {pattern!r}, which matches no parameter",
                effect="parameters meant to be spared would decay",
                remedy=f"names look like {names[0]!r}, {names[-1]!r}",
            )
    spared = [name for name in names if any(re.search(pattern, name) for pattern in patterns)]
    return [name for name in names if name not in set(spared)], spared


def build(model: nn.Module, config: OptimizerSection) -> torch.optim.AdamW:
    """Fused AdamW (arXiv 1711.05101) over the model's parameters, in two groups. Raises ConfigError."""
    parameters = dict(model.named_parameters())
    decaying, spared = parameter_groups(model, config.no_decay)
    groups: list[dict[str, Any]] = [
        {"params": [parameters[name] for name in decaying], "weight_decay": config.weight_decay},
        {"params": [parameters[name] for name in spared], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=True,  # works on CPU and with DTensor, and is several times faster than the default there
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use `lr` for the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip(model: nn.Module, limit: float) -> Tensor:
    """Clip the global gradient norm to `limit` (0: only measure).

    Returns:
        The norm before clipping, a 0-dim fp32 tensor on the device, equal on all ranks.
    """
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit or float("inf"))
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def state_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """Optimiser state as {parameter name: {"step", "exp_avg", "exp_avg_sq"}}, allocating what is missing.

    By name, not by index, so that groups may change; and without `get_optimizer_state_dict`, which takes a hidden
    step on a fresh optimiser. The tensors are the live ones: loading into them loads the optimiser.
    """
    states = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        if not state:
            # Fused AdamW keeps its step count on the device of the parameter.
            device = parameter.to_local().device if isinstance(parameter, DTensor) else parameter.device
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        states[name] = dict(state)
    return states
