"""The mirror of a run, `MIRROR/<run.name>/`, and what is in it. No torch.

    run_id                       the id of the run directory
    checkpoints/step-N/...       the files of a checkpoint; `manifest.json` is written last and deleted first
    record/NAME/TIME-SIZE-XXH3   a file of the record, whole; its name says what its bytes must be
    record.json                  which of these make up the record; written after them

A checkpoint exists in the mirror if its manifest does and every file has the manifest's size. Whatever is read has a
checksum, and is read again if it is wrong: the answer may be, and not the object.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash
from pydantic import BaseModel

from fsdp_pretrain.checkpoint.manifest import CheckpointManifest, FileEntry
from fsdp_pretrain.checkpoint.store import MANIFEST, PINNED, difference, directory_name, step_of
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.errors import CheckpointError, Exit, UserError
from fsdp_pretrain.record import lineage, state_files
from fsdp_pretrain.record.lineage import LineageNode
from fsdp_pretrain.record.run_id import NAME as RUN_ID
from fsdp_pretrain.record.state_files import StateFile
from fsdp_pretrain.remote import PATIENCE, ObjectInfo, Problem, Remote, RemoteError, Url

CHECKPOINTS, INDEX, RECORD = "checkpoints", "record.json", "record"
_CHUNK = 16 << 20
_READS, _WRITES = 10, 4
"""Of an object whose bytes are wrong; the same wrong bytes twice are those that are stored."""
_OBJECT = re.compile(rf"{RECORD}/(.+)/(\d+)-(\d+)-([0-9a-f]{{32}})")
_RUN_ID = re.compile(r"[0-9a-f]{32}")


class MirrorError(UserError):
    """The mirror and the run directory do not fit together; a person must decide."""

    exit = Exit.NEEDS_PERSON


@dataclass(frozen=True)
class RecordFile:
    """A copy of a file of the record.

    Attributes:
        name: relative to the run directory.
        written: when it was copied, in milliseconds since 1970.
        bytes, xxh3: its size and checksum.
    """

    name: str
    written: int
    bytes: int
    xxh3: str

    @classmethod
    def of(cls, object_name: str) -> RecordFile | None:
        """That of an object; None if it is none."""
        found = _OBJECT.fullmatch(object_name)
        return None if found is None else cls(found[1], int(found[2]), int(found[3]), found[4])

    @property
    def object_name(self) -> str:
        """The name of the object, which never changes its contents."""
        return f"{RECORD}/{self.name}/{self.written:014d}-{self.bytes}-{self.xxh3}"


class RecordIndex(StateFile):
    """`record.json`: a state of the record, by the names of its objects, which were all there when it was written."""

    run_id: str
    time: str
    objects: list[str]


@dataclass(frozen=True)
class MirroredRecord:
    """The record as the mirror has it.

    Attributes:
        index: None: it is absent or damaged, and all files count whose objects are there.
        copies: by name of a file its copies, the one to use first; empty if they are gone.
    """

    index: RecordIndex | None
    copies: dict[str, list[RecordFile]]

    @property
    def newest(self) -> dict[str, RecordFile]:
        """The copy to use of each file that has one."""
        return {name: found[0] for name, found in self.copies.items() if found}


@dataclass(frozen=True)
class MirroredCheckpoint:
    """A checkpoint's directory in the mirror.

    Attributes:
        raw: its manifest as it was written; None: there is none yet.
        objects: names in the directory, with their sizes.
        problem: why it must not be used, by its manifest, names and sizes; None if it looks whole.
    """

    step: int
    raw: bytes | None
    objects: dict[str, int]
    problem: str | None

    @classmethod
    def of(cls, step: int, raw: bytes | None, objects: dict[str, int]) -> MirroredCheckpoint:
        """That of a directory's objects; see the attributes."""
        item = cls(step, raw, objects, None)
        return replace(item, problem=_problem(item))

    @property
    def name(self) -> str:
        """Of the directory, relative to the mirror."""
        return f"{CHECKPOINTS}/{directory_name(self.step)}"

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


