"""AdamW with a group that does not decay, clipping, loss scaling, skipped steps, the optimiser's state by name."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_pretrain.config.sections import LossScaleSection, OptimizerSection
from fsdp_pretrain.errors import ConfigError

from .mesh import local_part


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


class LossScaler:
    """Dynamic loss scaling for fp16: the law of Megatron-DeepSpeed, in tensors of the device, so that no step waits.

    A step overflows if loss or gradients of any rank are not finite. All ranks then skip it. The first overflow of a
    window only uses up hysteresis, further ones halve the scale; a good step in between does not bring hysteresis back
    (it is not consecutive). After `window` good steps in a row the scale doubles and hysteresis is full again.

    It continues from the `state()` of another scaler, if one is given.
    """

    def __init__(self, section: LossScaleSection, device: torch.device, state: list[float] | None = None) -> None:
        self._section = section
        start = [section.first, section.hysteresis, 0.0]
        self._state = torch.tensor(state or start, dtype=torch.float32, device=device)

    @property
    def scale(self) -> Tensor:
        """What the loss of the next step is multiplied by, fp32, 0-dim."""
        return self._state[0]

    def state(self) -> list[float]:
        """[scale, hysteresis left, good steps in a row]; waits for the device."""
        values: list[float] = self._state.tolist()
        return values

    def advance(self, overflow: Tensor) -> None:
        """Apply the law after a step; `overflow`: 0-dim, the same on every rank, 1 if it was skipped, else 0."""
        law = self._section
        scale, left, good = self._state.unbind()
        halved = torch.where(left > 1, scale, (scale / 2).clamp(min=law.min))
        after_overflow = torch.stack((halved, (left - 1).clamp(min=1), torch.zeros_like(good)))
        doubled = torch.stack((scale * 2, torch.full_like(left, law.hysteresis), torch.zeros_like(good)))
        after_good = torch.where(good + 1 >= law.window, doubled, torch.stack((scale, left, good + 1)))
        self._state = torch.where(overflow > 0, after_overflow, after_good)


def gradient_norm(model: nn.Module) -> Tensor:
    """Global norm of the gradients, fp32 0-dim, loss scale included; without waiting for the device. Collective."""
    total = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return total.full_tensor() if isinstance(total, DTensor) else total


def clip(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    norm: Tensor,
    limit: float,
    *,
    scaler: LossScaler | None,
    parts: int,
) -> Tensor:
    """Limit the norm of the gradients that `apply` will use.

    Args:
        norm: from `gradient_norm`.
        limit: of the norm; 0 is none.
        scaler: for fp16. The gradients are then `scaler.scale * parts` times too large, and stay it: the optimiser
            divides them.
        parts: micro-batches of the step.

    Returns:
        The norm before clipping and without scale, fp32 0-dim.
    """
    if scaler is None:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), limit or float("inf"), norm)
        return norm
    scale = scaler.scale * parts
    norm = norm / scale
    coefficient = (limit / (norm + 1e-6)).clamp(max=1.0) if limit else 1.0
    optimizer.grad_scale = scale / coefficient  # type: ignore[attr-defined]
    return norm


def apply(optimizer: torch.optim.Optimizer, *, lr: float, skip: Tensor | None, scaler: LossScaler | None) -> None:
    """Take one step, or skip it; without waiting for the device. The gradients are gone afterwards.

    Args:
        skip: the same on every rank, fp32 0-dim: 1 if the step shall change neither parameters nor moments nor their
            step counts, else 0. None skips none.
        scaler: for fp16, with `skip`.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    # Fused AdamW does nothing where this is 1: as torch.amp.GradScaler hands it over.
    optimizer.found_inf = skip  # type: ignore[attr-defined]
    optimizer.step()
    if scaler is not None:
        assert skip is not None
        scaler.advance(skip)
    optimizer.zero_grad()


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
            state["step"] = torch.zeros((), dtype=torch.float32, device=local_part(parameter).device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        states[name] = dict(state)
    return states
