"""Random operations on tiny runs beside twins; see `sequences.py`.

`SEQUENCES=1000 FIRST_SEQUENCE=300 python -m pytest tests/test_sequences.py -m slow -s` goes on with others.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from typing import Any

import pytest
from processes import Run
from sequences import RandomSequence


def play(lab: Any, run_command: Run, seeds: range) -> Counter[str]:
    figures = Counter[str]()
    for seed in seeds:
        RandomSequence(lab, run_command, seed, figures).play()
        for path in lab.path.iterdir():
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else None
        print(f"{seed}: {figures}", flush=True)
    return figures


@pytest.mark.promise("live-changes")
def test_a_run_that_was_operated_on_is_the_one_that_was_planned(lab: Any, run_command: Run) -> None:
    """A sample of the next test."""
    assert play(lab, run_command, range(3))["steps"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_so_are_others(lab: Any, run_command: Run) -> None:
    """Losses, gradient norms, rates and batches of the kept line, and every replay: equal to the bit. Others than those
    of the test before."""
    first = int(os.environ.get("FIRST_SEQUENCE", "3"))
    figures = play(lab, run_command, range(first, first + int(os.environ.get("SEQUENCES", "9"))))
    assert figures["replays"] and figures["rollbacks"] and figures["forks"]
