"""Writing checkpoints in the format of PyTorch's distributed checkpoint (DCP), which plain DCP reads.

Writing is spread over all ranks, replicas included. This module and `store` add what DCP's own writer lacks: checksums
(computed while writing), durability, commit by rename, and read-back.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
import xxhash

from fsdp_pretrain.errors import StorageError, UserError
from fsdp_pretrain.parallel.mesh import World, local_part
from fsdp_pretrain.run.files import make_directory, now, replace_file
from fsdp_pretrain.run.journal import Kind
from fsdp_pretrain.units import human_bytes

from .delivery import root_cause
from .digest import StateDigest
from .disk_space import Prune, SpaceNeeded, make_room
from .layout import FILE_BYTES, SaveLayout, TensorRows, file_name, layout_of
from .loading import flatten, verify
from .manifest import CheckpointManifest, Facts, FileEntry
from .store import CONFIG, TRAIN_STATE, Checkpoint, Store, describe_file

Note = tuple[Kind, str]
"""A journal entry: kind and text."""
Fetch = Callable[[str], torch.Tensor]
_FILES_BESIDE = 8
"""Files of a checkpoint that hold no pieces: descriptions, manifest, and temporary files for atomic writes."""


class _PieceFile:
    """A file of pieces, hashed while torch.save writes it sequentially. Durable after `finish`."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("xb")
        self._digest, self.size = xxhash.xxh3_128(), 0

    def write(self, data: Any) -> int:
        self._digest.update(data)
        self.size += memoryview(data).nbytes
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        with suppress(OSError):  # what was not written is not counted
            self._file.close()

    def finish(self) -> FileEntry:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return FileEntry(name=self._path.name, bytes=self.size, xxh3=self._digest.hexdigest())


@dataclass(frozen=True)
class SaveResult:
    """A committed and, if so configured, verified checkpoint."""

    checkpoint: Checkpoint
    manifest: CheckpointManifest | None  # its manifest, on rank 0; None on the others
    bytes: int  # total size of its files
    seconds: float  # duration from the start of writing to the end of read-back
    deleted: tuple[int, ...] = ()  # steps whose checkpoints retention deleted afterwards
    notes: tuple[Note, ...] = ()  # further journal entries


def save(
    world: World,
    store: Store,
    facts: Facts,
    *,
    state: dict[str, Any],
    train_state: str,
    config: str,
    prune: Prune | None = None,
    guard: Callable[[], None] = lambda: None,
    fetch: Fetch | None = None,
) -> SaveResult:
    """Write, commit and verify a checkpoint. All ranks call it together.

    Args:
        facts: facts for the manifest, which include the step.
        state: from `loading.state_dict`, live or a copy; must not change meanwhile. Without optimiser state only
            weights are saved, which the manifest records.
        train_state, config: contents of `train_state.json` and `config.toml`.
        prune: called on rank 0 if the checkpoint does not fit, see `disk_space.make_room`.
        guard: called on rank 0 before the commit; its exception ends the save on every rank.
        fetch: returns a tensor of `state` (then on the meta device) by flat name (`model.NAME`); called one tensor at
            a time, so the model is never in memory as a whole. For a single process.

    Raises:
        UserError: what `fetch` raised.
        StorageError: on every rank, if the save failed on any; an uncommitted attempt is removed.
    """
    start = time.perf_counter()
    layout = layout_of(state, world)
    need = SpaceNeeded(layout.size, layout.files + _FILES_BESIDE)
    attempt, pruned = world.decide(lambda: _begin(store, facts.step, need, prune))
    manifest: CheckpointManifest | None = None
    try:
        files, descriptions, digest = _write(world, attempt, layout, flatten(state), fetch)

        def commit() -> tuple[Checkpoint, int]:
            nonlocal manifest
            guard()
            small = _write_small(attempt, {**descriptions, TRAIN_STATE: train_state, CONFIG: config})
            entries = [*files, *small]
            manifest = CheckpointManifest(
                **facts.model_dump(exclude_unset=True),
                optimizer="optim" in state,
                state_digest=digest,
                committed=now(),
                files=sorted(entries, key=lambda entry: entry.name),
            )
            return store.commit(attempt, manifest), sum(entry.bytes for entry in entries)

        checkpoint, written = world.decide(commit)
    except BaseException:  # includes a lost lock, and a group that another rank left
        if world.is_main:
            store.discard(attempt)
        raise
    checkpoint = _read_back(world, store, checkpoint)
    room: Note = ("checkpoint-room", "deleted before this save: all but the two newest verified ones")
    notes = (room,) if pruned else ()
    return SaveResult(checkpoint, manifest, written, time.perf_counter() - start, notes=notes)


