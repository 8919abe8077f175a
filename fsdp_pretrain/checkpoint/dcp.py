"""Writing checkpoints with PyTorch's distributed checkpoint (DCP).

DCP reshards and spreads writing over all ranks, replicas included. This module and `store` add what it lacks: checksums
(computed while writing), a check that every chunk in the metadata was written, commit by rename, and read-back. DCP's
`CheckpointException` is a BaseException.
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
from .disk_space import Reclaimable, SpaceNeeded, make_room
from .loading import flatten, root_cause, verify
from .manifest import CheckpointManifest, Facts, FileEntry
from .metadata import wrong_metadata
from .store import CONFIG, TRAIN_STATE, Checkpoint, Store, describe_file, sync_directory

Note = tuple[Kind, str]
"""A journal entry: kind and text."""
Fetch = Callable[[str], torch.Tensor]
_FILES_BESIDE = 8
"""Files of a checkpoint besides one per rank: metadata, manifest, and temporary files for atomic writes."""
_CHUNK_OVERHEAD = 2048
"""Upper bound of the bytes that DCP adds per chunk (zip header and metadata entry)."""


class _HashingStream:
    """Hashes a file while it is written; DCP writes strictly sequentially."""

    def __init__(self, file: Any) -> None:
        self._file, self.digest, self.size = file, xxhash.xxh3_128(), 0

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.size += memoryview(data).nbytes
        return cast(int, self._file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _HashingFileSystem(FileSystem):
    """DCP's local file system; `written` has an entry for every finished file."""

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


class _FetchingPlanner(DefaultSavePlanner):
    """Saves meta tensors, fetching each one's values only when it is written."""

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
    """A committed and, if so configured, verified checkpoint.

    Attributes:
        manifest: of the checkpoint, on rank 0; None on the others.
        bytes: total size of its files.
        seconds: from the start of writing to the end of read-back.
        deleted: steps whose checkpoints retention deleted afterwards.
        notes: further journal entries.
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
    reclaimable: Reclaimable = (),
    guard: Callable[[], None] = lambda: None,
    fetch: Fetch | None = None,
) -> SaveResult:
    """Write, commit and verify a checkpoint. All ranks call it together.

    Args:
        facts: for the manifest; includes the step.
        state: from `loading.state_dict`, live or a copy; must not change meanwhile. Has no optimiser state if only
            weights are saved (recorded in the manifest).
        train_state, config: contents of `train_state.json` and `config.toml`.
        read_back: verify every byte afterwards.
        reclaimable: what may be deleted if the checkpoint does not fit, see `disk_space.make_room`; used on rank 0.
        guard: called on rank 0 before the commit; its exception ends the save on every rank.
        fetch: returns a tensor of `state` (then on the meta device) by flat name (`model.NAME`); called one tensor at
            a time, so the model is never in memory as a whole.

    Raises:
        StorageError: on every rank, if the save failed on any; an uncommitted attempt is removed.
    """
    start = time.perf_counter()
    tensors = flatten(state)
    # Each tensor is stored once across all ranks; DCP adds overhead per chunk.
    size = sum(each.numel() * each.element_size() + _CHUNK_OVERHEAD * world.shards for each in tensors.values())
    need = SpaceNeeded(size, world.size + _FILES_BESIDE)
    attempt, reclaimed = world.decide(lambda: _begin(store, facts.step, need, reclaimable))
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
    except BaseException:  # includes a lost lock, and a group that another rank left
        if world.is_main:
            store.discard(attempt)
        raise
    if read_back:
        checkpoint = _read_back(world, store, checkpoint)
    notes: tuple[Note, ...] = tuple(("checkpoint-room", f"to make room: {name}") for name in reclaimed)
    return SaveResult(checkpoint, promised, written, time.perf_counter() - start, notes=notes)


def _begin(store: Store, step: int, need: SpaceNeeded, reclaimable: Reclaimable) -> tuple[Path, list[str]]:
    """Ensure that the checkpoint fits before writing. Returns the attempt's directory, and what was deleted for it."""
    try:
        make_directory(store.directory)
    except OSError as error:
        raise StorageError(f"cannot create {store.directory}: {error.strerror}") from None
    reclaimed = list(make_room(store.directory, need, reclaimable))
    return store.begin(step), reclaimed


def _write(world: World, attempt: Path, state: dict[str, Any], fetch: Fetch | None) -> tuple[list[FileEntry], str]:
    """Write with DCP. Returns the entries of all ranks' files, and the state digest.

    Raises StorageError on every rank if any failed.
    """
    files, tensors = _HashingFileSystem(), flatten(state)
    # DCP keeps a file's tensors in memory until it is written, so each fetched tensor gets its own file.
    writer = FileSystemWriter(attempt, single_file_per_rank=fetch is None, sync_files=True, overwrite=False)
    if not any(tensor.is_cuda for tensor in tensors.values()):
        # The state is a host copy. DCP's copy-ahead would synchronize with training's queued kernels between tensors,
        # and with GPU 0 in every process, since that is a new thread's current device.
        writer.per_thread_copy_ahead = 0
    writer.fs = files
    fetching = _FetchingPlanner(world, fetch) if fetch else None
    planner = fetching or DefaultSavePlanner()
    failure = None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*single process")  # a command's world has no process group
            dcp.save(state, storage_writer=writer, planner=planner, process_group=world.host_group)
    except (CheckpointException, Exception) as error:  # the other ranks must learn of any failure
        failure = root_cause(error)
    outcomes = world.gather((failure, files.written))
    failures = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(outcomes) if text]
    if failures:
        free = ""
        with suppress(OSError):  # the directory may be gone
            free = f" ({human_bytes(shutil.disk_usage(attempt.parent).free)} free)"
        raise StorageError(f"writing {attempt.with_name(attempt.name.partition('.')[0])} failed: {failures[0]}{free}")
    world.decide(lambda: _check_complete(attempt))
    digest = fetching.digest.total() if fetching else state_digest(world, tensors)
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
    """Verify a checkpoint and mark it. If it is damaged, moves it aside and raises StorageError on every rank."""
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
            effect="it stays where it is, unverified; a resume that reads it rejects it",
        ) from None
