"""From a step back to its text, and the loss of each sample: a real run, its record, its corpora."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from laboratory import seal
from processes import Run

from fsdp_pretrain.config.config import load
from fsdp_pretrain.config.toml_file import inline
from fsdp_pretrain.data.packing.loader import Loader
from fsdp_pretrain.data.packing.opening import open_packer
from fsdp_pretrain.data.text.tokenizer import Tokenizer
from fsdp_pretrain.errors import ConfigError, DataError
from fsdp_pretrain.eval.samples import sample_losses
from fsdp_pretrain.lineage import provenance
from fsdp_pretrain.lineage.fork import fork
from fsdp_pretrain.lineage.rollback import rollback
from fsdp_pretrain.run.files import RunDir


@pytest.fixture(scope="module")
def trained(module_lab: Any) -> Path:
    """Segment 1 trained steps 1 to 12 on two ranks; its later checkpoints were lost; segment 2 trained 6 to 8."""
    sources = [
        {"name": "a", "path": str(module_lab.corpus), "weight": 2.0},
        {"name": "b", "path": str(module_lab.corpus)},
    ]
    config = module_lab.config(
        "traced",
        data={"sources": sources, "sequence_length": 256, "attention": "document", "loss_across_documents": False},
        train={"duration": "12 steps", "global_batch": "12 samples", "micro_batch": 3},
        optimizer={"decay": "12 steps"},
        checkpoint={"every": "5 steps"},
    )
    run: Path = module_lab.path / "traced"
    module_lab.train(config, ranks=2)
    for step in (10, 12):
        shutil.rmtree(run / f"checkpoints/step-{step:08d}")
    module_lab.train(config, "train.duration=8 steps", ranks=2, flags=("--allow", "train.duration"))
    return run


@pytest.fixture(scope="module")
def steps(trained: Path) -> list[dict[str, Any]]:
    """Steps 1 to 8 as the command reports them."""
    found = [provenance.trained_step(RunDir(trained), step) for step in range(1, 9)]
    return [provenance.describe_step(step, text=True, ids=True).model_dump(exclude_unset=True) for step in found]


@pytest.mark.shows("B16")
@pytest.mark.promise("batch-digest")
def test_ids_are_the_trained_batch(trained: Path, steps: list[dict[str, Any]], helpers: Any) -> None:
    """The digest, computed here from the ids shown, is the one recorded for each step in training."""
    records = helpers.metrics(trained)
    assert [step["step"] for step in steps] == [record["step"] for record in records] == list(range(1, 9))
    for step, record in zip(steps, records, strict=True):
        rows = np.array([sample["ids"] for sample in step["samples"]], dtype=np.int64)
        assert rows.shape == (12, 257)
        assert f"{sum(xxhash.xxh3_64_intdigest(row) for row in rows) % 2**64:016x}" == record["data_digest"]
        assert [sample["index"] for sample in step["samples"]] == list(range(record["cursor"] - 12, record["cursor"]))
        assert step["segment"] == (1 if step["step"] < 6 else 2) and step["replaced_by"] is None


def check_text(steps: list[dict[str, Any]], tokenizer: Tokenizer, originals: set[str]) -> int:
    """Pieces and separators tile every sample, text is that of its ids; a whole document shows an original text, which
    encodes to its ids. Returns the number of those."""
    whole = 0
    for sample in (sample for step in steps for sample in step["samples"]):
        rebuilt: list[int] = []
        for piece in sample["pieces"]:
            assert piece["position"] == len(rebuilt) and not piece["quarantined"]
            ids = sample["ids"][len(rebuilt) : len(rebuilt) + piece["stop"] - piece["start"]]
            if (piece["start"], piece["stop"]) == (0, piece["length"]):
                assert piece["text"] in originals and tokenizer.encode([piece["text"]])[0] == ids
                whole += 1
            assert piece["text"] == tokenizer.decode(ids)
            rebuilt += [*ids, tokenizer.eod]
        size = len(sample["ids"])
        assert sample["ids"] == rebuilt[:size] and len(rebuilt) in (size, size + 1)
    return whole


def texts(path: Path) -> set[str]:
    return {json.loads(line)["text"] for line in path.read_text().splitlines()}


@pytest.mark.shows("B16")
def test_text_is_that_of_the_documents(trained: Path, steps: list[dict[str, Any]], shared_corpus: Path) -> None:
    assert check_text(steps, Tokenizer.load(trained / "tokenizer"), texts(shared_corpus / "train.jsonl")) > 50
    assert {sample["source"] for step in steps for sample in step["samples"]} == {"a", "b"}


def test_ranks_and_micro_batches_are_those_of_the_loader(trained: Path, steps: list[dict[str, Any]]) -> None:
    config = load(trained / "segments/0001/config.toml")
    for rank in range(2):
        loader = Loader(open_packer(config), config.schedule.batch, rank=rank, world=2, micro_batch=3, prefetch=0)
        for step in steps[:3]:
            shown = [sample for sample in step["samples"] if sample["rank"] == rank]
            for number, micro in enumerate(next(loader).micro):
                assert [s["ids"] for s in shown if s["micro_batch"] == number] == micro.tokens.tolist()


@pytest.mark.parametrize(
    ("arguments", "indices"),
    [(["--rank", "1"], range(42, 48)), (["--step", "11", "--segment", "1", "--rank", "0"], range(120, 126))],
)
def test_parts_of_a_step(trained: Path, run_command: Run, arguments: list[str], indices: list[int]) -> None:
    done = run_command("fsdp_pretrain.cli", "where", trained, "--step", 4, *arguments, "--json", expect=0)
    found = json.loads(done.stdout)
    assert [sample["index"] for sample in found["samples"]] == list(indices)
    assert found["replaced_by"] == (2 if "--segment" in arguments else None)


def test_what_a_person_sees(trained: Path, steps: list[dict[str, Any]], run_command: Run) -> None:
    done = run_command("fsdp_pretrain.cli", "where", trained, "--step", 4, "--text")
    sample = steps[3]["samples"][4]
    piece = sample["pieces"][0]
    assert f"computed again, the batch has the recorded digest {steps[3]['data_digest']}" in done.stdout
    assert f"sample 40: rank 0, micro-batch 1, source {sample['source']}, epoch {sample['epoch']}" in done.stdout
    assert f"{piece['shard']} document {piece['document']}, tokens {piece['start']} to {piece['stop']}" in done.stdout
    for text in (piece["text"] for piece in sample["pieces"]):
        assert "".join(f"    | {line}\n" for line in text.split("\n")) in done.stdout


@pytest.mark.parametrize(
    ("step", "segment", "options", "expected"),
    [
        (99, None, {}, "step 99 is not in the record of {run}, which has steps 1 to 8"),
        (11, None, {}, "segment 2 went back to an earlier checkpoint and has not trained it again"),
        (11, None, {}, "look at the replaced step with --segment 1"),
        (3, 2, {}, "segment 2 has no record of step 3; segments that have: 1"),
        (3, None, {"rank": 2}, "there is no rank 2: step 3 is split over ranks 0 to 1"),
    ],
)
def test_mistakes(trained: Path, step: int, segment: int | None, options: dict[str, int], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        provenance.describe_step(provenance.trained_step(RunDir(trained), step, segment), **options)
    assert expected.format(run=trained) in str(caught.value)


@pytest.fixture
def moved(trained: Path, shared_corpus: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the run with its own corpus, both free to be damaged; its digests still match."""
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    shutil.copytree(shared_corpus / "corpus", tmp_path / "corpus")
    for config in (run / "config.toml", run / "segments/0001/config.toml"):
        config.write_text(config.read_text().replace(str(shared_corpus / "corpus"), str(tmp_path / "corpus")))
    yield run


