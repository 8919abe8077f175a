"""The record of a run (lineage, journal, metrics, settings, evaluations) to the mirror and back. No torch.

Each copy is one archive, so that it is one state of the record, and the one before it stays: a copy that is damaged in
the mirror costs what was recorded since. Logs, traces and evaluated samples are not copied.
"""

from __future__ import annotations

import re
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import xxhash
import zstandard

from fsdp_pretrain.checkpoint.store import describe_file
from fsdp_pretrain.errors import StorageError
from fsdp_pretrain.record import lineage, mirror_status, run_id, state_files
from fsdp_pretrain.record.environment import ENVIRONMENT
from fsdp_pretrain.record.files import RunDir, now

from .layout import MirrorState, RecordManifest, RunMirror

ARCHIVE = "record.tar.zst"
_LEFT_OUT = frozenset(
    "checkpoints mirror restoring control run_id lock.json aim tensorboard wandb trackers profiles".split()
)
"""What is copied otherwise, belongs to this start alone, can be rebuilt (views), or is large (traces)."""
_PASSING = re.compile(r"^\.|lease\.json$|^claim\.json$|^log$|\.log$|^samples_.*\.jsonl$")
"""Names of files that only matter to processes that live, and of large ones."""
_OF_WATCHDOG = frozenset(("alarms.jsonl", "pace.json", "unigrams.json"))
"""What a later start reads of `watchdog/`."""
_TIME = re.compile(r"record/(\d+)\.")


def record_files(run: RunDir) -> Iterator[tuple[str, Path]]:
    """(name, path) of every file that is copied."""
    for top in sorted(run.path.iterdir()):
        if top.name in _LEFT_OUT or _PASSING.search(top.name):
            continue
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if top.name == "watchdog" and (path.parent != top or path.name not in _OF_WATCHDOG):
                continue
            if path.is_file() and not path.is_symlink() and not _PASSING.search(path.name):
                yield path.relative_to(run.path).as_posix(), path


def starts(run: RunDir) -> dict[str, str]:
    """The checksum of each start's environment, by its segment."""
    found = {segment.name: segment / ENVIRONMENT for segment in run.segments}
    return {name: xxhash.xxh3_128_hexdigest(path.read_bytes()) for name, path in found.items() if path.is_file()}


class RecordCopy:
    """Copies the record of a run to its mirror. Only one process at a time.

    Raises from its methods: RemoteError, RunGoneError, StorageError, DamagedFileError, OSError.
    """

    def __init__(self, run: RunDir, mirror: RunMirror, own_id: str) -> None:
        self._run, self._mirror, self._id = run, mirror, own_id
        self._copied: Mapping[str, tuple[int, int]] = {}
        self._lost_since: float | None = None

    def push(self, patience: float) -> None:
        """Copy what there is, if something has changed; then keep that and the copy before it.

        Args:
            patience: seconds for which files must be missing before there is a copy without them, so that a run
                directory that is being deleted does not take the mirror with it.
        """
        run_id.check()
        lineage.nodes(self._run)  # with a damaged one no start goes on
        found = {name: (path.stat().st_size, path.stat().st_mtime_ns) for name, path in record_files(self._run)}
        if found == self._copied:
            return
        if self._is_going(found, patience):
            return
        packed, there = mirror_status.folder(self._run) / ARCHIVE, self._mirror.remote.list("record")
        _pack(self._run, packed)
        run_id.check()
        last = max((int(found[1]) for found in map(_TIME.match, there) if found), default=0)
        number = f"{max(time.time_ns() // 10**6, last + 1):014d}"  # after the last one, whatever the clock says
        name, entry = f"record/{number}", describe_file(packed).model_copy(update={"name": f"{number}.tar.zst"})
        self._mirror.put(f"record/{entry.name}", packed, entry)
        manifest = RecordManifest(run_id=self._id, time=now(), archive=entry, starts=starts(self._run))
        self._mirror.put(f"{name}.json", state_files.seal(manifest).encode())
        packed.unlink()
        self._copied = found
        kept = (name, max((path.removesuffix(".json") for path in there if path.endswith(".json")), default=name))
        old = [path for path in there if not path.startswith(kept)]
        self._mirror.remote.delete(
            sorted(old, key=lambda path: not path.endswith(".json"))
        )  # what vouches for it first

    def _is_going(self, found: Mapping[str, tuple[int, int]], patience: float) -> bool:
        """Whether files are missing, and have not been for long."""
        if not self._copied.keys() - found.keys():
            self._lost_since = None
            return False
        if {"journal.jsonl", "config.toml"} & (self._copied.keys() - found.keys()):
            raise StorageError(f"{self._run.path} has lost files of its record", effect="the mirror keeps them")
        self._lost_since = self._lost_since or time.monotonic()
        return time.monotonic() - self._lost_since < patience


def _pack(run: RunDir, target: Path) -> None:
    """Write the archive; a file that is deleted meanwhile is left out. Raises OSError."""
    target.parent.mkdir(exist_ok=True)
    with (
        target.open("wb") as file,
        zstandard.ZstdCompressor().stream_writer(file) as packed,
        tarfile.open(mode="w|", fileobj=packed, dereference=True) as archive,
    ):
        for name, path in record_files(run):
            try:
                content = path.open("rb")
            except FileNotFoundError:
                continue
            with content:  # of a file that grows, as much as it has now
                archive.addfile(archive.gettarinfo(arcname=name, fileobj=content), content)


def restore_record(
    mirror: RunMirror, state: MirrorState, into: Path, shown: Callable[[int], object] = lambda size: None
) -> RecordManifest | None:
    """Unpack the newest whole copy of the record below a directory; files are as old as they were.

    Returns:
        Which copy it is; None if none is whole.

    Raises:
        RemoteError, OSError.
    """
    packed = into / ARCHIVE
    for record in state.records:
        if mirror.fetch(f"record/{record.archive.name}", record.archive, packed, shown):
            continue
        with (
            packed.open("rb") as file,
            zstandard.ZstdDecompressor().stream_reader(file) as content,
            tarfile.open(mode="r|", fileobj=content) as archive,
        ):
            archive.extractall(into, filter="data")
        packed.unlink()
        return record
    packed.unlink(missing_ok=True)
    return None
