"""Damaged files, read by the commands that read such files; `python tests/fuzz.py` reads 4,000."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_damaged_file_crashes_a_reader_or_loses_documents(tmp_path: Path) -> None:
    line = [sys.executable, str(Path(__file__).with_name("fuzz.py")), "--cases", "300"]
    line += ["--workers", str(os.cpu_count() or 1)]
    done = subprocess.run(line, capture_output=True, text=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stdout + done.stderr
