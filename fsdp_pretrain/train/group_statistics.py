"""Norms of gradients and weights and Adam's second moments by group of parameters, to explain loss spikes.

Measured in some steps only, gradients before the update, second moments and weights after it: one pass over this rank's
shards and one gather. Nothing is changed, and nothing waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp_pretrain.checkpoint.state import TrainState
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.models import Decoder
from fsdp_pretrain.parallel.mesh import World, local_part
from fsdp_pretrain.parallel.optimizer import Optimizer
from fsdp_pretrain.run.step_record import ParameterGroup, number

from .observer import Observer

_STRETCHES = 4
"""Parts of the depth whose attention and feed-forward layers are groups of their own."""


def group_of(name: str, layers: int) -> str:
    """The group of a parameter: `embedding`, `head`, `norms`, `attention/FIRST-LAST` or `mlp/FIRST-LAST` (blocks)."""
    parts = name.split(".")
    if any("norm" in part for part in parts):
        return "norms"
    if parts[0] != "blocks":
        return "head" if parts[0] == "head" else "embedding"
    size, width = -(-layers // _STRETCHES), len(str(layers - 1))
    first = int(parts[1]) // size * size
    last = min(first + size, layers) - 1
    return f"{parts[2]}/{first:0{width}}" + (f"-{last:0{width}}" if last > first else "")


class GroupStatistics(Observer):
    """Measures the groups of parameters of a sharded model and its optimiser."""

    def __init__(self, model: Decoder, optimizer: Optimizer, config: Config, world: World) -> None:
        self._optimizer, self._config, self._world = optimizer, config, world
        self._parameters = dict(model.named_parameters())
        groups = [group_of(name, config.model.layers) for name in self._parameters]
        self._names = list(dict.fromkeys(groups))
        mask = [[group == name for group in groups] for name in self._names]
        self._members = torch.tensor(mask, device=world.device)  # bool [groups, parameters]
        self._gradients: Tensor | None = None

    def reconfigured(self, config: Config) -> None:
        self._config = config

    def _due(self, state: TrainState) -> bool:
        """Whether to measure in the step that leads to `state`."""
        every, before = self._config.record.statistics_every, state.consumed - state.batch
        schedule = self._config.schedule
        return every.value > 0 and schedule.due(every, step=state.step, before=before, after=state.consumed)

    def before_update(self, state: TrainState, scale: Tensor | None) -> None:
        """Keep the squared norms of this rank's parts of the gradients: fp64 [groups]."""
        if not self._due(state):
            return
        zero = torch.zeros((), device=self._world.device)
        gradients = [parameter.grad for parameter in self._parameters.values()]
        squares = torch.stack([zero if gradient is None else _square(gradient) for gradient in gradients]).double()
        self._gradients = self._by_group(squares if scale is None else squares / scale.double().square()).sum(-1)

    @torch.no_grad()
    def after_update(self) -> Tensor | None:
        """Squared norms of gradients and weights and the largest second moment: fp64 [3, groups]. One gather."""
        gradients, self._gradients = self._gradients, None
        if gradients is None:
            return None
        states = self._optimizer.state_by_name()
        weights = torch.stack([_square(parameter) for parameter in self._parameters.values()]).double()
        moments = [states[name].get("exp_avg_sq") for name in self._parameters]
        none = torch.full((), -torch.inf, device=self._world.device)  # below every moment, so that it does not count
        largest = torch.stack([none if moment is None else _largest(moment) for moment in moments]).double()
        highest = torch.where(self._members, largest, -torch.inf).amax(-1)
        local = torch.stack((gradients, self._by_group(weights).sum(-1), highest))
        shards = self._world.gather_shards(local)
        return torch.cat((shards[:, :2].sum(0), shards[:, 2:].amax(0)))

    def _by_group(self, values: Tensor) -> Tensor:
        """Values [parameters] -> [groups, parameters]: each in the row of its group, 0 elsewhere."""
        return torch.where(self._members, values, 0.0)

    def fields(self, measured: Tensor) -> dict[str, dict[str, ParameterGroup]]:
        """The field `groups` of a step's record."""
        groups = {
            name: ParameterGroup(
                grad_norm=number(gradients**0.5), weight_norm=number(weights**0.5), second_moment_max=number(largest)
            )
            for name, (gradients, weights, largest) in zip(self._names, measured.T.tolist(), strict=True)
        }
        return {"groups": groups}


def _square(tensor: Tensor) -> Tensor:
    """Squared norm of this rank's part, fp32 0-dim; on a CPU several times faster than `norm()`, and more exact."""
    flat = local_part(tensor).detach().flatten()
    return torch.dot(flat, flat)


def _largest(tensor: Tensor) -> Tensor:
    """The largest element of this rank's part of a tensor without negative elements, 0-dim."""
    local = local_part(tensor)
    return local.amax() if local.numel() else local.new_zeros(())
