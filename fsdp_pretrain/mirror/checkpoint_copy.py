"""Files of checkpoints to the mirror and back, checked on the way. No torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fsdp_pretrain.checkpoint.manifest import FileEntry
from fsdp_pretrain.checkpoint.store import (
    MANIFEST,
    PINNED,
    VERIFIED,
    Checkpoint,
    Store,
    describe_file,
    difference,
    directory_name,
    sync_directory,
)
from fsdp_pretrain.errors import CheckpointError
from fsdp_pretrain.record import state_files
from fsdp_pretrain.record.files import now
from fsdp_pretrain.remote import Problem, RemoteError

from .layout import MirroredCheckpoint, RunMirror

AT_ONCE = 4
"""Files that are copied at the same time."""


class LocallyGoneError(CheckpointError):
    """A checkpoint was deleted, or is damaged, in the run directory while it was copied."""


def owner(name: str, local_ranks: int, nodes: int) -> int:
    """The node that copies a file of a checkpoint: that of the rank in DCP's name of it, if there is one, else 0."""
    head = name.removeprefix("__").partition("_")[0]
    node = int(head) // local_ranks if name.startswith("__") and head.isdecimal() else 0
    return node if node < nodes else 0


def send(mirror: RunMirror, folder: Path, entry: FileEntry, name: str, *, read_back: bool, there: int | None) -> int:
    """Copy a file of the checkpoint in `folder` to the object `name`, and check it. Returns the bytes sent.

    Args:
        read_back: compare its checksum, else only its size.
        there: size of the object that is there already, if any: it may be whole.

    Raises:
        LocallyGoneError: the file is gone, or is not the one in the manifest.
        RemoteError: also if what was read back differs.
    """
    if read_back and there == entry.bytes and not mirror.copy(name, entry):
        return 0
    path = folder / entry.name
    try:
        mirror.remote.upload(path, name)
    except (OSError, RemoteError) as error:
        if path.is_file():
            raise
        raise LocallyGoneError(f"{path} is gone: {error}") from None
    size = mirror.remote.info(name).size
    wrong = difference(entry, FileEntry(name=entry.name, bytes=size, xxh3=entry.xxh3))
    if not wrong and read_back:
        wrong = mirror.copy(name, entry)
    if not wrong:
        return entry.bytes
    try:
        if local := difference(entry, describe_file(path)):
            raise LocallyGoneError(f"{path.parent.name} is damaged in the run directory: {local}")
    except OSError as error:
        raise LocallyGoneError(f"{path}: {error.strerror}") from None
    raise RemoteError(str(mirror.url / name), Problem.FAILED, f"after it was written, {wrong}")


def fetch(
    mirror: RunMirror, item: MirroredCheckpoint, store: Store, shown: Callable[[int], object] = lambda size: None
) -> Checkpoint:
    """Copy a checkpoint that looks whole into a store, and commit it there, verified.

    Files of an attempt that was cut off are taken if they are whole. `shown` is called with bytes, from several
    threads.

    Raises:
        CheckpointError: a file is missing or damaged in the mirror; nothing was committed.
        RemoteError: the mirror does not answer.
        OSError: of the store.
    """
    manifest = item.manifest()
    target = store.directory / directory_name(item.step)
    attempt = target.with_name(f"{target.name}.writing-from-mirror")
    attempt.mkdir(parents=True, exist_ok=True)

    def one(entry: FileEntry) -> str:
        path = attempt / entry.name
        if path.is_file() and path.stat().st_size == entry.bytes and not difference(entry, describe_file(path)):
            shown(entry.bytes)
            return ""
        return mirror.copy(f"{item.name}/{entry.name}", entry, path, shown)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        wrong = [problem for problem in pool.map(one, manifest.files) if problem]
    if wrong:
        raise CheckpointError(wrong[0])
    assert item.raw is not None
    for name, content in ((MANIFEST, item.raw), (VERIFIED, state_files.seal({"verified": now()}).encode())):
        _write(attempt / name, content)
    if item.pinned:
        _write(attempt / PINNED, state_files.seal({"pinned": now()}).encode())
    sync_directory(attempt)
    if target.exists():  # a damaged one of the same step
        store.abandon(target)
    attempt.rename(target)
    sync_directory(store.directory)
    return Checkpoint(item.step, target, None, True, item.pinned)


def read_back(
    mirror: RunMirror, item: MirroredCheckpoint, shown: Callable[[int], object] = lambda size: None
) -> list[str]:
    """Read a checkpoint that looks whole in the mirror. Returns one text per bad file. Raises RemoteError."""

    def one(entry: FileEntry) -> str:
        return mirror.copy(f"{item.name}/{entry.name}", entry, shown=shown)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [problem for problem in pool.map(one, item.manifest().files) if problem]


def delete(mirror: RunMirror, item: MirroredCheckpoint) -> None:
    """Delete a checkpoint from the mirror, the manifest first, so that what is left never looks whole."""
    mirror.remote.delete(f"{item.name}/{name}" for name in (MANIFEST, *sorted(item.objects.keys() - {MANIFEST})))
    mirror.remote.remove_folder(item.name)


def _write(path: Path, content: bytes) -> None:
    """Write a file and sync it. Raises OSError."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
