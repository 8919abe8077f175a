"""The record of a run (journal, segments, evaluations, ...) copied to the mirror and back. No torch.

A file that has changed is copied as a whole, under a name that says what its bytes must be, and read back. The index is
written after all files, and copies that neither it nor the one before it needs are deleted after that. So the mirror
holds one whole state of the record at any time; and a file that is damaged there costs no other.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import xxhash

from fsdp_pretrain.checkpoint.manifest import FileEntry
from fsdp_pretrain.errors import StorageError
from fsdp_pretrain.record import run_id, state_files
from fsdp_pretrain.record.files import RunDir, now
from fsdp_pretrain.remote import ObjectInfo

from .checkpoint_copy import AT_ONCE
from .layout import INDEX, RECORD, MirroredRecord, RecordFile, RecordIndex, RunMirror

_LEFT_OUT = frozenset(
    "checkpoints mirror restoring control run_id lock.json aim tensorboard wandb trackers profiles".split()
)
"""What is copied otherwise, belongs to this start alone, can be rebuilt (views), or is large (traces)."""
_PASSING = re.compile(r"^\.|lease\.json$|^claim\.json$")
"""Names of files that only matter to processes that live."""
_OF_WATCHDOG = frozenset(("alarms.jsonl", "muted.json", "hosts.json", "pace.json", "unigrams.json"))
"""What a later start reads of `watchdog/`."""
_APPENDED = re.compile(r"\.jsonl$|\.log$|^log$|^CHRONICLE\.md$")
_ALWAYS_THERE = ("journal.jsonl", "config.toml")


def record_files(run: RunDir) -> Iterator[tuple[str, Path]]:
    """(name, path) of every file of the record."""
    for top in sorted(run.path.iterdir()):
        if top.name in _LEFT_OUT or _PASSING.search(top.name):
            continue
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if top.name == "watchdog" and (path.parent != top or path.name not in _OF_WATCHDOG):
                continue
            if path.is_file() and not path.is_symlink() and not _PASSING.search(path.name):
                yield path.relative_to(run.path).as_posix(), path


class RecordCopy:
    """Copies the record of a run to its mirror. Only one process at a time, with the mirror claimed.

    Raises from its methods: RemoteError, RunGoneError, StorageError, OSError.
    """

    def __init__(self, run: RunDir, mirror: RunMirror, known: MirroredRecord, own_id: str) -> None:
        self._run, self._mirror, self._id = run, mirror, own_id
        self._known = known.newest
        self._stamps: dict[str, tuple[int, int, int]] = {}
        self._absent: dict[str, float] = {}
        self._clean = False

    def push(self, patience: float) -> bool:
        """Bring the mirror up to date. Returns whether there was anything new.

        Args:
            patience: seconds for which a file must be missing before the mirror forgets it, so that a run directory
                that is being deleted does not take the mirror with it.
        """
        run_id.check()
        there = self._mirror.remote.list(RECORD)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            sent = pool.map(lambda item: self._send(item[0], item[1], there), record_files(self._run))
            current = {file.name: file for file in sent if file is not None}
        run_id.check()
        if any(name in self._known and name not in current for name in _ALWAYS_THERE):
            raise StorageError(f"{self._run.path} has lost files of its record", effect="the mirror keeps them")
        current |= self._kept(current, patience)
        if current == self._known and self._clean:
            return False
        objects = [file.object_name for file in current.values()]
        index = RecordIndex(run_id=self._id, time=now(), objects=objects)
        self._mirror.put(INDEX, state_files.seal(index).encode())
        before = {file.object_name for name, file in self._known.items() if name in current}
        self._known, self._clean = current, False
        self._mirror.remote.delete(sorted(there.keys() - before - set(objects)))
        self._clean = True
        return True

    def _kept(self, current: dict[str, RecordFile], patience: float) -> dict[str, RecordFile]:
        """Files that are missing, and have not been for long."""
        missing = {name for name in self._known if name not in current}
        self._absent = {name: self._absent.get(name, time.monotonic()) for name in missing}
        return {name: self._known[name] for name in missing if time.monotonic() - self._absent[name] < patience}

    def _send(self, name: str, path: Path, there: dict[str, ObjectInfo]) -> RecordFile | None:
        """Copy a file, unless its contents are there. None if it has gone."""
        known = self._known.get(name)
        if known is not None and known.object_name not in there:
            known = None
        try:
            facts = path.stat()
            stamp = (facts.st_size, facts.st_mtime_ns, facts.st_ino)
            if known is not None and self._stamps.get(name) == stamp:
                return known
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        if _APPENDED.search(path.name):
            content = content[: content.rfind(b"\n") + 1]  # whole lines
        file = RecordFile(name, time.time_ns() // 10**6, len(content), xxhash.xxh3_128_hexdigest(content))
        if known is not None and (known.bytes, known.xxh3) == (file.bytes, file.xxh3):
            file = known
        else:
            self._mirror.put(file.object_name, content)
        self._stamps[name] = stamp
        return file


def restore_record(
    mirror: RunMirror, record: MirroredRecord, into: Path, shown: Callable[[int], object] = lambda size: None
) -> list[str]:
    """Write what is whole of a record below a directory, as old as its copies. `shown` is called with bytes.

    Returns:
        The names of files that are lost, or older than they were.

    Raises:
        RemoteError, OSError.
    """

    wanted = set() if record.index is None else set(record.index.objects)

    def one(name: str) -> str:
        path, copies = into / name, record.copies[name]
        if ".." in PurePosixPath(name).parts or not path.is_relative_to(into):
            return name
        found = _restore_file(mirror, copies, path, shown)
        newest = found is not None and (found.object_name in wanted if wanted else found == copies[0])
        return "" if newest else name if found is None else f"{name} (an earlier copy is there)"

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [name for name in pool.map(one, sorted(record.copies)) if name]


def _restore_file(
    mirror: RunMirror, copies: Sequence[RecordFile], path: Path, shown: Callable[[int], object]
) -> RecordFile | None:
    """Write the first of its copies that is whole, as old as it is. Returns which, None if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for file in copies:
        entry = FileEntry(name=path.name, bytes=file.bytes, xxh3=file.xxh3)
        if not mirror.copy(file.object_name, entry, path, shown):
            os.utime(path, (file.written / 1000,) * 2)  # an earlier start's end must not look like that of this one
            return file
    path.unlink(missing_ok=True)
    return None
