"""AdamW with a group that does not decay, clipping, loss scaling, skipped steps, the optimiser's state by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .errors import ConfigError
from .sections import LossScaleSection, OptimizerSection


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

    Args:
        section: the law's constants.
        device: of the ranks, which overflow together.
        state: `state()` of the scaler to continue, or None.
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


def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    lr: float,
    clip: float,
    scaler: LossScaler | None,
    parts: int,
    skip: Callable[[Tensor], Tensor | None],
) -> Tensor:
    """Clip the global gradient norm and take one step; without waiting for the device.

    Args:
        model, optimizer: with gradients, which are gone afterwards.
        lr: learning rate of the step.
        clip: limit of the norm; 0 only measures.
        scaler: for fp16. The gradients are then `scaler.scale * parts` times too large.
        parts: micro-batches of the step.
        skip: is given this rank's norm, fp32 0-dim; what it returns is the same on every rank, fp32 0-dim: 1 if the
            step shall change neither parameters nor moments nor their step counts, else 0. None: none is skipped.

    Returns:
        fp64 [norm before clipping and without scale, loss scale (1 without scaler), 1 if the step was skipped], equal
        on all ranks.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    total = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    norm = total.full_tensor() if isinstance(total, DTensor) else total
    skipped = skip(norm)
    # Fused AdamW does nothing where this is 1: as torch.amp.GradScaler hands it over.
    optimizer.found_inf = skipped  # type: ignore[attr-defined]
    if scaler is None:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), clip or float("inf"), total)
        scale = torch.ones_like(norm)
        optimizer.step()
    else:
        assert skipped is not None
        scale = scaler.scale
        norm = norm / (scale * parts)
        coefficient = (clip / (norm + 1e-6)).clamp(max=1.0) if clip else 1.0
        optimizer.grad_scale = scale * parts / coefficient  # type: ignore[attr-defined]
        optimizer.step()
        scaler.advance(skipped)
    optimizer.zero_grad()
    return torch.stack((norm, scale, torch.zeros_like(norm) if skipped is None else skipped)).double()


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
