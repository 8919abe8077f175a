"""The mirror of a run, `MIRROR/<run.name>/`, and what is in it.

    checkpoints/step-N/...   the files of a checkpoint; `manifest.json` is written last and deleted first
    record/TIME-ID-SUM...    the record of the run, packed; its name has the run id and the archive's checksum

A checkpoint counts as present in the mirror if it has a manifest and its files have the right sizes. Every object has
a checksum. If what is read does not match it, the object is read again, since the answer may be wrong and not the
object. Every object is read back after it was written.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import xxhash

from fsdp_pretrain.checkpoint.manifest import CheckpointManifest, FileEntry
from fsdp_pretrain.checkpoint.store import (
    MANIFEST,
    describe_file,
    difference,
    directory_name,
    size_problem,
    step_of,
)
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.errors import CheckpointError, Exit, UserError
from fsdp_pretrain.files import PARTIAL
from fsdp_pretrain.remote import PATIENCE, Problem, Remote, RemoteError, Url
from fsdp_pretrain.run import lineage, state_files
from fsdp_pretrain.run.lineage import LineageNode
from fsdp_pretrain.run.state_files import StateFile
from fsdp_pretrain.units import counted

T = TypeVar("T")
_CHUNK = 16 << 20
_READS = 10
"""Attempts to read an object whose bytes are wrong. Wrong bytes that come twice are taken as those stored."""
RECORD = re.compile(r"record/((\d{14})-([0-9a-f]{32})-([0-9a-f]{32})\.tar\.zst)")


class MirrorError(UserError):
    """The mirror and the run directory do not fit together; a person must decide."""

    exit = Exit.NEEDS_PERSON


@dataclass(frozen=True)
class MirroredRecord:
    """A copy of the record, described by the name of its object."""

    made: int  # time of the copy, in milliseconds since 1970
    run_id: str  # id of the run directory
    entry: FileEntry  # name, size and checksum of the object

    def __str__(self) -> str:
        return datetime.fromtimestamp(self.made / 1000, UTC).isoformat(" ", "seconds")


@dataclass(frozen=True)
class MirroredCheckpoint:
    """A checkpoint's directory in the mirror."""

    step: int
    raw: bytes | None  # bytes of its manifest; None if that is not written yet
    objects: dict[str, int]  # sizes of the files in the directory, by name

    @property
    def name(self) -> str:
        """Name of the directory, relative to the mirror."""
        return f"checkpoints/{directory_name(self.step)}"

    def manifest(self) -> CheckpointManifest:
        """The parsed manifest. Raises CheckpointError if it is missing or damaged."""
        try:
            if self.raw is None:
                raise ValueError("is missing")
            return state_files.parse(self.raw, CheckpointManifest)
        except ValueError as error:
            raise CheckpointError(f"{MANIFEST} {error}") from None

    @cached_property
    def problem(self) -> str | None:
        """Why it must not be used, judged by manifest, names and sizes; None if it looks whole."""
        if self.raw is None:
            return "it is incomplete: its manifest has not been written"
        try:
            manifest = self.manifest()
        except CheckpointError as error:
            return error.cause
        if manifest.step != self.step:
            return f"{MANIFEST} is that of step {manifest.step}"
        return next(filter(None, (size_problem(entry, self.objects.get(entry.name)) for entry in manifest.files)), None)

    def is_abandoned(self, nodes: list[LineageNode]) -> bool:
        """Whether a rollback or a fresh start has abandoned it. Raises CheckpointError."""
        segment = self.manifest().segment
        return segment is not None and lineage.abandoned_by(nodes, segment, self.step) is not None


@dataclass(frozen=True)
class MirrorState:
    """What the mirror holds of a run."""

    records: list[MirroredRecord]  # copies of the record, newest first
    checkpoints: list[MirroredCheckpoint]  # all directories, oldest step first
    partial: list[str]  # names of what a killed process was writing; only in a directory (`file://`)

    @property
    def whole(self) -> list[MirroredCheckpoint]:
        """The checkpoints that look whole."""
        return [item for item in self.checkpoints if item.problem is None]

    def __str__(self) -> str:
        newest = f", the newest of step {self.whole[-1].step:_}" if self.whole else ""
        text = f"{counted(len(self.whole), 'whole checkpoint')}{newest}"
        return f"{text}, and {f'a record of {self.records[0]}' if self.records else 'no record'}"


