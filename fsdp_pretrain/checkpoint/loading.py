"""Loading and verifying checkpoints, written by any mesh.

Names, shapes and dtypes are compared first; afterwards the digest of the loaded state is compared with the saved one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from fsdp_pretrain.errors import CheckpointError, shortened
from fsdp_pretrain.parallel.mesh import World, local_part, local_rows
from fsdp_pretrain.parallel.optimizer import Optimizer

from .delivery import Delivery, parse_chunk, place, read_archive, root_cause
from .digest import StateDigest
from .layout import leaves
from .manifest import CheckpointManifest
from .store import CONFIG, TRAIN_STATE, Checkpoint, verify_files
from .tensors import METADATA, TENSORS, Chunk, StoredTensor, read_tensors, wrong_tensors

M = TypeVar("M", bound=nn.Module)


class DamagedError(CheckpointError):
    """Files of a checkpoint are damaged; raised on all ranks. Model and optimiser may be partly overwritten."""


ObserverTensors = Mapping[str, Mapping[str, torch.Tensor]]
"""Tensors of extensions' observers that checkpoints keep, by the name of the observer, `PACKAGE:PART`."""
_OBSERVER = "observer."


def state_dict(
    model: nn.Module, optimizer: Optimizer | None, observers: ObserverTensors | None = None
) -> dict[str, Any]:
    """A checkpoint's tensors by name; live, not copies.

    They are `model.NAME`, `optim.NAME.STATE` (of `UpdateRule`) and `observer.PACKAGE:PART.NAME`.
    """
    state: dict[str, Any] = {"model": model.state_dict()}
    state |= {} if optimizer is None else {"optim": optimizer.state_by_name()}
    return state | {_OBSERVER + name: dict(tensors) for name, tensors in (observers or {}).items() if tensors}


