"""Pytest hooks that fail a test skipped without a reason in the machine: a test that nobody runs proves nothing."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Generator
from typing import Any

import pytest

MACHINE = (
    r"needs a CUDA device|needs Chromium|needs? root|aim has no release for this Python|this is not a checkout|needs tmux"
    r"|slurm-wlm is not installed"
)
PACKAGES = r"could not import|is an optional extra|the project is not installed here"
"""Further allowed reasons, unless all packages are installed: `TEST_PACKAGES=all`, which `scripts/test.sh` sets."""

needs_aim = pytest.mark.skipif(
    importlib.util.find_spec("aim") is None,
    reason="aim is an optional extra" if sys.version_info < (3, 13) else "aim has no release for this Python",
)


def judge(report: Any) -> Any:
    """The report, turned into a failure if it is of a skip without a good reason."""
    if report.skipped and isinstance(report.longrepr, tuple) and not hasattr(report, "wasxfail"):
        accepted = MACHINE if os.environ.get("TEST_PACKAGES") == "all" else f"{MACHINE}|{PACKAGES}"
        path, line, reason = report.longrepr
        if not re.search(accepted, reason):
            report.outcome, report.longrepr = "failed", f"{path}:{line}: no fact of this machine: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    """Of a test."""
    return judge((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    """Of a module."""
    return judge((yield))
