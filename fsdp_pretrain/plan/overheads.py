"""What saves and failures cost a run, from closed forms. No torch.

Saves copy the state to host memory, then write and verify it in the background. A failure ends the start: it has to be
noticed, all ranks start again, every byte of the checkpoint is read once in all and delivered to the replicas, and what
was trained since the last verified checkpoint is lost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fsdp_pretrain.checkpoint.upcoming import BYTES_PER_PARAMETER

from .scale import FITTED, Cluster, Workload

DAY = 86_400.0
LLAMA_3 = 419 / 54 / 2048
"""Failures per node and day: Llama 3's 419 unexpected interruptions in 54 days on 16,384 GPUs, 3.8 per 1,000 node-days.
Sites differ: GLM-130B had half as many (10 in 55 days on 96 nodes), two clusters at Meta 2.3 and 6.5, OPT-175B 16 (two
machines a day of 124)."""
_DIGEST = 1.1e9
"""Bytes/s of the digest of the state, on the host (docs/performance.md)."""
_START = 60.0
_CONNECT = 0.05
"""Seconds of a start without the checkpoint: launch, imports, rendezvous, building and compiling; and more per rank.
Assumed, not measured."""


@dataclass(frozen=True)
class Operations:
    """Storage, failures and how they are handled.

    Attributes:
        storage: bytes/s of all ranks together.
        failures: per node and day.
        detect: seconds until a failure is noticed.
        background: training waits only for the copy of a save.
        verify: checkpoints are read back.
    """

    storage: float = 10e9
    failures: float = LLAMA_3
    detect: float = 180.0
    background: bool = True
    verify: bool = True


@dataclass(frozen=True)
class Overheads:
    """Costs in seconds.

    Attributes:
        save: from the beginning of a save until its checkpoint is verified.
        stall: of it, what training waits.
        restart: from a failure until training continues.
        lost: training lost by a failure, expected.
        between: mean time between failures; infinite without any.
        goodput: share of the time that steps take which the final weights contain.
    """

    save: float
    stall: float
    restart: float
    lost: float
    between: float
    goodput: float


def overheads(work: Workload, cluster: Cluster, operations: Operations, *, interval: float) -> Overheads:
    """Costs of a run that saves after every `interval` seconds of steps."""
    state = BYTES_PER_PARAMETER * work.sizes.total
    nodes = math.ceil(work.ranks / cluster.gpus)
    copy = state / work.shards / (FITTED.network * cluster.device.host)
    save = state / operations.storage * (2 if operations.verify else 1)
    if operations.background:
        save += copy + state / work.shards / _DIGEST
        stall = copy + max(0.0, save - copy - interval)  # a save waits for the one before it
    else:
        stall = save
    restart = operations.detect + _START + _CONNECT * work.ranks + resume(work, cluster, operations)
    rate, every = operations.failures * nodes / DAY, interval + stall
    kept = kept_share(rate, every, save, restart)
    between = 1 / rate if rate else math.inf
    lost = between - (between + restart) * kept if rate else every / 2 + save
    return Overheads(save, stall, restart, lost, between, kept * interval / every)


def resume(work: Workload, cluster: Cluster, operations: Operations) -> float:
    """Seconds of reading a checkpoint: each byte once in all, then each shard to its replicas."""
    state = BYTES_PER_PARAMETER * work.sizes.total
    per_rank = cluster.network / cluster.gpus if work.ranks > cluster.gpus else cluster.link
    delivery = state / work.shards / (FITTED.network * per_rank) if work.replicas > 1 else 0.0
    return state / operations.storage + delivery


def kept_share(rate: float, every: float, save: float, restart: float) -> float:
    """Share of the time that ends in a verified checkpoint, of a run with exponentially distributed failures.

    A start that fails after X seconds keeps floor((X - save) / every) intervals, e^(-rate save) / (e^(rate every) - 1)
    in the mean. Times `every`, that is to first order 1 / rate - every / 2 - save seconds: a failure loses half an
    interval, and the save that was not complete.

    Args:
        rate: failures per second of training.
        every: seconds between the beginnings of saves.
        save: seconds of a save.
        restart: seconds from a failure until training continues.
    """
    if not rate:
        return 1.0
    kept = every * math.exp(-rate * (save + every)) / -math.expm1(-rate * every)  # of the text, without overflow
    return kept / (1 / rate + restart)
