"""What is evaluated, and reading its weights for forward passes. Needs no lm-eval."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from data.text.tokenizer import Tokenizer
from fsdp_pretrain import models
from fsdp_pretrain.checkpoint.loading import RowReader, Weights, load_rows
from fsdp_pretrain.checkpoint.store import CONFIG, Checkpoint
from fsdp_pretrain.checkpoint.tokenizer import find_tokenizer
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.data_section import AnyObjective
from fsdp_pretrain.config.resume_rules import load_compatible
from fsdp_pretrain.errors import CheckpointError
from fsdp_pretrain.models import Decoder
from fsdp_pretrain.parallel.fsdp import compute_dtype, shard_for_inference
from fsdp_pretrain.parallel.mesh import World


@dataclass(frozen=True)
class EvaluatedModel:
    """A checkpoint or an exported folder, before its weights are read.

    Attributes:
        path: of it.
        step, tokens: how far it was trained; 0 if that is not known.
        length: tokens of a training sample.
        objective: what it was trained with.
        read: its model, on a device or sharded over ranks; raises UserError.
        checkpoint, trained: the checkpoint, and the configuration it was trained with; None for a folder.
    """

    path: Path
    step: int
    tokens: int
    tokenizer: Tokenizer
    length: int
    objective: AnyObjective
    read: Callable[[str, World | None], Decoder]
    checkpoint: Checkpoint | None = None
    trained: Config | None = None


def open_checkpoint(checkpoint: Checkpoint, tokenizer_path: Path | None = None) -> EvaluatedModel:
    """A checkpoint to evaluate.

    Raises:
        UserError: the checkpoint or the tokenizer cannot be used.
    """
    trained = load_compatible(checkpoint.path / CONFIG)
    return EvaluatedModel(
        path=checkpoint.path,
        step=checkpoint.step,
        tokens=checkpoint.train_state().tokens,
        tokenizer=find_tokenizer(checkpoint, trained, tokenizer_path),
        length=trained.data.sequence_length,
        objective=trained.data.objective,
        read=lambda device, world: read_checkpoint(checkpoint, device, world)[0],
        checkpoint=checkpoint,
        trained=trained,
    )


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
    place = usable_device(device) if world is None else world.device
    model = models.build(config.model)
    weights = Weights(checkpoint, model)
    return read_weights(weights, model, compute_dtype(config, place), place, world), config


def read_weights(
    weights: RowReader, model: Decoder, dtype: torch.dtype, device: torch.device, world: World | None
) -> Decoder:
    """A model on the meta device with its weights, in a dtype, sharded over the ranks if there are any."""
    if world is None:
        model = model.to(dtype).to_empty(device=device)
    else:
        model = shard_for_inference(model.to(dtype), world)
    load_rows(weights, model)
    return model


def usable_device(name: str) -> torch.device:
    """The device of that name. Raises CheckpointError if it cannot be used."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise CheckpointError(
            f"device {name!r} cannot be used: {str(error).splitlines()[0]}",
            remedy="set eval.device or --device",
        ) from None
    return device
