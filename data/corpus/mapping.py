"""Memory-mapped files without a file descriptor each, whose pages are loaded on request.

Python's `mmap` keeps a duplicate of the descriptor for every mapping (before 3.13, always). A packer has hundreds of
shards open, and a process commonly may have 1,024 descriptors, so the mapping is made through the C library.

Reading mapped memory is a page fault, and a fault cannot return an error: storage that does not answer freezes the
thread, with the interpreter lock if it holds it, and storage that fails kills the process (SIGBUS). `Mapping.load`
loads pages by a system call instead, which lets other threads run and reports errors.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import weakref
from pathlib import Path
from threading import get_ident

import numpy as np
import numpy.typing as npt

from fsdp_pretrain.remote import Location

_library = ctypes.CDLL(None, use_errno=True)
_library.mmap.restype = ctypes.c_void_p
_library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_library.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_FAILED = ctypes.c_void_p(-1).value
_POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14; the Python module does not name it


now_reading: dict[int, Location] = {}
"""The file each thread reads or read last, by thread identity."""


class Mapping:
    """A file's `bytes`, uint8 [size], read-only. Unmapped once neither the object nor an array made from it is left.

    `inode` is that of the file, which may meanwhile have another name or none.

    Raises:
        OSError: it cannot be opened or mapped.
    """

    def __init__(self, path: Path) -> None:
        self.path = now_reading[get_ident()] = path
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            size, self.inode = status.st_size, status.st_ino
            # For files of other users the kernel reports all pages as resident (mincore could spy on them).
            self._tells_residency = status.st_uid == os.geteuid() or os.access(path, os.W_OK)
            if not size:  # cannot be mapped; a shard without tokens is legal
                self.bytes: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
                return
            address = _library.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        finally:
            os.close(descriptor)
        if address == _FAILED:
            raise _error(path)
        buffer = (ctypes.c_ubyte * size).from_address(address)
        # Not at exit: a thread may still be reading.
        weakref.finalize(buffer, _library.munmap, address, size).atexit = False
        self._address = address
        self.bytes = np.frombuffer(memoryview(buffer), np.uint8)
        self.bytes.flags.writeable = False

    def resident(self, start: int, stop: int) -> bool:
        """Whether bytes [start, stop) are known to be in memory, so that reading them needs no storage.

        They are still part of the file: reading what was cut off would be a signal (SIGBUS).
        """
        stop = min(stop, len(self.bytes))
        start -= start % mmap.PAGESIZE
        if start >= stop:
            return True
        if not self._tells_residency:
            return False
        count = -(-(stop - start) // mmap.PAGESIZE)
        pages, address = _pages.of(count)
        if _library.mincore(self._address + start, stop - start, address) or pages.find(0, 0, count) >= 0:
            return False
        # Where pages are kept in groups (folios), those beyond the end of the file count as resident too.
        last = self._address + start + (count - 1) * mmap.PAGESIZE
        return not _library.madvise(last, 1, _POPULATE_READ) or ctypes.get_errno() == errno.EINVAL

    def load(self, start: int, stop: int) -> None:
        """Load bytes [start, stop) into memory; blocks as long as storage takes, but no other thread.

        Raises:
            OSError: storage reported an error, or the file is shorter than when it was mapped.
        """
        now_reading[get_ident()] = self.path
        stop = min(stop, len(self.bytes))
        start -= start % mmap.PAGESIZE
        if start >= stop:
            return
        while _library.madvise(self._address + start, stop - start, _POPULATE_READ):
            number = ctypes.get_errno()
            if number == errno.EINVAL:  # an older kernel: fault the pages in, still without the interpreter lock
                ctypes.memmove(ctypes.create_string_buffer(stop - start), self._address + start, stop - start)
                return
            if number not in (errno.EINTR, errno.EAGAIN):
                raise _error(self.path, errno.EIO if number == errno.EFAULT else number)


class _Pages(threading.local):
    """A buffer for `mincore`, kept: a new one would take longer than the call."""

    def __init__(self) -> None:
        self._buffer, self._address = bytearray(), 0

    def of(self, count: int) -> tuple[bytearray, int]:
        """A buffer of at least `count` bytes, and its address."""
        if len(self._buffer) < count:
            self._buffer = bytearray(2 * count)
            self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))
        return self._buffer, self._address


_pages = _Pages()


def _error(path: Path, number: int | None = None) -> OSError:
    number = ctypes.get_errno() if number is None else number
    return OSError(number, os.strerror(number), str(path))
