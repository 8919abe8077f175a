"""Token files in remote storage, fetched whole into a scratch directory while they are worked on."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

from data.text.remote_files import remote_of
from fsdp_pretrain.errors import StorageError, naming
from fsdp_pretrain.remote import Location, Problem, RemoteError, Url
from fsdp_pretrain.units import human_bytes

from .corpus import CHECKSUMS
from .manifest import parse_manifest

_PREFIX = "fsdp-data-"
_PIECE = 16 << 20
_ATTEMPTS = 3
PAIR = (".bin", ".idx")
"""What the prefix of a Megatron pair stands for."""


@contextmanager
def scratch_directory(parent: Path | None) -> Iterator[Path]:
    """An empty directory on local disk, removed at the end. Those that killed processes left are removed first.

    Args:
        parent: made if absent; None takes the system's directory for temporary files.

    Raises:
        OSError: `parent` cannot be written.
    """
    parent = parent or Path(tempfile.gettempdir())
    parent.mkdir(parents=True, exist_ok=True)
    for left in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError), _held(left):
            shutil.rmtree(left)
    while True:
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        with suppress(BlockingIOError), _held(directory):
            if directory.exists():  # else another process took it for an abandoned one
                try:
                    yield directory
                finally:
                    shutil.rmtree(directory, ignore_errors=True)
                return


@contextmanager
def _held(directory: Path) -> Iterator[None]:
    """Hold a directory as in use, for as long as this process lives. Raises BlockingIOError if it is held."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def require_room(scratch: Path, sizes: Iterable[int], workers: int) -> None:
    """Raise StorageError if the largest `workers` files of these bytes do not fit at one time."""
    needed, free = sum(sorted(sizes)[-workers:]), shutil.disk_usage(scratch).free
    if free < needed:
        raise StorageError(
            f"{scratch.parent} has {human_bytes(free)} free; the files in work at one time may take up to "
            f"{human_bytes(needed)}",
            remedy="name a directory on a larger disk with --scratch, or take fewer --workers",
        )


@contextmanager
def fetched(
    file: Location, suffixes: Sequence[str], scratch: Path | None, checksums: Mapping[str, str] | None = None
) -> Iterator[Path]:
    """A token file as a local path: itself, or a copy of the object that is removed at the end.

    Args:
        suffixes: of the files that `file` stands for: `PAIR`, or an empty one.
        scratch: from `scratch_directory`.
        checksums: by suffix, the xxh3-128 that is expected; an object that differs is read again, a few times, because
            the response may be wrong. What still differs is for the caller to find.

    Raises:
        RemoteError: the storage cannot be read.
        OSError: `scratch` cannot be written.
    """
    if not isinstance(file, Url):
        yield file
        return
    with tempfile.TemporaryDirectory(dir=scratch) as directory:
        path = Path(directory, file.name)
        for suffix in suffixes:
            expected = (checksums or {}).get(suffix)
            for _ in range(_ATTEMPTS):
                if fetch(Url(file + suffix), path.with_name(path.name + suffix)) == expected or expected is None:
                    break
        yield path


def fetch_tables(url: Url, here: Path) -> Path:
    """Copy what a corpus has beside its shards, as far as it is there, into the empty directory `here`; returns it.

    Raises:
        DataError: the manifest is damaged; RemoteError.
    """
    if _fetched_if_there(url / "manifest.json", here / "manifest.json"):
        manifest = parse_manifest((here / "manifest.json").read_bytes(), f"{url}/manifest.json")
        for name in ("blocks.npy", CHECKSUMS, manifest.tokenizer.file):
            _fetched_if_there(url / name, here / name)
    return here


def _fetched_if_there(url: Url, path: Path) -> bool:
    try:
        path.write_bytes(read_twice(url))
    except RemoteError as error:
        if error.problem is not Problem.MISSING:
            raise
        return False
    return True


def read_twice(url: Url) -> bytes:
    """A small object that no checksum is known of, read until two answers agree. Raises RemoteError."""
    remote, name = remote_of(url)
    answers = [remote.read(name), remote.read(name)]
    while answers[-1] != answers[-2]:
        if len(answers) > _ATTEMPTS:
            raise RemoteError(url, Problem.FAILED, "every answer has other bytes")
        answers.append(remote.read(name))
    return answers[-1]


def fetch(url: Url, path: Path) -> str:
    """Copy an object to a local file; its xxh3-128. Raises RemoteError, OSError."""
    remote, name = remote_of(url)
    size, digest = remote.info(name).size, xxhash.xxh3_128()
    with naming(path), path.open("wb") as target:
        for start in range(0, size, _PIECE):
            content = remote.read(name, start, min(size, start + _PIECE))
            digest.update(content)
            target.write(content)
    return digest.hexdigest()
