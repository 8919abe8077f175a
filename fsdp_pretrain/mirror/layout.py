"""The mirror of a run, `MIRROR/<run.name>/`, and what is in it. No torch.

    checkpoints/step-N/...   the files of a checkpoint; `manifest.json` is written last and deleted first
    record/TIME.tar.zst      the record of the run, packed
    record/TIME.json         of which run it is, and what its bytes must be; written after it and deleted first

What has a manifest whose sizes are right exists in the mirror, nothing else does. Whatever is read has a checksum, and
is read again if it is wrong: the answer may be, and not the object. Whatever is written is read back.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import xxhash

from fsdp_pretrain.checkpoint.manifest import CheckpointManifest, FileEntry
from fsdp_pretrain.checkpoint.store import (
    MANIFEST,
    PINNED,
    describe_file,
    difference,
    directory_name,
    size_problem,
    step_of,
)
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.errors import CheckpointError, Exit, UserError
from fsdp_pretrain.record import lineage, state_files
from fsdp_pretrain.record.lineage import LineageNode
from fsdp_pretrain.record.state_files import StateFile
from fsdp_pretrain.remote import PATIENCE, Problem, Remote, RemoteError, Url
from fsdp_pretrain.units import human_count

T = TypeVar("T")
_CHUNK = 16 << 20
_READS, _WRITES = 10, 4
"""Of an object whose bytes are wrong; the same wrong bytes twice are those that are stored."""
_RECORD = re.compile(r"record/\d+\.json")


class MirrorError(UserError):
    """The mirror and the run directory do not fit together; a person must decide."""

    exit = Exit.NEEDS_PERSON


class SourceDamagedError(CheckpointError):
    """A local file is not the one that its manifest describes, or is gone."""


class RecordManifest(StateFile):
    """`record/TIME.json`: a copy of the record.

    Attributes:
        run_id: of the run directory.
        time: when it was made.
        archive: name, size and checksum of the object beside it.
        starts: checksum of the `environment.json` of each segment, by its number: no two starts have the same.
    """

    run_id: str
    time: str
    archive: FileEntry
    starts: dict[str, str]


@dataclass(frozen=True)
class MirroredCheckpoint:
    """A checkpoint's directory in the mirror.

    Attributes:
        raw: its manifest as it was written; None: there is none yet.
        objects: names in the directory, with their sizes.
    """

    step: int
    raw: bytes | None
    objects: dict[str, int]

    @property
    def name(self) -> str:
        """Of the directory, relative to the mirror."""
        return f"checkpoints/{directory_name(self.step)}"

    @property
    def pinned(self) -> bool:
        return PINNED in self.objects

    def manifest(self) -> CheckpointManifest:
        """Raises CheckpointError."""
        try:
            if self.raw is None:
                raise ValueError("is missing")
            return state_files.parse(self.raw, CheckpointManifest)
        except ValueError as error:
            raise CheckpointError(f"{MANIFEST} {error}") from None

    @cached_property
    def problem(self) -> str | None:
        """Why it must not be used, by its manifest, names and sizes; None if it looks whole."""
        if self.raw is None:
            return "it is incomplete: its manifest has not been written"
        try:
            manifest = self.manifest()
        except CheckpointError as error:
            return error.cause
        if manifest.step != self.step:
            return f"{MANIFEST} is that of step {manifest.step}"
        return next(filter(None, (size_problem(entry, self.objects.get(entry.name)) for entry in manifest.files)), None)

    def is_on_line(self, nodes: Sequence[LineageNode]) -> bool:
        """Whether it is whole, and no rollback or fresh start has left it behind."""
        if self.problem is not None:
            return False
        segment = self.manifest().segment
        return segment is None or lineage.left_on_purpose(nodes, segment, self.step) is None


@dataclass(frozen=True)
class MirrorState:
    """What the mirror holds of a run.

    Attributes:
        records: copies of the record that look whole, newest first.
        checkpoints: all directories, oldest step first.
    """

    records: list[RecordManifest]
    checkpoints: list[MirroredCheckpoint]

    @property
    def run_id(self) -> str | None:
        """None: no run's, or it is lost."""
        return self.records[0].run_id if self.records else None

    @property
    def newest(self) -> MirroredCheckpoint | None:
        """The newest that looks whole."""
        return next((item for item in reversed(self.checkpoints) if item.problem is None), None)

    def __str__(self) -> str:
        record = f"its record of {self.records[0].time}" if self.records else "no copy of its record"
        text = f"run {self.run_id or 'without an id'}, {record}"
        if (newest := self.newest) is None:
            return f"{text}, no whole checkpoint"
        manifest = newest.manifest()
        text += f", {sum(item.problem is None for item in self.checkpoints)} whole checkpoints, the newest of step "
        return f"{text}{newest.step:_} ({human_count(manifest.tokens)} tokens), written {manifest.committed}"


