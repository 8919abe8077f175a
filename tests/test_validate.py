"""`fsdp-data validate`: damaged files, bare directories, the command line. Defects in tokens: test_planted.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import DATA, Run, python
from test_import import store

from fsdp_pretrain.data.corpus.manifest import Vocabulary, read_manifest
from fsdp_pretrain.data.text.tokenizer import EOD, Tokenizer
from fsdp_pretrain.data.validate import validate as validation
from fsdp_pretrain.data.validate.validate import validate
from fsdp_pretrain.errors import DataError

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def documents(shared_corpus: Path, tokenizer: Tokenizer) -> list[list[int]]:
    texts = [json.loads(line)["text"] for line in (shared_corpus / "train.jsonl").read_text().splitlines()]
    return tokenizer.encode(texts[:200])


@pytest.fixture
def corpus(tmp_path: Path, documents: list[list[int]], tokenizer: Tokenizer, helpers: Any) -> Path:
    """A clean corpus to damage."""
    path: Path = helpers.corpus(tmp_path / "c", documents, tokenizer)
    return path


def found(path: Path, **options: Any) -> dict[str, int]:
    report = validate(path, quiet=True, **options)
    severities = {finding.kind.severity for finding in report.findings.by_code.values()}
    assert report.findings.exit_code == (2 if "error" in severities else 1 if severities else 0)
    return {code: finding.count for code, finding in report.findings.by_code.items()}


def damage_bit(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 4 * 2] ^= 1  # the low byte of a token: another valid one
    path.write_bytes(raw)


def cut(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


def append(path: Path, raw: bytes) -> None:
    path.write_bytes(path.read_bytes() + raw)


def edit_manifest(corpus: Path, **values: Any) -> None:
    manifest = json.loads((corpus / "manifest.json").read_text())
    (corpus / "manifest.json").write_text(json.dumps({**manifest, **values}))


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda c: None, set()),
        (lambda c: damage_bit(c / "shards/s0.bin"), {"checksum"}),
        (lambda c: (c / "shards/s0.bin").unlink(), {"unreadable"}),
        (lambda c: (c / "shards/s0.idx").write_bytes(b"x" * 100), {"unreadable"}),
        (lambda c: cut(c / "shards/s0.bin", 4), {"unreadable"}),
        (lambda c: cut(c / "shards/s0.idx", 9), {"unreadable"}),
        (lambda c: append(c / "shards/s0.bin", b"xx"), {"manifest-mismatch", "checksum"}),
        (lambda c: damage_bit(c / "tokenizer.json"), {"unreadable"}),
        (lambda c: append(c / "tokenizer.json", b" "), {"tokenizer"}),
        (lambda c: (c / "tokenizer.json").unlink(), {"unreadable"}),
        (lambda c: append(c / "blocks.npy", b"x"), {"checksum"}),
        (lambda c: edit_manifest(c, documents=7), {"manifest-mismatch"}),
        (lambda c: edit_manifest(c, dtype="int32"), {"manifest-mismatch"}),
        (
            lambda c: shutil.copy(c / "shards/s1.bin", c / "shards/s0.bin"),
            {"manifest-mismatch", "checksum", "unreadable"},
        ),
    ],
)
def test_damaged_files_are_found(corpus: Path, damage: Any, expected: set[str]) -> None:
    damage(corpus)
    codes = set(found(corpus))
    assert codes <= expected and bool(codes) == bool(expected)


@pytest.mark.parametrize(
    ("at", "value", "size", "note"),
    [
        (34 + 100 * 4 + 5 * 8, 0, 8, "document 5 does not begin"),
        (34, -4, 4, "negative length"),
        (34 + 100 * 12 + 8, 2, 8, "several sequences"),
    ],
)
def test_an_unsound_index_is_found(corpus: Path, at: int, value: int, size: int, note: str) -> None:
    index = corpus / "shards/s0.idx"
    raw = bytearray(index.read_bytes())
    raw[at : at + size] = value.to_bytes(size, "little", signed=True)
    index.write_bytes(raw)
    report = validate(corpus, quiet=True)
    assert {"checksum", "index"} <= set(report.findings.by_code)
    assert note in str(report.findings.by_code["index"].examples[0])


def test_runs_and_processes_do_not_change_the_report(
    corpus: Path, documents: list[list[int]], tokenizer: Tokenizer, helpers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are measured run by run; duplicates and counts must not depend on where they are cut, nor by whom."""
    planted = [*documents, *documents[:9], [], [5, 0, 6]]
    path = helpers.corpus(corpus.parent / "d", planted, tokenizer, shards=2)
    whole = validate(path, quiet=True).as_dict()
    assert {f["code"]: f["count"] for f in whole["findings"]} == {
        "duplicate-documents": sum(len(d) >= 16 for d in documents[:9]),
        "empty-documents": 1,
        "separator-inside": 1,
    }
    monkeypatch.setattr(validation, "MEASURED_TOKENS", 1000)
    parts = validate(path, quiet=True).as_dict()
    monkeypatch.setattr(validation, "_POOL_BYTES", 0)
    assert validate(path, quiet=True, workers=2).as_dict()["findings"] == whole["findings"]
    assert parts["findings"] == whole["findings"] and parts["lengths"] == whole["lengths"]
    assert (parts["documents"], parts["tokens"]) == (len(planted), sum(map(len, planted)))


