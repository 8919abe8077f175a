"""Installing from nothing, with pip and an empty home."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_data_tools_in_an_environment_without_torch(tmp_path: Path) -> None:
    """`pip install .` alone, not editable, from a copy: the whole way from text to a validated corpus."""
    source, home = tmp_path / "source", tmp_path / "home"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(source)], check=True)
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    tools = tmp_path / "venv/bin"
    subprocess.run([tools / "pip", "install", "-q", "--no-input", str(source)], check=True)
    home.mkdir()

    def run(*arguments: str, expect: int = 0) -> str:
        environment = {"PATH": f"{tools}:/usr/bin:/bin", "HOME": str(home)}
        done = subprocess.run(arguments, env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == expect, done.stderr
        return done.stdout

    installed = run("pip", "list").split()
    assert "fsdp-pretrain" in installed and not {"torch", "aim", "lm_eval", "lm-eval"} & set(installed)
    run("fsdp-data", "quickstart-corpus", "--out", "text")
    for kind in ("bpe", "sentencepiece"):
        run(
            *("fsdp-data", "train-tokenizer", "text/heldout.jsonl", "--kind", kind),
            *("--vocab-size", "600", "--out", f"tokenizer-{kind}"),
        )
        run("fsdp-data", "prepare", "text/heldout.jsonl", "--tokenizer", f"tokenizer-{kind}", "--out", kind)
        run("fsdp-data", "validate", kind, "--tokenizer", f"tokenizer-{kind}")
    assert "corpus of" in run("fsdp-data", "bench", "bpe", "--seconds", "0.1", "--sequence-length", "64")
    assert "plan" in run("fsdp-pretrain", "--help")
