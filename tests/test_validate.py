"""`fsdp-data validate`: every planted defect is found under its name, its clean twin is clean."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.corpus import write_corpus
from data.shards import ShardWriter
from data.tokenizer import Tokenizer
from data.validate import CATALOGUE, validate

pytestmark = pytest.mark.quick
Run = Callable[..., subprocess.CompletedProcess[str]]
EOD = 0


@pytest.fixture(scope="module")
def tokenizer(shared_corpus: Path) -> Tokenizer:
    return Tokenizer.load(shared_corpus / "tokenizer")


def documents(count: int = 200) -> list[list[int]]:
    rng = random.Random(9)
    return [[rng.randrange(3, 300) for _ in range(rng.choice([2, 9, 40]))] for _ in range(count)]


def corpus(path: Path, docs: list[list[int]], tokenizer: Tokenizer, dtype: str = "<u2") -> Path:
    (path / "shards").mkdir(parents=True)
    entries = []
    for number in range(2):
        with ShardWriter(path / "shards" / f"s{number}", np.dtype(dtype)) as writer:
            for document in docs[number::2]:
                writer.append(np.array(document, dtype=dtype))
            entries.append(writer.finish())
    write_corpus(path, tokenizer, entries, np.dtype(dtype), {})
    return path


def rates(path: Path, **options: Any) -> dict[str, int]:
    report = validate(path, quiet=True, **options)
    assert report.findings.exit_code == max(
        [0, *({"error": 2, "warning": 1}[f.severity] for f in report.findings.by_code.values())]
    )
    return {code: finding.count for code, finding in report.findings.by_code.items()}


def test_clean_corpus_is_clean(tmp_path: Path, tokenizer: Tokenizer, shared_corpus: Path) -> None:
    assert rates(corpus(tmp_path / "c", documents(), tokenizer), tokenizer=tokenizer) == {}
    assert rates(shared_corpus / "corpus", workers=2) == {}


@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        (lambda docs: [[*d, EOD] for d in docs], {"separator-at-end": 200}),
        (lambda docs: [[EOD, *d] for d in docs], {"separator-at-start": 200}),
        (lambda docs: [[*d, EOD] if n % 10 == 0 else d for n, d in enumerate(docs)], {"separator-at-end": 20}),
        (
            lambda docs: [[*d, EOD, EOD] for d in docs],
            {"separator-at-end": 200, "separator-inside": 200, "separator-doubled": 200},
        ),
        (lambda docs: [[*docs[0], EOD, *docs[1]], *docs[2:]], {"separator-inside": 1}),
        (lambda docs: [*docs[:7], [5, 301, 6], *docs[7:]], {"special-token": 1}),
        (lambda docs: [*docs, [700, 3], [4, 65_000, 65_001]], {"outside-vocabulary": 3}),
        (lambda docs: [*docs, [], [], []], {"empty-documents": 3}),
        (lambda docs: [*docs, [8]], {"one-token-documents": 1}),
        (lambda docs: [*docs, [EOD]], {"separator-at-end": 1, "one-token-documents": 1}),
    ],
)
def test_planted_tokens_are_found(tmp_path: Path, tokenizer: Tokenizer, plant: Any, expected: dict[str, int]) -> None:
    tokenizer.specials[301] = "<planted>"
    try:
        assert rates(corpus(tmp_path / "c", plant(documents()), tokenizer)) == expected
    finally:
        del tokenizer.specials[301]


def test_examples_lead_to_the_defect(tmp_path: Path, tokenizer: Tokenizer) -> None:
    docs = documents()
    docs[11] = [5, 6, EOD, 7]
    report = validate(corpus(tmp_path / "c", docs, tokenizer), quiet=True)
    assert report.findings.by_code["separator-inside"].examples == ["s1, document 5, token 2"]


def test_negative_ids(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert rates(corpus(tmp_path / "c", [*documents(), [3, -2]], tokenizer, "<i4")) == {"outside-vocabulary": 1}


def damage_bit(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 4 * 2] ^= 1  # the low byte of a token: another valid one
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda c: damage_bit(c / "shards/s0.bin"), {"checksum"}),
        (lambda c: (c / "shards/s0.bin").unlink(), {"unreadable"}),
        (lambda c: (c / "shards/s0.idx").write_bytes(b"x" * 100), {"unreadable"}),
        (lambda c: (c / "shards/s0.bin").write_bytes((c / "shards/s0.bin").read_bytes()[:-4]), {"unreadable"}),
        (lambda c: (c / "shards/s0.idx").write_bytes((c / "shards/s0.idx").read_bytes()[:-9]), {"unreadable"}),
        (lambda c: (c / "shards/s0.bin").open("ab").write(b"xx"), {"manifest-mismatch", "checksum"}),
        (
            lambda c: shutil.copy(c / "shards/s1.bin", c / "shards/s0.bin"),
            {"manifest-mismatch", "checksum", "unreadable"},
        ),
        (lambda c: damage_bit(c / "tokenizer.json"), {"tokenizer", "unreadable"}),
        (lambda c: (c / "tokenizer.json").unlink(), {"unreadable"}),
    ],
)
def test_damaged_files_are_found(tmp_path: Path, tokenizer: Tokenizer, damage: Any, expected: set[str]) -> None:
    path = corpus(tmp_path / "c", documents(), tokenizer)
    damage(path)
    found = set(rates(path))
    assert found and found <= expected


def test_an_index_that_overlaps_is_found(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = corpus(tmp_path / "c", documents(), tokenizer)
    index = path / "shards/s0.idx"
    raw = bytearray(index.read_bytes())
    at = 34 + 100 * 4 + 5 * 8  # the sixth pointer
    raw[at : at + 8] = (0).to_bytes(8, "little")
    index.write_bytes(raw)
    assert set(rates(path)) == {"checksum", "index"}


def test_bare_megatron_shards_need_a_vocabulary(tmp_path: Path, tokenizer: Tokenizer, run_command: Run) -> None:
    path = corpus(tmp_path / "c", [[*d, EOD] for d in documents()], tokenizer)
    bare = tmp_path / "bare"
    shutil.copytree(path / "shards", bare)
    refused = run_command("data.cli", "validate", bare)
    assert refused.returncode == 78 and "--vocab-size" in refused.stderr
    found = run_command("data.cli", "validate", bare, "--vocab-size", 512, "--eod", 0, "--json")
    assert found.returncode == 2
    report = json.loads(found.stdout)["corpora"][0]
    assert [f["code"] for f in report["findings"]] == ["separator-at-end"]
    assert report["findings"][0]["rate"] == 1.0


def test_command_line(tmp_path: Path, tokenizer: Tokenizer, run_command: Run, shared_corpus: Path) -> None:
    clean = corpus(tmp_path / "clean", documents(), tokenizer)
    assert run_command("data.cli", "validate", clean).returncode == 0
    warned = run_command("data.cli", "validate", corpus(tmp_path / "w", [*documents(), []], tokenizer))
    assert warned.returncode == 1 and "WARNING empty-documents" in warned.stdout
    other = tmp_path / "other.json"
    other.write_text(tokenizer.path.read_text() + " ")
    wrong = run_command("data.cli", "validate", clean, "--tokenizer", other)
    assert wrong.returncode == 2 and "ERROR   tokenizer" in wrong.stdout and "remedy:" in wrong.stdout
    nothing = run_command("data.cli", "validate", tmp_path / "absent")
    assert nothing.returncode == 78 and "nothing to validate" in nothing.stderr


def test_against_a_configuration(tmp_path: Path, run_command: Run, lab: Any) -> None:
    assert run_command("data.cli", "validate", lab.corpus, "--against", lab.config()).returncode == 0
    small = lab.config("small", model={"vocab": 300})
    found = run_command("data.cli", "validate", lab.corpus, "--against", small, "--json")
    assert found.returncode == 2
    assert [f["code"] for f in json.loads(found.stdout)["corpora"][0]["findings"]] == ["vocabulary-too-small"]


def test_every_finding_has_a_remedy() -> None:
    for severity, meaning, remedy in CATALOGUE.values():
        assert severity in ("error", "warning") and meaning and remedy


def test_prepare_and_validate_run_without_torch(tmp_path: Path, shared_corpus: Path, helpers: Any) -> None:
    """With torch (and everything else the trainer alone needs) made unimportable."""
    blocker = "import sys\nfor m in ('torch','torchdata','lm_eval','aim','safetensors'): sys.modules[m] = None\n"
    for arguments in (
        [
            "prepare",
            shared_corpus / "train.jsonl",
            "--tokenizer",
            shared_corpus / "tokenizer",
            "--out",
            tmp_path / "c",
            "--workers",
            2,
        ],
        ["validate", tmp_path / "c"],
        ["inspect", tmp_path / "c"],
    ):
        argv = ["fsdp-data", *map(str, arguments)]
        code = f"{blocker}from data.cli import main\nsys.argv = {argv!r}\nif __name__ == '__main__': sys.exit(main())"
        script = tmp_path / "script.py"
        script.write_text(code)
        done = subprocess.run(
            [sys.executable, script], cwd="/", env=helpers.environment(), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
