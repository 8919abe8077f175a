"""AdamW with a no-decay group, gradient clipping, loss scaling, skipped steps, optimiser state by name."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from fsdp_pretrain.config.sections import SMALLEST_SCALE, LossScaleSection, OptimizerSection

from .mesh import local_part

_HYSTERESIS = 2
"""Overflows within a window before the loss scale is halved."""


def parameter_groups(model: nn.Module) -> tuple[list[str], list[str]]:
    """Names of the parameters with weight decay; and of those without: biases, and the weights of norms."""
    names = [name for name, _ in model.named_parameters()]
    undecayed = [name for name in names if re.search(r"bias$|norm.*\.weight$", name)]
    return [name for name in names if name not in set(undecayed)], undecayed


class AdamW:
    """Fused AdamW (arXiv 1711.05101) over this rank's parts of a model's parameters, in two groups.

    `torch.optim.AdamW` would take three times as long on the host, since the parameters are DTensors. State is kept by
    name, not index, so that groups may change.

    Attributes:
        state: by parameter name, {"step", "exp_avg", "exp_avg_sq"}; the moments are sharded like the parameter.
    """

    def __init__(self, model: nn.Module, config: OptimizerSection) -> None:
        self._config, self._parameters = config, dict(model.named_parameters())
        decayed, undecayed = parameter_groups(model)
        self._groups = ((decayed, True), (undecayed, False))
        self.state: dict[str, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(
        self,
        *,
        lr: float,
        weight_decay: float | None = None,
        betas: tuple[float, float] | None = None,
        divisor: Tensor | None = None,
        skip: Tensor | None = None,
    ) -> None:
        """Take or skip one step without synchronising with the device. Clears the gradients.

        Args:
            weight_decay, betas: values for this step; None: as configured. The second group has no weight decay.
            divisor: the gradients are divided by this, fp32 0-dim; None is 1.
            skip: fp32 0-dim, the same on every rank: 1 to leave parameters, moments and step counts unchanged, else 0;
                None is 0.
        """
        decay = self._config.weight_decay if weight_decay is None else weight_decay
        betas = self._config.betas if betas is None else betas
        for names, decays in self._groups:
            used = [name for name in names if self._parameters[name].grad is not None]
            parameters, states = [self._parameters[name] for name in used], [self._state_of(name) for name in used]
            adamw(
                [local_part(parameter).detach() for parameter in parameters],
                [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None],
                [local_part(state["exp_avg"]) for state in states],
                [local_part(state["exp_avg_sq"]) for state in states],
                [],
                [state["step"] for state in states],
                fused=True,  # also works on CPU, several times faster than the default
                grad_scale=divisor,
                found_inf=skip,
                amsgrad=False,
                beta1=betas[0],
                beta2=betas[1],
                lr=lr,
                weight_decay=decay if decays else 0.0,
                eps=self._config.eps,
                maximize=False,
            )
        self.zero_grad()

    def zero_grad(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def state_by_name(self) -> dict[str, dict[str, Tensor]]:
        """The live state of all parameters; allocates state that does not exist yet."""
        return {name: dict(self._state_of(name)) for name in self._parameters}

    def _state_of(self, name: str) -> dict[str, Tensor]:
        state, parameter = self.state.setdefault(name, {}), self._parameters[name]
        if not state:
            # The fused kernel wants the step count on the parameter's device.
            state["step"] = torch.zeros((), dtype=torch.float32, device=local_part(parameter).device)
            state["exp_avg"] = torch.zeros_like(parameter, requires_grad=False)
            state["exp_avg_sq"] = torch.zeros_like(parameter, requires_grad=False)
        return state


class LossScaler:
    """Dynamic loss scaling for fp16 with Megatron-DeepSpeed's rule, in device tensors, so no step synchronises.

    A step overflows if loss or gradients of any rank are not finite; all ranks then skip it. An overflow uses up
    hysteresis; once one is left, it halves the scale. Good steps in between do not restore hysteresis; after `window`
    good steps in a row the scale doubles and hysteresis is full again.

    `state`: the `state()` of another scaler to continue from.
    """

    def __init__(self, section: LossScaleSection, device: torch.device, state: list[float] | None = None) -> None:
        self._window = section.window
        start = [section.first, _HYSTERESIS, 0.0]
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
        """Update the scale after a step. `overflow`: 0-dim, equal on all ranks, 1 if the step was skipped, else 0."""
        scale, left, good = self._state.unbind()
        halved = torch.where(left > 1, scale, (scale / 2).clamp(min=SMALLEST_SCALE))
        after_overflow = torch.stack((halved, (left - 1).clamp(min=1), torch.zeros_like(good)))
        doubled = torch.stack((scale * 2, torch.full_like(left, _HYSTERESIS), torch.zeros_like(good)))
        after_good = torch.where(good + 1 >= self._window, doubled, torch.stack((scale, left, good + 1)))
        self._state = torch.where(overflow > 0, after_overflow, after_good)


def local_norm(model: nn.Module) -> Tensor:
    """Norm of this rank's parts of the gradients, loss scale included, fp32 0-dim, without waiting for the device."""
    gradients = [local_part(p.grad) for p in model.parameters() if p.grad is not None]
    return torch.nn.utils.get_total_norm(gradients)


def clip(norm: Tensor, limit: float, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """How to clip the norm of the gradients that the optimiser will use.

    Args:
        norm: norm of all gradients, 0-dim.
        limit: largest norm; 0: no limit.
        scale: factor by which the gradients are too large (for fp16), fp32 0-dim; None is 1.

    Returns:
        The norm unscaled and unclipped, fp32 0-dim; and the divisor for `AdamW.step`.
    """
    norm = norm.float() if scale is None else norm.float() / scale
    if not limit:
        return norm, scale
    coefficient = (limit / (norm + 1e-6)).clamp(max=1.0)
    return norm, (1.0 if scale is None else scale) / coefficient
