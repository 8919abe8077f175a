"""A skip that the machine does not explain is a failure; see `skips.py`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.quick
MODULE = "import pytest\npytest.importorskip('no_such_package')\n"


def skips(reason: str) -> str:
    """A test that is skipped for a reason."""
    return f"import pytest\n@pytest.mark.skipif(True, reason={reason!r})\ndef test_it(): pass\n"


FILES = {
    "root": skips("mounting a tmpfs needs root"),
    "gpu": skips("needs a CUDA device"),
    "flaky": skips("it is flaky"),
    "package": MODULE,
}


@pytest.mark.parametrize(("packages", "wrong"), [("some", {"flaky"}), ("all", {"flaky", "package"})])
def test_a_skip_needs_a_reason(tmp_path: Path, helpers: Any, packages: str, wrong: set[str]) -> None:
    for name, content in FILES.items():
        (tmp_path / f"test_{name}.py").write_text(content)
    environment = helpers.environment(PYTHONPATH=helpers.python_path(helpers.root / "tests"), TEST_PACKAGES=packages)
    line = [sys.executable, "-m", "pytest", "-p", "skips", "-q", "--continue-on-collection-errors", "-rfEs"]
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True)
    told = {
        re.search(r"test_(\w+)\.py", text)[1] for text in done.stdout.splitlines() if re.match("(FAILED|ERROR) ", text)
    }  # type: ignore[index]
    assert told == wrong and done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.count("no fact of this machine") >= len(wrong)
