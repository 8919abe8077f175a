"""Reading and verifying checkpoints of any mesh with PyTorch's distributed checkpoint (DCP), which reshards.

DCP ignores unrequested keys and casts dtypes silently, so names, shapes and dtypes are compared first; afterwards the
digest of the loaded state is compared with the saved one.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor

from fsdp_pretrain.errors import CheckpointError, shortened
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.parallel.optimizer import state_by_name

from .digest import state_digest
from .manifest import CheckpointManifest
from .metadata import StoredTensor, read_metadata, wrong_metadata
from .store import Checkpoint, verify_files


class UnreadableError(CheckpointError):
    """Loading failed midway, on all ranks: model and optimiser may be partly overwritten."""


def state_dict(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """A checkpoint's tensors by name, `model.NAME` and `optim.NAME.{step,exp_avg,exp_avg_sq}`; live, not copies."""
    state: dict[str, Any] = {"model": model.state_dict()}
    return state if optimizer is None else {**state, "optim": state_by_name(model, optimizer)}


def flatten(tree: Any, prefix: str = "") -> dict[str, torch.Tensor | DTensor]:
    """The tensors of nested dictionaries by dotted name."""
    if isinstance(tree, torch.Tensor):
        return {prefix: tree}
    return {
        name: tensor
        for key, value in tree.items()
        for name, tensor in flatten(value, f"{prefix}.{key}" if prefix else key).items()
    }


def verify(world: World, checkpoint: Checkpoint) -> list[str]:
    """Read a checkpoint back, files spread over the ranks. Returns what is wrong, the same on every rank.

    With several nodes, each file is read on another node than the one that wrote it, bypassing the writer's page cache.
    """
    entries = world.decide(checkpoint.files)
    mine = [entry for i, entry in enumerate(entries) if (i + world.local_world) % world.size == world.rank]
    wrong = [text for texts in world.gather(verify_files(checkpoint.path, mine)) for text in texts]
    return wrong or world.decide(lambda: wrong_metadata(checkpoint.path))


def load(
    world: World, checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer
) -> CheckpointManifest:
    """Load a checkpoint of any mesh into a model and optimiser. All ranks call it together.

    The optimiser's hyperparameters are not stored; the configuration's apply. If the checkpoint has no optimiser state
    (it was imported), the optimiser is unchanged.

    Returns:
        The manifest; its digest matches the loaded state.

    Raises:
        UnreadableError: a tensor cannot be read from its file.
        CheckpointError: tensors are missing, unexpected, or of another shape or dtype, or differ from what was saved.
    """
    manifest = world.decide(checkpoint.manifest)
    state = state_dict(model, optimizer if manifest.optimizer else None)
    reader = world.together(lambda: _Reader(checkpoint.path))
    world.decide(lambda: _compare(checkpoint, reader.tensors, state))
    try:
        dcp.load(state, storage_reader=reader, process_group=world.host_group)
    except CheckpointException as error:  # DCP raises it on every rank
        raise UnreadableError(f"{checkpoint.path} cannot be read: {root_cause(error)}").on_all_ranks() from None
    digest = state_digest(world, flatten(state))
    if digest != manifest.state_digest:
        raise CheckpointError(
            f"{checkpoint.path} is not the state that was saved (digest {digest}, at saving {manifest.state_digest})",
            effect="training would continue from damaged weights",
            remedy="go back to an earlier checkpoint, and check memory and storage of the nodes",
        ).on_all_ranks()
    model.load_state_dict(state["model"])
    parameters = dict(model.named_parameters())
    for name, values in state.get("optim", {}).items():
        optimizer.state[parameters[name]] = values
    return manifest


def load_model(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Load only the weights, without a process group, into an unsharded model. Raises CheckpointError."""
    state, reader = {"model": model.state_dict()}, _Reader(checkpoint.path)
    _compare(checkpoint, reader.tensors, state)
    _load_alone(checkpoint, state, reader)


class Weights:
    """The weights of a checkpoint of any mesh, read one by one in one process, without a process group.

    Args:
        checkpoint: its files must have been verified.
        model: on the meta device; its parameters must match the checkpoint.

    Attributes:
        shapes: of every parameter, by name.

    Raises:
        CheckpointError: the metadata cannot be read, or the tensors do not match the model.
    """

    def __init__(self, checkpoint: Checkpoint, model: nn.Module) -> None:
        self._checkpoint, self._reader, self._model = checkpoint, _Reader(checkpoint.path), model.state_dict()
        _compare(checkpoint, self._reader.tensors, {"model": self._model})
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._model.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        """A parameter, whole, in the dtype it is stored in. Raises CheckpointError."""
        tensor = torch.empty_like(self._model[name], device="cpu")
        _load_alone(self._checkpoint, {f"model.{name}": tensor}, self._reader)
        return tensor


class _Reader(FileSystemReader):
    """DCP's reader with our safe parser of `.metadata`, read once: with thousands of chunks it takes a second.

    `tensors`: all tensors of the checkpoint by name. Raises CheckpointError, see `metadata.read_metadata`.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.tensors = read_metadata(path)
        self._metadata = Metadata(
            state_dict_metadata={
                name: TensorStorageMetadata(
                    TensorProperties(dtype=getattr(torch, tensor.dtype)),
                    torch.Size(tensor.shape),
                    [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in tensor.chunks],
                )
                for name, tensor in self.tensors.items()
            },
            storage_data={
                MetadataIndex(name, chunk.offsets): _StorageInfo(chunk.file, chunk.start, chunk.length)
                for name, tensor in self.tensors.items()
                for chunk in tensor.chunks
            },
        )

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Replaces DCP's unpickling of the file."""
        return self._metadata


def _load_alone(checkpoint: Checkpoint, state: dict[str, Any], reader: _Reader) -> None:
    """Fill tensors without a process group. Raises CheckpointError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # having no process group is intended
            dcp.load(state, storage_reader=reader, no_dist=True)
    except (CheckpointException, OSError, RuntimeError) as error:
        raise CheckpointError(
            f"cannot read {checkpoint.path}: {root_cause(error)}",
            remedy="if the run is live, retention may just have deleted it: take a newer one",
        ) from None


def _compare(checkpoint: Checkpoint, stored: dict[str, StoredTensor], state: dict[str, Any]) -> None:
    """Raise CheckpointError unless the names, shapes and dtypes of `state` are those stored."""
    wanted = flatten(state)
    prefixes = tuple(f"{key}." for key in state)
    problems = [f"{name} is missing in the checkpoint" for name in sorted(set(wanted) - set(stored))]
    problems += [
        f"{name} is not in the model" for name in sorted(set(stored) - set(wanted)) if name.startswith(prefixes)
    ]
    for name in sorted(set(wanted) & set(stored)):
        held, asked = (stored[name].shape, getattr(torch, stored[name].dtype)), (wanted[name].shape, wanted[name].dtype)
        if held != asked:
            problems.append(
                f"{name} is {held[0]} {held[1]} in the checkpoint, {tuple(asked[0])} {asked[1]} in the model"
            )
    if problems:
        raise CheckpointError(
            f"{checkpoint.path} does not fit this model:\n    " + shortened(problems),
            remedy="the [model] section must be the one the checkpoint was trained with",
        )


def root_cause(error: BaseException) -> str:
    """The first line of the innermost of DCP's nested errors, or of the OSError among them."""
    if isinstance(error, CheckpointException):
        inner = next(iter(error.failures.values()), None)
        error = inner[0] if inner else error
    while not isinstance(error, OSError) and (below := error.__cause__ or error.__context__) is not None:
        error = below
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