def test_measures_of_the_corpus(tmp_path: Path, documents: list[list[int]], tokenizer: Tokenizer, helpers: Any) -> None:
    """Against closed forms: quantiles, and many special ids."""
    rng = np.random.default_rng(3)
    docs = [rng.integers(256, 320, length).tolist() for length in range(1, 1001)]
    path = helpers.corpus(tmp_path / "c", docs, tokenizer, shards=1) / "shards"
    scattered = frozenset(range(0, 250, 2))
    report = validate(path, vocabulary=Vocabulary(512, 0, scattered), quiet=True)
    for name, exact in (("p1", 10), ("p10", 100), ("p50", 500), ("p90", 900), ("p99", 990), ("max", 1000)):
        assert report.lengths[name] == exact
    assert set(report.findings.by_code) == {"one-token-documents"}
    docs[20][7] = 248
    path = helpers.corpus(tmp_path / "d", docs, tokenizer, shards=1) / "shards"
    report = validate(path, vocabulary=Vocabulary(512, 0, scattered), quiet=True)
    (example,) = report.findings.by_code["special-token"].examples
    assert (example.document, example.token) == (20, 7)


def test_bare_megatron_shards(
    tmp_path: Path, documents: list[list[int]], tokenizer: Tokenizer, run_command: Run, helpers: Any
) -> None:
    bare = helpers.corpus(tmp_path / "c", [[*d, 0] for d in documents], tokenizer) / "shards"
    assert "--vocab-size" in run_command(DATA, "validate", bare, expect=78).stderr
    assert "not an id" in run_command(DATA, "validate", bare, "--vocab-size", 5, "--eod", 9, expect=78).stderr
    measured = run_command(DATA, "validate", bare, "--vocab-size", 512, "--eod", 0, expect=0)
    assert "trailing (measured: of 200 documents 200 end and 0 begin with one)" in measured.stdout
    done = run_command(
        DATA, "validate", bare, "--tokenizer", tokenizer.path, "--separators", "none", "--json", expect=2
    )
    report = json.loads(done.stdout)["corpora"][0]
    (finding,) = report["findings"]
    expected = {"code": "separator-at-end", "severity": "error", "count": 200, "rate": 1.0}
    assert expected.items() <= finding.items()
    assert finding["examples"][0]["place"].startswith("s0, document 0, token ") and finding["remedy"]
    assert "<|endoftext|> ‖ " in finding["examples"][0]["text"]
    assert [entry["documents"] for entry in report["files"]] == [100, 100]


@pytest.mark.parametrize("end", ["<|im_end|>", None])
def test_a_tokenizer_whose_separator_is_named(
    tmp_path: Path, documents: list[list[int]], tokenizer: Tokenizer, run_command: Run, helpers: Any, end: str | None
) -> None:
    """It names another one, or none."""
    content = json.loads(tokenizer.path.read_text())
    for added in content["added_tokens"]:
        added["content"] = "[SEP]"
    content["model"]["vocab"] = {"[SEP]" if k == EOD else k: v for k, v in content["model"]["vocab"].items()}
    folder = tmp_path / "t"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(content))
    if end is not None:
        word = next(iter(set(content["model"]["vocab"]) - {"[SEP]"}))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": word}))
    corpus = helpers.corpus(tmp_path / "c", documents, Tokenizer.load(folder, "[SEP]"))
    for name in ("[SEP]", "0"):
        run_command(DATA, "validate", corpus, "--tokenizer", folder, "--eod", name, expect=0)
    bare = run_command(DATA, "validate", corpus / "shards", "--eod", "[SEP]", "--vocab-size", 512, expect=78)
    assert "without --tokenizer it is an id" in bare.stderr


