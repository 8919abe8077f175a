"""Statistics of groups of parameters, in some steps: what to look at when the loss spikes.

Gradients are measured before the update; second moments, weights and the update after it. The update is computed again
from the moments: a copy of all weights from before it would double their memory. Everything is one pass over this
rank's shards in stretches of bounded size, and one gather; nothing is changed, and nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_pretrain.checkpoint.state import TrainState
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.models import Decoder
from fsdp_pretrain.parallel.mesh import World, local_part
from fsdp_pretrain.parallel.optimizer import AdamW, AppliedUpdate
from fsdp_pretrain.record.step_record import ParameterGroup, number

_STRETCHES = 4
"""Parts of the depth whose attention and feed-forward layers are groups of their own."""
_ELEMENTS = 2**22
"""Most elements of a stretch, which needs two fp32 tensors of its size."""


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


@dataclass(frozen=True)
class _Piece:
    """Elements [start, stop) of this rank's part of a parameter, which is the model's `number`-th."""

    name: str
    number: int
    start: int
    stop: int

    def of(self, tensor: Tensor) -> Tensor:
        return local_part(tensor).detach().flatten()[self.start : self.stop]


class GroupStatistics:
    """Measures the groups of a model.

    Args:
        model: sharded.
        optimizer: of its parameters.
        config: the run's configuration.
        world: all ranks.
    """

    def __init__(self, model: Decoder, optimizer: AdamW, config: Config, world: World) -> None:
        self._optimizer, self._config, self._world = optimizer, config, world
        self._parameters = dict(model.named_parameters())
        groups = [group_of(name, config.model.layers) for name in self._parameters]
        self._names = list(dict.fromkeys(groups))
        self._stretches = list(_stretches(self._parameters))
        pieces = [piece for stretch in self._stretches for piece in stretch]
        self._members = self._mask(groups)
        self._piece_members = self._mask([groups[piece.number] for piece in pieces])

    def _mask(self, groups: list[str]) -> Tensor:
        """Which of a list belong to each group: bool [groups, 1 + length]; the first to none."""
        mask = [[False, *(group == name for group in groups)] for name in self._names]
        return torch.tensor(mask, device=self._world.device)

    def due(self, state: TrainState) -> bool:
        """Whether to measure in the step that leads to `state`."""
        every, before = self._config.record.statistics_every, state.consumed - state.batch
        schedule = self._config.schedule
        return every.value > 0 and schedule.due(every, step=state.step, before=before, after=state.consumed)

    def of_gradients(self, scale: Tensor | None) -> Tensor:
        """Squared norms of this rank's parts of the gradients: fp64 [groups].

        `scale`: by which they are too large, 0-dim; None is 1.
        """
        gradients = [parameter.grad for parameter in self._parameters.values()]
        zero = torch.zeros((), device=self._world.device)
        own = [zero if each is None else _square(local_part(each).flatten()) for each in gradients]
        squares = torch.stack([zero, *own]).double()
        return torch.where(self._members, squares if scale is None else squares / scale.double().square(), 0.0).sum(-1)

    @torch.no_grad()
    def after_update(self, gradients: Tensor) -> Tensor:
        """What was measured, of the whole model: fp64 [values, groups] on the device, for `read`. One gather.

        `gradients`: what `of_gradients` returned before the update.
        """
        applied = {name: update for update in self._optimizer.applied for name in update.names}
        states = self._optimizer.state_by_name()
        factors, offsets = self._corrections(states)
        rows = [torch.zeros(3, 1, dtype=torch.float64, device=self._world.device)]
        for stretch in self._stretches:
            rows.append(self._measure(stretch, states, applied, factors, offsets))
        values = torch.where(self._piece_members, torch.cat(rows, 1).unsqueeze(1), 0.0)
        own = torch.cat((gradients.unsqueeze(0), values[:2].sum(-1), values[2:].amax(-1)))
        every = self._world.gather_shards(own)
        return torch.cat((every[:, :3].sum(0), every[:, 3:].amax(0)))

    def _corrections(self, states: dict[str, dict[str, Tensor]]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """(a, b) of every parameter, fp32 0-dim, so that Adam's update is lr / a * exp_avg / (sqrt(exp_avg_sq) + b)."""
        beta1, beta2 = self._optimizer.applied[0].betas
        steps = torch.stack([state["step"] for state in states.values()]).double().clamp(min=1)
        first, second = 1 - beta1**steps, 1 - beta2**steps
        eps = self._config.optimizer.eps
        return (first / second.sqrt()).float().unbind(), (second.sqrt() * eps).float().unbind()

    def _measure(
        self,
        stretch: list[_Piece],
        states: dict[str, dict[str, Tensor]],
        applied: dict[str, AppliedUpdate],
        factors: tuple[Tensor, ...],
        offsets: tuple[Tensor, ...],
    ) -> Tensor:
        """Of every piece: squared norms of weights and update, and the maximum of the second moment.

        The update with decay d is -lr * (u + d * w) / (1 - lr * d), of Adam's u and the weights w after it.
        """
        weights = [piece.of(self._parameters[piece.name]) for piece in stretch]
        first = [piece.of(states[piece.name]["exp_avg"]) for piece in stretch]
        second = [piece.of(states[piece.name]["exp_avg_sq"]) for piece in stretch]
        updates = [applied.get(piece.name, _NONE) for piece in stretch]
        scales = [factors[piece.number] for piece in stretch]
        roots = list(torch._foreach_sqrt(second))
        torch._foreach_add_(roots, [offsets[piece.number] for piece in stretch])
        moved = torch._foreach_mul(weights, torch._foreach_mul(scales, [update.weight_decay for update in updates]))
        torch._foreach_addcdiv_(moved, first, roots)
        rates = [update.lr / (1 - update.lr * update.weight_decay) for update in updates]
        lengths = [
            _square(each) * (rate / scale).square() for each, rate, scale in zip(moved, rates, scales, strict=True)
        ]
        values = [*map(_square, weights), *lengths, *(each.amax() for each in second)]
        return torch.stack(values).double().view(3, -1)

    def read(self, measured: Tensor, *, skipped: bool) -> dict[str, ParameterGroup]:
        """By group, from what `after_update` measured, in host memory. `skipped`: the step was."""
        found = {}
        for name, column in zip(self._names, measured.T.tolist(), strict=True):
            gradients, weights, updates, largest = column
            found[name] = ParameterGroup(
                grad_norm=number(gradients**0.5),
                weight_norm=number(weights**0.5),
                update_ratio=0.0 if skipped else number((updates / weights) ** 0.5) if weights else None,
                second_moment_max=number(largest),
            )
        return found


def _square(flat: Tensor) -> Tensor:
    """The squared norm of [n], fp32 0-dim; on a CPU several times faster than a norm, and nearer to it."""
    return torch.dot(flat, flat)


_NONE = AppliedUpdate([], 0.0, 0.0, (0.0, 0.0))


def _stretches(parameters: Mapping[str, Tensor]) -> Iterator[list[_Piece]]:
    """This rank's parts of the parameters, cut so that a stretch has at most `_ELEMENTS`."""
    stretch, room = list[_Piece](), _ELEMENTS
    for index, (name, parameter) in enumerate(parameters.items()):
        start, size = 0, local_part(parameter).numel()
        while start < size:
            stop = min(start + room, size)
            stretch.append(_Piece(name, index, start, stop))
            start, room = stop, room - (stop - start)
            if not room:
                yield stretch
                stretch, room = [], _ELEMENTS
    if stretch:
        yield stretch
