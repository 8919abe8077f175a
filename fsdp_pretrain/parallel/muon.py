"""Muon (kellerjordan.github.io/posts/muon, arXiv 2502.16982) on a hybrid mesh, without computing any product twice.

FSDP reduces the gradients as for any optimiser. Of each matrix, one rank among all is the owner: the shards of the
owner's replica send it their rows of the update's direction, it makes them orthogonal, sends the rows back, and every
shard passes its rows on to the other replicas. Rounds of at most one matrix per rank overlap. Collectives depend only
on names, shapes and mesh; a matrix's result does not depend on what is sent with it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_pretrain.config.sections import OptimizerSection

from .mesh import REPLICATE, SHARD, World, shard_rows
from .update_rules import ParameterPart, UpdateRule, unless

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the odd polynomial x, x^3, x^5 that brings singular values towards 1 (Jordan et al.)."""
ITERATIONS = 5
_SMALLEST_NORM = 1e-7


def orthogonalize(matrix: Tensor) -> Tensor:
    """A matrix with the singular vectors of `matrix` [m, n] and singular values near 1, in its dtype."""
    a, b, c = _COEFFICIENTS
    x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=_SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


def flops_of(shape: tuple[int, int]) -> int:
    """Floating-point operations of `orthogonalize`."""
    small, large = sorted(shape)
    return ITERATIONS * (4 * small**2 * large + 2 * small**3)


@dataclass(frozen=True)
class Matrix:
    """A parameter by its name and shape."""

    name: str
    rows: int
    columns: int


Round = tuple[Matrix | None, ...]
"""By rank, the matrix that it makes orthogonal."""


@cache
def assign(matrices: tuple[Matrix, ...], replicas: int, shards: int) -> tuple[Round, ...]:
    """The rounds of a step: the largest remaining matrix goes to the rank with the least work so far.

    Of several such ranks, to one in another replica than the last: then replicas have alike rows to pass on.
    """
    loads = [(0, shard, replica) for shard in range(shards) for replica in range(replicas)]
    owned: list[list[Matrix]] = [[] for _ in range(replicas * shards)]
    for matrix in sorted(matrices, key=lambda each: -flops_of((each.rows, each.columns))):
        load, shard, replica = heapq.heappop(loads)
        owned[replica * shards + shard].append(matrix)
        heapq.heappush(loads, (load + flops_of((matrix.rows, matrix.columns)), shard, replica))
    return tuple(zip_longest(*owned))


class Muon(UpdateRule):
    """Momentum of the gradients, with Nesterov's look ahead, made orthogonal; decoupled weight decay.

    Products in bf16 on a GPU, in fp32 on a CPU.
    """

    tensors = ("momentum",)

    def __init__(self, section: OptimizerSection, world: World | None) -> None:
        self._momentum, self._scale = section.momentum, section.update_scale
        device = torch.device("cpu") if world is None else world.device
        self._lanes = _Lanes(world)
        self._nothing = torch.empty(0, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)

    @classmethod
    def takes(cls, shape: tuple[int, ...]) -> bool:
        return len(shape) == 2

    def update(
        self, parts: Sequence[ParameterPart], *, betas: tuple[float, float], divisor: Tensor | None, skip: Tensor | None
    ) -> None:
        """As `UpdateRule.update`. Sends rows of matrices within replicas and between them."""
        del betas
        by_name = {part.name: part for part in parts}

        def direction(matrix: Matrix) -> Tensor:
            part = by_name[matrix.name]
            gradient = _finite(part.gradient, divisor, skip)
            return gradient.lerp(part.state["momentum"], self._momentum).to(self._nothing.dtype)

        def change(matrix: Matrix, rows: Tensor) -> None:
            part = by_name[matrix.name]
            decayed = part.values * (1 - part.lr * part.weight_decay)
            new = decayed.add_(rows, alpha=-part.lr * self._factor(part.shape))
            part.values.copy_(unless(skip, part.values, new))

        for part in parts:
            momentum = part.state["momentum"]
            ahead = momentum.lerp(_finite(part.gradient, divisor, skip), 1 - self._momentum)
            momentum.copy_(unless(skip, momentum, ahead))
        matrices = tuple(Matrix(part.name, *part.shape) for part in parts)
        rounds = assign(matrices, self._lanes.replicas, self._lanes.shards)
        flights: dict[int, _Flight] = {}
        for now in range(len(rounds) + 3):  # what is sent for one round overlaps with the products of the one before
            if now < len(rounds):
                flights[now] = _Flight(rounds[now], self._lanes)
                flights[now].collect(direction, self._nothing)
            if now - 1 in flights:
                flights[now - 1].orthogonalize()
            if now - 2 in flights:
                flights[now - 2].spread()
            if now - 3 in flights:
                flights.pop(now - 3).apply(change)

    def _factor(self, shape: tuple[int, ...]) -> float:
        """Factor of the learning rate. `rms`: an update has the usual size of AdamW's (0.2 per element); `spectral`:
        its spectral norm is 1, or more for tall matrices."""
        rows, columns = shape
        return 0.2 * math.sqrt(max(shape)) if self._scale == "rms" else math.sqrt(max(1.0, rows / columns))


