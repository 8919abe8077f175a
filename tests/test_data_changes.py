"""Changing the data of a real run: skips, mixtures, reshuffles, bad documents; before, during and after crashes."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import scripted

from fsdp_pretrain.config.config import load
from fsdp_pretrain.data.corpus.corpus import Corpus
from fsdp_pretrain.data.packing.opening import open_packer, open_skips, read_exclusions
from fsdp_pretrain.data.text.tokenizer import Tokenizer
from fsdp_pretrain.errors import DataError


def digests(config: Path, run: Path, helpers: Any) -> list[str]:
    """Recorded digests, each checked against the samples by the run's configuration."""
    import xxhash

    settings = load(str(config))
    packer, skips, cursor = open_packer(settings), open_skips(settings), 0
    recorded = []
    for record in helpers.metrics(run):
        samples = skips.take(cursor, record["batch"])
        rows = packer.pack_samples(samples).tokens
        assert f"{sum(xxhash.xxh3_64_intdigest(row) for row in rows) % 2**64:016x}" == record["data_digest"]
        cursor = samples[-1] + 1
        assert record["cursor"] == cursor and record["consumed"] == record["step"] * record["batch"]
        recorded.append(record["data_digest"])
    return recorded


@pytest.mark.shows("A29", "B9")
def test_skipped_steps_across_crashes(lab: Any, helpers: Any, gates: Any) -> None:
    """Steps 10 to 20 at 4 x 3 samples: never trained, whether the skip is configured at first or after a crash."""
    train = {"duration": "30 steps", "global_batch": "12 samples", "micro_batch": 6}
    plain = lab.config("plain", train=train, checkpoint={"every": "6 steps"})
    skipping = lab.config("skipping", train=train, checkpoint={"every": "6 steps"}, data={"skip": ["108:240 samples"]})
    lab.train(skipping)
    reference = digests(skipping, lab.path / "skipping", helpers)
    (entry,) = helpers.journal(lab.path / "skipping", "skip")
    assert (entry["first"], entry["stop"]) == (108, 240)
    assert helpers.metrics(lab.path / "skipping")[9]["cursor"] == 252  # step 10 trains samples 240 to 251

    late = lab.path / "late"  # trained step 6 without the skip, crashed in step 14; resuming from 12 would be too late
    lab.train(plain, f"run.dir={late}", "train.duration=6 steps", "optimizer.decay=30 steps")
    for step in (8, 16):  # before and after the range
        gates(step + 4)
        job = lab.start(skipping, f"run.dir={late}", flags=("--allow", "data.skip"))
        helpers.wait_for(
            lambda step=step, job=job: helpers.metrics(late)[-1]["step"] >= step or job.ranks[0].poll() is not None,
            what=f"step {step}",
        )
        job.kill(0, signal.SIGKILL)
        job.wait()
    gates()
    lab.train(skipping, f"run.dir={late}")  # declaring it once is enough
    assert digests(skipping, late, helpers) == reference
    assert helpers.losses(late) == helpers.losses(lab.path / "skipping")


@pytest.mark.shows("A18")
def test_adding_and_dropping_sources_on_the_way(lab: Any, helpers: Any) -> None:
    """A resume may change the mixture ahead but not behind; a run that had it from the start is identical."""
    a, b, c = (
        {"name": name, "path": str(lab.corpus), "weight": weight}
        for name, weight in (("a", 3.0), ("b", 1.0), ("c", 2.0))
    )
    before = lab.config(
        "before",
        data={"sources": [a, b]},
        train={"duration": "10 steps", "micro_batch": 8},
        optimizer={"decay": "20 steps"},
    )
    sources = [{**c, "start": "80 samples"}, a, {**b, "stop": "120 samples"}]
    after = lab.config("after", data={"sources": sources}, train={"micro_batch": 8})
    changed, whole = lab.path / "changed", lab.path / "whole"
    lab.train(before, f"run.dir={changed}")
    too_late = lab.config("too-late", data={"sources": [a, b, {**c, "start": "79 samples"}]})
    output = lab.train(too_late, f"run.dir={changed}", expect=78)
    assert "data.sources.c" in output and 'start = "80 samples"' in output and "Traceback" not in output
    lab.train(after, f"run.dir={changed}", flags=("--allow", "data.sources"))
    lab.train(after, f"run.dir={whole}")
    assert digests(after, changed, helpers) == digests(after, whole, helpers)
    assert helpers.losses(changed) == helpers.losses(whole)
    record = helpers.metrics(whole)[-1]
    assert record["ramps"]["shares"] == pytest.approx({"a": 0.6, "b": 0, "c": 0.4}, abs=1e-6)
    packer = open_packer(load(str(after)))
    expected = {
        n: c / packer.epoch_samples[n] for n, c in zip(packer.mixture.names, packer.mixture.counts(160), strict=True)
    }
    assert record["epochs"] == pytest.approx(expected) and all(expected.values())


def test_a_mixture_that_ends_before_the_run_is_refused(lab: Any) -> None:
    output = lab.train(
        lab.config(data={"sources": [{"name": "a", "path": str(lab.corpus), "max_epochs": 0.1}]}), expect=78
    )
    assert "the run reads 160 samples, but the mixture ends after" in output and "a after 0.1" in output


