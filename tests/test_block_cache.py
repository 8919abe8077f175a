"""Corpora by URL: where blocks lie, what the cache holds, and the same samples as from files."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from object_store import Faults, ObjectStore

from fsdp_pretrain.config.sequence_stages import SequenceStages
from fsdp_pretrain.data.corpus.cached import CachedCopy, CacheUse, blocks_in
from fsdp_pretrain.data.corpus.corpus import Corpus
from fsdp_pretrain.data.corpus.manifest import read_manifest
from fsdp_pretrain.data.corpus.shards import Shard, ShardWriter
from fsdp_pretrain.data.corpus.writing import write_corpus
from fsdp_pretrain.data.packing.packer import Packer
from fsdp_pretrain.data.text.tokenizer import Tokenizer
from fsdp_pretrain.errors import DataError, Exit, ReadTimeoutError
from fsdp_pretrain.remote import RemoteError, Url
from fsdp_pretrain.units import Progress

pytest.importorskip("fsspec")
pytestmark = pytest.mark.quick
KINDS = ("plain", "empty", "trailing", "leading", "pairs", "wide")
BLOCK = 400


def documents(kind: str, tokenizer: Tokenizer, shard: int) -> list[list[int]]:
    rng = np.random.default_rng(shard)
    found = [rng.integers(10, 250, int(size)).tolist() for size in rng.integers(1, 90, 60)]
    if kind == "empty":
        found[3:3] = [[]] * 5
        found += [[7] * BLOCK, *[[]] * 9]  # no block has these
    if kind in ("trailing", "leading"):
        found = [[*own, tokenizer.eod] if kind == "trailing" else [tokenizer.eod, *own] for own in found]
        found += [[tokenizer.eod]] * 4
    return found


def build(path: Path, tokenizer: Tokenizer, kind: str = "plain", block_tokens: int = BLOCK) -> Path:
    """A corpus of small blocks in three shards, of which the middle one holds nothing."""
    dtype, entries = np.dtype("<i4" if kind == "wide" else "<u2"), []
    shards = path / "shards"
    shards.mkdir(parents=True, exist_ok=True)
    for number in range(3):
        with ShardWriter(shards / f"s{number}", dtype) as writer:
            for document in documents(kind, tokenizer, number) if number != 1 else [[]] * (kind == "empty"):
                writer.append(np.array(document, dtype))
            entries.append(writer.finish())
    separators: Any = kind if kind in ("trailing", "leading") else "none"
    write_corpus(path, tokenizer, entries, dtype, {}, separators, pairs=kind == "pairs", block_tokens=block_tokens)
    return path


def url(path: Path) -> Url:
    return Url(f"file://{path}")


@pytest.mark.parametrize("kind", KINDS)
def test_the_block_table_says_where_blocks_lie(tmp_path: Path, tokenizer: Tokenizer, kind: str) -> None:
    """What it says is what the indices say; the checksums are those of these bytes."""
    corpus = build(tmp_path / "corpus", tokenizer, kind)
    found, manifest = CachedCopy(url(corpus), CacheUse(tmp_path / "cache")), read_manifest(corpus)
    assert len(found.blocks) > 8
    for number, (shard_number, first, count) in enumerate(found.blocks[:, :3].tolist()):
        shard = Shard(manifest.shards[shard_number].prefix(corpus))
        start, last = int(shard.pointers[first]), first + count - 1
        stop = int(shard.pointers[last]) + int(shard.lengths[last]) * shard.dtype.itemsize
        expected = [shard.lengths[first : first + count].tobytes(), shard.tokens.tobytes()[start:stop]]
        parts = found.parts(number)
        assert [found.remote.read(name, start, stop) for name, start, stop, _ in parts] == expected
        assert found.sizes[number] == sum(map(len, expected)) == found.fetch(number)
        assert [checksum for *_, checksum in parts] == [xxhash.xxh3_64_intdigest(part) for part in expected]
        assert found.path(number).read_bytes() == b"".join(expected)


def test_pointers_between_two_tokens_are_damage(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Those of some documents moved by a byte: their distances are still their lengths."""
    prefix = read_manifest(build(tmp_path / "corpus", tokenizer)).shards[0].prefix(tmp_path / "corpus")
    shard = Shard(prefix)
    assert list(shard.rows(0, 3).pointers) == list(shard.pointers[:3])
    content = bytearray(shard.index_path.read_bytes())
    pointers = np.frombuffer(content, "<i8", 4, shard.lengths_at(shard.documents))
    pointers += 1
    shard.index_path.write_bytes(content)
    with pytest.raises(DataError, match="is damaged: document 0 does not fit"):
        Shard(prefix).rows(0, 3)


PACKERS: dict[str, dict[str, Any]] = {
    "sources": {"kinds": ("plain", "empty", "trailing", "leading", "wide")},
    "reshuffled": {"kinds": ("plain", "wide"), "reshuffle": [50, 120]},
    "stages": {"kinds": ("plain", "empty"), "stages": SequenceStages.of([(8, Progress(160, "sample"))], 32)},
    "pairs": {"kinds": ("pairs", "plain"), "slots": (4, 24)},
}


def packers(tmp_path: Path, tokenizer: Tokenizer, name: str, cache: CacheUse) -> tuple[Packer, Packer]:
    """The packer of corpora in files, and of the same corpora by URL."""
    options = dict(PACKERS[name])
    paths = {kind: build(tmp_path / kind, tokenizer, kind) for kind in options.pop("kinds")}
    options = {"seed": 5, "lanes": 6, "cache": cache, **options}
    return (
        Packer([(kind, path, 1.0) for kind, path in paths.items()], 32, **options),
        Packer([(kind, url(path), 1.0) for kind, path in paths.items()], 32, **options),
    )