def _finite(gradient: Tensor, divisor: Tensor | None, skip: Tensor | None) -> Tensor:
    """The gradient that counts: clipped, and zero in a skipped step."""
    clipped = gradient if divisor is None else gradient / divisor
    return clipped if skip is None else unless(skip, torch.zeros_like(clipped), clipped)


class _Lanes:
    """Where this rank is in the mesh, and the groups that it sends to; without a world, a single process."""

    def __init__(self, world: World | None) -> None:
        self.replicas, self.shards = (1, 1) if world is None else (world.replicas, world.shards)
        self.ranks = self.replicas * self.shards
        self.replica, self.shard = (0, 0) if world is None else divmod(world.rank, self.shards)
        self._shards = None if world is None else world.mesh.get_group(SHARD)
        self._replicas = None if world is None else world.mesh.get_group(REPLICATE)

    def exchange(self, sent: Tensor, sizes: list[int], received: list[int]) -> tuple[Tensor, dist.Work | None]:
        """Send each shard of this replica its part of `sent`; sizes in elements."""
        if self.shards == 1:
            return sent, None
        out = sent.new_empty(sum(received))
        return out, dist.all_to_all_single(out, sent, received, sizes, group=self._shards, async_op=True)

    def gather(self, part: Tensor) -> tuple[list[Tensor], dist.Work | None]:
        """The parts of this shard in all replicas."""
        if self.replicas == 1:
            return [part], None
        parts = [torch.empty_like(part) for _ in range(self.replicas)]
        return parts, dist.all_gather(parts, part, group=self._replicas, async_op=True)


class _Flight:
    """A round on its way: rows to the owners, orthogonal rows back, and on to the other replicas."""

    def __init__(self, owned: Round, lanes: _Lanes) -> None:
        self._lanes, self._owned = lanes, owned
        self._near = self._replicas()[lanes.replica]
        self._own = self._near[lanes.shard]
        self._parts = [self._elements(matrix, lanes.shard) for matrix in self._near]
        self._whole = [self._elements(self._own, shard) for shard in range(lanes.shards)]

    def _elements(self, matrix: Matrix | None, shard: int) -> int:
        return 0 if matrix is None else len(shard_rows(matrix.rows, self._lanes.shards, shard)) * matrix.columns

    def collect(self, direction: Callable[[Matrix], Tensor], nothing: Tensor) -> None:
        """Begin to send this rank's rows to their owners."""
        rows = [direction(matrix).flatten() for matrix in self._near if matrix is not None]
        self._values, self._work = self._lanes.exchange(torch.cat([nothing, *rows]), self._parts, self._whole)

    def orthogonalize(self) -> None:
        """Make the own matrix orthogonal, and begin to send its rows back."""
        self._wait()
        values = self._values
        if self._own is not None:
            values = orthogonalize(values.view(self._own.rows, self._own.columns)).flatten()
        self._values, self._work = self._lanes.exchange(values, self._whole, self._parts)

    def spread(self) -> None:
        """Begin to send this rank's rows to the other replicas, all with as much room as the largest needs."""
        self._wait()
        room = max(sum(self._elements(matrix, self._lanes.shard) for matrix in near) for near in self._replicas())
        padded = torch.nn.functional.pad(self._values, (0, room - self._values.numel()))
        self._everything, self._work = self._lanes.gather(padded)

    def apply(self, change: Callable[[Matrix, Tensor], None]) -> None:
        """Call `change` with every matrix of the round and its rows of this rank."""
        self._wait()
        for near, values in zip(self._replicas(), self._everything, strict=True):
            sizes = [self._elements(matrix, self._lanes.shard) for matrix in near]
            for matrix, rows in zip(near, values[: sum(sizes)].split(sizes), strict=True):
                if matrix is not None:
                    change(matrix, rows.view(-1, matrix.columns))

    def _replicas(self) -> list[Round]:
        """The matrices by replica and shard."""
        size = self._lanes.shards
        return [self._owned[first : first + size] for first in range(0, self._lanes.ranks, size)]

    def _wait(self) -> None:
        """Wait for what was sent last; on a GPU, the stream waits, not the host."""
        if self._work is not None:
            self._work.wait()
