"""`fsdp-data checksums`: the checksums of blocks for a corpus that was made without them, in a directory or by URL."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from data.corpus.corpus import CHECKSUMS, block_checksums, write_table
from data.corpus.fetched import PAIR, fetched, remote_manifest, scratch_directory
from data.corpus.manifest import read_manifest, write_manifest
from data.corpus.shards import Shard, file_checksum
from fsdp_pretrain.errors import DataError
from fsdp_pretrain.remote import Location, Url

from .jobs import READINGS, Task, make_all, records, write_record
from .outputs import open_output

_MADE = ".checksums"
"""Ends the names of the files in `shards/` that hold those of finished shards."""


def add_checksums(out: Location, *, workers: int, scratch: Path | None = None, quiet: bool = False) -> int:
    """Write `checksums.npy` and name it in the manifest, whose fingerprint stays.

    Returns:
        Number of blocks; 0 if they had checksums already, and these are whole.

    Raises:
        DataError: not a corpus, or a shard is not the one that the manifest names.
        OSError: the corpus cannot be written; RemoteError: remote storage failed.
    """
    manifest = remote_manifest(out) if isinstance(out, Url) else read_manifest(out)
    with open_output(out, scratch) as place, scratch_directory(scratch) as room:
        names = place.names()
        there = place.read([CHECKSUMS]) if manifest.checksums_xxh3 is not None and CHECKSUMS in names else []
        if [xxhash.xxh3_128_hexdigest(table) for table in there] == [manifest.checksums_xxh3]:
            return 0
        for _ in range(READINGS):
            table = place.read(["blocks.npy"])[0]
            if xxhash.xxh3_128_hexdigest(table) == manifest.blocks_xxh3:
                break
        else:
            raise DataError(f"{out}/blocks.npy is not the block table that manifest.json names", remedy="restore it")
        blocks, tasks = np.load(io.BytesIO(table), allow_pickle=False), []
        for number, entry in enumerate(manifest.shards):
            table_rows = blocks[blocks[:, 0] == number, 1:].tolist()
            arguments = (entry.location(out), entry.bin_xxh3, entry.idx_xxh3, table_rows, room)
            tasks.append(Task(f"shards/{entry.name}{_MADE}", arguments, entry.bytes))
        todo = [task for task in tasks if not task.is_done(names, (".json",))]
        make_all(_sum_shard, place, tasks, todo, None, workers, desc="checksums", disable=quiet or None)
        made = [f"{task.name}.json" for task in tasks]
        rows = [row for record in records(place, tasks) for row in record["checksums"]]
        checksums = np.asarray(rows, dtype=np.uint64)
        with place.making() as directory:
            manifest.checksums_xxh3 = write_table(directory / CHECKSUMS, checksums.reshape(-1, 2))
            write_manifest(directory, manifest)
        place.delete(made)
    return len(checksums)


def _sum_shard(
    part: Path, shard: Location, bin_xxh3: str, idx_xxh3: str, table: list[list[int]], room: Path, _: None, report: Any
) -> None:
    expected = dict(zip(PAIR, (bin_xxh3, idx_xxh3), strict=True))
    with fetched(shard, PAIR, room, expected) as prefix:
        for suffix, checksum in expected.items():
            if file_checksum(prefix.with_name(prefix.name + suffix)) != checksum:
                raise DataError(
                    f"{shard}{suffix} is not the file that the manifest names: another checksum",
                    effect="checksums of damaged blocks would declare them sound",
                    remedy="restore it from where the corpus came from, or prepare the corpus again",
                )
        opened = Shard(prefix)
        checksums = block_checksums(opened, np.asarray(table, dtype=np.int64).reshape(-1, 4))
        write_record(part, {"checksums": checksums.tolist()})
        report(opened.bytes)
