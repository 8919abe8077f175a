"""The mirror of a run, `MIRROR/<run.name>/`, and what is in it. No torch.

    run_id                       the id of the run directory
    checkpoints/step-N/...       the files of a checkpoint; `manifest.json` is written last and deleted first
    record.json                  which pieces make up the record, see `record_copy`
    record/...                   the pieces

A checkpoint exists in the mirror if its manifest does and every file has the manifest's size.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import xxhash

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


class MirrorError(UserError):
    """The mirror and the run directory do not fit together; a person must decide."""

    exit = Exit.NEEDS_PERSON


class RecordPiece(StateFile):
    """Bytes [start, stop) of a file of the record, and their xxh3_128."""

    start: int
    stop: int
    xxh3: str


class RecordFile(StateFile):
    """A file of the record, by its pieces; `name` is relative to the run directory."""

    name: str
    pieces: list[RecordPiece]

    @property
    def size(self) -> int:
        return self.pieces[-1].stop

    def object_of(self, piece: RecordPiece) -> str:
        """The name of a piece in the mirror; it never changes its content."""
        return f"{RECORD}/{self.name}/{piece.start:012d}-{piece.stop:012d}-{piece.xxh3}"


class RecordIndex(StateFile):
    """`record.json`: a state of the record; everything that it names is in the mirror."""

    run_id: str
    time: str
    files: list[RecordFile]

    def file(self, name: str) -> RecordFile | None:
        return next((file for file in self.files if file.name == name), None)

    @property
    def objects(self) -> set[str]:
        return {file.object_of(piece) for file in self.files for piece in file.pieces}


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
        """The id of the run that it belongs to; None: of no run yet."""
        content = self._read(RUN_ID)
        return None if content is None else content.decode(errors="replace").strip()

    def claim(self, run_id: str) -> None:
        """Make it that of a run, if it is of none. Raises MirrorError if it is another's."""
        found = self.run_id()
        if found is None:
            self.remote.write(RUN_ID, f"{run_id}\n".encode())
        elif found != run_id:
            raise taken(self.url, found)

    def try_to_write(self) -> None:
        """Write a small object, and delete it: a mirror that takes nothing should be known before a run begins."""
        name = f"written-by-{os.uname().nodename}-{os.getpid()}"
        self.remote.write(name, b"\n")
        self.remote.delete([name])

    def index(self) -> RecordIndex | None:
        """The newest copied state of the record. Raises MirrorError if it is damaged."""
        content = self._read(INDEX)
        try:
            return None if content is None else state_files.parse(content, RecordIndex)
        except ValueError as error:
            raise MirrorError(
                f"{self.url / INDEX} {error}",
                effect="the record cannot be restored from the mirror",
                remedy="restore an earlier version of that object, if the bucket keeps versions; otherwise remove it: "
                "the next copy of the record, by a start with the run directory, writes it again",
            ) from None

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
        raw = self._read(f"{CHECKPOINTS}/{directory_name(step)}/{MANIFEST}") if MANIFEST in found else None
        return MirroredCheckpoint.of(step, raw, sizes)

    def _read(self, name: str) -> bytes | None:
        try:
            return self.remote.read(name)
        except RemoteError as error:
            if error.problem is Problem.MISSING:
                return None
            raise

    def digest(self, entry: FileEntry, name: str, *, on_bytes: Callable[[bytes], object] = lambda chunk: None) -> str:
        """Read an object of a checkpoint back in parts. Returns how it differs from its entry; empty if it does not."""
        digest = xxhash.xxh3_128()
        for start in range(0, entry.bytes, _CHUNK):
            chunk = self.remote.read(name, start, min(start + _CHUNK, entry.bytes))
            digest.update(chunk)
            on_bytes(chunk)
        return difference(entry, FileEntry(name=entry.name, bytes=entry.bytes, xxh3=digest.hexdigest()))


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
