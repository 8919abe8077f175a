"""The quickstart: nothing is made twice, nothing old is used for new, and its logs hold plain text."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import ROOT, Run

UNCHANGED = "already there, unchanged"


@pytest.mark.parametrize(
    ("change", "again"),
    [("nothing", False), ("option", True), ("text", True), ("result", True), ("code", True), ("interrupted", True)],
)
def test_a_tokenizer_is_trained_once(
    tmp_path: Path, shared_corpus: Path, run_command: Run, change: str, again: bool
) -> None:
    """The same command leaves the file as it is; whatever could change the result makes it again."""
    text = shutil.copy(shared_corpus / "train.jsonl", tmp_path / "text.jsonl")
    out, size = tmp_path / "out", 300

    def train() -> str:
        done = run_command("data.cli", "train-tokenizer", text, "--kind", "bpe", "--vocab-size", size, "--out", out)
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    assert UNCHANGED not in train()
    file, record = out / "tokenizer.json", out / "made.json"
    before = file.stat().st_ino
    match change:
        case "option":
            size = 301
        case "text":
            os.utime(text, ns=(1, 1))
        case "result":
            file.write_text(file.read_text() + " ")
            before = file.stat().st_ino
        case "code":
            made = json.loads(record.read_text())
            record.write_text(json.dumps({**made, "origin": {**made["origin"], "code": "another"}}))
        case "interrupted":
            record.unlink()
    assert (UNCHANGED not in train()) == again
    assert (file.stat().st_ino != before) == again
    assert UNCHANGED in train()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_quickstart_twice(tmp_path: Path, helpers: Any) -> None:
    """A short one, killed while it trains, finished, and started again: the last trains nothing."""
    for name in ("scripts", "fsdp_pretrain", "data", "eval", "configs", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    config = tmp_path / "configs/runs/quickstart.toml"
    text = config.read_text()
    for old, new in (
        ('duration = "300 steps"', 'duration = "12 steps"'),
        ('warmup = "20 steps"', 'warmup = "2 steps"'),
        ('loss_every = "50 steps"', 'loss_every = "4 steps"'),
        ('every = "50 steps"', 'every = "4 steps"'),
        ('every = "150 steps"', 'every = "12 steps"\nlimit = 2'),
        ("aim = true", "aim = false"),
    ):
        assert old in text
        text = text.replace(old, new)
    config.write_text(text)
    environment = helpers.environment(INSTALL="no", RANKS="2", PYTHON=sys.executable, TERM="xterm")
    run = tmp_path / "runs/quickstart/run"

    def start() -> subprocess.Popen[str]:
        script = ["bash", str(tmp_path / "scripts/quickstart.sh")]
        return subprocess.Popen(
            script, env=environment, cwd="/", text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip

    first = start()
    assert first.stdout is not None
    for line in first.stdout:
        if "[checkpoint] step-00000004" in line:
            break
    os.killpg(first.pid, 9)
    first.wait()
    outputs = [process.communicate()[0] for process in [start()] if process]
    assert UNCHANGED in outputs[0] and "[resume]" in outputs[0], outputs[0]
    outputs.append(start().communicate()[0])
    assert "step=" not in outputs[1], outputs[1]
    for output in outputs:
        assert "\x1b" not in output and f"complete: open {run}/report.html" in output, output
    assert (run / "report.html").stat().st_size > 10_000 and len(list((run / "segments").iterdir())) == 3
    logs = [*run.glob("segments/*/log"), run / "evals/log", run / "CHRONICLE.md"]
    assert all(b"\x1b" not in path.read_bytes() for path in logs if path.exists())
    assert list(run.glob("evals/step-00000012/*/results.json"))