def test_what_is_due_next_after_a_branch(trained: Path, lab: Any) -> None:
    """Before it trains, a fork shows what it then trains, and a rollback what is due with its settings."""
    run = RunDir(lab.path / "fork")

    def due(step: int, segment: int | None = None) -> tuple[int, list[int]]:
        found = provenance.trained_step(run, step, segment)
        return found.record.segment, [*found.indices]

    fork(RunDir(trained), 5, run.path, skip_steps=(6, 7), changes=["train.duration=6 steps"])
    assert due(6) == due(6, 3) == (3, [*range(84, 96)])
    lab.train(run.config, ranks=2)
    assert due(6) == (4, [*range(84, 96)])
    rollback(run, 6, changes=["train.global_batch=24 samples", "train.duration=7 steps"])
    assert due(7) == due(7, 5) == (5, [*range(96, 120)])


def spoil_a_shard(run: Path) -> None:
    (shard,) = (run.parent / "corpus/shards").glob("*.bin")
    tokens = np.fromfile(shard, "<u2")
    np.roll(tokens, 1).tofile(shard)


def spoil_the_order(run: Path) -> None:
    config = run / "segments/0001/config.toml"
    config.write_text(config.read_text().replace("lanes = 8", "lanes = 7"))


def spoil_the_manifest(run: Path) -> None:
    spoil_a_shard(run)
    manifest = run.parent / "corpus/manifest.json"
    content = json.loads(manifest.read_text())
    content["shards"][0]["bin_xxh3"] = "0" * 32
    manifest.write_text(json.dumps(content))
    seal(run.parent / "corpus")


@pytest.mark.parametrize(
    ("spoil", "problem", "expected"),
    [
        (spoil_a_shard, r"shard-00000\.bin or \.idx is damaged in the block of documents 0 to", "fsdp-data validate"),
        (spoil_the_order, "computed again it has", "changed since: data.lanes: 8 -> 7"),
        (spoil_the_manifest, "computed again it has", "changed since: corpora.a"),
    ],
)
@pytest.mark.promise("batch-digest")
def test_another_batch_is_never_shown(moved: Path, spoil: Callable[[Path], None], problem: str, expected: str) -> None:
    spoil(moved)
    with pytest.raises(DataError, match=problem) as caught:
        provenance.trained_step(RunDir(moved), 3)
    assert expected in str(caught.value)


