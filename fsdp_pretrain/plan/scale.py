"""Scale model: seconds of a step on N ranks, from closed forms. No torch.

A rank computes matrix products at a share of what its device can do at best, moves the bytes of everything else through
its memory, and waits for the part of the communication that does not hide behind them, and for the slowest rank.
Communication is FSDP2's as `parallel.fsdp` sets it up: blocks are gathered for the forward and again for the backward
pass of every micro-batch, their gradients reduce-scattered after every micro-batch, and all-reduced over the replicas
after the last. The three free constants are in `Constants`, fitted to published runs (`published`).
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from functools import cached_property
from statistics import NormalDist

from fsdp_pretrain.config.model import AnyModel, GPTModel

from .devices import Device
from .flops import feed_forward, hardware_flops_per_token
from .sizes import Sizes, sizes

HOP = 5e-6
"""Seconds per step of a ring: NCCL's tables (src/graph/tuning.cc, protocol Simple) have 3.4 us over NVLink and 14 us
over the network, which is one hop in eight in a ring through nodes of eight."""
NOISE = 0.01
"""Standard deviation of a rank's time for a step, as a share: 1.0% in 134 runs on 8 x H100."""
_OPTIMIZER = 32
"""Bytes that AdamW moves per parameter: 28, and 4 for the gradient's norm."""
_COPIES_GATHER, _COPIES_REDUCE = 2, 1
"""How often buffers are read or written beside the collective itself: FSDP2 copies what it gathered into the parameters
(a read and a write), and gradients into the buffer to be reduced (a write; they are read in the compute dtype, which is
neglected)."""


@dataclass(frozen=True)
class Constants:
    """The constants of the model. The first three are free, and fitted.

    Attributes:
        products: share of the device's best matrix product (`Device.achievable`) that those of a model reach.
        throttled: the same on devices that run into their power limit (`Device.throttles`).
        overlap: share of the communication of the blocks that hides behind computation, as long as that lasts.
        network: share of their nominal bandwidth that links and adapters reach: about what nccl-tests show on 8 x A100
            (230 of 300 GB/s) and 8 x H100 (360 of 450 GB/s).
    """

    products: float
    throttled: float
    overlap: float
    network: float = 0.8


FITTED = Constants(products=0.87, throttled=0.63, overlap=1.0)
"""Rounded result of `published.fit`. The overlap is at its bound: in those runs, hidden communication costs nothing."""


@dataclass(frozen=True)
class Workload:
    """What the ranks do in a step.

    Attributes:
        micro_batch: samples per rank and micro-batch.
        micro_batches: per step and rank.
        shards: ranks that share the parameters.
        replicas: of the parameters.
        recompute: share of the blocks' forward pass that is recomputed in the backward pass.
        compiled: elementwise kernels are fused.
        reshard: parameters are gathered again for the backward pass; else once per step.
        parameter_bytes, gradient_bytes: per element, in collectives.
    """

    model: AnyModel
    sequence_length: int
    micro_batch: int
    micro_batches: int
    shards: int
    replicas: int
    recompute: float = 0.0
    compiled: bool = True
    reshard: bool = True
    parameter_bytes: int = 2
    gradient_bytes: int = 4

    @property
    def ranks(self) -> int:
        return self.shards * self.replicas

    @property
    def tokens(self) -> int:
        """Tokens per rank and micro-batch."""
        return self.micro_batch * self.sequence_length

    @cached_property
    def sizes(self) -> Sizes:
        return sizes(self.model)


@dataclass(frozen=True)
class Cluster:
    """Equal nodes.

    Attributes:
        gpus: devices per node.
        link: bytes/s from a device to the others of its node, one direction.
        network: bytes/s from a node to the others.
        hop: seconds per step of a ring.
    """

    device: Device
    gpus: int
    link: float
    network: float
    hop: float = HOP

    @classmethod
    def of(cls, device: Device, gpus: int = 8, link: float | None = None, network: float | None = None) -> Cluster:
        """With the links that the device usually has, unless they are given."""
        return cls(device, gpus, link or device.link, network or device.network * gpus)


