"""Filling and reading checkpoints with PyTorch's distributed checkpoint (DCP).

DCP is used for what it does well, resharding and spreading the writing over all ranks, replicas included. What it
does not do is done here and in `store`: checksums (computed while writing), proof that every chunk its metadata
promises was written, commit by rename, read-back. Its `CheckpointException` is a BaseException.
"""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor

from ..errors import CheckpointError, StorageError, shortened
from ..mesh import World
from ..optim import state_by_name
from ..record.files import make_directory, replace_file
from ..record.journal import Kind
from ..units import human_bytes
from .digest import StateDigest, state_digest
from .metadata import StoredTensor, read_metadata, wrong_metadata
from .space import GiveUp, Need, make_room
from .store import (
    CONFIG,
    TRAIN_STATE,
    Checkpoint,
    FileEntry,
    Store,
    describe_file,
    sync_directory,
    verify_files,
)

Note = tuple[Kind, str]
"""For the journal: the kind of entry, and a text."""
_FILES_BESIDE = 8
"""Files of a checkpoint besides one per rank: metadata, manifest, and those that replace them atomically."""
_CHUNK_OVERHEAD = 2048
"""Bytes that DCP adds to each chunk (the header of its zip format, its line in the metadata), rounded up."""


class _HashingStream:
    """A file being written, hashed on the way. DCP writes strictly forward."""

    def __init__(self, file: Any) -> None:
        self._file, self.digest, self.size = file, xxhash.xxh3_128(), 0

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.size += memoryview(data).nbytes
        return cast(int, self._file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _HashingFileSystem(FileSystem):
    """DCP's local file system, keeping an entry for every file it finishes writing."""

    def __init__(self) -> None:
        self.written: list[FileEntry] = []

    def mkdir(self, path: Any) -> None:
        make_directory(Path(path))

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with Path(path).open(mode) as file:
            hashing: Any = _HashingStream(file)
            yield hashing
        name = Path(path).name.removesuffix(".tmp")
        self.written.append(FileEntry(name=name, bytes=hashing.size, xxh3=hashing.digest.hexdigest()))


class _Delivering(DefaultSavePlanner):
    """Writes meta tensors whose values are fetched one by one, as their turn to be written comes."""

    def __init__(self, world: World, fetch: Callable[[str], torch.Tensor]) -> None:
        super().__init__()
        self._fetch = fetch
        self._sum = StateDigest(world)

    def lookup_object(self, index: MetadataIndex) -> Any:
        tensor = self._fetch(index.fqn)
        self._sum.add(index.fqn, tensor)
        return tensor

    def digest(self) -> str:
        """The digest of what was fetched; collective."""
        return self._sum.total()


def state_dict(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """A checkpoint's tensors by name, `model.NAME` and `optim.NAME.{step,exp_avg,exp_avg_sq}`; live, not copies."""
    state: dict[str, Any] = {"model": model.state_dict()}
    return state if optimizer is None else {**state, "optim": state_by_name(model, optimizer)}


def checkpoint_bytes(world: World, state: dict[str, Any]) -> int:
    """Bytes that a checkpoint takes at most, over all ranks: every tensor once, and what DCP adds to its chunks."""
    tensors = _flatten(state).values()
    return sum(tensor.numel() * tensor.element_size() + _CHUNK_OVERHEAD * world.shards for tensor in tensors)


@dataclass(frozen=True)
class Saved:
    """A committed and, if so configured, verified checkpoint, and what it took.

    Attributes:
        checkpoint: the checkpoint.
        bytes: of its files.
        seconds: from the beginning of writing to the end of reading back.
        stalled: seconds for which training waited.
        deleted: steps whose checkpoints retention removed afterwards.
        notes: what else should be told.
    """

    checkpoint: Checkpoint
    bytes: int
    seconds: float
    stalled: float = 0.0
    deleted: tuple[int, ...] = ()
    notes: tuple[Note, ...] = ()


def save(
    world: World,
    store: Store,
    step: int,
    *,
    state: dict[str, Any],
    train_state: str,
    config: str,
    facts: dict[str, Any],
    verify: bool,
    give_up: GiveUp = (),
    guard: Callable[[], None] = lambda: None,
    fetch: Callable[[str], torch.Tensor] | None = None,
) -> Saved:
    """Write, commit and verify a checkpoint. All ranks call it together.

    Args:
        state: from `state_dict`, live or a copy; must not change meanwhile. Without optimiser state where only weights
            are known (the manifest says so).
        train_state: contents of `train_state.json`.
        config: contents of `config.toml`.
        facts: further entries of the manifest.
        verify: read everything back.
        give_up: what may go if the checkpoint does not fit, see `space.make_room`; used on rank 0.
        guard: asked on rank 0 before the commit; what it raises ends the save on every rank.
        fetch: values of the tensors of `state`, which is then on the meta device, by flat name (`model.NAME`); called
            for one after the other, so that the whole is never in memory.

    Raises:
        StorageError: on every rank, if it failed on any; what was written is removed.
    """
    start = time.perf_counter()
    need = Need(checkpoint_bytes(world, state), world.size + _FILES_BESIDE)
    attempt, given_up = world.decide(lambda: _begin(store, step, need, give_up))
    try:
        files, digest = _write(world, attempt, state, fetch)
        facts = {"optimizer": "optim" in state, **facts, "state_digest": digest}
        checkpoint = world.decide(lambda: _commit(store, attempt, files, train_state, config, facts, guard))
    except BaseException:  # also of the lock, or a group that another rank left
        if world.is_main:
            store.discard(attempt)
        raise
    if verify:
        _verify_after_save(world, store, checkpoint)
        checkpoint = world.decide(lambda: store.mark_verified(checkpoint))
    size = sum(entry.bytes for entry in files)
    notes: tuple[Note, ...] = tuple(("checkpoint-room", f"to make room: {name}") for name in given_up)
    return Saved(checkpoint, size, time.perf_counter() - start, notes=notes)


def _begin(store: Store, step: int, need: Need, give_up: GiveUp) -> tuple[Path, list[str]]:
    """Make sure that the checkpoint fits before a byte of it is written."""
    try:
        make_directory(store.directory)
    except OSError as error:
        raise StorageError(f"cannot create {store.directory}: {error.strerror}") from None
    given_up = list(make_room(store.directory, need, give_up))
    return store.begin(step), given_up


def _write(
    world: World, attempt: Path, state: dict[str, Any], fetch: Callable[[str], torch.Tensor] | None
) -> tuple[list[FileEntry], str]:
    """Let DCP write; the entries of all files of all ranks, and the digest of what they hold.

    Raises StorageError on every rank if any failed.
    """
    files = _HashingFileSystem()
    # DCP holds on to the tensors of a file until it is written: what is fetched gets a file for each.
    writer = FileSystemWriter(attempt, single_file_per_rank=fetch is None, sync_files=True, overwrite=False)
    if not any(tensor.is_cuda for tensor in _flatten(state).values()):
        # A copy in host memory. To copy ahead from a GPU, DCP would wait between tensors for all that training has
        # queued; and for GPU 0 in every process, since that is the current device of a new thread.
        writer.per_thread_copy_ahead = 0
    delivering = _Delivering(world, fetch) if fetch else None
    writer.fs = files
    failure = None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*single process")  # a command's world has no process group
            dcp.save(
                state, storage_writer=writer, planner=delivering or DefaultSavePlanner(), process_group=world.host_group
            )
    except (CheckpointException, Exception) as error:  # whatever it is, the other ranks must hear of it
        failure = _cause(error)
    outcomes = world.gather((failure, files.written))
    failures = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(outcomes) if text]
    if failures:
        free = ""
        with suppress(OSError):  # the directory may be gone
            free = f" ({human_bytes(shutil.disk_usage(attempt.parent).free)} free)"
        raise StorageError(f"writing {attempt.with_name(attempt.name.partition('.')[0])} failed: {failures[0]}{free}")
    world.decide(lambda: _check_complete(attempt))
    digest = delivering.digest() if delivering else state_digest(world, _flatten(state))
    return [entry for _, written in outcomes for entry in written], digest


def _cause(error: BaseException) -> str:
    """The most telling line of DCP's nested failures: the operating system's error if there is one below."""
    if isinstance(error, CheckpointException):
        inner = next(iter(error.failures.values()), None)
        error = inner[0] if inner else error
    while not isinstance(error, OSError) and (below := error.__cause__ or error.__context__) is not None:
        error = below
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _check_complete(attempt: Path) -> None:
    """Raise StorageError if DCP reported success with chunks missing."""
    if wrong := wrong_metadata(attempt):
        raise StorageError(f"DCP reported success, but in {attempt} {wrong[0]}")


def _commit(
    store: Store,
    attempt: Path,
    files: list[FileEntry],
    train_state: str,
    config: str,
    facts: dict[str, Any],
    guard: Callable[[], None],
) -> Checkpoint:
    guard()
    try:
        for name, content in ((TRAIN_STATE, train_state), (CONFIG, config)):
            replace_file(attempt / name, content)
            files.append(describe_file(attempt / name))
        sync_directory(attempt)
    except OSError as error:
        raise StorageError(f"cannot write into {attempt}: {error}") from None
    return store.commit(attempt, files, facts)


def _verify_after_save(world: World, store: Store, checkpoint: Checkpoint) -> None:
    wrong = verify(world, checkpoint)
    if wrong:
        world.decide(lambda: _put_aside(store, checkpoint))
        raise StorageError(
            f"{checkpoint.path.name} was written but reads back wrong: {wrong[0]}",
            effect="it was moved to checkpoints/abandoned and does not count",
            remedy="check the storage; the data in memory is not affected",
        )


def _put_aside(store: Store, checkpoint: Checkpoint) -> None:
    try:
        store.abandon(checkpoint.path)
    except OSError as error:
        raise StorageError(
            f"{checkpoint.path.name} was written but reads back wrong, and cannot be moved aside: {error}",
            effect="it stays where it is, unverified; a resume that reads it passes it over",
        ) from None


def verify(world: World, checkpoint: Checkpoint) -> list[str]:
    """Read a checkpoint back, files spread over the ranks; what is wrong, the same on every rank.

    With several nodes a file is read on another node than the one that wrote it, past the writer's page cache.
    """
    entries = world.decide(checkpoint.files)
    mine = [entry for i, entry in enumerate(entries) if (i + world.local_world) % world.size == world.rank]
    wrong = [text for texts in world.gather(verify_files(checkpoint.path, mine)) for text in texts]
    return wrong or world.decide(lambda: wrong_metadata(checkpoint.path))


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint gave: whether it has optimiser state, and the digest of its state, equal to the one saved."""

    optimizer: bool
    digest: str


class UnreadableError(CheckpointError):
    """Loading failed on its way, on all ranks: what was to be filled may hold parts of the checkpoint."""


def load(world: World, checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> Loaded:
    """Load a checkpoint, of any mesh, into a model and optimiser. All ranks call it together.

    The optimiser's hyperparameters are not stored; those of the configuration stay in force.

    If it has no optimiser state (it was imported), the optimiser is left as it is.

    Raises:
        UnreadableError: a tensor cannot be read from its file.
        CheckpointError: tensors are missing, superfluous, or of another shape or dtype, or not what was saved.
    """
    whole = world.decide(lambda: checkpoint.manifest().optimizer)
    state = state_dict(model, optimizer if whole else None)
    reader = world.together(lambda: _Reader(checkpoint.path))
    world.decide(lambda: _compare(checkpoint, reader.tensors, state))
    try:
        dcp.load(state, storage_reader=reader, process_group=world.host_group)
    except CheckpointException as error:  # DCP raises it on every rank
        raise UnreadableError(f"{checkpoint.path} cannot be read: {_cause(error)}").on_all_ranks() from None
    digest, expected = state_digest(world, _flatten(state)), world.decide(lambda: checkpoint.manifest().state_digest)
    if digest != expected:
        raise CheckpointError(
            f"{checkpoint.path} gave another state than was saved (digest {digest}, at saving {expected})",
            effect="training on would continue from damaged weights",
            remedy="go back to an earlier checkpoint, and check memory and storage of the nodes",
        ).on_all_ranks()
    model.load_state_dict(state["model"])
    parameters = dict(model.named_parameters())
    for name, values in state.get("optim", {}).items():
        optimizer.state[parameters[name]] = values
    return Loaded(whole, digest)


def load_model(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Load only the weights, without a process group, into an unsharded model. Raises CheckpointError."""
    state, reader = {"model": model.state_dict()}, _Reader(checkpoint.path)
    _compare(checkpoint, reader.tensors, state)
    _load_alone(checkpoint, state, reader)


class Weights:
    """The weights of a checkpoint of any mesh, read one by one in one process, without a process group.

    Args:
        checkpoint: whose files were verified.
        model: what it must be the weights of; on the meta device.

    Attributes:
        shapes: of every parameter, by name.

    Raises:
        CheckpointError: its metadata cannot be read, or its tensors are not those of the model.
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
    """DCP's reader with our way of reading `.metadata`; once, as with thousands of chunks it takes a second.

    Attributes:
        tensors: all that the checkpoint holds, by name.

    Raises:
        CheckpointError: see `metadata.read_metadata`.
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
        """What DCP asks for, instead of its unpickling of the file."""
        return self._metadata


def _load_alone(checkpoint: Checkpoint, state: dict[str, Any], reader: _Reader) -> None:
    """Fill tensors without a process group. Raises CheckpointError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group is the point
            dcp.load(state, storage_reader=reader, no_dist=True)
    except (CheckpointException, OSError, RuntimeError) as error:
        raise CheckpointError(
            f"cannot read {checkpoint.path}: {_cause(error)}",
            remedy="if the run is live, retention may just have deleted it: take a newer one",
        ) from None


def _compare(checkpoint: Checkpoint, stored: dict[str, StoredTensor], state: dict[str, Any]) -> None:
    """DCP ignores keys nobody asks for and casts dtypes silently: compare names, shapes and dtypes first."""
    wanted = _flatten(state)
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


def _flatten(tree: Any, prefix: str = "") -> dict[str, torch.Tensor | DTensor]:
    if isinstance(tree, torch.Tensor):
        return {prefix: tree}
    return {
        name: tensor
        for key, value in tree.items()
        for name, tensor in _flatten(value, f"{prefix}.{key}" if prefix else key).items()
    }


__all__ = ["Saved", "UnreadableError", "Weights", "load", "load_model", "save", "state_dict", "verify"]
