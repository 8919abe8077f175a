"""Who uses a cache: each live fetcher says which blocks it needs, so that the others evict them last. No torch.

    CACHE/users/<name>.json    {corpus fingerprint: [block, ...]}, what one fetcher needs soon
    CACHE/users/<name>.lock    held (flock) by that fetcher as long as it lives

A file whose lock is free is of a fetcher that was killed, and is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from fsdp_pretrain.atomic import replace_file

Key = tuple[str, int]
"""A block: (corpus fingerprint, row of the block table)."""


class CacheUser:
    """This process among the users of a cache, until it ends. Raises OSError."""

    def __init__(self, cache: Path, name: str) -> None:
        self._folder, self._name = cache / "users", name
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def say(self, needed: Collection[Key]) -> None:
        """Publish what this user needs soon. Raises OSError."""
        with contextlib.suppress(BlockingIOError):  # an earlier fetcher of this node is about to end
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found: dict[str, list[int]] = {}
        for fingerprint, block in sorted(needed):
            found.setdefault(fingerprint, []).append(block)
        replace_file(self._folder / f"{self._name}.json", json.dumps(found))

    def needs_of_others(self) -> set[Key]:
        """What the other live users need; files of dead ones are removed."""
        found: set[Key] = set()
        for path in self._folder.glob("*.json"):
            if path.stem == self._name:
                continue
            with contextlib.suppress(OSError, ValueError, AttributeError):
                if not _is_alive(path.with_suffix(".lock")):
                    path.unlink(missing_ok=True)
                    continue
                for fingerprint, blocks in json.loads(path.read_text()).items():
                    found |= {(str(fingerprint), int(block)) for block in blocks}
        return found

    def leave(self) -> None:
        """Say that nothing is needed any more."""
        with contextlib.suppress(OSError):
            (self._folder / f"{self._name}.json").unlink(missing_ok=True)
        os.close(self._lock)


def _is_alive(lock: Path) -> bool:
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


@contextlib.contextmanager
def alone(path: Path) -> Iterator[bool]:
    """Whether no other process does the same: a lock on `path` (of a block), free again when a process is killed.

    Raises OSError.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        try:
            yield True
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)
