"""Writing checkpoints with PyTorch's distributed checkpoint (DCP).

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
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex

from fsdp_pretrain.errors import StorageError
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.record.files import make_directory, now, replace_file
from fsdp_pretrain.record.journal import Kind
from fsdp_pretrain.units import human_bytes

from .digest import StateDigest, state_digest
from .disk_space import GiveUp, SpaceNeeded, make_room
from .loading import flatten, root_cause, verify
from .manifest import CheckpointManifest, Facts, FileEntry
from .metadata import wrong_metadata
from .store import CONFIG, TRAIN_STATE, Checkpoint, Store, describe_file, sync_directory

Note = tuple[Kind, str]
"""For the journal: the kind of entry, and a text."""
Fetch = Callable[[str], torch.Tensor]
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

    def __init__(self, world: World, fetch: Fetch) -> None:
        super().__init__()
        self._fetch = fetch
        self.digest = StateDigest(world)

    def lookup_object(self, index: MetadataIndex) -> Any:
        tensor = self._fetch(index.fqn)
        self.digest.add(index.fqn, tensor)
        return tensor


@dataclass(frozen=True)
class SaveResult:
    """A committed and, if so configured, verified checkpoint, and what it took.

    Attributes:
        manifest: of the checkpoint, on rank 0; None on the others.
        bytes: of its files.
        seconds: from the beginning of writing to the end of reading back.
        deleted: steps whose checkpoints retention removed afterwards.
        notes: what else belongs into the journal.
    """

    checkpoint: Checkpoint
    manifest: CheckpointManifest | None
    bytes: int
    seconds: float
    deleted: tuple[int, ...] = ()
    notes: tuple[Note, ...] = ()


def save(
    world: World,
    store: Store,
    facts: Facts,
    *,
    state: dict[str, Any],
    train_state: str,
    config: str,
    read_back: bool,
    give_up: GiveUp = (),
    guard: Callable[[], None] = lambda: None,
    fetch: Fetch | None = None,
) -> SaveResult:
    """Write, commit and verify a checkpoint. All ranks call it together.

    Args:
        facts: what the manifest says of it; the step among them.
        state: from `loading.state_dict`, live or a copy; must not change meanwhile. Without optimiser state where only
            weights are known (the manifest says so).
        train_state, config: contents of `train_state.json` and `config.toml`.
        read_back: verify every byte afterwards.
        give_up: what may go if the checkpoint does not fit, see `disk_space.make_room`; used on rank 0.
        guard: called on rank 0 before the commit; what it raises ends the save on every rank.
        fetch: values of the tensors of `state`, which is then on the meta device, by flat name (`model.NAME`); called
            for one after the other, so that the whole is never in memory.

    Raises:
        StorageError: on every rank, if it failed on any; what was written is removed.
    """
    start = time.perf_counter()
    tensors = flatten(state)
    # Every tensor once, over all ranks, and what DCP adds to its chunks.
    size = sum(each.numel() * each.element_size() + _CHUNK_OVERHEAD * world.shards for each in tensors.values())
    need = SpaceNeeded(size, world.size + _FILES_BESIDE)
    attempt, given_up = world.decide(lambda: _begin(store, facts.step, need, give_up))
    promised: CheckpointManifest | None = None
    try:
        files, digest = _write(world, attempt, state, fetch)

        def commit() -> tuple[Checkpoint, int]:
            nonlocal promised
            guard()
            every = [*files, *_write_texts(attempt, {TRAIN_STATE: train_state, CONFIG: config})]
            promised = CheckpointManifest(
                **facts.model_dump(exclude_unset=True),
                optimizer="optim" in state,
                state_digest=digest,
                committed=now(),
                files=sorted(every, key=lambda entry: entry.name),
            )
            return store.commit(attempt, promised), sum(entry.bytes for entry in every)

        checkpoint, written = world.decide(commit)
    except BaseException:  # also of the lock, or a group that another rank left
        if world.is_main:
            store.discard(attempt)
        raise
    if read_back:
        checkpoint = _read_back(world, store, checkpoint)
    notes: tuple[Note, ...] = tuple(("checkpoint-room", f"to make room: {name}") for name in given_up)
    return SaveResult(checkpoint, promised, written, time.perf_counter() - start, notes=notes)


def _begin(store: Store, step: int, need: SpaceNeeded, give_up: GiveUp) -> tuple[Path, list[str]]:
    """Make sure that the checkpoint fits before a byte of it is written; the attempt, and what was given up for it."""
    try:
        make_directory(store.directory)
    except OSError as error:
        raise StorageError(f"cannot create {store.directory}: {error.strerror}") from None
    given_up = list(make_room(store.directory, need, give_up))
    return store.begin(step), given_up


def _write(world: World, attempt: Path, state: dict[str, Any], fetch: Fetch | None) -> tuple[list[FileEntry], str]:
    """Let DCP write; the entries of all files of all ranks, and the digest of what they hold.

    Raises StorageError on every rank if any failed.
    """
    files, tensors = _HashingFileSystem(), flatten(state)
    # DCP holds on to the tensors of a file until it is written: what is fetched gets a file for each.
    writer = FileSystemWriter(attempt, single_file_per_rank=fetch is None, sync_files=True, overwrite=False)
    if not any(tensor.is_cuda for tensor in tensors.values()):
        # A copy in host memory. To copy ahead from a GPU, DCP would wait between tensors for all that training has
        # queued; and for GPU 0 in every process, since that is the current device of a new thread.
        writer.per_thread_copy_ahead = 0
    writer.fs = files
    delivering = _Delivering(world, fetch) if fetch else None
    planner = delivering or DefaultSavePlanner()
    failure = None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*single process")  # a command's world has no process group
            dcp.save(state, storage_writer=writer, planner=planner, process_group=world.host_group)
    except (CheckpointException, Exception) as error:  # whatever it is, the other ranks must learn of it
        failure = root_cause(error)
    outcomes = world.gather((failure, files.written))
    failures = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(outcomes) if text]
    if failures:
        free = ""
        with suppress(OSError):  # the directory may be gone
            free = f" ({human_bytes(shutil.disk_usage(attempt.parent).free)} free)"
        raise StorageError(f"writing {attempt.with_name(attempt.name.partition('.')[0])} failed: {failures[0]}{free}")
    world.decide(lambda: _check_complete(attempt))
    digest = delivering.digest.total() if delivering else state_digest(world, tensors)
    return [entry for _, written in outcomes for entry in written], digest


def _check_complete(attempt: Path) -> None:
    if wrong := wrong_metadata(attempt):
        raise StorageError(f"DCP reported success, but in {attempt} {wrong[0]}")


def _write_texts(attempt: Path, contents: dict[str, str]) -> list[FileEntry]:
    try:
        for name, content in contents.items():
            replace_file(attempt / name, content)
        entries = [describe_file(attempt / name) for name in contents]
        sync_directory(attempt)
    except OSError as error:
        raise StorageError(f"cannot write into {attempt}: {error}") from None
    return entries


def _read_back(world: World, store: Store, checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint, marked verified. Raises StorageError on every rank, with it put aside, if a byte is wrong."""
    if wrong := verify(world, checkpoint):
        world.decide(lambda: _put_aside(store, checkpoint))
        raise StorageError(
            f"{checkpoint.path.name} was written but reads back wrong: {wrong[0]}",
            effect="it was moved to checkpoints/abandoned and does not count",
            remedy="check the storage; the data in memory is not affected",
        )
    return world.decide(checkpoint.mark_verified)


def _put_aside(store: Store, checkpoint: Checkpoint) -> None:
    try:
        store.abandon(checkpoint.path)
    except OSError as error:
        raise StorageError(
            f"{checkpoint.path.name} was written but reads back wrong, and cannot be moved aside: {error}",
            effect="it stays where it is, unverified; a resume that reads it passes it over",
        ) from None
