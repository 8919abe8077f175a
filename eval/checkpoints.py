"""Loading a checkpoint's model for forward passes. Needs no lm-eval."""

from __future__ import annotations

import torch

from fsdp_pretrain import models
from fsdp_pretrain.checkpoint.loading import Weights, load_parts
from fsdp_pretrain.checkpoint.store import CONFIG, Checkpoint
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.resume_rules import load_compatible
from fsdp_pretrain.errors import CheckpointError
from fsdp_pretrain.models import Decoder
from fsdp_pretrain.parallel.fsdp import compute_dtype, shard_for_inference
from fsdp_pretrain.parallel.mesh import World


def read_checkpoint(checkpoint: Checkpoint, device: str, world: World | None = None) -> tuple[Decoder, Config]:
    """The model of a checkpoint in the run's compute precision, and its configuration.

    Each process reads the parts that it holds, from the DCP files of any mesh; nothing is held in another precision.

    Args:
        device: of an unsharded model.
        world: ranks to shard the model over, on their devices; None: this process has all of it.

    Raises:
        CheckpointError: it cannot be read, or the device does not exist.
    """
    config = load_compatible(checkpoint.path / CONFIG)
    model = models.build(config.model)
    weights = Weights(checkpoint, model)
    if world is None:
        place = usable_device(device)
        model = model.to(compute_dtype(config, place)).to_empty(device=place)
    else:
        model = shard_for_inference(model.to(compute_dtype(config, world.device)), world)
    load_parts(weights, model)
    return model, config


def usable_device(name: str) -> torch.device:
    """The device. Raises CheckpointError if it cannot be used."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise CheckpointError(
            f"device {name!r} cannot be used: {str(error).splitlines()[0]}",
            remedy="set eval.device or --device",
        ) from None
    return device
