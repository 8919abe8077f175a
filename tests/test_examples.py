"""The scripts in `examples/`, on real engines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from object_store import ObjectStore
from processes import Run, clean_environment

from data.corpus.manifest import parse_manifest, read_manifest


@pytest.mark.slow
def test_dask_makes_the_corpus_of_one_machine(
    tmp_path: Path, shared_corpus: Path, object_store: ObjectStore, run_command: Run, helpers: Any
) -> None:
    pytest.importorskip("distributed")
    texts, tokenizer = shared_corpus / "train.jsonl", shared_corpus / "tokenizer"
    size = ("--shard-size", "40KB", "--workers", "1")
    done = run_command("data.cli", "prepare", texts, "--tokenizer", tokenizer, "--out", tmp_path / "local", *size)
    assert done.returncode == 0, done.stderr
    object_store.put("text/train.jsonl", texts.read_bytes())
    script = [sys.executable, str(helpers.root / "examples/prepare_on_dask.py"), "--parts", "3", "--"]

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*script, *map(str, arguments), *size],
            env=clean_environment(DASK_DISTRIBUTED__WORKER__MEMORY__TERMINATE="false"),
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )

    url = object_store.url
    made = run(url / "text/*.jsonl", "--tokenizer", tokenizer, "--out", url / "out")
    assert made.returncode == 0, made.stdout + made.stderr
    assert "3 of 3" in made.stdout and made.stdout.count("shards of other parts are still missing") < 3
    manifest = parse_manifest(object_store.get("out/manifest.json"), "out")
    assert manifest.fingerprint == read_manifest(tmp_path / "local").fingerprint
    refused = run(url / "absent/*.jsonl", "--tokenizer", tokenizer, "--out", url / "other")
    assert refused.returncode == 78 and "there is no input" in refused.stdout
