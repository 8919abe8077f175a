"""The quickstart: nothing is made twice, nothing old is used for new, and its logs hold plain text."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import ROOT

UNCHANGED = "already there, unchanged"
SHORT = """
include = ["full.toml"]
train = { duration = "12 steps" }
optimizer = { warmup = "2 steps" }
checkpoint = { every = "4 steps" }
eval = { every = "12 steps", limit = 2, loss_every = "4 steps" }
record = { aim = false }
"""


def shortened(folder: Path) -> Path:
    """A copy of the checkout with a quickstart of 12 steps; returns its script."""
    for name in ("scripts", "fsdp_pretrain", "data", "eval", "configs", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    config = folder / "configs/runs/quickstart.toml"
    config.rename(config.with_name("full.toml"))
    config.write_text(SHORT)
    return folder / "scripts/quickstart.sh"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_quickstart_twice(tmp_path: Path, helpers: Any) -> None:
    """A short one, killed while it trains, finished, and started again: the last trains nothing."""
    script = shortened(tmp_path)
    environment = helpers.environment(INSTALL="no", RANKS="2", PYTHON=sys.executable, TERM="xterm")
    run = tmp_path / "runs/quickstart/run"

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(script)], env=environment, cwd="/", text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    first = start()
    assert first.stdout is not None
    for line in first.stdout:
        if "[checkpoint] step-00000004" in line:
            break
    os.killpg(first.pid, 9)
    first.wait()
    outputs = [start().communicate()[0]]
    assert UNCHANGED in outputs[0] and "[resume]" in outputs[0], outputs[0]
    outputs.append(start().communicate()[0])
    assert "step=" not in outputs[1], outputs[1]
    for output in outputs:
        assert "\x1b" not in output and f"  open        {run}/report.html\n" in output, output
    assert (run / "report.html").stat().st_size > 10_000 and len(list((run / "segments").iterdir())) == 3
    logs = [*run.glob("segments/*/log"), run / "evals/log", run / "CHRONICLE.md"]
    assert all(b"\x1b" not in path.read_bytes() for path in logs if path.exists())
    assert list(run.glob("evals/step-00000012/*/results.json"))
