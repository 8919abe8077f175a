"""Installing from nothing, with pip and an empty home; and doing without an installation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import ROOT


@pytest.fixture
def carried(helpers: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment whose Python has nothing installed; packages come from PYTHONPATH alone."""
    folders = [*(path for path in sys.path if path.endswith("-packages")), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))
    environment: dict[str, str] = helpers.environment(
        PATH="/usr/bin:/bin", PYTHON=str(sys._base_executable), INSTALL="no", CUDA_VISIBLE_DEVICES=""
    )
    return environment


def test_scripts_without_an_installation(carried: dict[str, str], tmp_path: Path) -> None:
    for name in ("scripts", "fsdp_pretrain", "data", "eval"):
        (tmp_path / name).symlink_to(ROOT / name)
    line = ". scripts/environment.sh dev && fsdp-data --help && fsdp-pretrain --help && fsdp-eval --help"
    script = ["bash", "-c", line]
    done = subprocess.run(script, env=carried, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("usage:") == 3, done.stderr
    assert not (tmp_path / ".venv").exists()


@pytest.mark.slow
@pytest.mark.promise("no-torch")
def test_data_tools_in_an_environment_without_torch(tmp_path: Path) -> None:
    """`pip install .` alone, not editable, from a copy: from text to a validated corpus."""
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
        return done.stdout + done.stderr

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
    run("fsdp-pretrain", "init", "--minimal", "mine")
    refused = run("fsdp-pretrain", "plan", "mine/run.toml", expect=78)
    assert "remedy: pip install 'fsdp-pretrain[train]'" in refused
