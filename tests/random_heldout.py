"""The held-out loss of random tokens, instead of the corpora that a configuration names."""

from __future__ import annotations

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.data.packing.batch import MicroBatch
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.train.batch_reader import DataStream


def random_samples(config: Config, world: World, batches: DataStream) -> list[MicroBatch]:
    """As many samples from `batches` as the configuration measures."""
    ranks, size = world.size, config.train.micro_batch
    passes = -(-config.heldout_samples * len(config.eval.loss_on) // (ranks * size))
    micro: list[MicroBatch] = []
    while len(micro) < passes:
        micro += next(batches).micro
    return micro[:passes]