class RunMirror:
    """The mirror of the run of a configuration, which has one. Its methods raise RemoteError."""

    def __init__(self, config: Config, *, patience: float = PATIENCE) -> None:
        assert config.checkpoint.mirror is not None
        self.url = Url(config.checkpoint.mirror) / config.run.name
        self.remote = Remote(self.url, patience=patience)

    def run_id(self) -> str | None:
        """The id of the run that it belongs to; None: of no run yet, or it is lost.

        The index says it with a checksum; of the object `run_id` two answers must agree.
        """
        index = self.index()
        return self._id_object() if index is None else index.run_id

    def _id_object(self) -> str | None:
        before = None
        for _ in range(_READS):
            content = self._read(RUN_ID)
            if content is None or content == before:
                text = (content or b"").decode(errors="replace").strip()
                return text if _RUN_ID.fullmatch(text) else None
            before = content
        return None

    def claim(self, run_id: str) -> None:
        """Make it that of a run, if it is of none. Raises MirrorError if it is another's."""
        found = self.run_id()
        if found not in (None, run_id):
            raise taken(self.url, str(found))
        if self._id_object() != run_id:
            self.put(RUN_ID, f"{run_id}\n".encode())

    def try_to_write(self) -> None:
        """Write a small object, and delete it: a mirror that takes nothing should be known before a run begins."""
        name = f"written-by-{os.uname().nodename}-{os.getpid()}"
        self.remote.write(name, b"\n")
        self.remote.delete([name])

    def index(self) -> RecordIndex | None:
        """The newest copied state of the record; None if it is absent or damaged."""
        content = self._sealed(INDEX, RecordIndex)
        try:
            return None if content is None else state_files.parse(content, RecordIndex)
        except ValueError:
            return None

    def record(self) -> MirroredRecord:
        """What is there of the record: that of the index, or without one all that is found."""
        found: defaultdict[str, list[RecordFile]] = defaultdict(list)
        for name, info in self.remote.list(RECORD).items():
            file = RecordFile.of(name)
            if file is not None and file.bytes == info.size:
                found[file.name].append(file)
        for copies in found.values():
            copies.sort(key=lambda file: -file.written)
        index = self.index()
        if index is None:
            return MirroredRecord(None, dict(found))
        named = [file for file in map(RecordFile.of, index.objects) if file is not None]
        for file in named:  # that of the index first, then those of a state before or after it
            found[file.name].sort(key=file.__ne__)
        return MirroredRecord(index, {file.name: found[file.name] for file in named})

    def scan(self) -> list[MirroredCheckpoint]:
        """All directories with a checkpoint's name, oldest step first."""
        objects: defaultdict[int, dict[str, ObjectInfo]] = defaultdict(dict)
        for name, info in self.remote.list(CHECKPOINTS).items():
            _, _, rest = name.partition(f"{CHECKPOINTS}/")
            folder, _, file = rest.partition("/")
            step = step_of(folder)
            if step is not None and file:
                objects[step][file] = info
        return [self._inspect(step, found) for step, found in sorted(objects.items())]

    def _inspect(self, step: int, found: dict[str, ObjectInfo]) -> MirroredCheckpoint:
        sizes = {name: info.size for name, info in found.items()}
        name = f"{CHECKPOINTS}/{directory_name(step)}/{MANIFEST}"
        raw = self._sealed(name, CheckpointManifest) if MANIFEST in found else None
        return MirroredCheckpoint.of(step, raw, sizes)

    def _sealed(self, name: str, schema: type[BaseModel]) -> bytes | None:
        """An object with a checksum inside, as it is stored, perhaps damaged; None if it is absent."""
        before = None
        for _ in range(_READS):
            content = self._read(name)
            with contextlib.suppress(ValueError):
                if content is None or content == before or state_files.parse(content, schema):
                    break
            before = content
        return content

    def _read(self, name: str) -> bytes | None:
        try:
            return self.remote.read(name)
        except RemoteError as error:
            if error.problem is Problem.MISSING:
                return None
            raise

    def copy(
        self, name: str, entry: FileEntry, path: Path | None = None, shown: Callable[[int], object] = lambda size: None
    ) -> str:
        """Read an object that should have the bytes of an entry, in parts, and make them durable in `path`, if given.

        Args:
            shown: is called with bytes, for each part; with 0 when it is read again.

        Returns:
            What is wrong with the object; empty: nothing.
        """
        wrong = set[str]()
        for attempt in range(_READS):
            try:
                digest = self._copy(name, entry.bytes, path, shown if not attempt else lambda size: shown(0))
            except RemoteError as error:
                if error.problem is Problem.MISSING:
                    return f"{entry.name} is missing"
                raise
            if digest == entry.xxh3:
                return ""
            if digest in wrong:
                break
            wrong.add(digest)
        return difference(entry, entry.model_copy(update={"xxh3": digest}))

    def _copy(self, name: str, size: int, path: Path | None, shown: Callable[[int], object]) -> str:
        digest = xxhash.xxh3_128()
        with Path(path or os.devnull).open("wb") as file:
            for start in range(0, size, _CHUNK):
                chunk = self.remote.read(name, start, min(start + _CHUNK, size))
                digest.update(chunk)
                file.write(chunk)
                shown(len(chunk))
            file.flush()
            if path is not None:
                os.fsync(file.fileno())
        return digest.hexdigest()

    def put(self, name: str, content: bytes) -> None:
        """Write an object and read it back; a few times, if it differs."""
        entry = FileEntry(name=name.rpartition("/")[2], bytes=len(content), xxh3=xxhash.xxh3_128_hexdigest(content))
        for _ in range(_WRITES):
            self.remote.write(name, content)
            wrong = self.copy(name, entry)
            if not wrong:
                return
        raise RemoteError(str(self.url / name), Problem.FAILED, f"after it was written, {wrong}")


def _problem(item: MirroredCheckpoint) -> str | None:
    if item.raw is None:
        return "it is incomplete: its manifest has not been written"
    try:
        manifest = item.manifest()
    except CheckpointError as error:
        return error.cause
    if manifest.step != item.step:
        return f"{MANIFEST} is that of step {manifest.step}"
    for entry in manifest.files:
        size = item.objects.get(entry.name)
        if size is None:
            return f"{entry.name} is missing"
        if size != entry.bytes:
            return f"{entry.name} has {size} bytes, the manifest says {entry.bytes}"
    return None


def on_line(item: MirroredCheckpoint, nodes: Sequence[LineageNode]) -> bool:
    """Whether no rollback or fresh start has left a whole checkpoint behind."""
    segment = item.manifest().segment
    return segment is None or lineage.left_on_purpose(nodes, segment, item.step) is None


def taken(url: Url, found: str) -> MirrorError:
    """The error for a mirror of another run."""
    return MirrorError(
        f"{url} is the mirror of another run, with the id {found}",
        effect="nothing was trained: two runs in one mirror would replace each other's checkpoints",
        remedy="give this run another run.name or another checkpoint.mirror. To continue the run of the mirror, name "
        "an empty run directory and pass --from-mirror",
    )
