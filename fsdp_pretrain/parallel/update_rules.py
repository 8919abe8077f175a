"""How parameters change in a step. `Optimizer` chooses the rule of each parameter, and keeps their states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from fsdp_pretrain.config.sections import OptimizerSection

from .mesh import World


@dataclass(slots=True)  # not frozen: one is made for every parameter in every step
class ParameterPart:
    """This rank's rows of a parameter in a step, all fp32.

    Attributes:
        name, shape: name and shape of the whole parameter.
        values, gradient: the rows, perhaps none.
        state: the states of the rows, by name.
        lr, weight_decay: learning rate and decoupled weight decay of this step.
    """

    name: str
    shape: tuple[int, ...]
    values: Tensor
    gradient: Tensor
    state: dict[str, Tensor]
    lr: float
    weight_decay: float


class UpdateRule(ABC):
    """Base of the rules. A rule keeps nothing between steps but the states that it names here.

    Attributes:
        tensors: names of states in the parameter's shape, fp32, sharded as it is, zero at first.
        scalars: names of fp32 scalars, zero at first.
    """

    tensors: ClassVar[tuple[str, ...]]
    scalars: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def __init__(self, section: OptimizerSection, world: World | None) -> None:
        """`world`: the ranks that share the model; None: this process has all of it."""

    @classmethod
    def takes(cls, shape: tuple[int, ...]) -> bool:
        """Whether parameters of this shape can follow the rule. One that does not take () is for matrices only."""
        del shape
        return True

    @abstractmethod
    def update(
        self, parts: Sequence[ParameterPart], *, betas: tuple[float, float], divisor: Tensor | None, skip: Tensor | None
    ) -> None:
        """Update values and states in place, without waiting for the device. All ranks call it together.

        Args:
            parts: the parameters that have gradients, the same and in the same order on every rank.
            betas: `optimizer.betas` of this step.
            divisor: the gradients are divided by this, fp32 0-dim; None is 1.
            skip: fp32 0-dim, the same on every rank: 1 to leave values and states unchanged, else 0; None is 0.
                Gradients may then be not finite.
        """


class AdamW(UpdateRule):
    """Fused AdamW (arXiv 1711.05101)."""

    tensors = ("exp_avg", "exp_avg_sq")
    scalars = ("step",)

    def __init__(self, section: OptimizerSection, world: World | None) -> None:
        del world
        self._eps = section.eps

    def update(
        self, parts: Sequence[ParameterPart], *, betas: tuple[float, float], divisor: Tensor | None, skip: Tensor | None
    ) -> None:
        """As `UpdateRule.update`: one fused call for each pair of rate and decay."""
        for lr, decay in dict.fromkeys((part.lr, part.weight_decay) for part in parts):
            alike = [part for part in parts if (part.lr, part.weight_decay) == (lr, decay)]
            adamw(
                [part.values for part in alike],
                [part.gradient for part in alike],
                [part.state["exp_avg"] for part in alike],
                [part.state["exp_avg_sq"] for part in alike],
                [],
                [part.state["step"] for part in alike],
                fused=True,  # also works on CPU, several times faster than the default
                grad_scale=divisor,
                found_inf=skip,
                amsgrad=False,
                beta1=betas[0],
                beta2=betas[1],
                lr=lr,
                weight_decay=decay,
                eps=self._eps,
                maximize=False,
            )


def unless(skip: Tensor | None, old: Tensor, new: Tensor) -> Tensor:
    """`new`, or `old` where `skip` is 1: elementwise, so that what is not finite in one never reaches the other."""
    return new if skip is None else torch.where(skip > 0, old, new)
