"""Objects in remote storage: `s3://`, `gs://`, `az://`, `https://`, and directories as `file://`, through fsspec.

Every call is one object or a range of one, retried with growing pauses while the storage is busy or fails.
Credentials come from where fsspec and the vendor's library look for them, never from the configuration.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterable
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from .errors import ConfigError, DataError, Exit, install
from .files import replacing

T = TypeVar("T")
_SCHEMES = ("s3", "gs", "az", "https", "http", "file")
CREDENTIALS = "a URL must not hold credentials"
"""Beginning of the error about a URL whose text must not be shown."""
PATIENCE = 60.0
"""Seconds for which a failing call is repeated by default."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 20.0
_CONNECT_SECONDS, _READ_SECONDS = 10, 30
_CREDENTIALS = re.compile(r"credential|token.*expired|(expired|invalid).*token|\(400\)", re.IGNORECASE)
"""Error messages about credentials. S3 answers HEAD with an expired token by 400 and no text."""
_SETTINGS = re.compile(r"ParamValidation|ProfileNotFound|ConfigParse|InvalidConfig|NoRegion|Invalid endpoint")
"""Errors of the vendors' libraries before any request: a wrong name of a bucket, profile or endpoint."""
_NO_BUCKET = "bucket does not exist"
_CHECKSUMS = dict.fromkeys(("request_checksum_calculation", "response_checksum_validation"), "when_required")
"""Turns off botocore's own checksums, which other servers (rclone, older MinIO and Ceph) answer with errors. Data read
here has our own checksums, and data written is read back."""


class Url(str):
    """A directory or object in remote storage: `s3://bucket/corpora/web`, without a slash at its end. Raises ValueError
    if the scheme is unknown, there is no path, or the URL has forbidden parts such as credentials."""

    __slots__ = ()

    def __new__(cls, text: str) -> Url:
        scheme, separator, rest = text.partition("://")
        if not separator or scheme not in _SCHEMES:
            raise ValueError(f"{text!r} is not a URL of remote storage: {', '.join(f'{name}://' for name in _SCHEMES)}")
        if "@" in rest.partition("/")[0] or ("?" in rest and scheme != "file"):
            raise ValueError(
                f"{CREDENTIALS}, nor a query (?key=value), which may be some: leave them where the storage's own tools "
                "look for them"
            )
        if not rest.strip("/") or any(part in ("", ".", "..") for part in rest.strip("/").split("/")):
            raise ValueError(f"{text!r} does not name a directory")
        return super().__new__(cls, text.rstrip("/"))

    def __truediv__(self, name: str) -> Url:
        return Url(f"{self}/{name}")

    @property
    def scheme(self) -> str:
        return self.partition("://")[0]


Location = Path | Url
"""A file or directory on this machine, or in remote storage."""


def is_url(text: str) -> bool:
    """Whether a text names remote storage rather than a local path."""
    return "://" in text


class Problem(StrEnum):
    """Why a call failed."""

    MISSING = "missing"
    DENIED = "denied"
    """Wrong, absent or expired credentials, or other settings that make requests impossible."""
    NO_RANGES = "no ranges"
    """The server answers a request for a range with the whole object."""
    FAILED = "failed"
    """Any other failure: no connection, no answer, a truncated answer, busy storage, a server error."""


_REMEDIES = {
    Problem.MISSING: "look for a mistake in the URL; buckets are not created here",
    Problem.DENIED: "check credentials, endpoint and region, where the storage's own tools look for them, and the URL",
    Problem.NO_RANGES: "serve it by one that answers requests for ranges: object storage, nginx, Apache",
    Problem.FAILED: "run the same command again when the storage answers; if it never does, check the endpoint and the "
    "network",
}


