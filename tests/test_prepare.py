"""From raw text to shards: every format, any number of workers, kills and resumes, and no special tokens added."""

from __future__ import annotations

import gzip
import json
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from processes import DATA, Run
from sight import PATIENCE
from test_import import carry, documents, megatron

from fsdp_pretrain.checkpoint.tokenizer import export_tokenizer
from fsdp_pretrain.data.corpus.corpus import Corpus
from fsdp_pretrain.data.corpus.manifest import read_manifest
from fsdp_pretrain.data.corpus.shards import Shard
from fsdp_pretrain.data.prepare.jobs import Job
from fsdp_pretrain.data.text.files import find_files
from fsdp_pretrain.data.text.inputs import plan_shards, read_documents
from fsdp_pretrain.data.text.tokenizer import Tokenizer
from fsdp_pretrain.errors import DataError

pytestmark = pytest.mark.quick


@pytest.fixture(scope="session")
def texts(helpers: Any) -> list[str]:
    rng = random.Random(3)
    return [helpers.text(n, rng.choice([3, 40, 200])) for n in range(120)]


def tokens_of(corpus: Path) -> list[list[int]]:
    shards = [Shard(corpus / "shards" / entry.name) for entry in read_manifest(corpus).shards]
    return [shard.document(n).tolist() for shard in shards for n in range(shard.documents)]


def write(path: Path, texts: list[str]) -> Path:
    """The same texts in the format the name asks for."""
    plain = path.name.removesuffix(".gz").removesuffix(".zst")
    if plain.endswith(".parquet"):
        pq.write_table(pa.table({"text": texts, "n": list(range(len(texts)))}), path, row_group_size=30)
        return path
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":
        half = len(content) // 2  # two frames, as concatenated dumps have
        compressor = zstandard.ZstdCompressor()
        content = compressor.compress(content[:half]) + compressor.compress(content[half:])
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "workers"), [("a.jsonl", 1), ("a.jsonl", 2), ("a.jsonl.gz", 1), ("a.jsonl.zst", 1), ("a.parquet", 2)]
)
def test_formats_and_workers_give_the_same_documents(
    tmp_path: Path, run_command: Run, shared_corpus: Path, texts: list[str], name: str, workers: int
) -> None:
    source = write(tmp_path / name, texts)
    out = tmp_path / "out"
    arguments = ["prepare", source, "--tokenizer", shared_corpus / "tokenizer", "--out", out, "--workers", workers]
    run_command(DATA, *arguments, "--shard-size", "10KB", expect=0)
    tokenizer = Tokenizer.load(shared_corpus / "tokenizer")
    assert tokens_of(out) == tokenizer.encode(texts)
    assert len(read_manifest(out).shards) > 1 or name.endswith((".gz", ".zst"))
    assert Corpus(out).tokenizer().fingerprint == tokenizer.fingerprint


