"""Where a job makes its corpus: a directory, or a URL of remote storage.

In a directory each file is made in its place. In remote storage a shard is made in a scratch directory on local disk,
uploaded, read back and compared, its record last; objects are seen whole or not at all, so nothing else is needed for
readers never to see half a shard, and no killed process leaves more than scratch files behind.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from data.corpus.fetched import require_room, scratch_directory
from data.corpus.shards import file_checksum
from data.text.remote_files import at_once, objects_below, remote_of
from fsdp_pretrain.atomic import replace_file
from fsdp_pretrain.errors import DataError
from fsdp_pretrain.remote import Location, Problem, RemoteError, Url

_PIECE = 16 << 20
_ATTEMPTS = 3
_LAST = (".json", "manifest.json")
"""Of several files made together, what names the others is uploaded last."""


@dataclass(frozen=True)
class LocalOutput:
    """A directory. Names are relative to it: `shards/shard-00001.json`."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def names(self) -> set[str]:
        """Of the files in it and in its `shards/`."""
        found = [*self.path.iterdir(), *self.path.glob("shards/*")] if self.path.exists() else []
        return {str(path.relative_to(self.path)) for path in found}

    def read(self, names: Sequence[str]) -> list[bytes]:
        """Whole files. Raises OSError."""
        return [(self.path / name).read_bytes() for name in names]

    def write(self, name: str, content: bytes) -> None:
        """Create or replace a file, which is seen whole or not at all."""
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path / name, content)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            (self.path / name).unlink(missing_ok=True)
        with suppress(OSError):
            (self.path / "shards").rmdir()  # unless something is left

    @contextmanager
    def making(self, name: str = "") -> Iterator[Path]:
        """A local path: what is made there, at that path and beside it with a suffix, is in the place afterwards.
        Without a name it is a directory."""
        path = self.path / name
        (path.parent if name else path).mkdir(parents=True, exist_ok=True)
        yield path

    def require_room(self, sizes: Iterable[int], workers: int) -> None:
        """Raise StorageError if files of these bytes, `workers` at a time, cannot be made."""
        # what is made stays: a full disk is found when it is full, and nothing is lost


@dataclass(frozen=True)
class RemoteOutput:
    """A URL, and the local directory where what is in work lies. See `LocalOutput`."""

    url: Url
    scratch: Path

    def __str__(self) -> str:
        return self.url

    def names(self) -> set[str]:
        return {name for name in objects_below(self.url) if name.count("/") == name.startswith("shards/")}

    def read(self, names: Sequence[str]) -> list[bytes]:
        return at_once(self._read, names)

    def write(self, name: str, content: bytes) -> None:
        remote, object_name = remote_of(self.url / name)
        digest = xxhash.xxh3_128_hexdigest(content)
        self._checked(name, len(content), digest, lambda: remote.write(object_name, content))

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            remote, object_name = remote_of(self.url / name)
            remote.delete([object_name])

    @contextmanager
    def making(self, name: str = "") -> Iterator[Path]:
        folder, _, own = name.rpartition("/")
        with tempfile.TemporaryDirectory(dir=self.scratch) as directory:
            yield Path(directory, own)
            for path in sorted(Path(directory).iterdir(), key=lambda path: path.name.endswith(_LAST)):
                self._upload(path, f"{folder}/{path.name}" if folder else path.name)

    def require_room(self, sizes: Iterable[int], workers: int) -> None:
        require_room(self.scratch, sizes, workers)

    def _read(self, name: str) -> bytes:
        remote, object_name = remote_of(self.url / name)
        return remote.read(object_name)

    def _upload(self, path: Path, name: str) -> None:
        remote, object_name = remote_of(self.url / name)
        size = path.stat().st_size
        self._checked(name, size, file_checksum(path), lambda: remote.upload(path, object_name))

    def _checked(self, name: str, size: int, digest: str, send: Callable[[], None]) -> None:
        """Send an object and read it back. Raises RemoteError if it is not what was sent."""
        remote, object_name = remote_of(self.url / name)
        for _ in range(_ATTEMPTS):
            send()
            found = xxhash.xxh3_128()
            for start in range(0, size, _PIECE):
                found.update(remote.read(object_name, start, min(size, start + _PIECE)))
            if found.hexdigest() == digest and remote.info(object_name).size == size:
                return
        text = f"what was written reads back as other bytes, {_ATTEMPTS} times"
        raise RemoteError(self.url / name, Problem.FAILED, text)


Output = LocalOutput | RemoteOutput


@contextmanager
def open_output(out: Location, scratch: Path | None) -> Iterator[Output]:
    """The place of a corpus.

    Args:
        scratch: directory for what is in work on its way to a URL; None takes the system's for temporary files.

    Raises:
        DataError: a URL that cannot be written to.
    """
    if not isinstance(out, Url):
        yield LocalOutput(out)
        return
    if out.scheme in ("https", "http"):
        raise DataError(f"{out} can be read, but not written to", remedy="name a bucket: s3://, gs:// or az://")
    with scratch_directory(scratch) as directory:
        yield RemoteOutput(out, directory)
