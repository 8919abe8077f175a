"""Atomic writes of small files: complete or absent for readers and after a crash."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import naming

_WITHOUT_LINKS = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""Errors of file systems without hard links."""


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace a file in an existing directory, durably. Raises OSError."""
    with _partial(path, _bytes(content)) as partial:
        partial.replace(path)


def create_file(path: Path, content: str | bytes) -> None:
    """Create a file that must not exist in an existing directory, durably. Raises FileExistsError, OSError."""
    with _partial(path, _bytes(content)) as partial:
        try:
            os.link(partial, path)
        except FileExistsError:
            if partial.stat().st_nlink != 2:  # else it was created, and a network file system lost the reply
                raise
        except OSError as error:
            if error.errno not in _WITHOUT_LINKS:
                raise
            with path.open("xb") as file:
                file.write(_bytes(content))


@contextmanager
def _partial(path: Path, content: bytes) -> Iterator[Path]:
    """A temporary file beside `path` with the content and a unique name."""
    partial = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}.partial")
    try:
        with naming(path), partial.open("wb") as file:  # errors name `path`, not the temporary file
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        yield partial
    finally:
        partial.unlink(missing_ok=True)


def _bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content
