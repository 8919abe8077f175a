"""A minute each of the soaks of `soak.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.shows("F50")
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["null", "faults"])
def test_soak(kind: str, tmp_path: Path) -> None:
    """Faults at random for a while; and the false alarms of a healthy run."""
    if kind == "faults" and os.geteuid():
        pytest.skip("mounting a tmpfs needs root")
    script = Path(__file__).with_name("soak.py")
    line = [sys.executable, str(script), kind, "--minutes", "1", "--seed", "1"]
    done = subprocess.run(line, capture_output=True, text=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stdout + done.stderr