def test_exclusions_of_shards_with_spaces(tmp_path: Path) -> None:
    """As files may be named that `fsdp-data import` adopts."""
    (tmp_path / "bad.txt").write_text("# a text\n\nweb s0 1\n  web my  shard 2 17 \n")
    assert read_exclusions(tmp_path / "bad.txt") == {("web", "s0", 1), ("web", "my  shard 2", 17)}
    for wrong in ("web s0", "web s0 x", "web s0 -1", "17"):
        (tmp_path / "bad.txt").write_text(wrong)
        with pytest.raises(DataError, match="line 1 is not a document"):
            read_exclusions(tmp_path / "bad.txt")
    with pytest.raises(DataError, match=r"cannot read data\.exclude = /nowhere"):
        read_exclusions(Path("/nowhere"))


@pytest.mark.parametrize("line", ["text shard-00000.bin 1", "text SHARD 300"])
def test_an_exclusion_of_no_document_is_refused(lab: Any, line: str) -> None:
    """Other sources may be listed too."""
    shard = Corpus(lab.corpus).manifest.shards[0].name
    listed, config = lab.path / "bad.txt", load(lab.config(data={"exclude": str(lab.path / "bad.txt")}))
    listed.write_text(f"text {shard} 299\nelsewhere s0 1000\n")
    open_packer(config)
    with listed.open("a") as file:
        file.write(line.replace("SHARD", shard))
    with pytest.raises(DataError, match=r"data\.exclude names document .* of text, which does not exist"):
        open_packer(config)


def test_another_list_at_the_same_place_is_declared(lab: Any, helpers: Any) -> None:
    """The order of its lines means nothing."""
    shard, listed = Corpus(lab.corpus).manifest.shards[0].name, lab.path / "bad.txt"
    config = lab.config(data={"exclude": str(listed)}, optimizer={"decay": "20 steps"})

    def train(documents: list[int], steps: int, *allowed: str, expect: int = 0, also: str = "", **more: Any) -> str:
        listed.write_text("".join(f"text {shard} {document}\n" for document in documents))
        values = [f"train.duration={steps} steps", *([also] if also else [])]
        return str(lab.train(config, *values, flags=allowed, expect=expect, **more))

    train([1, 2], 10)
    train([2, 1], 12)
    refused = train([1, 3], 14, expect=78)
    assert f"data.exclude: {listed} names other documents" in refused and "--allow data.exclude" in refused
    another = {"also": "optimizer.weight_decay=0.05", "expect": 78}
    assert "names other documents" in train([1, 3], 14, "--allow", "optimizer.weight_decay", **another)
    train([1, 3], 14, "--allow", "data.exclude")
    train([1, 3], 16)
    assert "names other documents" in helpers.journal(lab.path / "run", "resume")[1]["text"]
    assert "names other documents" in train([], 18, expect=78)
    train([5], 18, "--allow", "data.exclude", expect=-9, variables=scripted({17: [("kill", {})]}))
    assert "names other documents" in train([6], 18, expect=78)  # than the start that saved nothing
    train([5], 18)


@pytest.mark.promise("bad-documents")
def test_a_corpus_with_bad_documents_is_trained(lab: Any, helpers: Any) -> None:
    """1% empty, 1% of one token, 1% only separators: every other document once, no adjacent separators."""
    tokenizer = Tokenizer.load(lab.tokenizer)
    rng = np.random.default_rng(3)
    assert max(tokenizer.specials) < 5
    documents = [rng.integers(5, tokenizer.vocab_size, rng.integers(5, 60)) for _ in range(500)]
    for number, tokens in ((10, []), (20, [301]), (30, [tokenizer.eod] * 3)):
        for at in range(number, 500, 100):
            documents[at] = np.array(tokens)
    corpus = helpers.corpus(lab.path / "corpus", documents, tokenizer, shards=1)
    sources = [{"name": "bad", "path": str(corpus)}]
    config = lab.config(
        data={"sources": sources, "max_quarantined": 0.02},
        train={"duration": "75 steps", "micro_batch": 4},
        checkpoint={"every": "1000 steps"},
    )
    lab.train(config, ranks=2)
    records = helpers.metrics(lab.path / "run")
    packer = open_packer(load(str(config)))
    epoch = int(packer.epoch_samples["bad"]) + 1
    assert epoch < 75 * 8
    assert sum(record["quarantined"] for record in records) >= 5  # once per epoch, in as many pieces as samples
    seen: dict[int, int] = {}
    for sample in range(epoch):
        tokens = packer.pack(sample, 1)
        row = tokens.tokens[0] == packer.eod
        assert not (row[1:] & row[:-1]).any()
        for piece in packer.provenance(sample):
            seen[piece.document] = seen.get(piece.document, 0) + piece.stop - piece.start
    assert set(seen) == {n for n, document in enumerate(documents) if len(document)}
    assert all(seen[n] >= len(documents[n]) for n in seen)
    assert json.loads((lab.path / "run/status.json").read_text())["state"] == "complete"
