"""Copies the record of a run to the mirror and back, or to where somebody looks at it.

Each copy is one archive, so that it holds one state of the record. The copy before it is kept: if the newest is damaged
in the mirror, only what was recorded since then is lost. Logs, traces, views and evaluated samples are not copied.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, cast

import zstandard
from tqdm import tqdm

from fsdp_pretrain.checkpoint.store import MANIFEST, VERIFIED, describe_file
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.remote import Url
from fsdp_pretrain.run import lineage, mirror_status, run_id
from fsdp_pretrain.run.files import Fetched, RunDir, stamp
from fsdp_pretrain.run.metrics import METRICS

from .layout import RECORD, MirroredRecord, MirrorError, MirrorState, RunMirror

_ARCHIVE = "record.tar.zst"
_COPIED = (
    *("avoid_hosts", "config.toml", "evals", "journal.jsonl", "overrides.toml", "rollback.json", "segments"),
    *("status.json", "tokenizer", "watchdog/alarms.jsonl", "watchdog/pace.json", "watchdog/unigrams.json"),
)
_PASSING = re.compile(r"^\.|(lease|claim)\.json$|^log$|\.log$|^samples_.*\.jsonl$")
"""Names of files that matter only to running processes, and of large files; these are not copied."""
_EVERY, _PATIENCE = 60.0, 15.0
"""Seconds between two looks at a mirror that somebody watches, and for which one that fails is repeated."""
Versions = Mapping[str, tuple[int, int]]
"""(size, time of the last change) of files, by name."""


def _record_files(run: RunDir) -> Iterator[tuple[str, Path]]:
    """(name, path) of every file that is copied."""
    for top in (run.path / name for name in _COPIED):
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.is_file() and not path.is_symlink() and not _PASSING.search(path.name):
                yield path.relative_to(run.path).as_posix(), path


def push_record(
    run: RunDir, mirror: RunMirror, own_id: str, before: list[MirroredRecord], copied: Versions, own: set[str]
) -> Versions:
    """Copy the record if it has changed, and keep only the two newest copies. Only one process at a time may do this.

    Args:
        before: the copies in the mirror, newest first.
        copied: the file versions that this process copied last.
        own: gets the name of the new copy before that is written.

    Returns:
        The file versions that are copied now.

    Raises:
        RemoteError, RunGoneError, DamagedFileError, OSError.
    """
    lineage.nodes(run)  # raises for a damaged lineage, which no start would accept
    versions = {name: (path.stat().st_size, path.stat().st_mtime_ns) for name, path in _record_files(run)}
    if versions == copied:
        return copied
    packed = mirror_status.folder(run) / _ARCHIVE
    _pack(run, packed)
    run_id.check()
    entry = describe_file(packed)
    made = max(
        [time.time_ns() // 10**6, *(record.made + 1 for record in before)]
    )  # newer than all, whatever the clock shows
    name = f"{made:014d}-{own_id}-{entry.xxh3}.tar.zst"
    own.add(name)
    mirror.put(f"record/{name}", packed, entry)
    packed.unlink()
    mirror.remote.delete(f"record/{record.entry.name}" for record in before[1:])
    return versions


def _pack(run: RunDir, target: Path) -> None:
    """Write the archive; a file that is deleted meanwhile is left out. Raises OSError."""
    target.parent.mkdir(exist_ok=True)
    with (
        target.open("wb") as file,
        zstandard.ZstdCompressor().stream_writer(file) as packed,
        tarfile.open(mode="w|", fileobj=packed, dereference=True) as archive,
    ):
        for name, path in _record_files(run):
            try:
                content = path.open("rb")
            except FileNotFoundError:
                continue
            with content:  # a growing file is copied up to its present size
                archive.addfile(archive.gettarinfo(arcname=name, fileobj=content), content)


def restore_record(
    mirror: RunMirror, state: MirrorState, into: Path, work: Path, shown: Callable[[int], object]
) -> MirroredRecord | None:
    """Unpack the newest whole copy of the record into `into`, with its modification times; `work` is for the archive.

    Returns:
        The copy that was unpacked; None if none is whole.

    Raises:
        RemoteError, MirrorError, OSError.
    """
    packed = work / _ARCHIVE
    for record in state.records:
        if not mirror.fetch(f"record/{record.entry.name}", record.entry, packed, shown):
            with (
                packed.open("rb") as file,
                zstandard.ZstdDecompressor().stream_reader(file) as content,
                tarfile.open(mode="r|", fileobj=content) as archive,
            ):
                _unpack(archive, into)
            return record
    return None


def _unpack(archive: tarfile.TarFile, into: Path) -> None:
    """Unpack regular files as `extractall(into, filter="data")`, which came with Python 3.11.4.

    Raises MirrorError, OSError.
    """
    for member in archive:
        path = into / member.name
        if not member.isfile() or not path.resolve().is_relative_to(into.resolve()):
            raise MirrorError(
                f"the copy of the record holds {member.name!r}, which is not a file of it",
                remedy="find out who else writes to the mirror; the copy before it is there too",
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        with cast(IO[bytes], archive.extractfile(member)) as content, path.open("wb") as file:
            shutil.copyfileobj(content, file)
        path.chmod(member.mode & 0o666 | 0o600)
        os.utime(path, (member.mtime, member.mtime))


class FetchedRun(RunDir):
    """A copy of the record of the only run at a URL or below, which is deleted when this process ends.

    Of the mirror's whole checkpoints it has manifests, and empty files of the right sizes. Raises ConfigError,
    RemoteError, OSError.
    """

    def __init__(self, url: Url) -> None:
        names = RunMirror(url, patience=_PATIENCE).remote.list()
        places = sorted({name[: match.start()] for name in names if (match := RECORD.search(name))})
        if len(places) != 1:
            cause = f"{url} holds {len(places)} runs: {', '.join(places)}" if places else f"{url} holds no run's record"
            remedy = "name the checkpoint.mirror of a run, with its run.name if others are there too: URL/NAME"
            raise ConfigError(cause, "nothing is shown", remedy)
        self._mirror = RunMirror(Url(f"{url}/{places[0]}"), patience=_PATIENCE)
        self._work, self._due, self._objects = Path(tempfile.mkdtemp(prefix="fsdp-pretrain-")), 0.0, dict[str, int]()
        atexit.register(shutil.rmtree, self._work, ignore_errors=True)
        super().__init__(self._work / self._mirror.url.rpartition("/")[2])
        self.refresh()

    def refresh(self) -> None:
        """Fetch the record, once a minute if anything in the mirror has changed."""
        if time.monotonic() >= self._due:
            if (objects := self._mirror.remote.list()) != self._objects:
                self._fetch()
            self._objects, self._due = objects, time.monotonic() + _EVERY

    def _fetch(self) -> None:
        state = self._mirror.look()
        shutil.rmtree(self.checkpoints, ignore_errors=True)
        for path in [path for path in self.path.rglob("*") if path.is_file() and path.name != METRICS]:
            path.unlink()  # of metrics, only new lines are parsed again
        with tqdm(desc="fetching", unit="B", unit_scale=True, delay=2, disable=True if self.fetched else None) as bar:
            record = restore_record(self._mirror, state, self.path, self._work, bar.update)
        if record is None:
            raise ConfigError(f"no record in {self._mirror.url} is whole", "nothing is shown", "wait for the next copy")
        nodes = lineage.nodes(self)
        for item in [item for item in state.whole if not item.is_abandoned(nodes)]:
            folder = self.path / item.name
            folder.mkdir(parents=True)
            for entry in item.manifest().files:
                with (folder / entry.name).open("wb") as file:
                    file.truncate(entry.bytes)
            (folder / MANIFEST).write_bytes(item.raw or b"")
            (folder / VERIFIED).touch()
        self.fetched = Fetched(self._mirror.url, stamp(record.made / 1000))
