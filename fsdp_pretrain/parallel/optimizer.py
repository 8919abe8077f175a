"""The optimiser: a rule for every parameter, their states by name, skipped steps; gradient norm and clipping."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from fsdp_pretrain import extensions
from fsdp_pretrain.config.sections import OptimizerSection
from fsdp_pretrain.errors import ConfigError

from .mesh import World, local_part
from .muon import Muon
from .update_rules import AdamW, ParameterPart, UpdateRule

RULES: Mapping[str, type[UpdateRule]] = {"adamw": AdamW, "muon": Muon}
"""Our own rules, by the names of `optimizer.kind`."""


def rule_of(kind: str) -> type[UpdateRule]:
    """The rule of a kind, perhaps an extension's. Raises ConfigError: there is none, or it cannot be imported."""
    if kind in RULES:
        return RULES[kind]
    if (part := extensions.parts("optimizers").get(kind)) is None:
        known = ", ".join([*RULES, *extensions.parts("optimizers")])
        raise ConfigError(f"there is no optimiser {kind!r}", remedy=f"there are {known}")
    rule: type[UpdateRule] = part.load()
    return rule


@dataclass(frozen=True)
class Treatment:
    """How a parameter is updated: `kind` of its rule, factor of the learning rate, weight decay if not the run's."""

    kind: str
    lr_scale: float = 1.0
    weight_decay: float | None = None


def treatments(shapes: Mapping[str, tuple[int, ...]], section: OptimizerSection) -> dict[str, Treatment]:
    """The treatment of every parameter, given all shapes by name.

    The first of `optimizer.groups` that matches a parameter sets what it names. Otherwise biases and the weights of
    norms do not decay. Of a kind that takes matrices only are those of blocks; the rest are AdamW's. Raises ConfigError
    if a group matches no parameter, or a rule does not take a parameter.
    """
    found, problems, matched = dict[str, Treatment](), [], set[str]()
    for name, shape in shapes.items():
        rule = rule_of(section.kind)
        fits = rule.takes(shape) and (name.startswith("blocks.") or rule.takes(()))
        kind = section.kind if fits else "adamw"
        decay = 0.0 if re.search(r"bias$|norm.*\.weight$", name) else None
        found[name] = Treatment(kind, weight_decay=decay)
        group = next((group for group in section.groups if fnmatchcase(name, group.match)), None)
        if group is None:
            continue
        matched.add(group.match)
        decay = decay if group.weight_decay is None else group.weight_decay
        found[name] = Treatment(group.kind or kind, group.lr_scale, decay)
        if not rule_of(found[name].kind).takes(shape):
            problems.append(f"{group.match!r}: {found[name].kind} takes no parameter of shape {shape}, as of {name}")
    for group in section.groups:
        if group.match not in matched:
            problems.append(f"{group.match!r}: matches no parameter that no earlier group matches")
    if problems:
        raise ConfigError(
            "optimizer.groups do not fit the model:\n    " + "\n    ".join(dict.fromkeys(problems)),
            remedy=f"the model has parameters such as {', '.join(list(shapes)[:3])}",
        )
    return found


def checkpoint_bytes(model: nn.Module, section: OptimizerSection) -> int:
    """Bytes of the tensors of a checkpoint: parameters and their states, in fp32. Raises ConfigError."""
    states = state_tensors(model, section)
    return sum(4 * parameter.numel() * (1 + states[name]) for name, parameter in model.named_parameters())


def state_tensors(model: nn.Module, section: OptimizerSection) -> dict[str, int]:
    """Number of fp32 states in a parameter's own shape, by its name. Raises ConfigError, as `treatments`."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return {name: len(rule_of(each.kind).tensors) for name, each in treatments(shapes, section).items()}


class Optimizer:
    """Updates this rank's parts of a model's parameters, each by its rule.

    `torch.optim.AdamW` would take three times as long on the host, since the parameters are DTensors. State is kept by
    name, not index, so that groups may change.

    Args:
        world: the ranks that share the model; None: this process has all of it.

    Attributes:
        state: by parameter name, the states that its rule names, sharded as the rule says.
    """

    def __init__(self, model: nn.Module, section: OptimizerSection, world: World | None = None) -> None:
        self._section, self._parameters = section, dict(model.named_parameters())
        self._shapes = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
        self._treatments = treatments(self._shapes, section)
        kinds = dict.fromkeys(treatment.kind for treatment in self._treatments.values())
        self._rules = {kind: rule_of(kind)(section, world) for kind in kinds}
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
            weight_decay, betas: values for this step; None: as configured.
            divisor: the gradients are divided by this, fp32 0-dim; None is 1.
            skip: fp32 0-dim, the same on every rank: 1 to leave parameters and states unchanged, else 0; None is 0.
        """
        decay = self._section.weight_decay if weight_decay is None else weight_decay
        betas = self._section.betas if betas is None else betas
        for kind, rule in self._rules.items():
            rule.update(self._parts(kind, lr, decay), betas=betas, divisor=divisor, skip=skip)
        self.zero_grad()

    def _parts(self, kind: str, lr: float, weight_decay: float) -> list[ParameterPart]:
        """The parameters of a kind that have gradients."""
        parts = []
        for name, treatment in self._treatments.items():
            parameter = self._parameters[name]
            if treatment.kind != kind or parameter.grad is None:
                continue
            state = {key: local_part(tensor) for key, tensor in self._state_of(name).items()}
            decay = weight_decay if treatment.weight_decay is None else treatment.weight_decay
            values, gradient = local_part(parameter).detach(), local_part(parameter.grad)
            scaled = lr * treatment.lr_scale
            parts.append(ParameterPart(name, self._shapes[name], values, gradient, state, scaled, decay))
        return parts

    def zero_grad(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def state_by_name(self) -> dict[str, dict[str, Tensor]]:
        """The live state of all parameters; allocates state that does not exist yet."""
        return {name: dict(self._state_of(name)) for name in self._parameters}

    def _state_of(self, name: str) -> dict[str, Tensor]:
        state, parameter = self.state.setdefault(name, {}), self._parameters[name]
        if not state:
            rule = self._rules[self._treatments[name].kind]
            # The fused kernel wants the step count on the parameter's device.
            device = local_part(parameter).device
            state.update({key: torch.zeros((), dtype=torch.float32, device=device) for key in rule.scalars})
            state.update({key: torch.zeros_like(parameter, requires_grad=False) for key in rule.tensors})
        return state


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
        The norm unscaled and unclipped, fp32 0-dim; and the divisor for `Optimizer.step`.
    """
    norm = norm.float() if scale is None else norm.float() / scale
    if not limit:
        return norm, scale
    coefficient = (limit / (norm + 1e-6)).clamp(max=1.0)
    return norm, (1.0 if scale is None else scale) / coefficient
