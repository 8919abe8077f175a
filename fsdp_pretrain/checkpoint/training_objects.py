"""The objects that checkpoints save and restore: the training state of one run on one rank."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.parallel.optimizer import AdamW
from fsdp_pretrain.record.files import RunDir

from .manifest import RunIdentity


@dataclass(frozen=True)
class TrainingObjects:
    """A run in training; `model` and `optimizer` are sharded."""

    world: World
    run: RunDir
    model: nn.Module
    optimizer: AdamW
    config: Config
    identity: RunIdentity