class RunMirror:
    """The mirror of a run whose configuration sets `checkpoint.mirror`, or at a URL. Its methods raise RemoteError."""

    def __init__(self, config: Config | Url, *, patience: float = PATIENCE) -> None:
        self.url = config if isinstance(config, Url) else Url(config.checkpoint.mirror or "") / config.run.name
        self.remote = Remote(self.url, patience=patience)

    def look(self) -> MirrorState:
        """The contents of the mirror, as names, sizes and manifests show them."""
        sizes = self.remote.list()
        folders: defaultdict[int, dict[str, int]] = defaultdict(dict)
        records = []
        for name, size in sorted(sizes.items()):
            folder, _, file = name.removeprefix("checkpoints/").partition("/")
            if match := RECORD.fullmatch(name):
                entry = FileEntry(name=match[1], bytes=size, xxh3=match[4])
                records.append(MirroredRecord(int(match[2]), match[3], entry))
            elif (step := step_of(folder)) is not None and file:
                folders[step][file] = size
        manifests = {step: self._manifest(step) for step, objects in folders.items() if MANIFEST in objects}
        checkpoints = [
            MirroredCheckpoint(step, manifests.get(step), objects) for step, objects in sorted(folders.items())
        ]
        return MirrorState(records[::-1], checkpoints, [name for name in sizes if name.endswith(PARTIAL)])

    def _manifest(self, step: int) -> bytes | None:
        """The stored bytes of a manifest, perhaps damaged; None if there is none."""

        def read() -> tuple[bytes, bool]:
            content = self.remote.read(f"checkpoints/{directory_name(step)}/{MANIFEST}")
            with contextlib.suppress(ValueError):
                state_files.parse(content, StateFile)
                return content, True
            return content, False

        return _read_until_right(read)

    def remove(self, item: MirroredCheckpoint) -> None:
        """Delete a checkpoint, its manifest first, so that an incomplete deletion never looks whole."""
        names = (MANIFEST, *sorted(item.objects.keys() - {MANIFEST}))
        self.remote.delete(f"{item.name}/{name}" for name in names)
        self.remote.remove_folder(item.name)

    def fetch(
        self, name: str, entry: FileEntry, path: Path | None = None, shown: Callable[[int], object] = lambda size: None
    ) -> str:
        """Read an object in parts, compare it with its entry, and write it durably to `path`, if given.

        Args:
            shown: called with the number of bytes of each part.

        Returns:
            What is wrong with the object; empty if nothing is.
        """

        def read() -> tuple[str, bool]:
            digest = xxhash.xxh3_128()
            with Path(path or os.devnull).open("wb") as file:
                for start in range(0, entry.bytes, _CHUNK):
                    chunk = self.remote.read(name, start, min(start + _CHUNK, entry.bytes))
                    digest.update(chunk)
                    file.write(chunk)
                    shown(len(chunk))
                file.flush()
                if path is not None:
                    os.fsync(file.fileno())
            return digest.hexdigest(), digest.hexdigest() == entry.xxh3

        stored = _read_until_right(read)
        if stored is None:
            return f"{entry.name} is missing"
        return difference(entry, entry.model_copy(update={"xxh3": stored}))

    def put(self, name: str, source: Path | bytes, entry: FileEntry | None = None) -> None:
        """Write an object and read it back.

        Args:
            source: a file with its entry, or the contents.

        Raises:
            CheckpointError: the file differs from its entry.
        """
        if isinstance(source, bytes):
            entry = FileEntry(name=name.rpartition("/")[2], bytes=len(source), xxh3=xxhash.xxh3_128_hexdigest(source))
            self.remote.write(name, source)
        else:
            self.remote.upload(source, name)
        assert entry is not None
        if wrong := self.fetch(name, entry):
            if isinstance(source, Path) and (local := difference(entry, describe_file(source))):
                raise CheckpointError(f"{source.parent.name} is damaged in the run directory: {local}")
            raise RemoteError(str(self.url / name), Problem.FAILED, f"after it was written, {wrong}")


def _read_until_right(read: Callable[[], tuple[T, bool]]) -> T | None:
    """Call `read` until an answer is right or comes twice, and return it; None if there is no such object."""
    answers = list[T]()
    for _ in range(_READS):
        try:
            answer, right = read()
        except RemoteError as error:
            if error.problem is Problem.MISSING:
                return None
            raise
        if right or answer in answers:
            return answer
        answers.append(answer)
    return answers[-1]