@pytest.mark.parametrize("name", PACKERS)
def test_samples_are_the_same_through_a_cache(tmp_path: Path, tokenizer: Tokenizer, name: str) -> None:
    """Over two epochs, with their provenance."""
    cache = CacheUse(tmp_path / "cache")
    files, by_url = packers(tmp_path, tokenizer, name, cache)
    assert by_url.tokenizer == files.tokenizer and by_url.capacity == files.capacity
    samples = 2 * max(map(int, files.epoch_samples.values())) * len(files.corpora)
    for first in range(0, samples, 64):
        assert by_url.pack(first, 64).digest == files.pack(first, 64).digest
    for sample in range(0, samples, samples // 7):
        assert by_url.provenance(sample) == files.provenance(sample)
    assert {corpus.tokenizer().fingerprint for corpus in by_url.corpora.values()} == {tokenizer.fingerprint}


def test_a_missing_block_is_waited_for(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """With a fetcher, a process fetches nothing itself."""
    files, by_url = packers(tmp_path, tokenizer, "pairs", CacheUse(tmp_path / "cache", tmp_path / "fetcher.json"))
    copies = [corpus.cached for corpus in by_url.corpora.values() if corpus.cached is not None]
    assert not blocks_in(tmp_path / "cache")

    def fetch() -> None:
        for copy in copies:
            for block in range(len(copy.blocks)):
                copy.fetch(block)

    fetcher = threading.Thread(target=fetch)
    fetcher.start()
    assert by_url.pack(0, 150).digest == files.pack(0, 150).digest
    fetcher.join()


def test_a_block_that_does_not_come_is_told_with_the_fetchers_words(tmp_path: Path, tokenizer: Tokenizer) -> None:
    fetcher, corpus = tmp_path / "fetcher.json", build(tmp_path / "corpus", tokenizer)
    fetcher.write_text(json.dumps({"problem": "no access to the bucket"}))
    cache = CacheUse(tmp_path / "cache", fetcher)
    packer = Packer([("a", url(corpus), 1.0)], 32, seed=5, lanes=6, cache=cache, read_timeout=0.5)
    with pytest.raises(ReadTimeoutError, match=r"s\d did not answer for 0.5 s: no access to the bucket") as caught:
        packer.pack(0, 1)
    assert caught.value.exit == Exit.RESUME


@pytest.mark.parametrize("name", ["manifest.json", "blocks.npy", "checksums.npy"])
def test_a_table_that_does_not_come_is_named(
    tmp_path: Path, tokenizer: Tokenizer, object_store: ObjectStore, name: str
) -> None:
    """Of all that a corpus is opened with, the object that is waited for."""
    corpus = object_store.put_folder(build(tmp_path / "corpus", tokenizer), "corpus")
    Corpus(corpus, cache=CacheUse(tmp_path / "before"))  # imports the client, for seconds on a busy machine
    object_store.faults = Faults(hang=True, objects=f"corpus/{name}")
    with pytest.raises(ReadTimeoutError, match=f"corpus/{name} did not answer for 5 s"):
        Corpus(corpus, cache=CacheUse(tmp_path / "cache"), read_timeout=5.0)


def test_a_dropped_block_takes_up_no_room_and_comes_again(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Whoever reads it does not keep its file."""
    cache = CacheUse(tmp_path / "cache")
    files, by_url = packers(tmp_path, tokenizer, "sources", cache)
    expected = files.pack(0, 100).digest
    assert by_url.pack(0, 100).digest == expected
    blocks = list(cache.directory.glob("*/blocks/*"))
    for block in blocks:
        block.unlink()
    descriptors = [str(path.resolve()) for path in Path("/proc/self/fd").iterdir()]
    assert not any(str(cache.directory) in path for path in descriptors)
    assert by_url.pack(0, 100).digest == expected and len(list(cache.directory.glob("*/blocks/*"))) == len(blocks)


def test_what_a_killed_writer_left_goes(tmp_path: Path) -> None:
    folder = tmp_path / "corpus/blocks"
    folder.mkdir(parents=True)
    old, new, whole = (folder / name for name in (".00000099.abc.partial", ".00000098.abc.partial", "00000007"))
    for path in (old, new, whole):
        path.write_bytes(b"block")
    os.utime(old, (0, 0))
    assert {key: size for key, (_, size) in blocks_in(tmp_path).items()} == {("corpus", 7): 5}
    assert new.exists() and not old.exists()  # one that may be being written stays


def test_a_wrong_byte_is_found_and_its_object_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = build(tmp_path / "corpus", tokenizer)
    copy = CachedCopy(url(path), CacheUse(tmp_path / "cache"))
    name, start, *_ = copy.parts(1)[1]
    with (path / name).open("r+b") as file:
        file.seek(start)
        file.write(b"\xff")
    copy.fetch(0)
    reader = Corpus(url(path), cache=CacheUse(tmp_path / "cache"))
    for act in (copy.fetch, reader.block):
        with pytest.raises(DataError, match=f"{name} has a wrong checksum"):
            act(1)
    assert not list((tmp_path / "cache").glob("*/blocks/*1"))
    (path / name).unlink()
    with pytest.raises(RemoteError, match=f"{name} does not exist"):
        reader.block(1)
