"""Atomic writes: a file is complete or absent, for readers and after a crash."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from .errors import naming

_WITHOUT_LINKS = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""Errors of file systems without hard links."""
PARTIAL = ".partial"
"""End of the name of a file that is being written."""
_LOCK_PAUSE = 0.05
"""Seconds between two tries to take a lock."""


def lock_file(path: Path, seconds: float) -> int | None:
    """Take a lock among the processes of this host.

    Returns:
        A descriptor of the file, which is created if needed; closing it, or the end of this process, releases the lock.
        None if another process still held it after `seconds`.

    Raises:
        OSError: the file cannot be written.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    until = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                os.close(descriptor)
                return None
            time.sleep(_LOCK_PAUSE)
        else:
            return descriptor


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace a file in an existing directory, durably. Raises OSError."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def create_file(path: Path, content: str | bytes) -> None:
    """Create a file that must not exist in an existing directory, durably. Raises FileExistsError, OSError."""
    with replacing(path, _create) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path, put: Callable[[Path, Path], object] = Path.replace) -> Iterator[IO[bytes]]:
    """Open a new file beside `path`, with a unique name. At the end of the block, make it durable and `put` it in
    place; after an error, remove it. Raises OSError."""
    partial = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}{PARTIAL}")
    try:
        with naming(path), partial.open("wb") as file:  # errors name `path`, not the temporary file
            yield file
            close_durably(file)
        put(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _create(partial: Path, path: Path) -> None:
    try:
        os.link(partial, path)
    except FileExistsError:
        if partial.stat().st_nlink != 2:  # 2: it was created, and a network file system lost the reply
            raise
    except OSError as error:
        if error.errno not in _WITHOUT_LINKS:
            raise
        with path.open("xb") as file:
            file.write(partial.read_bytes())


def close_durably(file: IO[bytes]) -> None:
    """Flush, fsync and close a file. Raises OSError."""
    file.flush()
    os.fsync(file.fileno())
    file.close()


def sync(path: Path) -> None:
    """Fsync a file, or a directory. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
