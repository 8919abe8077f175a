"""Small files that a reader, or a crash, sees whole or not at all. No torch."""

from __future__ import annotations

import errno
import os
import socket
import time
from pathlib import Path

from .errors import naming

_WITHOUT_LINKS = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""What file systems answer that have no hard links."""


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace a file, durably; its directory is there. Raises OSError."""
    partial = _beside(path)
    try:
        with naming(path):  # and not the name that it has for a moment
            _write_durably(partial, content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def create_file(path: Path, content: str | bytes) -> None:
    """Make a file that must not exist, durably; its directory is there. Raises FileExistsError, OSError."""
    partial = _beside(path)
    try:
        with naming(path):  # and not the name that it has for a moment
            _write_durably(partial, content)
        try:
            os.link(partial, path)
        except FileExistsError:
            if partial.stat().st_nlink != 2:  # else it was made, and a network file system lost the answer
                raise
        except OSError as error:
            if error.errno not in _WITHOUT_LINKS:
                raise
            with path.open("xb") as file:
                file.write(_bytes(content))
    finally:
        partial.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    """A name that no other process uses, for what is to become a file."""
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}.partial")


def _write_durably(path: Path, content: str | bytes) -> None:
    with path.open("wb") as file:
        file.write(_bytes(content))
        file.flush()
        os.fsync(file.fileno())


def _bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content
