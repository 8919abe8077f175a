"""docs/operations.md answers every published incident, and names one of the tests that are marked to show it.

python tests/test_operations.py    # writes the names and the numbers into the page
"""

from __future__ import annotations

import re

import pytest
from marked import by_row
from processes import ROOT

pytestmark = pytest.mark.quick
PAGE = ROOT / "docs/operations.md"
COUNTS = {"A": 35, "B": 24, "C": 6, "D": 25, "F": 54}
"""Incidents of each table; a row may have several."""
_ROW = re.compile(r"^\| ([A-F]\d+(?:, [A-F]\d+)*) \| (.*) \| (.*) \| (.*) \|$", re.MULTILINE)
_SUMMARY = re.compile(r"\d+ are shown by tests \(.*?not supported\.", re.DOTALL)


def written(page: str) -> str:
    """The page with the right tests and numbers."""
    tests = by_row("shows")

    def named(row: re.Match[str]) -> str:
        """One of the default suite, if there is one."""
        found = sorted((test for each in row[1].split(", ") for test in tests[each]), key=lambda test: test.slow)
        return f"| {row[1]} | {row[2]} | {row[3]} | {found[0] if found else '-'} |"

    page = _ROW.sub(named, page)
    rows = {each: row for row in _ROW.finditer(page) for each in row[1].split(", ") if each[0] != "F"}
    shown = [tests[each] for each in rows if tests[each]]
    default = sum(any(not test.slow for test in each) for each in shown)
    refused = sum(row[3].startswith("Not supported, because ") for each, row in rows.items() if not tests[each])
    summary = (
        f"{len(shown)} are shown by tests ({default} of them by tests of the\ndefault suite), "
        f"{len(rows) - len(shown) - refused} answered by a command, {refused} not supported."
    )
    return _SUMMARY.sub(summary, page)


def test_every_row_is_answered() -> None:
    """By tests that are marked for it, by a command, or by why not; each incident exactly once."""
    page, tests = PAGE.read_text(), by_row("shows")
    rows = {each: row for row in _ROW.finditer(page) for each in row[1].split(", ")}
    assert sorted(rows) == sorted(f"{table}{n + 1}" for table, count in COUNTS.items() for n in range(count))
    assert set(tests) <= set(rows)
    assert page == written(page), "run python tests/test_operations.py"
    for each, row in rows.items():
        refused = row[3].startswith("Not supported, because ")
        assert not tests[each] or not refused, f"{each} has tests"
        assert tests[each] or refused or "`fsdp-" in row[3], f"{each} has no answer"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