@pytest.mark.parametrize("format_", ["npy", "rows", "megatron"])
@pytest.mark.promise("separators-measured")
def test_every_format_is_measured(
    tmp_path: Path, documents: list[list[int]], tokenizer: Tokenizer, format_: str
) -> None:
    trailing = [[*d, 0] for d in documents]
    store(tmp_path / "clean", "a", trailing, format_)
    report = validate(tmp_path / "clean", tokenizer=tokenizer, quiet=True)
    assert report.findings.by_code == {}
    assert (report.documents, report.separators[0]) == (200, "trailing")
    assert report.tokens == sum(map(len, trailing))
    doubled = [[*d, 0] if n % 10 == 0 else d for n, d in enumerate(trailing)]
    store(tmp_path / "doubled", "a", doubled, format_)
    assert found(tmp_path / "doubled", tokenizer=tokenizer) == {"separator-doubled": 20}
    if format_ == "megatron":
        append(tmp_path / "doubled/a.bin", b"xxx")
        assert found(tmp_path / "doubled", tokenizer=tokenizer) == {"separator-doubled": 20, "index": 1}


def test_command_line(
    corpus: Path, documents: list[list[int]], tokenizer: Tokenizer, run_command: Run, helpers: Any
) -> None:
    with pytest.raises(DataError, match="declares separators `none`"):
        validate(corpus, separators="trailing", quiet=True)
    clean = run_command(DATA, "validate", corpus, "--workers", 2)
    assert clean.returncode == 0 and "clean" in clean.stdout and "at least 100.0%" in clean.stdout
    other = helpers.corpus(corpus.parent / "w", [*documents, []], tokenizer)
    warned = run_command(DATA, "validate", other, "--workers", 1)
    assert warned.returncode == 1 and "WARNING empty-documents: 1 documents (0.498%)" in warned.stdout
    other = corpus.parent / "other.json"
    other.write_text(tokenizer.path.read_text() + " ")
    wrong = run_command(DATA, "validate", corpus, "--tokenizer", other)
    assert wrong.returncode == 2 and "ERROR   tokenizer" in wrong.stdout and "remedy:" in wrong.stdout
    assert "there is no" in run_command(DATA, "validate", corpus / "absent", expect=78).stderr


def test_against_a_configuration(run_command: Run, lab: Any, corpus: Path, helpers: Any) -> None:
    run_command(DATA, "validate", lab.corpus, "--against", lab.config(), expect=0)
    small = lab.config("small", model={"vocab": 300})
    done = run_command(DATA, "validate", lab.corpus, "--against", small, "--json", expect=2)
    assert [f["code"] for f in json.loads(done.stdout)["corpora"][0]["findings"]] == ["vocabulary-too-small"]
    changed = corpus.parent / "tokenizer.json"
    changed.write_text((corpus / "tokenizer.json").read_text() + " ")
    other = helpers.corpus(corpus.parent / "o", [[5, 6, 7]] * 2, Tokenizer.load(changed))
    assert read_manifest(other).tokenizer.fingerprint != read_manifest(corpus).tokenizer.fingerprint
    sources = [{"name": "text", "path": str(lab.corpus)}, {"name": "web", "path": str(other)}]
    sources.append({"name": "gone", "path": str(lab.path / "gone")})
    mixed = lab.config("mixed", data={"sequence_length": 32, "sources": sources})
    done = run_command(DATA, "validate", lab.corpus, "--against", mixed)
    assert done.returncode == 2 and "source web of the run" in done.stdout and "at gone: " in done.stdout


@pytest.mark.promise("separators-measured")
def test_prepare_and_validate_run_without_torch(tmp_path: Path, shared_corpus: Path) -> None:
    """With torch (and everything else that only the trainer needs) made unimportable."""
    blocker = "import sys\nfor m in ('torch','torchdata','lm_eval','aim','safetensors'): sys.modules[m] = None\n"
    for arguments in (
        [
            *("prepare", shared_corpus / "train.jsonl", "--tokenizer", shared_corpus / "tokenizer"),
            *("--out", tmp_path / "c", "--workers", 2),
        ],
        ["validate", tmp_path / "c"],
        ["inspect", tmp_path / "c"],
    ):
        argv = ["fsdp-data", *map(str, arguments)]
        code = f"{blocker}from fsdp_pretrain.data.cli import main\nsys.argv = {argv!r}\nif __name__ == '__main__': sys.exit(main())"
        script = tmp_path / "script.py"
        script.write_text(code)
        python(script)
