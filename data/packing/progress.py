"""How far the ranks of a node have built their batches: each publishes its position in a small file for the fetcher."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import xxhash

from .position import Position

_PAGE = struct.Struct("4q8s")
"""A position and its checksum, which is wrong while the file is being written."""


def page_of(folder: Path, rank: int) -> Path:
    """The file of a rank."""
    return folder / f"rank-{rank}.position"


def begin(path: Path, start: Position) -> Callable[[Position], None]:
    """Begin a rank's page at a position; an existing page is replaced. Raises OSError.

    Returns:
        A function to call with the position after each batch; then blocks that only earlier batches need may be
        removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    file = path.open("wb", buffering=0)

    def built(position: Position) -> None:
        values = struct.pack("4q", position.step, position.consumed, position.cursor, position.batch)
        os.pwrite(file.fileno(), values + xxhash.xxh3_64_digest(values), 0)

    built(start)
    return built


def read(path: Path) -> Position | None:
    """The position on a page; None if there is no page yet, or it is being written."""
    try:
        content = path.read_bytes()
        *values, checksum = _PAGE.unpack(content)
    except (OSError, struct.error):
        return None
    return Position(*values) if xxhash.xxh3_64_digest(content[:-8]) == checksum else None