def test_steps_from_before_a_corpus_was_moved(lab: Any, run_command: Run) -> None:
    """From one disk to a URL: they are found, trained again to the bit and measured with the corpus where it is now."""
    here, there, run = lab.path / "here", lab.path / "there", RunDir(lab.path / "run")
    shutil.copytree(lab.corpus, here)

    def train(path: object, steps: int, **data: Any) -> None:
        source = {"name": "text", "path": str(path)}
        sections = {"train": {"duration": f"{steps} steps"}, "optimizer": {"decay": "20 steps"}}
        lab.train(lab.config(data={"sources": [source], **data}, checkpoint={"every": "2 steps"}, **sections))

    train(here, 4)
    before = provenance.describe_step(provenance.trained_step(run, 3))
    here.rename(there)
    train(f"file://{there}", 6, cache={"dir": str(lab.path / "cache"), "size": "10MB"})
    assert provenance.describe_step(provenance.trained_step(run, 3)) == before
    found = sample_losses(run, 3)
    assert found.loss.sum == pytest.approx(found.recorded.sum)
    shown = run_command("fsdp_pretrain.cli", "replay", run.path, "--from", 2, "--steps", 2, expect=0).stdout
    assert shown.endswith("\nequal\n")


@pytest.mark.promise("batch-digest")
def test_a_source_that_was_another_corpus_before_a_rollback(lab: Any, helpers: Any, tokenizer: Tokenizer) -> None:
    """A start that was left shows its own corpus, also in the step in flight; what is not to be found is refused."""
    old, new = (
        helpers.corpus(lab.path / name, [[first + n % 90] * 50 for n in range(400)], tokenizer)
        for name, first in (("old", 100), ("new", 300))
    )

    def sources(books: Path) -> list[dict[str, Any]]:
        late = {"name": "books", "path": str(books), "weight": 3.0, "start": "40 samples"}
        return [{"name": "text", "path": str(lab.corpus)}, late]

    lab.train(
        lab.config(data={"sources": sources(old)}, train={"duration": "8 steps"}, checkpoint={"every": "4 steps"})
    )
    run = RunDir(lab.path / "run")

    def samples(step: int, segment: int | None = 1) -> list[provenance.ShownSample]:
        return provenance.describe_step(provenance.trained_step(run, step, segment), ids=True).samples

    before = {step: samples(step) for step in (3, 7, 8)}
    assert all({sample.source for sample in before[step]} == {"text", "books"} for step in (7, 8))
    metrics = run.segment(1) / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:7]))  # as if killed in step 8
    rollback(run, 4, changes=[f"data.sources={inline(sources(new))}"])
    assert {step: samples(step) for step in before} == before
    old.rename(lab.path / "gone")
    assert samples(3, None) == before[3]  # nothing of the source was read yet
    shutil.copytree(new, old)
    for step, problem in ((7, "computed again it has"), (8, r"not those that it read: corpora\.books: ")):
        with pytest.raises(DataError, match=problem):
            samples(step)


@pytest.mark.shows("B16")
@pytest.mark.parametrize(("step", "checkpoint"), [(6, 5), (7, 5)])
def test_losses_of_samples(
    trained: Path, helpers: Any, steps: list[dict[str, Any]], step: int, checkpoint: int
) -> None:
    """With the parameters before the step they add up to what was recorded; highest first."""
    found = sample_losses(RunDir(trained), step, checkpoint=None if checkpoint == 5 else checkpoint)
    record = helpers.metrics(trained)[step - 1]
    exact = checkpoint == step - 1
    assert found.checkpoint == checkpoint and found.recorded.sum == record["loss"]["sum"]
    assert found.loss.count == record["loss"]["count"] < 12 * 256
    assert (abs(found.loss.sum / record["loss"]["sum"] - 1) < 1e-5) == exact
    for name, loss in record["sources"].items():
        mine = [sample for sample in found.samples if sample.source == name]
        assert sum(sample.count for sample in mine) == loss["count"]
        assert (abs(sum(sample.sum for sample in mine) / loss["sum"] - 1) < 1e-5) == exact
    means = [sample.mean for sample in found.samples]
    assert means == sorted(means, reverse=True) and len(set(means)) == 12
    assert sum(sample.sum for sample in found.samples) == pytest.approx(found.loss.sum, rel=1e-9)
    pieces = {sample["index"]: [p["document"] for p in sample["pieces"]] for sample in steps[step - 1]["samples"]}
    assert {sample.index: [p.document for p in sample.pieces] for sample in found.samples} == pieces
