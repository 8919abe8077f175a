"""AdamW with a no-decay group, gradient clipping, loss scaling, skipped steps, optimiser state by name."""

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
    """Names of the parameters with and without weight decay.

    Raises:
        ConfigError: a pattern that is not a default matches no parameter.
    """
    names = [name for name, _ in model.named_parameters()]
    # Norms have no bias in some families: a default pattern may match nothing, a configured one may not.
    defaults = OptimizerSection.model_fields["no_decay"].get_default()
    for pattern in patterns:
        if pattern not in defaults and not any(re.search(pattern, name) for name in names):
            raise ConfigError(
                f"optimizer.no_decay has {pattern!r}, which matches no parameter",
                effect="parameters meant to be exempt would decay",
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
        fused=True,  # also works on CPU and with DTensor, several times faster than the default
    )


class LossScaler:
    """Dynamic loss scaling for fp16 with Megatron-DeepSpeed's rule, in device tensors, so no step synchronises.

    A step overflows if loss or gradients of any rank are not finite; all ranks then skip it. An overflow uses up
    hysteresis; once one is left, it halves the scale. Good steps in between do not restore hysteresis; after `window`
    good steps in a row the scale doubles and hysteresis is full again.

    `state`: the `state()` of another scaler to continue from.
    """

    def __init__(self, section: LossScaleSection, device: torch.device, state: list[float] | None = None) -> None:
        self._section = section
        start = [section.first, section.hysteresis, 0.0]
        self._state = torch.tensor(state or start, dtype=torch.float32, device=device)

    @property
    def scale(self) -> Tensor:
        """Factor of the next step's loss, fp32, 0-dim."""
        return self._state[0]

    def state(self) -> list[float]:
        """[scale, hysteresis left, good steps in a row]; synchronises with the device."""
        values: list[float] = self._state.tolist()
        return values

    def advance(self, overflow: Tensor) -> None:
        """Update after a step; `overflow`: 0-dim, the same on every rank, 1 if the step was skipped, else 0."""
        law = self._section
        scale, left, good = self._state.unbind()
        halved = torch.where(left > 1, scale, (scale / 2).clamp(min=law.min))
        after_overflow = torch.stack((halved, (left - 1).clamp(min=1), torch.zeros_like(good)))
        doubled = torch.stack((scale * 2, torch.full_like(left, law.hysteresis), torch.zeros_like(good)))
        after_good = torch.where(good + 1 >= law.window, doubled, torch.stack((scale, left, good + 1)))
        self._state = torch.where(overflow > 0, after_overflow, after_good)


def gradient_norm(model: nn.Module) -> Tensor:
    """Global gradient norm, fp32 0-dim, loss scale included; does not synchronise with the device. Collective."""
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
    """Clip the norm of the gradients that `apply` will use.

    Args:
        norm: from `gradient_norm`.
        limit: largest norm; 0 is none.
        scaler: for fp16. The gradients are then `scaler.scale * parts` times too large, and stay so: the optimiser
            divides them.
        parts: micro-batches of the step.

    Returns:
        The unscaled norm before clipping, fp32 0-dim.
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
    """Take or skip one step without synchronising with the device. Clears the gradients.

    Args:
        skip: the same on every rank, fp32 0-dim: 1 to leave parameters, moments and step counts unchanged, else 0.
            None never skips.
        scaler: for fp16; needs `skip`.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    # Fused AdamW does nothing if this is 1; torch.amp.GradScaler sets it likewise.
    optimizer.found_inf = skip  # type: ignore[attr-defined]
    optimizer.step()
    if scaler is not None:
        assert skip is not None
        scaler.advance(skip)
    optimizer.zero_grad()


def state_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """Live optimiser state as {parameter name: {"step", "exp_avg", "exp_avg_sq"}}, allocating what is missing.

    It is keyed by name, not index, so that groups may change. `get_optimizer_state_dict` is avoided, since it takes a
    hidden step on a fresh optimiser.
    """
    states = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        if not state:
            # Fused AdamW keeps its step count on the parameter's device.
            state["step"] = torch.zeros((), dtype=torch.float32, device=local_part(parameter).device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        states[name] = dict(state)
    return states
