"""Held-out documents: a function of their text alone, whatever the files; and training never sees one."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import xxhash
from processes import DATA, Run
from test_import import adopt, megatron
from test_prepare import write

from fsdp_pretrain.data.corpus.corpus import Corpus
from fsdp_pretrain.data.corpus.manifest import read_manifest
from fsdp_pretrain.data.corpus.shards import Shard
from fsdp_pretrain.data.text.tokenizer import Tokenizer

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def texts(helpers: Any) -> list[str]:
    rng = random.Random(5)
    made = [helpers.text(n, rng.choice([4, 40, 150])) for n in range(900)]
    return [text for text in made if text.strip()]


def expected(texts: list[str], percent: float) -> list[str]:
    """The definition, once more: the digest is below the share of 2^64; in the order of digests, each once."""
    digests = {text: xxhash.xxh3_64_intdigest(text.encode()) for text in texts}
    return [text for text in sorted(digests, key=digests.__getitem__) if digests[text] < percent / 100 * 2**64]


def heldout(folder: Path) -> list[str]:
    return [json.loads(line)["text"] for line in (folder / "heldout.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.promise("held-out")
def test_the_side_of_a_document_depends_on_its_text_alone(tmp_path: Path, run_command: Run, texts: list[str]) -> None:
    """Not on the format, packing, order, number of files, processes, or repeats. A larger share begins with a smaller."""
    shuffled = random.Random(1).sample(texts, len(texts))
    (tmp_path / "in").mkdir()
    inputs = {
        "plain": [write(tmp_path / "plain.jsonl", texts)],
        "parts": [
            write(tmp_path / "in/b.jsonl.gz", shuffled[:300]),
            write(tmp_path / "in/a.jsonl.zst", shuffled[300:500]),
            write(tmp_path / "in/c.json.gz", shuffled[500:600]),
            write(tmp_path / "in/d.parquet", shuffled[600:]),
        ],
        "repeated": [tmp_path / "plain.jsonl", tmp_path / "in"],
    }
    files = {}
    for name, paths in inputs.items():
        workers = 2 if name == "parts" else 1
        command = ["split", *paths, "--holdout", "10%", "--out", tmp_path / name, "--workers", workers, "--json"]
        report = json.loads(run_command(DATA, *command, expect=0).stdout)
        files[name] = (tmp_path / name / "heldout.jsonl").read_bytes()
        assert report["read"] == len(texts) * (2 if name == "repeated" else 1)
        assert report["held_out"] - report["duplicates"] == len(expected(texts, 10)) > 50
        assert not list((tmp_path / name).glob("shards*"))
    assert heldout(tmp_path / "plain") == expected(texts, 10)
    assert set(files.values()) == {files["plain"]}
    (tmp_path / "plain/heldout.jsonl").unlink()
    command = ["split", tmp_path / "plain.jsonl", "--holdout", "10%", "--out", tmp_path / "plain"]
    assert run_command(DATA, *command).returncode == 0  # makes it again
    assert (tmp_path / "plain/heldout.jsonl").read_bytes() == files["plain"]
    command = ["split", tmp_path / "plain.jsonl", "--holdout", "12.5%", "--out", tmp_path / "more"]
    assert run_command(DATA, *command).returncode == 0 and heldout(tmp_path / "more") == expected(texts, 12.5)
    assert (tmp_path / "more/heldout.jsonl").read_bytes().startswith(files["plain"])
    assert report["duplicates"] >= len(expected(texts, 10))


@pytest.mark.promise("held-out")
def test_training_never_sees_a_held_out_text(
    tmp_path: Path, run_command: Run, texts: list[str], shared_corpus: Path, lab: Any
) -> None:
    """`prepare` with the same share leaves out exactly what `split` writes; so does `train-tokenizer`. `validate` finds
    them where the share was forgotten."""
    folder = tmp_path / "in"
    folder.mkdir()
    write(folder / "a.jsonl", texts[:400])
    write(folder / "b.parquet", texts[400:] + texts[:50])
    split = run_command(DATA, "split", folder, "--holdout", "10%", "--out", tmp_path / "heldout")
    assert split.returncode == 0 and "--holdout 10%" in split.stdout, split.stderr
    tokenizer = Tokenizer.load(shared_corpus / "tokenizer")
    eod, sides = tokenizer.eod, {}
    for name, source, more in (
        ("train", folder, ["--holdout", "10%"]),
        ("held", tmp_path / "heldout/heldout.jsonl", []),
        ("all", folder, []),
    ):
        command = ["prepare", source, "--tokenizer", tokenizer.path, "--out", tmp_path / name, *more]
        run_command(DATA, *command, expect=0)
        shards = [Shard(tmp_path / name / "shards" / entry.name) for entry in read_manifest(tmp_path / name).shards]
        sides[name] = [tuple(shard.document(n).tolist()) for shard in shards for n in range(shard.documents)]
    taken = set(expected(texts, 10))
    assert sides["train"] == [tuple(tokenizer.encode([text])[0]) for text in [*texts, *texts[:50]] if text not in taken]
    assert not set(sides["train"]) & set(sides["held"]) and len(sides["held"]) == len(taken)
    statistics = Corpus(tmp_path / "train").manifest.statistics
    assert statistics["holdout"] == "10%"
    shown = run_command(DATA, "inspect", tmp_path / "train").stdout
    assert f"held out    {statistics['held_out']} documents (10%)" in shown
    assert statistics["held_out"] == len(texts) + 50 - len(sides["train"])
    loss_on = [{"name": "held", "path": str(tmp_path / "held")}]
    run = lab.config(eval={"loss_on": loss_on})
    clean = run_command(DATA, "validate", tmp_path / "train", tmp_path / "held", "--against", run)
    assert clean.returncode < 2
    found = run_command(DATA, "validate", tmp_path / "all", "--against", run, "--json", expect=2)
    (finding,) = [f for f in json.loads(found.stdout)["corpora"][0]["findings"] if f["code"] == "held-out-documents"]
    long = {tokens for tokens in sides["held"] if len(tokens) >= 16}
    assert finding["count"] == sum(tokens in long for tokens in sides["all"]) > 20
    for separators in ("trailing", "leading"):  # and in a corpus of others, in another dtype
        stored = tmp_path / f"{separators}/s0"
        megatron(stored, [[eod, *doc] if separators == "leading" else [*doc, eod] for doc in sides["all"]], "<i4")
        adopt(stored.parent, tokenizer, tmp_path / f"adopted-{separators}", separators)
        found = run_command(DATA, "validate", tmp_path / f"adopted-{separators}", "--against", run, "--json", expect=2)
        findings = json.loads(found.stdout)["corpora"][0]["findings"]
        assert [f["count"] for f in findings if f["code"] == "held-out-documents"] == [finding["count"]]
    command = ["prepare", folder, "--tokenizer", tokenizer.path, "--out", tmp_path / "train", "--holdout", "11%"]
    assert "--overwrite" in run_command(DATA, *command, expect=78).stderr
    rest = write(tmp_path / "rest.jsonl", [text for text in [*texts, *texts[:50]] if text not in taken])
    for out, source, more in (("whole", folder, ["--holdout", "10%"]), ("rest", rest, [])):
        command = ["train-tokenizer", source, "--kind", "bpe", "--vocab-size", 400, "--out", tmp_path / out]
        run_command(DATA, *command, *more, expect=0)
    made = [(tmp_path / out / "tokenizer.json").read_bytes() for out in ("whole", "rest")]
    assert made[0] == made[1]


def test_prompts_decide_for_their_answers(tmp_path: Path, run_command: Run) -> None:
    source = tmp_path / "a.jsonl"
    rows = [{"q": f"question {n % 200}?", "a": f"answer {n}"} for n in range(400)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--text-field", "q", "--answer-field", "a", "--holdout", "20%"]
    run_command(DATA, "split", source, *arguments, "--out", tmp_path / "out", expect=0)
    found = [json.loads(line) for line in (tmp_path / "out/heldout.jsonl").read_text().splitlines()]
    taken = set(expected([row["q"] for row in rows], 20))
    assert sorted((row["text"], row["answer"]) for row in found) == sorted(
        (row["q"], row["a"]) for row in rows if row["q"] in taken
    )


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        ("0.1", "not a share such as 0.1%"),
        ("0%", "not a share"),
        ("100%", "not a share"),
        ("0.0001%", "holds out none of"),
    ],
)
def test_unusable_shares_are_refused(tmp_path: Path, run_command: Run, share: str, expected: str) -> None:
    source = write(tmp_path / "a.jsonl", ["one text", "another text"])
    done = run_command(DATA, "split", source, "--holdout", share, "--out", tmp_path / "out")
    assert done.returncode == 78 and expected in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out/heldout.jsonl").exists()
