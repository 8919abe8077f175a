"""Copies the record of a run to the mirror and back.

Each copy is one archive, so that it holds one state of the record. The copy before it is kept: if the newest is damaged
in the mirror, only what was recorded since then is lost. Logs, traces, views and evaluated samples are not copied.
"""

from __future__ import annotations

import re
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import zstandard

from fsdp_pretrain.checkpoint.store import describe_file
from fsdp_pretrain.run import lineage, mirror_status, run_id
from fsdp_pretrain.run.files import RunDir

from .layout import MirroredRecord, MirrorState, RunMirror

_ARCHIVE = "record.tar.zst"
_COPIED = (
    *("avoid_hosts", "config.toml", "evals", "journal.jsonl", "overrides.toml", "rollback.json", "segments"),
    *("tokenizer", "watchdog/alarms.jsonl", "watchdog/pace.json", "watchdog/unigrams.json"),
)
_PASSING = re.compile(r"^\.|(lease|claim)\.json$|^log$|\.log$|^samples_.*\.jsonl$")
"""Names of files that matter only to running processes, and of large files; these are not copied."""
Versions = Mapping[str, tuple[int, int]]
"""(size, time of the last change) of files, by name."""


def _record_files(run: RunDir) -> Iterator[tuple[str, Path]]:
    """(name, path) of every file that is copied."""
    for top in (run.path / name for name in _COPIED):
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.is_file() and not path.is_symlink() and not _PASSING.search(path.name):
                yield path.relative_to(run.path).as_posix(), path


def push_record(
    run: RunDir, mirror: RunMirror, own_id: str, before: list[MirroredRecord], copied: Versions
) -> Versions:
    """Copy the record if it has changed, and keep only the two newest copies. Only one process at a time may do this.

    Args:
        before: the copies in the mirror, newest first.
        copied: the file versions that this process copied last.

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
    mirror.put(f"record/{made:014d}-{own_id}-{entry.xxh3}.tar.zst", packed, entry)
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
        RemoteError, OSError.
    """
    packed = work / _ARCHIVE
    for record in state.records:
        if not mirror.fetch(f"record/{record.entry.name}", record.entry, packed, shown):
            with (
                packed.open("rb") as file,
                zstandard.ZstdDecompressor().stream_reader(file) as content,
                tarfile.open(mode="r|", fileobj=content) as archive,
            ):
                archive.extractall(into, filter="data")
            return record
    return None
