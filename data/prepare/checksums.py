"""`fsdp-data checksums`: the checksums of blocks for a corpus that was made without them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from data.corpus.corpus import CHECKSUMS, Corpus, block_checksums, load_json, write_manifest, write_table
from data.corpus.shards import Shard, file_checksum
from fsdp_pretrain.atomic import replace_file
from fsdp_pretrain.errors import DataError

from .jobs import Task, make_all

_PARTS = ".checksums"
"""Directory in the corpus for those of finished shards."""


def add_checksums(directory: Path, *, workers: int, quiet: bool = False) -> int:
    """Write `checksums.npy` and name it in the manifest, whose fingerprint stays.

    Returns:
        Number of blocks; 0 if they had checksums already.

    Raises:
        DataError: not a corpus, or a shard is not the one that the manifest names.
        OSError: the corpus cannot be written.
    """
    corpus = Corpus(directory)
    manifest, blocks = corpus.manifest, corpus.blocks
    if manifest.checksums_xxh3 is not None and (directory / CHECKSUMS).exists():
        return 0
    (directory / _PARTS).mkdir(exist_ok=True)
    tasks = []
    for number, entry in enumerate(manifest.shards):
        table = blocks[blocks[:, 0] == number, 1:].tolist()
        arguments = (entry.prefix(directory), entry.bin_xxh3, entry.idx_xxh3, table)
        tasks.append(Task(directory / _PARTS / (entry.bin_xxh3 + entry.idx_xxh3), arguments, entry.bytes))
    todo = [task for task in tasks if not task.is_done((".json",))]
    make_all(_sum_shard, tasks, todo, None, workers, desc="checksums", disable=quiet or None)
    found = [row for task in tasks for row in load_json(task.prefix.with_name(task.prefix.name + ".json"))]
    checksums = np.asarray(found, dtype=np.uint64).reshape(-1, 2)
    manifest.checksums_xxh3 = write_table(directory / CHECKSUMS, checksums)
    write_manifest(directory, manifest)
    shutil.rmtree(directory / _PARTS)
    return len(checksums)


def _sum_shard(
    part: Path, prefix: Path, bin_xxh3: str, idx_xxh3: str, table: list[list[int]], tokenizer: None, report: Any
) -> None:
    for suffix, expected in ((".bin", bin_xxh3), (".idx", idx_xxh3)):
        path = prefix.with_name(prefix.name + suffix)
        if file_checksum(path) != expected:
            raise DataError(
                f"{path} is not the file that the manifest names: another checksum",
                effect="checksums of damaged blocks would declare them sound",
                remedy="restore it from where the corpus came from, or prepare the corpus again",
            )
    shard = Shard(prefix)
    checksums = block_checksums(shard, np.asarray(table, dtype=np.int64).reshape(-1, 4))
    replace_file(part.with_name(part.name + ".json"), json.dumps(checksums.tolist()))
    report(shard.bytes)
