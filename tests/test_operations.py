"""docs/operations.md answers every row of its catalogue, and names exactly the tests that are marked to show it.

python tests/test_operations.py    # writes the names and the numbers into the page
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from marked import Marked, by_row, marked
from processes import ROOT

pytestmark = pytest.mark.quick
PAGE = ROOT / "docs/operations.md"
COUNTS = {"A": 35, "B": 24, "C": 6, "D": 25, "F": 53}
"""Rows of each table."""
_ROW = re.compile(r"^\| ([A-F]\d+) \| (.*) \| (.*) \| (.*) \|$", re.MULTILINE)
_SUMMARY = re.compile(r"\d+ are shown by tests \(.*?not supported\.", re.DOTALL)


def written(page: str) -> str:
    """The page with the right tests and numbers."""
    tests = by_row("shows")
    page = _ROW.sub(lambda row: f"| {row[1]} | {row[2]} | {row[3]} | {_names(tests[row[1]])} |", page)
    rows = [row for row in _ROW.finditer(page) if row[1][0] != "F"]
    shown = [tests[row[1]] for row in rows if tests[row[1]]]
    default = sum(any(not test.slow for test in each) for each in shown)
    refused = sum(row[3].startswith("Not supported, because ") for row in rows if not tests[row[1]])
    summary = (
        f"{len(shown)} are shown by tests ({default} of them by tests of the\ndefault suite), "
        f"{len(rows) - len(shown) - refused} answered by a command, {refused} not supported."
    )
    return _SUMMARY.sub(summary, page)


def _names(tests: list[Marked]) -> str:
    """Two of them at most, those of the default suite first."""
    return ", ".join(map(str, sorted(tests, key=lambda test: test.slow)[:2])) or "-"


def test_every_row_is_answered() -> None:
    """By tests that are marked for it, by a command, or by why not; each exactly once."""
    page = PAGE.read_text()
    rows = list(_ROW.finditer(page))
    assert [row[1] for row in rows] == [f"{table}{n + 1}" for table, count in COUNTS.items() for n in range(count)]
    assert {row for test in marked("shows") for row in test.rows} <= {row[1] for row in rows}
    assert page == written(page), "run python tests/test_operations.py"
    for row in rows:
        refused = row[3].startswith("Not supported, because ")
        assert (row[4] == "-") or not refused, f"{row[1]} has tests"
        assert row[4] != "-" or refused or "`fsdp-" in row[3], f"{row[1]} has no answer"


def test_what_is_marked_is_collected(request: pytest.FixtureRequest, collected: set[tuple[Any, ...]]) -> None:
    """In the files of this session, pytest finds the marks that the page was written from, on tests that it runs."""
    if not any("::" in argument for argument in request.config.args):
        files = {file for file, _, _ in collected}
        expected = {(test.file, test.name, test.rows) for test in marked("shows") if test.file in files}
        assert {each for each in collected if each[2]} == expected


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
