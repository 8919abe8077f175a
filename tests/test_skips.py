"""A skip that the machine does not explain is a failure; see `skips.py`."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("content", "packages", "code"),
    [
        (skips("mounting a tmpfs needs root"), "all", 0),
        (skips("needs a CUDA device"), "all", 0),
        (skips("it is flaky"), "some", 1),
        (MODULE, "some", 5),  # no tests
        (MODULE, "all", 2),  # an error
    ],
    ids=["root", "gpu", "flaky", "package", "package missing although all are installed"],
)
def test_a_skip_needs_a_reason(tmp_path: Path, helpers: Any, content: str, packages: str, code: int) -> None:
    (tmp_path / "test_it.py").write_text(content)
    environment = helpers.environment(PYTHONPATH=helpers.python_path(helpers.root / "tests"), TEST_PACKAGES=packages)
    line = [sys.executable, "-m", "pytest", "-p", "skips", "-q", "test_it.py"]
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    assert ("no fact of this machine" in done.stdout) is (code in (1, 2))
