"""The record of a run (journal, segments, evaluations, ...) as pieces in the mirror. No torch.

Of files to which lines are appended only the new bytes are sent. An index names the pieces; it is written after them,
and pieces that it does not name are deleted after that. So the mirror always holds one whole state of the record.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash

from fsdp_pretrain.errors import StorageError
from fsdp_pretrain.record import run_id, state_files
from fsdp_pretrain.record.files import RunDir, now

from .layout import INDEX, RECORD, MirrorError, RecordFile, RecordIndex, RecordPiece, RunMirror

_LEFT_OUT = frozenset(
    "checkpoints mirror restoring control run_id lock.json aim tensorboard wandb trackers profiles".split()
)
"""What is copied otherwise, belongs to this start alone, can be rebuilt (views), or is large (traces)."""
_PASSING = re.compile(r"^\.|lease\.json$|^claim\.json$")
"""Names of files that only matter to processes that live."""
_OF_WATCHDOG = frozenset(("alarms.jsonl", "muted.json", "hosts.json", "pace.json", "unigrams.json"))
"""What a later start reads of `watchdog/`."""
_APPENDED = re.compile(r"\.jsonl$|\.log$|^log$|^CHRONICLE\.md$")
_MERGED = 4 << 20
"""Pieces up to this size are sent again together with later ones, so that there are not thousands."""
_CORE = ("journal.jsonl", "config.toml")


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

    Raises from its methods: RemoteError, MirrorError, RunGoneError, StorageError, OSError.
    """

    def __init__(self, run: RunDir, mirror: RunMirror, known: RecordIndex | None, own_id: str) -> None:
        self._run, self._mirror, self._id = run, mirror, own_id
        self._known = {file.name: file for file in known.files} if known is not None else {}
        self._stamps: dict[str, tuple[int, int, int]] = {}
        self._absent: dict[str, float] = {}
        self._swept = False

    def push(self, patience: float) -> bool:
        """Bring the mirror up to date. Returns whether there was anything new.

        Args:
            patience: seconds for which a file must be missing before the mirror forgets it, so that a run directory
                that is being deleted does not take the mirror with it.
        """
        run_id.check()
        files = {name: self._send(name, path) for name, path in record_files(self._run)}
        current = {name: file for name, file in files.items() if file is not None}
        run_id.check()
        if self._known and any(name in self._known and name not in current for name in _CORE):
            raise StorageError(f"{self._run.path} has lost files of its record", effect="the mirror keeps them")
        current |= self._kept(current, patience)
        if current == self._known and self._swept:
            return False
        before = set(self._mirror.remote.list(RECORD)) if not self._swept else self._objects()
        index = RecordIndex(run_id=self._id, time=now(), files=list(current.values()))
        self._mirror.remote.write(INDEX, state_files.seal(index).encode())
        self._known = current
        self._mirror.remote.delete(sorted(before - index.objects))
        self._swept = True
        return True

    def _objects(self) -> set[str]:
        return {file.object_of(piece) for file in self._known.values() for piece in file.pieces}

    def _kept(self, current: dict[str, RecordFile], patience: float) -> dict[str, RecordFile]:
        """Files that are missing, and have not been for long."""
        missing = {name for name in self._known if name not in current}
        self._absent = {name: self._absent.get(name, time.monotonic()) for name in missing}
        return {name: self._known[name] for name in missing if time.monotonic() - self._absent[name] < patience}

    def _send(self, name: str, path: Path) -> RecordFile | None:
        """Send what is new of a file. None if it has gone."""
        known = self._known.get(name)
        try:
            facts = path.stat()
            stamp = (facts.st_size, facts.st_mtime_ns, facts.st_ino)
            if known is not None and self._stamps.get(name) == stamp:
                return known
            pieces = self._extended(path, known, facts.st_size) if _APPENDED.search(path.name) else None
            if pieces is None:
                pieces = [(0, path.read_bytes())]
        except FileNotFoundError:
            return None
        kept = [] if known is None else [piece for piece in known.pieces if piece.stop <= pieces[0][0]]
        if not pieces[0][0]:
            kept = []
        new = [RecordPiece(start=start, stop=start + len(b), xxh3=xxhash.xxh3_128_hexdigest(b)) for start, b in pieces]
        file = RecordFile(name=name, pieces=[*kept, *new])
        if file != known:
            there = {} if known is None else {known.object_of(piece) for piece in known.pieces}
            for piece, (_, content) in zip(new, pieces, strict=True):
                if file.object_of(piece) not in there:
                    self._mirror.remote.write(file.object_of(piece), content)
        self._stamps[name] = stamp
        return file

    def _extended(self, path: Path, known: RecordFile | None, size: int) -> list[tuple[int, bytes]] | None:
        """(offset, whole lines from there) to send of a file that grew; None if it is not the file that is known."""
        if known is None or size < known.size:
            return None
        with path.open("rb") as file:
            last = known.pieces[-1]
            file.seek(last.start)
            content = file.read(size - last.start)
            if xxhash.xxh3_128_hexdigest(content[: last.stop - last.start]) != last.xxh3:
                return None
            content = content[: content.rfind(b"\n") + 1]
            if len(content) <= last.stop - last.start:
                file.seek(last.start)
                return [(last.start, file.read(last.stop - last.start))]
            start, new = last.stop, content[last.stop - last.start :]
            for piece in reversed(known.pieces):
                if piece.stop - piece.start > min(len(new), _MERGED):
                    break
                file.seek(piece.start)
                start, new = piece.start, file.read(piece.stop - piece.start) + new
            return [(start, new)]


def restore_record(
    mirror: RunMirror, index: RecordIndex, into: Path, shown: Callable[[int], object] = lambda size: None
) -> None:
    """Write the files of an index below a directory; `shown` is called with bytes written.

    Raises MirrorError if a piece is damaged, RemoteError, OSError.
    """
    for file in index.files:
        path = into / file.name
        if ".." in path.parts or not path.is_relative_to(into):
            raise MirrorError(f"{mirror.url / INDEX} names a file outside of the run directory: {file.name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as out:
            for piece in file.pieces:
                content = mirror.remote.read(file.object_of(piece))
                if out.tell() != piece.start or xxhash.xxh3_128_hexdigest(content) != piece.xxh3:
                    raise MirrorError(
                        f"{mirror.url / file.object_of(piece)} is damaged: its bytes are not those that were written",
                        effect=f"{file.name} of the record cannot be restored, so nothing was",
                        remedy="restore an earlier version of that object, if the bucket keeps versions",
                    )
                out.write(content)
                shown(len(content))