class RemoteError(DataError):
    """An object cannot be read or written; `problem` says why, `object_url` names it."""

    def __init__(self, object_url: str, problem: Problem, text: str) -> None:
        self.object_url, self.problem = object_url, problem
        cause = {
            Problem.MISSING: f"{object_url} does not exist" + (f": {text}" if _NO_BUCKET in text else ""),
            Problem.DENIED: f"no access to {object_url}: {text}",
            Problem.NO_RANGES: f"{object_url}: the server does not send ranges of an object, only whole ones",
            Problem.FAILED: f"{object_url}: {text}",
        }[problem]
        super().__init__(cause, remedy=_REMEDIES[problem])
        self.args = (object_url, problem, text)  # to construct it again on other ranks
        if self.is_temporary:
            self.exit = Exit.RESUME

    @property
    def is_temporary(self) -> bool:
        """Whether the same call may succeed later without anyone's help."""
        return self.problem is Problem.FAILED


class Remote:
    """A directory in remote storage. Names are relative to it: `shards/shard-00001.bin`.

    Methods may be called from several threads.

    Args:
        url: the directory.
        patience: seconds for which a call that fails temporarily is repeated; 0 tries once. They count from the first
            failure, including its wait for an answer (at most `_READ_SECONDS`), but not a long transfer before it.

    Raises:
        ConfigError: the package for the scheme is not installed.
    """

    def __init__(self, url: Url, *, patience: float = PATIENCE) -> None:
        self.url, self.patience = url, patience
        self._files = _file_system(url.scheme)
        self._whole = {"max_concurrency": 1} if url.scheme == "s3" else {}  # else it asks for the size first
        self._root = _place(url)

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        """An object, or its bytes [start, stop). Raises RemoteError, also if there are fewer bytes than requested."""

        def act() -> bytes:
            content: bytes = self._files.cat_file(self._path(name), start=start, end=stop, **self._whole)
            if start is not None and stop is not None and len(content) > stop - start:
                raise _NoRangesError
            if start is not None and stop is not None and len(content) != stop - start:
                raise OSError(f"{len(content)} bytes instead of {stop - start} from {start} on")
            return content

        return self._call(name, act)

    def list(self) -> dict[str, int]:
        """Sizes in bytes of all objects by name; empty if there are none.

        Raises RemoteError, also if there is no bucket.
        """

        def act() -> dict[str, int]:
            if self.url.scheme == "file":
                return _list_folder(self._root)
            try:
                files = self._files.find(self._root, detail=True)
            except FileNotFoundError as error:
                if _NO_BUCKET in str(error):
                    raise
                return {}
            prefix = self._root.rstrip("/") + "/"
            return {str(path).removeprefix(prefix): int(facts.get("size") or 0) for path, facts in files.items()}

        return self._call("", act)

    def write(self, name: str, content: bytes) -> None:
        """Create or replace an object. Raises RemoteError."""
        self._call(name, lambda: self._put(name, content))

    def upload(self, path: Path, name: str) -> None:
        """Copy a local file to an object. Raises RemoteError, OSError of `path`."""
        path.stat()
        self._call(name, lambda: self._put(name, path))

    def _put(self, name: str, content: bytes | Path) -> None:
        """Write an object that readers see whole or not at all, as object storage does of itself."""
        path = self._path(name)
        if self.url.scheme == "file":
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with replacing(Path(path)) as file:
                if isinstance(content, bytes):
                    file.write(content)
                else:
                    with content.open("rb") as source:
                        shutil.copyfileobj(source, file)
        elif isinstance(content, bytes):
            self._files.pipe_file(path, content)
        else:
            self._files.put_file(str(content), path)

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects; absent ones are no error. Raises RemoteError."""
        for name in names:
            with contextlib.suppress(_MissingError):
                self._call(name, lambda name=name: self._files.rm_file(self._path(name)))  # type: ignore[misc]

    def remove_folder(self, name: str) -> None:
        """Remove an empty directory. Does nothing in object storage, which has no directories."""
        if self.url.scheme == "file":
            with contextlib.suppress(OSError):
                Path(self._path(name)).rmdir()

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _call(self, name: str, act: Callable[[], T]) -> T:
        until, pause = float("inf"), _FIRST_PAUSE
        while True:
            begun = time.monotonic()
            try:
                return act()
            except Exception as error:
                problem = _problem(_real(error))
                if problem is None:
                    raise
                object_url = f"{self.url}/{name}".rstrip("/")
                failure = _failure(object_url, problem, error)
            waited = min(time.monotonic() - begun, _READ_SECONDS)
            until = min(until, time.monotonic() - waited + self.patience)
            if not failure.is_temporary or time.monotonic() + pause > until:
                raise failure from None
            time.sleep(pause * random.uniform(0.5, 1.0))  # not all nodes at once
            pause = min(2 * pause, _LONGEST_PAUSE)


def _place(url: Url) -> str:
    """A URL as its file system names it."""
    if url.scheme in ("https", "http"):
        return str(url)
    place = url.partition("://")[2]
    return "/" + place.lstrip("/") if url.scheme == "file" else place


class _MissingError(RemoteError):
    pass


class _NoRangesError(Exception):
    pass


def _failure(object_url: str, problem: Problem, error: Exception) -> RemoteError:
    reported = error.__cause__ or error  # s3fs keeps only the message of a response and drops its code
    text = " ".join(str(reported).split()) or type(reported).__name__
    return (_MissingError if problem is Problem.MISSING else RemoteError)(object_url, problem, text[:300])


def _problem(error: Exception) -> Problem | None:
    """The problem behind an exception of fsspec, its back ends or the vendors' libraries; None for a bug."""
    text = f"{type(error).__name__}: {error} {error.__cause__ or ''}"
    status = _status(error)
    if isinstance(error, _NoRangesError):
        return Problem.NO_RANGES
    if isinstance(error, FileNotFoundError) or status == 404:
        return Problem.MISSING
    if (
        isinstance(error, PermissionError)
        or status in (401, 403)
        or _CREDENTIALS.search(text)
        or _SETTINGS.search(text)
    ):
        return Problem.DENIED
    module = type(error).__module__.partition(".")[0]
    known = ("botocore", "aiobotocore", "aiohttp", "s3fs", "gcsfs", "adlfs", "azure", "google", "fsspec", "requests")
    return Problem.FAILED if isinstance(error, OSError | TimeoutError | EOFError) or module in known else None