@dataclass(frozen=True)
class Step:
    """Seconds of a step by part; communication is only what computation does not hide.

    Attributes:
        products: matrix products.
        elementwise: everything between them: norms, activations, residuals, the loss, copies of FSDP.
        optimizer: the update.
        gather: all-gathers of the parameters.
        reduce: reduce-scatters of the gradients, and all-reduces over the replicas.
        stragglers: waiting for the slowest rank.
    """

    products: float
    elementwise: float
    optimizer: float
    gather: float
    reduce: float
    stragglers: float

    @property
    def seconds(self) -> float:
        return math.fsum(astuple(self))

    def tokens(self, work: Workload) -> float:
        """Tokens per second and rank, of the work that takes this."""
        return work.tokens * work.micro_batches / self.seconds


@dataclass(frozen=True)
class CollectiveTraffic:
    """Traffic of a rank: bytes on the link inside the node, bytes of its share of the network, steps of rings."""

    link: float = 0.0
    network: float = 0.0
    hops: int = 0

    def __add__(self, other: CollectiveTraffic) -> CollectiveTraffic:
        return CollectiveTraffic(self.link + other.link, self.network + other.network, self.hops + other.hops)

    def __mul__(self, times: int) -> CollectiveTraffic:
        return CollectiveTraffic(self.link * times, self.network * times, self.hops * times)

    def seconds(self, cluster: Cluster, constants: Constants) -> float:
        """Both kinds of wires work at the same time."""
        per_rank = cluster.network / cluster.gpus
        busy = max(self.link / cluster.link, self.network / per_rank) / constants.network
        return busy + self.hops * cluster.hop


def shard_traffic(work: Workload, cluster: Cluster, size: float) -> CollectiveTraffic:
    """A rank's traffic for an all-gather or reduce-scatter of `size` bytes in all, over the shards (neighbours)."""
    return _ring(size, work.shards, min(work.shards, cluster.gpus))