def _begin(store: Store, step: int, need: SpaceNeeded, prune: Prune | None) -> tuple[Path, bool]:
    """Make room for the checkpoint if necessary. Returns the directory to write to, and whether others were deleted."""
    try:
        make_directory(store.directory)
    except OSError as error:
        raise StorageError(f"cannot create {store.directory}: {error.strerror}") from None
    pruned = make_room(store.directory, need, prune)
    return store.begin(step), pruned


def _write(
    world: World, attempt: Path, layout: SaveLayout, state: dict[str, torch.Tensor], fetch: Fetch | None
) -> tuple[list[FileEntry], dict[str, str | bytes], str]:
    """Write this rank's pieces.

    Returns:
        The entries of all ranks' files; contents by name of the files that describe them, on rank 0; the state digest.

    Raises:
        StorageError: on every rank, if any failed.
    """
    digest, failure = StateDigest(world, {} if fetch else state), None
    written: list[FileEntry] = []
    lengths: list[int] = []

    def value(piece: TensorRows) -> torch.Tensor:
        name = piece.tensor.name
        if fetch is None:
            return state[name]
        digest.add(name, tensor := fetch(name))
        return tensor

    try:
        _write_pieces(attempt, world.rank, layout.pieces[world.rank], value, written, lengths)
    except UserError:  # of `fetch`, which failed to read
        raise
    except Exception as error:  # the other ranks must learn of any failure
        failure = root_cause(error)
    outcomes = world.gather((failure, written, lengths))
    failures = [f"rank {rank}: {text}" for rank, (text, _, _) in enumerate(outcomes) if text]
    if failures:
        free = ""
        with suppress(OSError):  # the directory may be gone
            free = f" ({human_bytes(shutil.disk_usage(attempt.parent).free)} free)"
        raise StorageError(f"writing {attempt.with_name(attempt.name.partition('.')[0])} failed: {failures[0]}{free}")
    descriptions = layout.descriptions([sizes for _, _, sizes in outcomes]) if world.is_main else {}
    return [entry for _, files, _ in outcomes for entry in files], descriptions, digest.totals()[0]


def _write_pieces(
    attempt: Path,
    rank: int,
    pieces: Sequence[TensorRows],
    value: Callable[[TensorRows], torch.Tensor],
    written: list[FileEntry],
    lengths: list[int],
) -> None:
    """Write a rank's pieces, with one at a time in memory.

    Args:
        value: returns the tensor that has the rows of a piece on this rank.
        written: the finished files are appended here.
        lengths: the bytes of every piece are appended here.
    """
    file: _PieceFile | None = None
    try:
        for piece in pieces:
            file = file or _PieceFile(attempt / file_name(rank, len(written)))
            start, tensor = file.size, local_part(value(piece)).detach().cpu().contiguous()
            if tensor.untyped_storage().nbytes() != tensor.nbytes:
                tensor = tensor.clone()  # torch.save would write the whole storage
            torch.save(tensor, cast(IO[bytes], file))
            del tensor  # before the next one is fetched
            lengths.append(file.size - start)
            if file.size >= FILE_BYTES:
                written.append(file.finish())
                file = None
        if file is not None:
            written.append(file.finish())
    finally:
        if file is not None:
            file.close()


def _write_small(attempt: Path, contents: dict[str, str | bytes]) -> list[FileEntry]:
    """Write files of these contents, and return their entries. Raises StorageError."""
    try:
        for name, content in contents.items():
            replace_file(attempt / name, content)
        return [describe_file(attempt / name) for name in contents]
    except OSError as error:
        raise StorageError(f"cannot write into {attempt}: {error}") from None


def _read_back(world: World, store: Store, checkpoint: Checkpoint) -> Checkpoint:
    """Read a checkpoint back and mark it verified; if it is damaged, move it aside and raise StorageError."""
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
