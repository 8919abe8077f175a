"""Data that changes after it was checked: no batch may be another one, and what was found is told. See `damage.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from damage import write
from processes import python
from sight import until
from test_block_cache import build, url

from fsdp_pretrain.data.corpus.cached import CacheUse
from fsdp_pretrain.data.corpus.corpus import Corpus
from fsdp_pretrain.data.packing.packer import Packer
from fsdp_pretrain.data.text.tokenizer import Tokenizer
from fsdp_pretrain.errors import DataError, Exit

pytest.importorskip("fsspec")


@pytest.mark.parametrize(
    ("cases", "seed"), [(18, 32), pytest.param(70, 1, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
)
@pytest.mark.promise("prepared-bits")
def test_no_damage_makes_another_batch(cases: int, seed: int) -> None:
    """In caches and in files, live and between starts."""
    done = python(Path(__file__).with_name("damage.py"), "--cases", cases, "--seed", seed)
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["cases"], found["wrong"], found["problems"]) == (cases, 0, 0)
    assert found["told"] > 0.8 * cases  # the others were damaged where nothing was read any more


def packer_of(corpus: Any, **places: Any) -> Packer:
    return Packer([("text", corpus, 1.0)], 32, seed=5, lanes=6, **places)


@pytest.mark.quick
@pytest.mark.parametrize("live", [False, True])
def test_each_damaged_block_of_a_cache_is_told_once(
    tmp_path: Path, tokenizer: Tokenizer, live: bool, capfd: Any
) -> None:
    corpus, cache = build(tmp_path / "corpus", tokenizer), CacheUse(tmp_path / "cache")
    expected = packer_of(corpus).pack(0, 200).digest
    packer = packer_of(url(corpus), cache=cache)
    assert packer.pack(0, 200).digest == expected
    blocks = sorted(cache.directory.glob("*/blocks/*"))
    for path in blocks:
        write(path, 0, b"\xff")  # a length: the documents after it would begin elsewhere
        write(path, path.stat().st_size - 1, b"\xff")
    packer = packer if live else packer_of(url(corpus), cache=cache)
    assert packer.pack(0, 200).digest == packer.pack(0, 200).digest == expected
    told, (notices,) = capfd.readouterr().err, [own.reads.take_notices() for own in packer.corpora.values()]
    assert len(notices) == len(blocks)
    for path in blocks:
        assert sum(str(path) in notice for notice in notices) == told.count(f"warning: {path} is damaged") == 1


@pytest.mark.quick
@pytest.mark.parametrize("name", ["blocks.npy", "checksums.npy", "tokenizer.json"])
def test_a_damaged_table_of_a_cache_is_fetched_again(tmp_path: Path, tokenizer: Tokenizer, name: str) -> None:
    corpus, cache = build(tmp_path / "corpus", tokenizer), CacheUse(tmp_path / "cache")
    whole = Corpus(url(corpus), cache=cache)
    (path,) = cache.directory.glob(f"*/{name}")
    content = path.read_bytes()
    path.write_bytes(content[:-30] + bytes([content[-30] ^ 1]) + content[-29:])
    again = Corpus(url(corpus), cache=cache)
    assert path.read_bytes() == content
    assert again.manifest == whole.manifest and again.tokenizer().fingerprint == tokenizer.fingerprint
    assert again.reads.take_notices()


@pytest.mark.quick
@pytest.mark.parametrize("name", ["shards/s2.bin", "shards/s2.idx", "checksums.npy", "tokenizer.json"])
def test_damaged_files_are_named(tmp_path: Path, tokenizer: Tokenizer, name: str) -> None:
    corpus = build(tmp_path / "corpus", tokenizer)
    path = corpus / name
    content = path.read_bytes()
    at = 34 if path.suffix == ".idx" else len(content) // 2
    write(path, at, bytes([content[at] ^ 1]))

    with pytest.raises(DataError) as caught:
        packer = packer_of(corpus)
        packer.corpora["text"].tokenizer()
        packer.pack(0, 200)
    assert str(path.with_suffix("")) in caught.value.cause and caught.value.remedy
    assert caught.value.exit == Exit.REFUSED


def sources(path: Any, **more: Any) -> dict[str, Any]:
    return {"sources": [{"name": "text", "path": str(path), **more}]}


def told(helpers: Any, run: Path) -> list[str]:
    return [str(entry["text"]) for entry in helpers.journal(run, "data-read")]


def batches(helpers: Any, run: Path) -> list[tuple[int, Any, Any]]:
    return [(each["step"], each["data_digest"], each["loss"]) for each in helpers.metrics(run)]


@pytest.mark.slow
@pytest.mark.promise("prepared-bits")
def test_a_run_whose_cache_was_damaged_goes_on(lab: Any, helpers: Any) -> None:
    """Between two starts, beside the fetcher: to the bit, and the journal tells of each block."""
    corpus, decay = build(lab.path / "corpus", Tokenizer.load(lab.tokenizer)), {"decay": "20 steps"}
    lab.train(lab.config("whole", data=sources(corpus), optimizer=decay))
    cache = {"dir": str(lab.path / "cache"), "size": "1GB"}
    config = lab.config("urls", data={**sources(url(corpus)), "cache": cache}, optimizer=decay)
    lab.train(config, "train.duration=10 steps")
    blocks = sorted((lab.path / "cache").glob("*/blocks/*"))
    for path in blocks:
        write(path, path.stat().st_size - 5, b"\0\0\0\0\0")
    output = lab.train(config)
    assert batches(helpers, lab.path / "urls") == batches(helpers, lab.path / "whole")
    damaged = [text for text in told(helpers, lab.path / "urls") if "is damaged" in text]
    assert damaged and all(any(str(path) in text for path in blocks) for text in damaged)
    assert output.count("is damaged") == len(damaged) and "Traceback" not in output


@pytest.mark.slow
@pytest.mark.promise("prepared-bits")
def test_a_run_whose_shards_were_damaged_is_refused_until_they_are_whole(lab: Any, helpers: Any) -> None:
    corpus, decay = build(lab.path / "corpus", Tokenizer.load(lab.tokenizer)), {"decay": "20 steps"}
    lab.train(lab.config("whole", data=sources(corpus), optimizer=decay))
    config = lab.config("files", data=sources(corpus), optimizer=decay)
    lab.train(config, "train.duration=10 steps")
    content = {path: path.read_bytes() for path in corpus.glob("shards/*.bin")}
    for path, whole in content.items():
        path.write_bytes(bytes(len(whole)))
    output = lab.train(config, expect=78)
    assert "shards/s" in output and "is damaged in the block of documents" in output and "Traceback" not in output
    for path, whole in content.items():
        path.write_bytes(whole)
    lab.train(config)
    assert batches(helpers, lab.path / "files") == batches(helpers, lab.path / "whole")


@pytest.mark.slow
def test_a_live_run_whose_cache_is_damaged(lab: Any, helpers: Any) -> None:
    """Two ranks, while they train: blocks get the content of others, again and again, and the batches are the same."""
    corpus = build(lab.path / "corpus", Tokenizer.load(lab.tokenizer))
    train = {"duration": "35 steps", "global_batch": "16 samples"}
    lab.train(lab.config("whole", data=sources(corpus), train=train), ranks=2)
    data = {**sources(url(corpus)), "cache": {"dir": str(lab.path / "cache"), "size": "1GB"}}
    run = lab.path / "run"
    job = lab.start(lab.config(data=data, train=train), ranks=2)
    for step in range(5, 30, 5):
        until(lambda step=step: len(helpers.metrics(run)) >= step or None not in job.codes(), what=job.output)  # type: ignore[misc]
        blocks = sorted((lab.path / "cache").glob("*/blocks/*"))
        for path, other in zip(blocks, blocks[1:] + blocks[:1], strict=True):
            try:
                content, size = other.read_bytes(), path.stat().st_size
                write(path, 0, content[:size])
            except FileNotFoundError:  # dropped meanwhile
                continue
    assert job.wait() == [0, 0], job.output()
    assert batches(helpers, run) == batches(helpers, lab.path / "whole")
    assert told(helpers, run) and "Traceback" not in job.output()
