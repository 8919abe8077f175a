"""Files read by system calls: storage that fails is an OSError, and one that hangs stops only the thread that reads.

A mapped file would do neither: a page fault cannot return an error, so failing storage is a signal (SIGBUS) and hanging
storage freezes the thread with the interpreter lock. Training reads only so; tools may map what they work on.
"""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from pathlib import Path
from threading import Lock, get_ident

import numpy as np

from fsdp_pretrain.remote import Location

reading: dict[int, Location] = {}
"""The file that each thread reads just now, by thread identity; see `fsdp_pretrain.data.corpus.reading`."""
NOT_AT_ONCE = (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of `RWF_NOWAIT`: storage must be asked, or the file system does not know."""


def now_reading(path: Location) -> None:
    """Name the file more exactly, if this thread said that it reads."""
    if (thread := get_ident()) in reading:
        reading[thread] = path


class File:
    """A file open for reading, until nobody refers to it.

    Attributes:
        descriptor: for system calls.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        now_reading(path)
        self.path, self.descriptor = path, -1
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)

    @property
    def size(self) -> int:
        """Bytes."""
        return os.fstat(self.descriptor).st_size

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes [start, stop), fewer where the file ends. Raises OSError."""
        now_reading(self.path)
        found, done = np.empty(stop - start, np.uint8).data, 0
        while done < len(found):
            count = os.preadv(self.descriptor, [found[done:]], start + done)
            if not count:
                break
            done += count
        return found[:done]


class KeptFiles:
    """The files that stay open for the next read, those of all corpora of a process: the `most` that were used last.

    Several threads may use it: the loader's, and that of the held-out loss.
    """

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, Lock()
        self._files: OrderedDict[tuple[object, str], File] = OrderedDict()

    def get(self, owner: object, path: str) -> File | None:
        """The file that `owner` opened under this path, if it is still open."""
        with self._lock:
            return self._files.get((owner, path))

    def keep(self, owner: object, path: str, file: File) -> None:
        """Keep a file; the one that was used longest ago is closed if there are too many."""
        with self._lock:
            self._files[owner, path] = file
            self._files.move_to_end((owner, path))
            if len(self._files) > self._most:
                self._files.popitem(last=False)

    def drop(self, owner: object, path: str) -> None:
        """Close a file, if it is open."""
        with self._lock:
            self._files.pop((owner, path), None)