def test_shards_are_megatron_core_indexed_datasets(shared_corpus: Path) -> None:
    """Read with the published layout only."""
    prefix = shared_corpus / "corpus/shards" / read_manifest(shared_corpus / "corpus").shards[0].name
    raw = prefix.with_suffix(".idx").read_bytes()
    assert raw[:9] == b"MMIDIDX\x00\x00"
    version, code, sequences, documents = struct.unpack_from("<QBQQ", raw, 9)
    assert (version, code, documents) == (1, 8, sequences + 1)
    lengths = np.frombuffer(raw, "<i4", sequences, 34)
    pointers = np.frombuffer(raw, "<i8", sequences, 34 + 4 * sequences)
    assert np.array_equal(np.frombuffer(raw, "<i8", documents, 34 + 12 * sequences), np.arange(documents))
    assert len(raw) == 34 + 12 * sequences + 8 * documents
    flat = np.fromfile(prefix.with_suffix(".bin"), "<u2")
    shard = Shard(prefix)
    for n in (0, sequences // 2, sequences - 1):
        assert np.array_equal(flat[pointers[n] // 2 :][: lengths[n]], shard.document(n))


def test_text_files_and_lines(tmp_path: Path, run_command: Run, shared_corpus: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "b.txt").write_text("second file\nwith lines\n")
    (folder / "a.txt").write_text("first file\n\nafter an empty line")
    (folder / "ignored.bin").write_text("not text")
    (folder / "link.txt").symlink_to(folder / "a.txt")
    tokenizer = Tokenizer.load(shared_corpus / "tokenizer")
    for split, expected in (
        ("file", ["first file\n\nafter an empty line", "second file\nwith lines\n"]),
        ("lines", ["first file", "after an empty line", "second file", "with lines"]),
    ):
        out = tmp_path / split
        run_command(DATA, "prepare", folder, "--tokenizer", tokenizer.path, "--out", out, "--split", split, expect=0)
        assert tokens_of(out) == tokenizer.encode(expected)


@pytest.mark.parametrize("size", [1, 7, 50, 333, 10_000])
@pytest.mark.promise("prepare-continues")
def test_byte_ranges_lose_and_repeat_no_line(tmp_path: Path, texts: list[str], size: int) -> None:
    source = write(tmp_path / "a.jsonl", texts)
    units = [unit for shard in plan_shards([source], size * 100, lines=False) for unit in shard]
    assert [document.text for unit in units for document in read_documents(unit, "text", lines=False)] == texts


def killable(kind: str, folder: Path, shared_corpus: Path, texts: list[str]) -> list[str]:
    """A command that makes many shards of what it writes into a folder, without the directory for them."""
    tokenizer, options = str(shared_corpus / "tokenizer"), list[str]()
    folder.mkdir()
    if kind == "prepare":
        write(folder / "a.jsonl", texts * 60)
        options = ["--shard-size", "200KB", "--workers", "2", "--tokenizer", tokenizer]
    elif kind == "split":
        for number in range(40):  # 8 MB make a part
            write(folder / f"{number}.jsonl", [text * 300 for text in texts[number::40]])
        options = ["--holdout", "5%", "--workers", "1"]  # one part after the other
    else:
        docs = carry(documents(3000), "trailing")
        megatron(folder / "s0", docs)
        megatron(folder / "s1", docs * 40)  # the others take long enough for the kill
        for number, suffix in product(range(2, 10), (".bin", ".idx")):
            shutil.copy(folder / f"s1{suffix}", folder / f"s{number}{suffix}")
        options = ["--separators", "trailing", "--workers", "1", "--tokenizer", tokenizer]
        options += ["--copy"] if kind == "copy" else []
    verb = "import" if kind == "copy" else kind
    return [sys.executable, "-m", DATA, verb, str(folder), *options, "--out"]


@pytest.mark.parametrize(
    "kind", ["prepare", "split", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("import", "copy"))]
)
@pytest.mark.promise("prepare-continues")
def test_killed_commands_continue(
    tmp_path: Path, shared_corpus: Path, helpers: Any, texts: list[str], kind: str
) -> None:
    """kill -9 in the middle leaves no result and no worker; the second run makes only what is missing, and the result is
    that of one that was not killed, which a third leaves as it is."""
    command, environment = killable(kind, tmp_path / "in", shared_corpus, texts), helpers.environment()
    whole, broken = tmp_path / "whole", tmp_path / "broken"

    def run(out: Path) -> None:
        subprocess.run([*command, str(out)], check=True, cwd="/", env=environment, capture_output=True)

    run(whole)
    process = subprocess.Popen([*command, str(broken)], cwd="/", env=environment, start_new_session=True)
    helpers.wait_for(lambda: list(broken.glob("shards/*.json")), what="a shard")
    workers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    assert psutil.wait_procs(workers, 60)[1] == []  # they would make shards among those of the next command
    result = "split.json" if kind == "split" else "manifest.json"
    assert not (broken / result).exists()
    if kind != "split":
        with pytest.raises(DataError, match="unfinished"):
            read_manifest(broken)
    made = {path: path.stat().st_mtime_ns for path in broken.glob("shards/*.json")}
    run(broken)
    kept = {path: path.stat().st_mtime_ns for path in broken.glob("shards/*.json")}
    assert made and (kind == "split" or (made.items() <= kept.items() and len(made) < len(kept)))
    assert not list(broken.rglob("*.partial"))
    if kind == "split":
        assert (broken / "heldout.jsonl").read_bytes() == (whole / "heldout.jsonl").read_bytes()
    else:
        assert read_manifest(broken).fingerprint == read_manifest(whole).fingerprint
    names = [*broken.glob("shards/*.json"), *broken.glob("heldout.jsonl")]
    before = [path.stat().st_mtime_ns for path in names]
    run(broken)
    assert [path.stat().st_mtime_ns for path in names] == before


def test_ctrl_c_says_so_and_loses_nothing(tmp_path: Path, shared_corpus: Path, helpers: Any, texts: list[str]) -> None:
    arguments = [*killable("prepare", tmp_path / "in", shared_corpus, texts * 2), str(tmp_path / "out")]
    process = subprocess.Popen(
        arguments, cwd="/", env=helpers.environment(), stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored if the tests run in the background
    )  # fmt: skip
    helpers.wait_for(lambda: list((tmp_path / "out").glob("shards/*.json")), what="a shard")
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "Traceback" not in errors and "interrupted" in errors


def test_parts_of_a_job_array_make_one_corpus(
    tmp_path: Path, run_command: Run, shared_corpus: Path, texts: list[str]
) -> None:
    source = write(tmp_path / "a.jsonl", texts)
    arguments = ["prepare", source, "--tokenizer", shared_corpus / "tokenizer", "--shard-size", "10KB", "--out"]
    for part in ("2/3", "1/3"):
        assert "still missing" in run_command(DATA, *arguments, tmp_path / "parts", "--part", part, expect=0).stdout
    assert "documents" in run_command(DATA, *arguments, tmp_path / "parts", "--part", "3/3").stdout
    run_command(DATA, *arguments, tmp_path / "whole")
    assert read_manifest(tmp_path / "parts").fingerprint == read_manifest(tmp_path / "whole").fingerprint


def test_a_part_that_begins_takes_nothing_from_another(tmp_path: Path) -> None:
    """Both have seen no plan; the other has made its folder."""

    class Late(Job):
        def _claimed_by(self) -> None:
            (self.out / "shards").mkdir(parents=True)

    Late(tmp_path / "out").claim({"the": "same"}, 2)
    assert (tmp_path / "out/shards").is_dir()


def test_what_was_killed_takes_no_room_and_a_cut_shard_is_told(
    tmp_path: Path, run_command: Run, shared_corpus: Path, texts: list[str]
) -> None:
    command = ["prepare", write(tmp_path / "a.jsonl", texts), "--tokenizer", shared_corpus / "tokenizer", "--out"]
    run_command(DATA, *command, tmp_path / "out", expect=0)
    shards = tmp_path / "out/shards"
    first = sorted(shards.glob("*.bin"))[0]
    content = first.read_bytes()
    left, foreign = (shards / f"x.bin.{host}.999999999.partial" for host in (socket.gethostname(), "elsewhere"))
    left.touch()
    foreign.touch()
    (tmp_path / "out/manifest.json").unlink()
    first.write_bytes(content[:-10])
    told = run_command(DATA, *command, tmp_path / "out", expect=78).stderr
    record = first.with_suffix(".json")
    assert f"{first} has {len(content) - 10:_} bytes" in told and f"delete {record}" in told
    record.unlink()
    left.touch()
    run_command(DATA, *command, tmp_path / "out", "--part", "1/1", expect=0)
    assert first.read_bytes() == content and not left.exists()


def test_another_job_is_not_mixed_in(tmp_path: Path, run_command: Run, shared_corpus: Path, texts: list[str]) -> None:
    arguments = ["--tokenizer", shared_corpus / "tokenizer", "--out", tmp_path / "out"]
    source = write(tmp_path / "a.jsonl", texts)
    run_command(DATA, "prepare", source, *arguments, expect=0)
    other = write(tmp_path / "b.jsonl", texts[:50])
    mine = write(tmp_path / "out/mine.jsonl", texts)
    (tmp_path / "alias").symlink_to(tmp_path)
    for own in (mine, tmp_path / "alias/out/mine.jsonl"):
        refused = run_command(DATA, "prepare", own, *arguments, "--overwrite", expect=78).stderr
        assert "is inside the output directory" in refused and len(tokens_of(tmp_path / "out")) == len(texts)
    assert "--overwrite" in run_command(DATA, "prepare", other, *arguments, expect=78).stderr
    run_command(DATA, "prepare", other, *arguments, "--overwrite", expect=0)
    assert len(tokens_of(tmp_path / "out")) == 50 and mine.exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("x")
    assert "not empty" in run_command(DATA, "prepare", other, *arguments[:3], tmp_path / "full", expect=78).stderr
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun/.plan.json.host.7.1.partial").touch()  # another part begins, or was killed while it began
    run_command(DATA, "prepare", other, *arguments[:3], tmp_path / "begun", expect=0)


NULLS = b'{"text": "first text"}\n{"text": null}\nnot json\n{"text": "last text"}\n[1]\n'


def bad_inputs(folder: Path) -> list[tuple[str, str, int, int | None]]:
    """Files with bad records, and where those are: file, line or row, its number, its first byte."""
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(NULLS)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(NULLS))
    pq.write_table(pa.table({"text": ["row", None, "row"] * 2}), folder / "c.parquet", row_group_size=4)
    lines = [("line", 2, 23), ("line", 3, 38), ("line", 5, 69)]
    return [
        *(("a.jsonl", *line) for line in lines),
        *(("b.jsonl.gz", *line) for line in lines),
        *(("c.parquet", "row", number, None) for number in (2, 5)),
    ]


def test_bad_records_are_passed_over_up_to_a_limit_and_nothing_is_lost(
    tmp_path: Path, run_command: Run, shared_corpus: Path
) -> None:
    expected = bad_inputs(tmp_path / "in")
    out = tmp_path / "out"
    command = ["prepare", tmp_path / "in", "--tokenizer", shared_corpus / "tokenizer", "--out", out]
    command += ["--shard-size", "30B", "--workers", 1]
    strict = run_command(DATA, *command, expect=78)
    assert "a.jsonl, line 2, byte 23: field 'text' is null" in strict.stderr and "--max-bad N" in strict.stderr
    few = run_command(DATA, *command, "--max-bad", 7)
    assert few.returncode == 78 and "8 of the 16 records read are bad, more than --max-bad 7" in few.stderr
    assert not (out / "manifest.json").exists()
    made = {path: path.stat().st_mtime_ns for path in out.glob("shards/*.json")}
    assert "bad records passed over: 8" in run_command(DATA, *command, "--max-bad", 8, expect=0).stderr
    assert made == {path: path.stat().st_mtime_ns for path in out.glob("shards/*.json")}
    found = [json.loads(line) for line in (out / "bad_records.jsonl").read_text().splitlines()]
    assert [(Path(r["path"]).name, r["kind"], r["number"], r["offset"]) for r in found] == expected
    assert [r["reason"].split(" ")[0] for r in found[:3]] == ["field", "not", "a"]
    manifest = read_manifest(out)
    assert (manifest.statistics["bad"], manifest.statistics["read"], manifest.documents) == (8, 8, 8)
    (tmp_path / "b.jsonl").write_text('{"body": "x"}\n' * 9 + '{"text": "y"}\n' * 9)
    command = ["train-tokenizer", tmp_path / "b.jsonl", "--kind", "bpe", "--vocab-size", 300, "--out", tmp_path / "t"]
    assert "3 of the 3 records read are bad" in run_command(DATA, *command, "--max-bad", 2, expect=78).stderr


def test_folders_of_the_hub_ask_for_a_split(tmp_path: Path, run_command: Run, shared_corpus: Path) -> None:
    """With a card, a cache and locks beside the data, as `hf download --local-dir` leaves them."""
    folder = tmp_path / "wiki"
    for name, texts in {
        "en/train-00000-of-00002.parquet": ["a"],
        "en/train-00001-of-00002.parquet": ["b"],
        "de/train-00000-of-00003.parquet": ["c"],
        "en/test-00000-of-00001.parquet": ["judge"],
        "de/dev/0.jsonl": ["tune"],
        ".cache/huggingface/download/en/train-00000-of-00002.parquet": ["d"],
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write(folder / name, texts)
    for name in ("README.md", ".gitattributes", "en/train-00000-of-00002.parquet.lock"):
        (folder / name).write_text("not data")
    tokenizer = Tokenizer.load(shared_corpus / "tokenizer")
    command = ["prepare", folder, "--tokenizer", tokenizer.path, "--out", tmp_path / "out"]
    asked = run_command(DATA, *command)
    assert asked.returncode == 78 and "test: 1, train: 3, validation: 1" in asked.stderr
    assert "--only train" in asked.stderr and not (tmp_path / "out").exists()
    assert "no files of the split sample" in run_command(DATA, *command, "--only", "sample", expect=78).stderr
    done = run_command(DATA, *command, "--only", "train", expect=0)
    assert tokens_of(tmp_path / "out") == tokenizer.encode(["c", "a", "b"])
    assert "de/train: 1 of 3 files are there" in done.stderr
    assert [path.name for path in find_files([str(folder)], only="valid")] == ["0.jsonl"]
    assert len(find_files([str(folder / "en/test-00000-of-00001.parquet"), str(folder / "de/dev")])) == 2


def test_damaged_text_is_repaired_and_counted(tmp_path: Path, run_command: Run, shared_corpus: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'{"text": "lone \\ud800 surrogate"}\n{"text": ""}\n{"text": "nul \\u0000 stays"}\n')
    bad = tmp_path / "b.txt"
    bad.write_bytes(b"latin \xe9 text")
    out = tmp_path / "out"
    done = run_command(DATA, "prepare", source, bad, "--tokenizer", shared_corpus / "tokenizer", "--out", out, expect=0)
    assert "1 empty documents" in done.stdout and "2 documents had invalid UTF-8" in done.stdout
    tokenizer = Tokenizer.load(shared_corpus / "tokenizer")
    decoded = [tokenizer.decode(ids) for ids in tokens_of(out)]
    assert decoded == ["lone \ufffd surrogate", "nul \x00 stays", "latin \ufffd text"]


# ---------------------------------------------------------------- separators and specials


@pytest.fixture(scope="session")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory, run_command: Run, shared_corpus: Path) -> Path:
    out = tmp_path_factory.mktemp("sp")
    arguments = ["train-tokenizer", shared_corpus / "train.jsonl", "--kind", "sentencepiece", "--vocab-size", "400"]
    run_command(DATA, *arguments, "--out", out, expect=0)
    return out / "tokenizer.model"


def test_sentencepiece_learns_from_long_lines(tmp_path: Path, run_command: Run, helpers: Any) -> None:
    """It would leave out, in silence, what is longer than its limit."""
    source = helpers.jsonl(tmp_path / "in.jsonl", ["qxz " * 20_000, "q"])
    command = ["train-tokenizer", source, "--kind", "sentencepiece", "--vocab-size", "266", "--out", tmp_path / "made"]
    run_command(DATA, *command, expect=0)
    assert len(Tokenizer.load(tmp_path / "made/tokenizer.model").encode(["qxz qxz"])[0]) <= 3


@pytest.mark.parametrize("kind", ["bpe", "sentencepiece"])
@pytest.mark.promise("one-separator")
def test_own_tokenizers_are_lossless_and_literals_stay_text(
    kind: str, shared_corpus: Path, sentencepiece_model: Path, tmp_path: Path, run_command: Run, helpers: Any
) -> None:
    tokenizer = Tokenizer.load(shared_corpus / "tokenizer" if kind == "bpe" else sentencepiece_model)
    nasty = ["<|endoftext|> in text", "a </s> b <s> <unk>", "  two  spaces\n\ttab\r\n", "ﬁ ﷺ é 漢字 🙂", "\u200b\ufeff"]
    assert [tokenizer.decode(ids) for ids in tokenizer.encode(nasty)] == nasty
    source = helpers.jsonl(tmp_path / "in.jsonl", nasty)
    run_command(DATA, "prepare", source, "--tokenizer", tokenizer.path, "--out", tmp_path / "out", expect=0)
    assert not set(tokenizer.specials) & {token for ids in tokens_of(tmp_path / "out") for token in ids}
    run_command(DATA, "validate", tmp_path / "out", expect=0)


def test_a_sentencepiece_model_is_exported_as_tokenizer_json_that_encodes_alike(
    shared_corpus: Path, sentencepiece_model: Path, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer as Model

    ours = Tokenizer.load(sentencepiece_model)
    assert "converted" in export_tokenizer(ours, tmp_path, sequence_length=32)
    theirs = Model.from_file(str(tmp_path / "tokenizer.json"))
    texts = [json.loads(line)["text"] for line in (shared_corpus / "heldout.jsonl").open()]
    assert [theirs.encode(text, add_special_tokens=False).ids for text in texts] == ours.encode(texts)


def test_templates_truncation_and_padding_in_the_file_are_switched_off(tmp_path: Path, shared_corpus: Path) -> None:
    """A tokenizer.json that adds BOS and EOS, cuts at 4, pads and drops out: our `encode` does none of it."""
    from tokenizers import Tokenizer as Model
    from tokenizers.processors import TemplateProcessing

    model = Model.from_file(str(shared_corpus / "tokenizer/tokenizer.json"))
    texts = ["the run writes every checkpoint"] * 20
    plain = model.encode(texts[0], add_special_tokens=False).ids
    around = "<|endoftext|> $A <|endoftext|>"
    model.post_processor = TemplateProcessing(single=around, special_tokens=[("<|endoftext|>", 0)])
    model.enable_truncation(4)
    model.enable_padding(length=50)
    model.model.dropout = 0.5
    model.save(str(tmp_path / "tokenizer.json"))
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    stored["model"]["dropout"] = 0.5
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    trap = Model.from_file(str(tmp_path / "tokenizer.json"))
    assert 0 in trap.encode("x").ids and len({tuple(trap.encode(text).ids) for text in texts}) > 1  # the traps are real
    assert Tokenizer.load(tmp_path).encode(texts) == [plain] * 20


def byte_bpe(**special: Any) -> Any:
    """A small byte-level BPE behind NFKC whose `</s>` is a special added token with the given options."""
    from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Model

    model = Model(models.BPE())
    model.normalizer, model.decoder = normalizers.NFKC(), decoders.ByteLevel()
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    model.train_from_iterator(["some text"], trainer)
    model.add_special_tokens([AddedToken("</s>", special=True, **special)])
    return model


@pytest.mark.parametrize("special", [{}, {"lstrip": True, "rstrip": True}, {"normalized": True}, {"single_word": True}])
def test_no_option_of_a_special_token_lets_text_spell_it(tmp_path: Path, special: dict[str, bool]) -> None:
    """Neither its literal nor a normaliser's result for full-width letters; the spaces around it stay."""
    model = byte_bpe(**special)
    model.save(str(tmp_path / "tokenizer.json"))
    eod = model.token_to_id("</s>")
    assert eod in model.encode("a </s> b", add_special_tokens=False).ids  # the trap is real
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eod == eod
    texts = ["a </s> b", "</s>", "a</s></s>", "a ＜/s＞ b"]
    encoded = tokenizer.encode(texts)
    assert not any(eod in ids for ids in encoded)
    assert [tokenizer.decode(ids) for ids in encoded] == [*texts[:3], "a </s> b"]


def spelling(folder: Path, kind: str, shared_corpus: Path) -> str | None:
    """A tokenizer that produces its separator from text, and which that is, if the tokenizer does not say."""
    from sentencepiece import SentencePieceTrainer
    from tokenizers import AddedToken, models, pre_tokenizers
    from tokenizers import Tokenizer as Model

    if kind == "unknown piece":
        lossy_sentencepiece(folder, shared_corpus)
        return "<unk>"
    if kind == "user-defined piece":
        SentencePieceTrainer.Train(
            input=str(shared_corpus / "train.jsonl"),
            model_prefix=str(folder / "tokenizer"),
            vocab_size=400,
            model_type="bpe",
            byte_fallback=True,
            user_defined_symbols=["<eod>"],
            minloglevel=2,
        )
        return "<eod>"
    if kind == "added, not special":
        model = Model.from_file(str(shared_corpus / "tokenizer/tokenizer.json"))
        model.add_tokens([AddedToken("<eod>", special=False)])
    elif kind == "Unigram":
        model = Model(models.Unigram([("<unk>", 0.0), ("</s>", 0.0), ("▁", -2.0), ("a", -3.0)], unk_id=0))
        model.pre_tokenizer = pre_tokenizers.Metaspace()
    else:
        unknown = "</s>" if kind == "unknown word" else "a"
        model = Model(models.WordLevel({"</s>": 0, "a": 1, "x": 2}, unk_token=unknown))
        model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if kind != "added, not special":
        model.add_special_tokens(["</s>"])
    model.save(str(folder / "tokenizer.json"))
    return "<eod>" if kind == "added, not special" else None


@pytest.mark.parametrize(
    "kind", ["unknown piece", "user-defined piece", "added, not special", "Unigram", "WordLevel", "unknown word"]
)
def test_a_separator_that_text_can_spell_is_refused(tmp_path: Path, shared_corpus: Path, kind: str) -> None:
    """Although special: the vocabulary of the model holds its text, or it is the unknown token."""
    eod = spelling(tmp_path, kind, shared_corpus)
    with pytest.raises(DataError, match="produces special tokens by itself"):
        Tokenizer.load(tmp_path, eod=eod)


def lossy_sentencepiece(folder: Path, shared_corpus: Path) -> None:
    """As its trainer makes them by default: NFKC, spaces removed, a space before the text, no bytes."""
    from sentencepiece import SentencePieceTrainer

    SentencePieceTrainer.Train(
        input=str(shared_corpus / "train.jsonl"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=150,
        hard_vocab_limit=False,
        user_defined_symbols=["<tool>"],
        minloglevel=2,
    )


@pytest.mark.parametrize("kind", ["tokenizers", "sentencepiece"])
def test_normalisers_that_change_text_are_reported_and_add_nothing(
    tmp_path: Path, shared_corpus: Path, run_command: Run, helpers: Any, kind: str
) -> None:
    """Full-width letters of the separator, text that vanishes, and tokens that a tokenizer declares as text."""
    if kind == "sentencepiece":
        lossy_sentencepiece(tmp_path, shared_corpus)
    else:
        model = byte_bpe()
        model.add_tokens(["<tool>"])
        model.save(str(tmp_path / "tokenizer.json"))
    texts = ["a </s> b", "ａ ＜／ｓ＞ ﬁ", "x <tool> y", " \u200b "]
    source = helpers.jsonl(tmp_path / "in.jsonl", texts)
    done = run_command(DATA, "prepare", source, "--tokenizer", tmp_path, "--out", tmp_path / "out", expect=0)
    assert "sampled documents do not decode to their text" in done.stdout
    manifest = read_manifest(tmp_path / "out")
    assert manifest.documents + manifest.statistics["empty"] == 4
    assert manifest.statistics["empty"] == (kind == "sentencepiece") and not manifest.statistics["quarantined"]
    documents = tokens_of(tmp_path / "out")
    assert not set(manifest.tokenizer.specials) & {token for ids in documents for token in ids}
    assert len(documents[2]) < len(documents[1])  # <tool> is one token, as declared
    run_command(DATA, "validate", tmp_path / "out", expect=0)


@pytest.mark.promise("one-separator")
def test_documents_that_would_encode_to_control_tokens_are_quarantined(
    tmp_path: Path, shared_corpus: Path, helpers: Any
) -> None:
    """If text can spell a tokenizer's second special, such documents are left out; too many are an error."""
    from fsdp_pretrain.data.prepare.jobs import Job
    from fsdp_pretrain.data.prepare.prepare import PrepareOptions, prepare

    tokenizer = Tokenizer.load(shared_corpus / "tokenizer")
    (spelt,) = set(tokenizer.encode(["state"])[0][:1])
    tokenizer.specials[spelt] = "state-like"
    texts = ["the run"] * 3000 + ["state"] * 2
    source = helpers.jsonl(tmp_path / "a.jsonl", texts)
    manifest = prepare([source], tokenizer, Job(tmp_path / "few", quiet=True), PrepareOptions())
    assert manifest is not None and manifest.statistics["quarantined"] == 2 and manifest.documents == 3000
    with pytest.raises(DataError, match="documents contain special tokens"):
        prepare([source], tokenizer, Job(tmp_path / "many", quiet=True), PrepareOptions(max_quarantined=0.0001))


def test_unclear_tokenizers(tmp_path: Path, shared_corpus: Path, sentencepiece_model: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((shared_corpus / "tokenizer/tokenizer.json").read_bytes())
    with pytest.raises(DataError, match="has no token '<nope>'"):
        Tokenizer.load(tmp_path, eod="<nope>")
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model.read_bytes())
    with pytest.raises(DataError, match="several"):
        Tokenizer.load(tmp_path)
    with pytest.raises(DataError, match="there is no tokenizer at some-org/Model-7b") as absent:
        Tokenizer.load("some-org/Model-7b")
    assert "hf download" in absent.value.remedy


def test_quickstart_corpus_is_real_and_split_by_file(tmp_path: Path, run_command: Run) -> None:
    run_command(DATA, "quickstart-corpus", "--out", tmp_path, expect=0)
    rows = {
        name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "heldout")
    }
    files = {name: {row["source"].partition("#")[0] for row in part} for name, part in rows.items()}
    assert not files["train"] & files["heldout"]
    sizes = {name: sum(len(row["text"]) for row in part) for name, part in rows.items()}
    assert sizes["train"] > 5_000_000 and sizes["heldout"] > 200_000
    both = {"argparse.py", "argparse.py#docstrings"}
    assert both <= {row["source"] for row in rows["train"]} or "argparse.py" in files["heldout"]


def test_inspect_shows_a_document(run_command: Run, shared_corpus: Path, tmp_path: Path) -> None:
    first = json.loads((shared_corpus / "train.jsonl").read_text().splitlines()[0])["text"]
    shown = run_command(DATA, "inspect", shared_corpus / "corpus", "--doc", 0)
    assert shown.stdout.rstrip("\n") == first.rstrip("\n")
    run_command(DATA, "inspect", shared_corpus / "corpus", "--doc", 10**6, expect=78)
    empty = tmp_path / "empty"
    shutil.copytree(shared_corpus / "corpus", empty)
    manifest = json.loads((empty / "manifest.json").read_text())
    (empty / "manifest.json").write_text(json.dumps({**manifest, "shards": []}))
    assert "Traceback" not in run_command(DATA, "inspect", empty, "--doc", 0, expect=78).stderr
    shown = run_command(DATA, "inspect", shared_corpus / "corpus", "--json")
    assert json.loads(shown.stdout)["separators"] == "none"
