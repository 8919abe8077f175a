"""Models to evaluate: opening a checkpoint, and reading its weights for forward passes. Needs no lm-eval."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fsdp_pretrain import models
from fsdp_pretrain.checkpoint import merging
from fsdp_pretrain.checkpoint.loading import DamagedError, RowReader, check_files, load_rows, load_weights
from fsdp_pretrain.checkpoint.store import CONFIG, TRAIN_STATE, Checkpoint, Store
from fsdp_pretrain.checkpoint.tokenizer import find_tokenizer
from fsdp_pretrain.checkpoint.witness import check_model_code
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.data_section import AnyObjective
from fsdp_pretrain.config.resume_rules import load_recorded
from fsdp_pretrain.config.sections import MergeSection
from fsdp_pretrain.data.text.tokenizer import Tokenizer
from fsdp_pretrain.errors import CheckpointError, ConfigError
from fsdp_pretrain.models import Decoder
from fsdp_pretrain.parallel.fsdp import compute_dtype, shard_for_inference
from fsdp_pretrain.parallel.mesh import SingleProcess, World


@dataclass(frozen=True)
class EvaluatedModel:
    """A checkpoint or an exported folder, before its weights are read."""

    path: Path  # directory of the checkpoint, or the folder
    step: int  # this and the next: how far the model was trained; 0 if that is not known
    tokens: int
    tokenizer: Tokenizer
    length: int  # tokens of a training sample
    objective: AnyObjective  # the objective it was trained with
    read: Callable[[str, World | None], Decoder]  # (device, world) -> the model; raises UserError
    checkpoint: Checkpoint | None = None  # this and the next: None for a folder
    trained: Config | None = None  # the configuration it was trained with


def open_checkpoint(checkpoint: Checkpoint) -> EvaluatedModel:
    """A checkpoint to evaluate. Raises UserError if a small file is damaged (those with weights are checked as they are
    read), or the checkpoint or the tokenizer cannot be used."""
    with _whole(checkpoint):
        check_files(checkpoint, TRAIN_STATE)
    trained = _configuration(checkpoint)
    return EvaluatedModel(
        path=checkpoint.path,
        step=checkpoint.step,
        tokens=checkpoint.train_state().tokens,
        tokenizer=find_tokenizer(checkpoint, trained),
        length=trained.data.sequence_length,
        objective=trained.data.objective,
        read=lambda device, world: read_checkpoint(checkpoint, device, world)[0],
        checkpoint=checkpoint,
        trained=trained,
    )


def open_merge(checkpoint: Checkpoint, merge: MergeSection) -> EvaluatedModel | None:
    """The mean of a run's last checkpoints up to one of them; None while there are fewer than two.

    Raises:
        CheckpointError: one is damaged, or of another model.
    """
    place = checkpoint.path.parent
    try:
        chosen = merging.choose(place.parent, Store(place).scan(), merge.last, merge.every, until=checkpoint.step)
    except ConfigError:
        return None
    mean, alone = merging.Mean(chosen, merge.weights), open_checkpoint(checkpoint)

    def read(device: str, world: World | None) -> Decoder:
        place = usable_device(device) if world is None else world.device
        return read_weights(mean, models.build(mean.config.model), compute_dtype(mean.config, place), place, world)

    return replace(alone, read=read)


def read_checkpoint(checkpoint: Checkpoint, device: str, world: World | None = None) -> tuple[Decoder, Config]:
    """The model of a checkpoint in the run's compute precision, and its configuration.

    The DCP files, of any mesh, are read once and hashed on the way. Besides the model, only the tensors being delivered
    are in memory.

    Args:
        device: where an unsharded model is put.
        world: ranks to shard the model over, on their devices, which all call this; None: this process has all of it.

    Raises:
        CheckpointError: a file is not the one that was written, or it cannot be read, or the device does not exist.
    """
    ranks = world or SingleProcess()
    config = ranks.decide(lambda: _configuration(checkpoint))
    place = usable_device(device) if world is None else world.device
    dtype = compute_dtype(config, place)
    with _whole(checkpoint):
        model = load_weights(
            ranks, checkpoint, models.build(config.model), lambda model: _allocate(model, dtype, place, world)
        )
    return model, config


def _configuration(checkpoint: Checkpoint) -> Config:
    """The configuration that a checkpoint was trained with. Raises CheckpointError, ConfigError."""
    with _whole(checkpoint):
        check_files(checkpoint, CONFIG)
    config = load_recorded(checkpoint.path / CONFIG, own=False)
    check_model_code(checkpoint.train_state().identity, config, checkpoint.path)
    return config


@contextmanager
def _whole(checkpoint: Checkpoint) -> Iterator[None]:
    """Turn a DamagedError into a CheckpointError that names the checkpoint."""
    try:
        yield
    except DamagedError as error:
        named = CheckpointError(
            f"{checkpoint.path} is damaged: {error.cause}",
            effect="it was not evaluated: the scores would be those of another model",
            remedy="evaluate another step; `fsdp-pretrain checkpoints RUN verify` says which are whole",
        )
        named.shared = error.shared
        raise named from None


def _allocate(model: Decoder, dtype: torch.dtype, device: torch.device, world: World | None) -> Decoder:
    """Allocate a model on the meta device, in a dtype and without values; sharded over the ranks if there are any."""
    if world is None:
        return model.to(dtype).to_empty(device=device)
    return shard_for_inference(model.to(dtype), world)


def read_weights(
    weights: RowReader, model: Decoder, dtype: torch.dtype, device: torch.device, world: World | None
) -> Decoder:
    """Give a model on the meta device its weights, in a dtype; sharded over the ranks if there are any."""
    model = _allocate(model, dtype, device, world)
    load_rows(weights, model)
    return model


def usable_device(name: str) -> torch.device:
    """The device of this name. Raises CheckpointError if it cannot be used."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise CheckpointError(
            f"device {name!r} cannot be used: {str(error).splitlines()[0]}",
            remedy="set eval.device or --device",
        ) from None
    return device
