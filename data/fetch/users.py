"""Who uses a cache: each live fetcher says what it needs, and how soon, so that the others keep it, and what it is
fetching, so that all of them together keep to the size. No torch.

    CACHE/users/<name>.json        {corpus fingerprint: {block: [seconds, seconds]}}, what it needs, first and last
    CACHE/users/<name>.fetching    {corpus fingerprint: {block: [bytes]}}, what it is fetching
    CACHE/users/<name>.lock        held (flock) by that fetcher as long as it lives
    CACHE/users/.deciding          held by the one that looks at the cache, evicts and starts transfers

Files whose lock is free are of a fetcher that was killed, and are removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

_STOPPED_SECONDS = 60.0
"""A live user that has said nothing for so long was stopped, as a scheduler does that suspends a job."""
Key = tuple[str, int]
"""A block: (corpus fingerprint, row of the block table)."""


class CacheUser:
    """This process among the users of a cache, until it ends. Raises OSError."""

    def __init__(self, cache: Path, name: str) -> None:
        self._folder, self._name = cache / "users", name
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def say(self, needed: Mapping[Key, tuple[float, float]]) -> None:
        """Publish what this user needs, in how many seconds first and last. Raises OSError."""
        self._publish(".json", {key: [round(first, 2), round(last, 2)] for key, (first, last) in needed.items()})

    def say_fetching(self, sizes: Mapping[Key, int]) -> None:
        """Publish what this user is fetching, and its bytes. Raises OSError."""
        self._publish(".fetching", {key: [size] for key, size in sizes.items()})

    def _publish(self, suffix: str, content: Mapping[Key, list[float] | list[int]]) -> None:
        with contextlib.suppress(BlockingIOError):  # an earlier fetcher of this node is about to end, or one looks
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found: dict[str, dict[int, list[float] | list[int]]] = {}
        for (fingerprint, block), values in content.items():
            found.setdefault(fingerprint, {})[block] = values
        partial = self._folder / f".{self._name}{suffix}.partial"
        partial.write_text(json.dumps(found))  # not synced: after a crash of the machine there is no user
        partial.replace(self._folder / f"{self._name}{suffix}")

    def needs_of_others(self) -> dict[Key, tuple[float, float]]:
        """What the other live users need, in how many seconds the first of them first and the last of them last."""
        found: dict[Key, tuple[float, float]] = {}
        for key, (first, last), age in self._of_others(".json"):
            before = found.get(key, (first - age, last - age))
            found[key] = max(0.0, min(before[0], first - age)), max(0.0, max(before[1], last - age))
        return found

    def fetching_of_others(self) -> dict[Key, int]:
        """What the other live users are fetching, and its bytes."""
        return {key: int(size) for key, (size,), _ in self._of_others(".fetching")}

    def _of_others(self, suffix: str) -> Iterator[tuple[Key, list[float], float]]:
        """Block, values and seconds since, of what the other live users say; files of dead ones are removed."""
        for path in self._folder.glob(f"[!.]*{suffix}"):
            if path.stem == self._name:
                continue
            with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
                if not _is_alive(path.with_suffix(".lock")):
                    path.unlink(missing_ok=True)
                    continue
                if (age := _age(path.stat())) > _STOPPED_SECONDS:
                    continue
                for fingerprint, blocks in json.loads(path.read_text()).items():
                    for block, values in blocks.items():
                        yield (str(fingerprint), int(block)), values, age

    @contextlib.contextmanager
    def deciding(self) -> Iterator[bool]:
        """Whether no other user decides at the same time what to evict and to fetch."""
        try:
            descriptor = os.open(self._folder / ".deciding", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError:  # the cache cannot be written: transfers say so
            yield True
            return
        try:
            free = True
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.utime(descriptor)
            except BlockingIOError:  # go on without one that was stopped
                free = _age(os.fstat(descriptor)) > _STOPPED_SECONDS
            except OSError:  # a file system without locks
                pass
            yield free
        finally:
            os.close(descriptor)

    def leave(self) -> None:
        """Say that nothing is needed or fetched any more."""
        for suffix in (".json", ".fetching"):
            with contextlib.suppress(OSError):
                (self._folder / f"{self._name}{suffix}").unlink(missing_ok=True)
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


def _age(file: os.stat_result) -> float:
    """Seconds since it was written."""
    return max(0.0, time.time() - file.st_mtime)