def flatten(tree: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of nested dictionaries by dotted name."""
    return {".".join(path): tensor for path, tensor in leaves(tree)}


def other_rank(file: str, ranks: int, ranks_per_node: int) -> int:
    """The rank that reads back a file of a checkpoint: one of another node than its writer's; on one node, the writer.

    With three nodes or more, several other nodes read the files of a writer.
    """
    if not file.endswith(".distcp"):
        return ranks - 1  # rank 0 wrote it
    writer, number = map(int, file.removesuffix(".distcp").strip("_").split("_"))
    other_nodes = max(1, ranks // ranks_per_node - 1)
    return (writer + ranks_per_node * (1 + number % other_nodes)) % ranks


def verify(world: World, checkpoint: Checkpoint) -> list[str]:
    """Read a checkpoint back, files spread over the ranks. Returns its defects, the same on every rank.

    With several nodes, another node than the writer's reads a file (see `other_rank`): the writer's page cache might
    hide that storage has lost it.
    """
    entries = world.decide(checkpoint.files)
    mine = [entry for entry in entries if other_rank(entry.name, world.size, world.local_world) == world.rank]
    wrong = [text for texts in world.gather(verify_files(checkpoint.path, mine)) for text in texts]
    return wrong or world.decide(lambda: wrong_tensors(checkpoint.path))


def kept_observers(checkpoint: Checkpoint) -> set[str]:
    """The observers with tensors in a checkpoint. Raises CheckpointError."""
    names = [name.removeprefix(_OBSERVER) for name in read_tensors(checkpoint.path) if name.startswith(_OBSERVER)]
    return {name.partition(".")[0] for name in names}


def load(
    world: World,
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: Optimizer | None,
    observers: ObserverTensors | None = None,
) -> CheckpointManifest:
    """Load a checkpoint of any mesh into a model and optimiser. All ranks call it together.

    The optimiser's hyperparameters are not stored; the configuration's apply. If the checkpoint has no optimiser state
    (it was imported), the optimiser is unchanged.

    Args:
        optimizer: None to leave its state in the checkpoint out.
        observers: of `kept_observers`, those whose tensors to load.

    Returns:
        The manifest; its digest matches the loaded state, if that is all of the checkpoint.

    Raises:
        DamagedError: a file's bytes are not those that were written, or cannot be read.
        CheckpointError: tensors are missing, unexpected, or of another shape or dtype, or differ from what was saved.
    """
    manifest = world.decide(checkpoint.manifest)
    state = state_dict(model, optimizer if manifest.optimizer else None, observers)
    tensors = flatten(state)
    stored = world.decide(lambda: _stored(checkpoint, manifest))
    world.decide(lambda: _compare(checkpoint, stored, state))
    _read_tensors(world, checkpoint, manifest, stored, tensors)
    if tensors.keys() != stored.keys():
        return manifest
    # Of all replicas: what one of them read was sent to the others, which can fail.
    digests = set(StateDigest(world, tensors, world.replicas).totals())
    if digests != {manifest.state_digest}:
        raise CheckpointError(
            f"{checkpoint.path} is not the state that was saved (digest {', '.join(sorted(digests))}, "
            f"at saving {manifest.state_digest})",
            effect="training would continue from damaged weights",
            remedy="go back to an earlier checkpoint, and check memory and storage of the nodes",
        ).on_all_ranks()
    return manifest


def load_weights(world: World, checkpoint: Checkpoint, model: M, allocate: Callable[[M], M]) -> M:
    """A model with the weights of a checkpoint of any mesh, without the optimiser. All ranks call it together.

    Every file is hashed as it is read, once in all, so damage anywhere in the checkpoint is found.

    Args:
        model: a model on the meta device, with the dtypes of training; its parameters must match the checkpoint.
        allocate: gives the model memory: plain or sharded over the ranks, in any dtype. Called if the names match.

    Raises:
        DamagedError: a file's bytes are not those that were written, or cannot be read.
        CheckpointError: the tensors do not match the model.
    """
    manifest = world.decide(checkpoint.manifest)
    stored = world.decide(lambda: _stored(checkpoint, manifest))
    world.decide(lambda: _compare(checkpoint, stored, {"model": model.state_dict()}))
    model = allocate(model)
    _read_tensors(world, checkpoint, manifest, stored, flatten({"model": model.state_dict()}))
    return model


def _read_tensors(
    world: World,
    checkpoint: Checkpoint,
    manifest: CheckpointManifest,
    stored: dict[str, StoredTensor],
    tensors: dict[str, torch.Tensor],
) -> None:
    """Fill tensors from the files of tensors, and check these files. Raises DamagedError on every rank."""
    files = [entry for entry in manifest.files if entry.name not in (TENSORS, METADATA, TRAIN_STATE, CONFIG)]
    if wrong := Delivery(world, checkpoint.path, files, stored, tensors).run():
        raise DamagedError(wrong[0]).on_all_ranks()


def check_files(checkpoint: Checkpoint, *names: str) -> None:
    """Read files of a checkpoint and compare them with its manifest. Raises DamagedError if one differs."""
    entries = {entry.name: entry for entry in checkpoint.files()}
    if missing := [name for name in names if name not in entries]:
        raise DamagedError(f"{missing[0]} is not in the manifest: another version of this program wrote it")
    if wrong := verify_files(checkpoint.path, [entries[name] for name in names]):
        raise DamagedError(wrong[0])


def _stored(checkpoint: Checkpoint, manifest: CheckpointManifest) -> dict[str, StoredTensor]:
    """The tensors that `tensors.json` lists. Raises DamagedError if it or `.metadata` is damaged."""
    check_files(checkpoint, TENSORS, METADATA)
    try:
        stored = read_tensors(checkpoint.path)
    except CheckpointError as error:
        raise DamagedError(error.cause) from None
    named = {chunk.file for tensor in stored.values() for chunk in tensor.chunks}
    if missing := sorted(named - {entry.name for entry in manifest.files}):
        raise DamagedError(f"{TENSORS} names {missing[0]}, which is not in the manifest")
    return stored


class RowReader(Protocol):
    """Reads rows of parameters, such as `Weights`."""

    def read_rows(self, name: str, rows: range, out: torch.Tensor) -> None:
        """Read rows of a parameter into a tensor of any dtype. Raises UserError."""


@torch.no_grad()
def load_rows(weights: RowReader, model: nn.Module) -> None:
    """Load this process's parts of the weights into a model of any dtype, plain or sharded. Raises UserError."""
    tensors = model.state_dict()
    for name in sorted(tensors, key=lambda name: -tensors[name].numel()):  # the largest when the least memory is used
        weights.read_rows(name, local_rows(tensors[name]), local_part(tensors[name]))


class Weights:
    """The weights of a checkpoint of any mesh, read one by one, without a process group.

    Args:
        checkpoint: its files must have been verified.
        model: may be on the meta device; its parameters must match the checkpoint.

    Attributes:
        shapes: shape of every parameter, by name.

    Raises:
        CheckpointError: `tensors.json` cannot be read, or the tensors do not match the model.
    """

    def __init__(self, checkpoint: Checkpoint, model: nn.Module) -> None:
        self._folder, self._stored = checkpoint.path, read_tensors(checkpoint.path)
        _compare(checkpoint, self._stored, {"model": model.state_dict()})
        self.shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        """A whole parameter in its stored dtype. Raises CheckpointError."""
        stored = self._stored[f"model.{name}"]
        if len(stored.chunks) == 1:
            return self._read(name, stored.chunks[0], stored)  # without a second copy
        tensor = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
        self.read_rows(name, range(stored.shape[0]), tensor)
        return tensor

    def read_rows(self, name: str, rows: range, out: torch.Tensor) -> None:
        """Read rows of a parameter into a tensor of any dtype. Raises CheckpointError."""
        stored = self._stored[f"model.{name}"]
        for chunk in stored.chunks:
            first, stop = max(chunk.first, rows.start), min(chunk.first + chunk.rows, rows.stop)
            if first < stop:
                values = self._read(name, chunk, stored)[first - chunk.first : stop - chunk.first]
                place(out, first - rows.start, values)

    def _read(self, name: str, chunk: Chunk, stored: StoredTensor) -> torch.Tensor:
        try:
            with (self._folder / chunk.file).open("rb") as file:
                file.seek(chunk.start)
                return parse_chunk(read_archive(file, chunk.length), stored, chunk)
        except Exception as error:  # `zipfile` has many for damaged content
            raise CheckpointError(
                f"cannot read {name} of {self._folder}: {root_cause(error)}",
                remedy="if the run is live, retention may just have deleted it: take a newer one",
            ) from None


def _compare(checkpoint: Checkpoint, stored: dict[str, StoredTensor], state: dict[str, Any]) -> None:
    """Raise CheckpointError unless names, shapes and dtypes of `state` equal the stored ones."""
    wanted = flatten(state)
    prefixes = tuple(f"{key}." for key in state)
    problems = [f"{name} is missing in the checkpoint" for name in sorted(set(wanted) - set(stored))]
    problems += [
        f"{name} is not in the model" for name in sorted(set(stored) - set(wanted)) if name.startswith(prefixes)
    ]
    for name in sorted(set(wanted) & set(stored)):
        saved, tensor = (stored[name].shape, getattr(torch, stored[name].dtype)), wanted[name]
        if saved != (tensor.shape, tensor.dtype):
            problems.append(
                f"{name} is {saved[0]} {saved[1]} in the checkpoint, {tuple(tensor.shape)} {tensor.dtype} in the model"
            )
    if problems:
        remedy = "the [model] section must be the one the checkpoint was trained with"
        if all(problem.startswith("optim.") for problem in problems):
            remedy = (
                "restore optimizer.kind and optimizer.groups, or begin with a new optimiser: "
                f"--reset-optimizer {checkpoint.step}"
            )
        raise CheckpointError(
            f"{checkpoint.path} does not fit this model and optimiser:\n    " + shortened(problems), remedy=remedy
        )