def replica_traffic(work: Workload, cluster: Cluster, size: float) -> CollectiveTraffic:
    """A rank's traffic for an all-reduce of `size` bytes over the replicas (every `shards`-th rank)."""
    return _ring(size, work.replicas, max(1, min(work.replicas, cluster.gpus // work.shards))) * 2


def _reductions(work: Workload, cluster: Cluster, elements: int) -> tuple[CollectiveTraffic, CollectiveTraffic]:
    """A rank's traffic for the gradients of a unit: reduce-scatter, and all-reduce over the replicas."""
    size = work.gradient_bytes * elements
    return shard_traffic(work, cluster, size), replica_traffic(work, cluster, size / work.shards)


def _ring(size: float, members: int, inside: int) -> CollectiveTraffic:
    """Reduce-scatter or all-gather of `size` bytes in all over `members`, `inside` of them per node.

    A rank needs the parts of all others. Those of other nodes come into its node once, over the adapters of all its
    members, and reach the rank over the link.
    """
    if members == 1:
        return CollectiveTraffic()
    nodes = members / inside
    link = size * (members - 1) / members if inside > 1 else 0.0
    return CollectiveTraffic(link, size * (nodes - 1) / nodes / inside, members - 1)


def step(work: Workload, cluster: Cluster, constants: Constants = FITTED) -> Step:
    """Predict the parts of a step."""
    forward, backward = _products(work, cluster, constants)
    element_forward, element_backward = _elementwise(work, cluster)
    forward, backward = forward + element_forward, backward + element_backward
    gather, reduce = _exposed(work, cluster, constants, forward, backward)
    elementwise = work.micro_batches * (element_forward + element_backward)
    computed = work.micro_batches * (forward + backward)
    optimizer = _OPTIMIZER * work.sizes.total / work.shards / cluster.device.bandwidth
    return Step(
        products=computed - elementwise,
        elementwise=elementwise,
        optimizer=optimizer,
        gather=gather,
        reduce=reduce,
        stragglers=slowest(work.ranks) * NOISE * (computed + optimizer),
    )


def slowest(ranks: int) -> float:
    """Expected largest of `ranks` standard normal values, by Blom's approximation; 0 for one."""
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


def _products(work: Workload, cluster: Cluster, constants: Constants) -> tuple[float, float]:
    """Seconds of matrix products in the forward and the backward pass of a micro-batch.

    Attention counts in full, although its kernels skip the masked half: they also run at about half the rate.
    """
    once = hardware_flops_per_token(work.model, work.sequence_length) / 3
    block = hardware_flops_per_token(work.model, work.sequence_length, 1) - 3 * once  # the blocks' forward pass
    share = constants.throttled if cluster.device.throttles else constants.products
    rate = share * cluster.device.achievable
    return work.tokens * once / rate, work.tokens * (2 * once + work.recompute * block) / rate


def block_traffic(work: Workload) -> int:
    """Bytes per token that the elementwise kernels of a block read and write in the forward pass, in bf16.

    With h = hidden, q = heads of queries and f = ffn. Fused: each norm reads the stream and a branch and writes their
    sum and its norm (8h), the rotation reads and writes queries and keys (8q), the feed-forward reads its inner tensors
    and writes one (2f each). Eager blocks with a rotation (Llama, GLM), as published ones had: norms and rotation are
    several kernels each, in fp32 (36h per norm, 66q), sums 12h, the gate 10f. Eager GPT: norms 4h each, sums 12h, GELU
    4f.
    """
    h, q, (ffn, matrices) = work.model.hidden, work.model.query_width, feed_forward(work.model)
    rotates = not isinstance(work.model, GPTModel)
    if work.compiled:
        return 16 * h + (8 * q if rotates else 0) + 2 * matrices * ffn
    return 84 * h + 66 * q + 10 * ffn if rotates else 20 * h + 4 * ffn


def _elementwise(work: Workload, cluster: Cluster) -> tuple[float, float]:
    """Seconds of everything but products, collectives and the optimiser, in both passes of a micro-batch.

    Backward, blocks move twice the bytes of the forward pass. The loss passes over fp32 logits twice forward, three
    times backward. FSDP copies what it gathers and reduces.
    """
    blocks = work.tokens * block_traffic(work) * work.model.layers
    logits = work.tokens * 4 * work.model.rows
    gathered = _COPIES_GATHER * work.parameter_bytes * work.sizes.total if work.shards > 1 else 0
    reduced = _COPIES_REDUCE * work.gradient_bytes * work.sizes.total if work.ranks > 1 else 0
    forward = blocks + 2 * logits + (gathered if work.reshard else gathered / work.micro_batches)
    backward = (2 + work.recompute) * blocks + 3 * logits + (gathered if work.reshard else 0) + reduced
    return forward / cluster.device.bandwidth, backward / cluster.device.bandwidth


def _exposed(
    work: Workload, cluster: Cluster, constants: Constants, forward: float, backward: float
) -> tuple[float, float]:
    """Seconds per step that a rank waits for gathers, and for reductions.

    Args:
        forward, backward: seconds that it computes in the passes of a micro-batch.

    The root is gathered once, before the first forward pass can begin, and its gradients are complete when a backward
    pass is over: nothing hides them. (An output matrix of its own is hidden; for it this is too slow.) What exceeds the
    backward pass is divided among its gathers and reductions.
    """

    def seconds(*traffic: CollectiveTraffic) -> float:
        return sum(traffic, CollectiveTraffic()).seconds(cluster, constants)

    def exposed(communication: float, computation: float) -> float:
        return communication - constants.overlap * min(communication, computation)

    gather = shard_traffic(work, cluster, work.parameter_bytes * work.sizes.block) * work.model.layers
    scatter, all_reduce = (each * work.model.layers for each in _reductions(work, cluster, work.sizes.block))
    root_scatter, root_all_reduce = _reductions(work, cluster, work.sizes.root)
    root_gather = shard_traffic(work, cluster, work.parameter_bytes * work.sizes.root)

    times = work.micro_batches if work.reshard else 1
    gathers = seconds(root_gather) + times * exposed(seconds(gather), forward)
    reduces = work.micro_batches * seconds(root_scatter) + seconds(root_all_reduce)
    again = gather if work.reshard else CollectiveTraffic()
    for count, reductions in ((work.micro_batches - 1, scatter), (1, scatter + all_reduce)):
        waits = count * exposed(seconds(again, reductions), backward)
        apart = seconds(again) + seconds(reductions)
        share = seconds(again) / apart if apart else 0.0
        gathers += share * waits
        reduces += (1 - share) * waits
    return gathers, reduces
