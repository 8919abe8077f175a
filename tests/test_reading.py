"""Corpora on storage that hangs, fails or changes: an error that names the file in time, and a copy carries the run on."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import random_corpus
from processes import python
from sight import until

from fsdp_pretrain.config.schedule import BatchSchedule
from fsdp_pretrain.data.corpus.corpus import Corpus
from fsdp_pretrain.data.corpus.files import reading
from fsdp_pretrain.data.corpus.reading import CorpusReads
from fsdp_pretrain.data.corpus.shards import Shard, ShardWriter
from fsdp_pretrain.data.corpus.writing import write_corpus
from fsdp_pretrain.data.packing.loader import Loader
from fsdp_pretrain.data.packing.packer import Packer
from fsdp_pretrain.data.text.tokenizer import Tokenizer
from fsdp_pretrain.errors import DataError, Exit, ReadTimeoutError

BATCHES = BatchSchedule(16)


@pytest.fixture
def corpus(tmp_path: Path, shared_corpus: Path) -> Path:
    """A corpus to break."""
    return random_corpus(tmp_path / "corpus", Tokenizer.load(shared_corpus / "tokenizer"), [[50] * 40] * 4)


@pytest.fixture(autouse=True)
def waiting_threads_end() -> Iterator[None]:
    """Open the other end of every pipe, so that no thread of this process stays stuck."""
    yield
    for pipe in PIPES:
        os.close(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))
    PIPES.clear()


PIPES: list[Path] = []


def hang(path: Path) -> Path:
    """Replace a file by a named pipe without a writer: opening it blocks forever."""
    path.unlink()
    os.mkfifo(path)
    PIPES.append(path)
    return path


def packed(packer: Packer, samples: int = 160) -> list[list[int]]:
    return packer.pack(0, samples).tokens.tolist()


def open_packer(corpus: Path, timeout: float = 60) -> Packer:
    return Packer([("a", corpus, 1.0)], 48, seed=1, lanes=4, read_timeout=timeout)


def damage(kind: str, path: Path) -> None:
    """Make reading a shard fail in one of the ways storage does."""
    if kind == "truncated":
        os.truncate(path, path.stat().st_size - 200)
    elif kind == "grown":
        path.write_bytes(path.read_bytes() + bytes(200))
    elif kind == "missing":
        path.unlink()
    elif kind == "directory":
        path.unlink()
        path.mkdir()
    else:
        hang(path)


@pytest.mark.shows("A17")
@pytest.mark.quick
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_a_shard_that_hangs_is_named_in_time(corpus: Path, suffix: str, prefetch: int) -> None:
    loader = Loader(open_packer(corpus, timeout=1), BATCHES, rank=0, world=1, micro_batch=4, prefetch=prefetch)
    pipe = hang(corpus / f"shards/shard-2{suffix}")
    with pytest.raises(ReadTimeoutError) as caught:
        for _ in range(20):
            next(loader)
    assert str(pipe) in caught.value.cause and "did not answer for 1 s" in caught.value.cause
    assert "copy of the corpus" in caught.value.remedy and caught.value.exit == Exit.RESUME


@pytest.mark.quick
@pytest.mark.parametrize("name", ["manifest.json", "blocks.npy"])
def test_opening_a_corpus_that_hangs_ends_in_time(corpus: Path, name: str) -> None:
    pipe = hang(corpus / name)
    with pytest.raises(ReadTimeoutError, match=str(pipe)):
        open_packer(corpus, timeout=1)


@pytest.mark.quick
@pytest.mark.parametrize("suffix", [".idx", ".bin"])
@pytest.mark.parametrize("kind", ["truncated", "grown", "missing", "directory"])
def test_a_shard_that_cannot_be_read_is_named(corpus: Path, kind: str, suffix: str) -> None:
    damage(kind, corpus / f"shards/shard-1{suffix}")
    with pytest.raises(DataError, match="shard-1"):
        packed(open_packer(corpus))


@pytest.mark.shows("D3")
@pytest.mark.quick
def test_a_shard_cut_while_it_is_open_is_an_error_and_no_signal(corpus: Path) -> None:
    """A mapped file would be a signal here (SIGBUS)."""
    path = corpus / "shards/shard-0.bin"
    alone, whole = Corpus(corpus), Shard(corpus / "shards/shard-0").tokens.tolist()
    assert alone.tokens(0, 0, 2000).tolist() == alone.tokens(0, 0, 2000).tolist() == whole
    os.truncate(path, 0)
    with pytest.raises(DataError, match=r"shard-0\.bin"):
        alone.tokens(0, 0, 2000)
    with pytest.raises(DataError, match=r"shard-0\.bin"):
        Corpus(corpus).shard(0)


@pytest.mark.quick
@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EOPNOTSUPP])
def test_storage_that_must_be_asked_gives_the_same_samples(
    corpus: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not in memory, or on a file system that cannot tell, is read in the thread with the timeout."""
    packer = open_packer(corpus)
    packer.corpora["a"].reads.take_times()
    expected = packed(packer), packed(packer)
    times = packer.corpora["a"].reads.take_times()
    assert times.reads >= 4 and 0 < times.slowest <= times.seconds  # each shard was opened
    assert times.file.startswith(str(corpus / "shards/shard-"))

    def refuse(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fsdp_pretrain.data.corpus.stored.preadv", refuse)
    packer = open_packer(corpus)
    assert (packed(packer), packed(packer)) == expected
    assert packer.corpora["a"].reads.take_times().reads > 320


@pytest.mark.quick
def test_reads_are_counted() -> None:
    reads = CorpusReads(60.0)
    assert [reads.read(Path(name), name.upper) for name in "abc"] == ["A", "B", "C"]
    assert (reads.take_times().reads, reads.take_times().reads) == (3, 0)


@pytest.mark.quick
def test_what_is_read_is_said_only_while_it_is_read(corpus: Path) -> None:
    """For the watchdog: the file in which a rank hangs."""
    packer = open_packer(corpus)
    assert packer.pack(0, 8).digest and not any(str(path).startswith(str(corpus)) for path in list(reading.values()))
    pipe = hang(corpus / "shards/shard-0.bin")

    def read() -> None:
        with contextlib.suppress(DataError):  # the pipe is opened at the end
            open_packer(corpus).pack(0, 160)

    threading.Thread(target=read, daemon=True).start()
    until(lambda: str(pipe) in map(str, list(reading.values())))


MANY = """
import json, os, resource, sys
from pathlib import Path
from fsdp_pretrain.data.packing.packer import Packer
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
names = "abcd"
packer = Packer([(name, Path(sys.argv[1]), 1.0) for name in names], 16, seed=1, lanes=8)
samples = len(names) * int(packer.epoch_samples["a"])
seen = {piece.shard for i in range(samples) for piece in packer.provenance(i)}
print(json.dumps({"shards": len(seen), "descriptors": len(os.listdir("/proc/self/fd"))}))
"""


@pytest.mark.slow
def test_thousands_of_shards_need_few_descriptors(tmp_path: Path, shared_corpus: Path) -> None:
    shards, path = 500, tmp_path / "many"
    (path / "shards").mkdir(parents=True)
    with ShardWriter(path / "shards/first", np.dtype("<u2")) as writer:
        writer.append(np.arange(10, 30, dtype="<u2"))
        entry = writer.finish()
    entries = []
    for number in range(shards):
        for suffix in (".bin", ".idx"):
            os.link(path / f"shards/first{suffix}", path / f"shards/shard-{number}{suffix}")
        entries.append({**entry, "name": f"shard-{number}"})
    write_corpus(path, Tokenizer.load(shared_corpus / "tokenizer"), entries, np.dtype("<u2"), {})
    found = json.loads(python("-c", MANY, path).stdout)
    assert found["shards"] == shards and found["descriptors"] < 150
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256  # the limit was the child's


def on(path: Path, timeout: str = "3 s", **more: Any) -> dict[str, Any]:
    """The data section of a run on a corpus."""
    return {"sources": [{"name": "text", "path": str(path)}], "read_timeout": timeout, **more}


@pytest.mark.slow
@pytest.mark.shows("A17")
def test_one_rank_alone_ends_the_run_on_all_and_a_copy_carries_it_on(
    lab: Any, tmp_path: Path, shared_corpus: Path, helpers: Any
) -> None:
    """Rank 1 opens the pipe, rank 0 does not need that shard: both end at once, with the file in the journal."""
    corpus = random_corpus(tmp_path / "wide", Tokenizer.load(shared_corpus / "tokenizer"), [[50] * 4] * 40)
    copy = Path(shutil.copytree(corpus, tmp_path / "copy"))
    packer = Packer([("text", corpus, 1.0)], 32, seed=1234, lanes=8)
    halves = [{piece.shard for i in range(4 * h, 4 * h + 4) for piece in packer.provenance(i)} for h in range(20)]
    step, name = next(  # first needed by rank 1, and by rank 0 only after the ranks have agreed
        (step, name)
        for step in range(1, 8)
        for name in sorted(halves[2 * step + 1])
        if not any(name in half for half in [*halves[: 2 * step + 1], *halves[2 * step + 2 : 2 * step + 6 : 2]])
    )
    lab.train(lab.config("whole", data=on(copy)), ranks=2)
    pipe = hang(corpus / f"shards/{name}.bin")
    output = lab.train(lab.config(data=on(corpus, prefetch=0)), "checkpoint.every=1 steps", ranks=2, expect=75)
    assert "Traceback" not in output
    (stop,) = helpers.journal(lab.path / "run", "stop")
    assert stop["text"].startswith("exit 75: rank 1:") and str(pipe) in stop["text"]
    assert helpers.metrics(lab.path / "run")[-1]["step"] == step  # later steps are not recorded
    lab.train(lab.config(data=on(copy)), ranks=2)
    ours, whole = (helpers.metrics(lab.path / run) for run in ("run", "whole"))
    assert [r["data_digest"] for r in ours] == [r["data_digest"] for r in whole]


@pytest.mark.quick
def test_waiting_longer_than_the_other_ranks_is_refused(lab: Any, run_command: Any) -> None:
    done = run_command("fsdp_pretrain.cli", "plan", lab.config(data=on(lab.corpus, "60 s")))
    assert done.returncode == 78 and "data.read_timeout = 60" in done.stderr
