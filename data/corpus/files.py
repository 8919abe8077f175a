"""Files read by system calls: failing storage is an OSError, and hanging storage stops only the thread that reads.

A memory-mapped file allows neither: a page fault cannot return an error, so failing storage is a signal (SIGBUS), and
hanging storage freezes the thread together with the interpreter lock. Training never maps files; tools may.
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
"""The file that each thread is reading, by thread identity; see `fsdp_pretrain.data.corpus.reading`."""
NOT_AT_ONCE = (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of a read with `RWF_NOWAIT`: the data are not in memory, or the file system does not support the flag."""


def now_reading(path: Location) -> None:
    """Set the file that this thread is reading more exactly, if it has an entry in `reading`."""
    if (thread := get_ident()) in reading:
        reading[thread] = path


class File:
    """A file open for reading, closed when no reference to this object is left.

    Attributes:
        descriptor: its file descriptor.

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
        """Read bytes [start, stop), or fewer if the file ends before. Raises OSError."""
        now_reading(self.path)
        content, done = np.empty(stop - start, np.uint8).data, 0
        while done < len(content):
            count = os.preadv(self.descriptor, [content[done:]], start + done)
            if not count:
                break
            done += count
        return content[:done]


class KeptFiles:
    """The files of all corpora of a process that stay open for the next read: the `most` that were used last.

    Thread-safe, since the loader and the held-out loss read in different threads.
    """

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, Lock()
        self._files: OrderedDict[tuple[object, str], File] = OrderedDict()

    def get(self, owner: object, path: str) -> File | None:
        """The file that `owner` opened under this path, if it is still open."""
        with self._lock:
            return self._files.get((owner, path))

    def keep(self, owner: object, path: str, file: File) -> None:
        """Keep a file open. If there are too many, close the one that was used longest ago."""
        with self._lock:
            self._files[owner, path] = file
            self._files.move_to_end((owner, path))
            if len(self._files) > self._most:
                self._files.popitem(last=False)

    def drop(self, owner: object, path: str) -> None:
        """Close a file, if it is open."""
        with self._lock:
            self._files.pop((owner, path), None)