class RunMirror:
    """The mirror of the run of a configuration, which has one. Its methods raise RemoteError."""

    def __init__(self, config: Config, *, patience: float = PATIENCE) -> None:
        assert config.checkpoint.mirror is not None
        self.url = Url(config.checkpoint.mirror) / config.run.name
        self.remote = Remote(self.url, patience=patience)

    def try_to_write(self) -> None:
        """Write a small object, and delete it: a mirror that takes nothing should be known before a run begins."""
        name = f"written-by-{os.uname().nodename}-{os.getpid()}"
        self.remote.write(name, b"\n")
        self.remote.delete([name])

    def look(self) -> MirrorState:
        """What is there, by names, sizes and manifests."""
        sizes = {name: info.size for name, info in self.remote.list().items()}
        folders: defaultdict[int, dict[str, int]] = defaultdict(dict)
        records = []
        for name in sorted(sizes, reverse=True):
            folder, _, file = name.removeprefix("checkpoints/").partition("/")
            if _RECORD.fullmatch(name):
                records += [found for found in [self._record(name)] if found and _is_there(found.archive, sizes)]
            elif (step := step_of(folder)) is not None and file:
                folders[step][file] = sizes[name]
        return MirrorState(records, [self._checkpoint(step, found) for step, found in sorted(folders.items())])

    def _checkpoint(self, step: int, objects: dict[str, int]) -> MirroredCheckpoint:
        name = f"checkpoints/{directory_name(step)}/{MANIFEST}"
        return MirroredCheckpoint(step, self._read_sealed(name) if MANIFEST in objects else None, objects)

    def objects(self, step: int) -> dict[str, int]:
        """Names in a checkpoint's directory, with their sizes."""
        found = self.remote.list(f"checkpoints/{directory_name(step)}")
        return {name.rpartition("/")[2]: info.size for name, info in found.items()}

    def _record(self, name: str) -> RecordManifest | None:
        with contextlib.suppress(ValueError):
            return state_files.parse(self._read_sealed(name) or b"", RecordManifest)
        return None

    def _read_sealed(self, name: str) -> bytes | None:
        """An object with a checksum inside, as it is stored, perhaps damaged; None if it is absent."""

        def act() -> tuple[bytes, bool]:
            content = self.remote.read(name)
            with contextlib.suppress(ValueError):
                state_files.parse(content, StateFile)
                return content, True
            return content, False

        return _read_until_right(act)

    def fetch(
        self, name: str, entry: FileEntry, path: Path | None = None, shown: Callable[[int], object] = lambda size: None
    ) -> str:
        """Read an object that should have the bytes of an entry, in parts, and make them durable in `path`, if given.

        Args:
            shown: is called with bytes, for each part.

        Returns:
            What is wrong with the object; empty: nothing.
        """

        def act() -> tuple[str, bool]:
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

        found = _read_until_right(act)
        return (
            f"{entry.name} is missing" if found is None else difference(entry, entry.model_copy(update={"xxh3": found}))
        )

    def put(self, name: str, source: Path | bytes, entry: FileEntry | None = None) -> None:
        """Write an object and read it back; a few times, if it differs.

        Args:
            source: a file with its entry, or the contents.

        Raises:
            SourceDamagedError: the file is gone, or is not that of the entry.
        """
        if isinstance(source, bytes):
            entry = FileEntry(name=name.rpartition("/")[2], bytes=len(source), xxh3=xxhash.xxh3_128_hexdigest(source))
        assert entry is not None
        wrong = ""
        for _ in range(_WRITES):
            self._write(name, source)
            wrong = self.fetch(name, entry)
            if not wrong:
                return
            if isinstance(source, Path):
                _check_source(source, entry)
        raise RemoteError(str(self.url / name), Problem.FAILED, f"after it was written, {wrong}")

    def _write(self, name: str, source: Path | bytes) -> None:
        if isinstance(source, bytes):
            self.remote.write(name, source)
            return
        try:
            self.remote.upload(source, name)
        except (OSError, RemoteError) as error:
            if source.is_file():
                raise
            raise SourceDamagedError(f"{source} is gone: {error}") from None


def _check_source(path: Path, entry: FileEntry) -> None:
    try:
        wrong = difference(entry, describe_file(path))
    except OSError as error:
        wrong = f"{entry.name}: {error.strerror}"
    if wrong:
        raise SourceDamagedError(f"{path.parent.name} is damaged in the run directory: {wrong}")


def _is_there(entry: FileEntry, sizes: dict[str, int]) -> bool:
    return sizes.get(f"record/{entry.name}") == entry.bytes


def _read_until_right(act: Callable[[], tuple[T, bool]]) -> T | None:
    """The first answer that is right, or the first that comes twice; None if there is no such object."""
    answers = list[T]()
    for _ in range(_READS):
        try:
            answer, right = act()
        except RemoteError as error:
            if error.problem is Problem.MISSING:
                return None
            raise
        if right or answer in answers:
            return answer
        answers.append(answer)
    return answers[-1]


def taken(url: Url, found: str) -> MirrorError:
    """The error for a mirror of another run."""
    return MirrorError(
        f"{url} is the mirror of another run, with the id {found}",
        effect="nothing was trained: two runs in one mirror would replace each other's checkpoints",
        remedy="give this run another run.name or another checkpoint.mirror. To continue the run of the mirror, name "
        "an empty run directory and pass --from-mirror",
    )
