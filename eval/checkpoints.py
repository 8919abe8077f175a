"""Loading a checkpoint as a model in one process. Needs no lm-eval."""

from __future__ import annotations

import torch

from fsdp_pretrain import models
from fsdp_pretrain.checkpoint.loading import load_model
from fsdp_pretrain.checkpoint.store import CONFIG, Checkpoint
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.resume_rules import load_compatible
from fsdp_pretrain.errors import CheckpointError
from fsdp_pretrain.models import Decoder
from fsdp_pretrain.parallel.fsdp import compute_dtype


def read_checkpoint(checkpoint: Checkpoint, device: str) -> tuple[Decoder, Config]:
    """The model of a checkpoint, unsharded and in the run's compute precision, and its configuration.

    Raises:
        CheckpointError: it cannot be read, or the device does not exist.
    """
    config = load_compatible(checkpoint.path / CONFIG)
    target = usable_device(device)
    model = models.build(config.model)
    model.to_empty(device="cpu")
    load_model(checkpoint, model)
    return model.to(device=target, dtype=compute_dtype(config, target)), config


def usable_device(name: str) -> torch.device:
    """The device of that name. Raises CheckpointError if it does not exist."""
    try:
        target = torch.device(name)
        torch.empty(1, device=target)
    except (RuntimeError, AssertionError) as error:
        raise CheckpointError(
            f"device {name!r} cannot be used: {str(error).splitlines()[0]}",
            remedy="set eval.device or --device",
        ) from None
    return target