def _status(error: BaseException | None) -> int | None:
    """The HTTP status in an exception or its causes; None if there is none."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):  # botocore
            return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)) or None
        codes = (getattr(error, name, None) for name in ("status", "status_code", "code"))
        if (status := next((value for value in codes if isinstance(value, int)), None)) is not None:
            return status
        error = error.__cause__
    return None


def _real(error: Exception) -> Exception:
    """The true error: over HTTP, fsspec reports some other errors as FileNotFoundError."""
    cause = error.__cause__
    if not isinstance(error, FileNotFoundError) or not isinstance(cause, Exception):
        return error
    lost = isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)
    return cause if lost or getattr(cause, "status", 404) != 404 else error


def _list_folder(root: str) -> dict[str, int]:
    """Sizes in bytes of all files below a folder by name. Raises OSError: fsspec leaves out what it cannot look
    into, and storage that does not answer would seem empty."""

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # absent, or deleted meanwhile
            raise error

    sizes = dict[str, int]()
    for folder, _, names in os.walk(root, onerror=fail, followlinks=True):
        for name in names:
            path = Path(folder, name)
            with contextlib.suppress(FileNotFoundError):
                sizes[str(path.relative_to(root))] = path.stat().st_size
    return sizes


def _file_system(scheme: str) -> Any:
    """The fsspec file system of a scheme, without its own retries and cached listings."""
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if scheme == "s3":
        options["config_kwargs"] = {
            "retries": {"total_max_attempts": 1},
            "connect_timeout": _CONNECT_SECONDS,
            "read_timeout": _READ_SECONDS,
            "max_pool_connections": 32,
            **_CHECKSUMS,
        }
    if scheme == "file":
        options = {"skip_instance_cache": True}
    try:
        import fsspec

        if scheme in ("https", "http"):
            import aiohttp

            timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=_READ_SECONDS)
            options["client_kwargs"] = {"timeout": timeout}
        files = fsspec.filesystem(scheme, **options)
    except ImportError as error:
        raise ConfigError(
            f"{scheme}:// needs a Python package that is not installed: {error}",
            remedy=f"{install('s3')}; for gs:// also gcsfs, for az:// adlfs",
        ) from None
    if scheme == "s3":
        files.retries = 1
    return files
