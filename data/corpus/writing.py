"""Makes a corpus of shards: blocks with their checksums, tables and manifest."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from fsdp_pretrain.data.text.tokenizer import Tokenizer
from fsdp_pretrain.errors import DataError
from fsdp_pretrain.files import replace_file

from .corpus import BLOCK_COLUMNS, CHECKSUMS
from .manifest import CorpusManifest, Separators, ShardEntry, write_manifest
from .shards import Shard

BLOCK_TOKENS = 4_000_000


def build_blocks(
    shards: Iterable[Shard], block_tokens: int = BLOCK_TOKENS, carried: int = 0, *, pairs: bool = False
) -> npt.NDArray[np.int64]:
    """Cut each shard into blocks of about `block_tokens`. Returns int64 [blocks, 5], see `BLOCK_COLUMNS`.

    Separators that documents carry (`carried` each) are not counted, so the table does not depend on how documents are
    stored. With `pairs`, no block separates a prompt from its answer.
    """
    rows = []
    for number, shard in enumerate(shards):
        lengths = shard.lengths - carried
        ends = np.cumsum(lengths, dtype=np.int64)
        full = np.cumsum(lengths > 0, dtype=np.int64)
        first, done_tokens, done_full = 0, 0, 0
        while first < shard.documents:
            stop = int(np.searchsorted(ends, done_tokens + block_tokens)) + 1
            stop = min(stop + (stop % 2 if pairs else 0), shard.documents)
            tokens, nonempty = int(ends[stop - 1]), int(full[stop - 1])
            if nonempty > done_full:
                rows.append((number, first, stop - first, nonempty - done_full, tokens - done_tokens))
            first, done_tokens, done_full = stop, tokens, nonempty
    return np.asarray(rows, dtype=np.int64).reshape(-1, len(BLOCK_COLUMNS))


@dataclasses.dataclass(frozen=True)
class ShardBlocks:
    """The blocks of one shard."""

    table: npt.NDArray[np.int64]  # int64 [blocks, 4], the columns of `BLOCK_COLUMNS` after the shard
    checksums: npt.NDArray[np.uint64]  # uint64 [blocks, 2], xxh3-64 of the bytes of each block's lengths and tokens

    @classmethod
    def of(cls, shard: Shard, block_tokens: int, carried: int, *, pairs: bool) -> ShardBlocks:
        """Cut a shard and read it. Raises DataError if its documents do not follow each other from its start."""
        if problem := shard.index_problem():
            raise DataError(f"the index of {shard.prefix} is damaged: {problem}")
        table = build_blocks([shard], block_tokens, carried, pairs=pairs)[:, 1:]
        item, checksums = shard.dtype.itemsize, []
        for first, documents in table[:, :2].tolist():
            last = first + documents - 1
            tokens = shard.tokens[
                int(shard.pointers[first]) // item : int(shard.pointers[last]) // item + int(shard.lengths[last])
            ]
            checksums.append(
                [xxhash.xxh3_64_intdigest(part.data) for part in (shard.lengths[first : last + 1], tokens)]
            )
        return cls(table, np.asarray(checksums, dtype=np.uint64).reshape(-1, 2))

    def to_json(self) -> dict[str, Any]:
        return {"table": self.table.tolist(), "checksums": self.checksums.tolist()}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ShardBlocks:
        table = np.asarray(value["table"], dtype=np.int64).reshape(-1, len(BLOCK_COLUMNS) - 1)
        return cls(table, np.asarray(value["checksums"], dtype=np.uint64).reshape(-1, 2))


def write_corpus(
    directory: Path,
    tokenizer: Tokenizer,
    entries: list[dict[str, Any]],
    dtype: np.dtype[Any],
    statistics: dict[str, Any],
    separators: Separators = "none",
    *,
    pairs: bool = False,
    block_tokens: int = BLOCK_TOKENS,
) -> CorpusManifest:
    """Write tables, tokenizer copy and finally, atomically, the manifest of shards already in place.

    `entries`: manifest entries of the shards. An entry may have the blocks of its shard as JSON of `ShardBlocks` under
    `blocks`; else the shard is read to make them.
    """
    entries, by_shard = [{**entry} for entry in entries], list[ShardBlocks]()
    for entry in entries:
        given = entry.pop("blocks", None)
        if given is not None:
            by_shard.append(ShardBlocks.from_json(given))
        else:
            shard = Shard(ShardEntry(**entry).prefix(directory))
            by_shard.append(ShardBlocks.of(shard, block_tokens, int(separators != "none"), pairs=pairs))
    rows = [np.insert(own.table, 0, number, axis=1) for number, own in enumerate(by_shard)]
    blocks = np.concatenate([np.zeros((0, len(BLOCK_COLUMNS)), np.int64), *rows])
    checksums = np.concatenate([np.zeros((0, 2), np.uint64), *(own.checksums for own in by_shard)])
    description = tokenizer.describe()
    description["file"] = "tokenizer.model" if tokenizer.kind == "sentencepiece" else "tokenizer.json"
    replace_file(directory / description["file"], tokenizer.path.read_bytes())
    manifest = CorpusManifest.model_validate(
        {
            "format": 1,
            "dtype": dtype.name,
            "separators": separators,
            "pairs": pairs,
            "tokenizer": description,
            "documents": sum(entry["documents"] for entry in entries),
            "tokens": sum(entry["tokens"] for entry in entries),
            "blocks_xxh3": _write_table(directory / "blocks.npy", blocks),
            "checksums_xxh3": _write_table(directory / CHECKSUMS, checksums),
            "shards": entries,
            "statistics": statistics,
        }
    )
    write_manifest(directory, manifest)
    return manifest


def _write_table(path: Path, table: npt.NDArray[Any]) -> str:
    """Write an array durably; returns the checksum of the file. Raises OSError."""
    buffer = io.BytesIO()
    np.save(buffer, table)
    replace_file(path, buffer.getvalue())
    return xxhash.xxh3_128_hexdigest(buffer.getvalue())
