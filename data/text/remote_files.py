"""Input files in remote storage: found by the URL of an object, a folder or a pattern, and read by ranges."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePosixPath
from typing import IO, TypeVar, cast

from fsdp_pretrain.errors import DataError
from fsdp_pretrain.remote import ObjectInfo, Remote, Url

S = TypeVar("S")
T = TypeVar("T")
_PIECE = 4 << 20
"""Bytes of a request while an object is read in order."""
_AT_ONCE = 16
_PATTERN = re.compile(r"[*?\[]")


@lru_cache(maxsize=64)
def _connection(root: Url) -> Remote:
    return Remote(root)


def remote_of(url: Url) -> tuple[Remote, str]:
    """The bucket or host of a URL, connected once per process, and the name of the object or folder there."""
    scheme, _, rest = url.partition("://")
    root, _, name = rest.lstrip("/").partition("/")
    return _connection(Url(f"{scheme}://{'/' if scheme == 'file' else ''}{root}")), name


def at_once(act: Callable[[S], T], items: Iterable[S]) -> list[T]:
    """The results of small requests, several of which are made at a time."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(act, items))


def parse_url(text: str) -> Url:
    """Raises DataError."""
    try:
        return Url(text)
    except ValueError as error:
        raise DataError(str(error)) from None


@dataclass(frozen=True)
class RemoteFile:
    """An object, with what a `Path` offers to those who read it."""

    url: Url
    info: ObjectInfo

    @classmethod
    def at(cls, url: Url) -> RemoteFile:
        """Raises RemoteError if there is no such object."""
        remote, name = remote_of(url)
        info = remote.info(name)
        if not info.size and url.scheme in ("https", "http"):
            raise DataError(
                f"the server does not tell the size of {url}, or it is empty", remedy="fetch the file first"
            )
        return cls(url, info)

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return self.url.name

    @property
    def parent(self) -> Url:
        """The folder."""
        return Url(self.url.rpartition("/")[0])

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    def open(self, mode: str = "rb", buffering: int = _PIECE) -> IO[bytes]:
        """Its bytes, read by ranges; without a buffer (0) a request for each read. Reading raises RemoteError."""
        assert mode == "rb"
        raw = _Ranges(self)
        return cast(IO[bytes], io.BufferedReader(raw, buffering) if buffering else raw)


class _Ranges(io.RawIOBase):
    """The bytes of an object."""

    def __init__(self, file: RemoteFile) -> None:
        super().__init__()
        self._remote, self._name = remote_of(file.url)
        self._size, self._at = file.info.size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: object) -> int:
        with memoryview(cast(bytearray, buffer)).cast("B") as view:
            stop = min(self._size, self._at + len(view))
            if stop <= self._at:
                return 0
            view[: stop - self._at] = self._remote.read(self._name, self._at, stop)
        count, self._at = stop - self._at, stop
        return count


@dataclass(frozen=True)
class Found:
    """What an input names: `folder` is None for an object and for a pattern, which name files one by one."""

    files: list[RemoteFile]
    folder: Url | None = None


def find_objects(text: str) -> Found:
    """The objects that a URL names: one, all below a folder, or those that match a pattern, in the order of a local
    directory. `*`, `?` and `[...]` match inside one part of a name, as in a shell.

    Raises:
        DataError: not a URL, nothing there, or a pattern where objects cannot be listed.
        RemoteError: the storage cannot be read.
    """
    url = parse_url(text)
    if url.scheme in ("https", "http"):
        return Found([RemoteFile.at(url)])
    parts = url.split("/")
    magic = next((n for n, part in enumerate(parts) if n > 2 and _PATTERN.search(part)), None)
    if magic is not None:
        folder, pattern = parse_url("/".join(parts[:magic])), "/" + "/".join(parts[magic:])
        objects = {
            name: info
            for name, info in objects_below(folder).items()
            if PurePosixPath(f"/{name}").match(pattern) and ("/." in pattern or "/." not in f"/{name}")
        }
    else:
        folder, objects = url, objects_below(url)
    if not objects:
        raise DataError(f"there is no input {text}", remedy="look for a mistake in the URL, or in its pattern")
    if list(objects) == [""]:
        return Found([RemoteFile(url, objects[""])])
    files = [RemoteFile(parse_url(f"{folder}/{name}"), info) for name, info in objects.items() if name]
    return Found(files, folder if magic is None else None)


def objects_below(folder: Url) -> dict[str, ObjectInfo]:
    """All objects below a folder by name relative to it, in the order of a local directory, without what only marks a
    folder. The name is empty for an object that has the folder's own. Raises RemoteError."""
    remote, here = remote_of(folder)
    prefix = f"{here}/" if here else ""
    found = {"" if name == here else name.removeprefix(prefix): info for name, info in remote.list(here).items()}
    return {name: found[name] for name in sorted(found, key=lambda name: name.split("/")) if not name.endswith("/")}
