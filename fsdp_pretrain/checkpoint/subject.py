"""What checkpoints are made of, and filled from: the training state of one run on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..config import Config
from ..mesh import World
from ..record.files import RunDir


@dataclass(frozen=True)
class Subject:
    """A run that is trained.

    Attributes:
        world: all ranks.
        run: its directory.
        model, optimizer: sharded.
        config: the run.
        identity: what no resume may change, see `state.identity`.
    """

    world: World
    run: RunDir
    model: nn.Module
    optimizer: torch.optim.Optimizer
    config: Config
    identity: dict[str, Any]
