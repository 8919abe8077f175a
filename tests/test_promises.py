"""docs/promises.md lists what a user may rely on, and names exactly the tests that are marked to show it.

python tests/test_promises.py    # writes the names into the page
"""

from __future__ import annotations

import re

import pytest
from marked import by_row
from processes import ROOT

pytestmark = pytest.mark.quick
PAGE = ROOT / "docs/promises.md"
_ROW = re.compile(r"^\| ([a-z0-9-]+) \| (.*) \| (.*) \|$", re.MULTILINE)


def written(page: str) -> str:
    """The page with the names of the tests, those of the default suite first: as many as fit a cell."""
    tests = by_row("promise")

    def named(row: re.Match[str]) -> str:
        names = [str(test) for test in sorted(tests[row[1]], key=lambda test: test.slow)]
        while len(", ".join(names)) > 200:
            names.pop()
        return row[0] if row[1] == "promise" else f"| {row[1]} | {row[2]} | {', '.join(names) or '-'} |"

    return _ROW.sub(named, page)


def test_every_promise_is_shown() -> None:
    """By a test of the default suite, or one that needs a GPU; no test shows a promise that nobody gave."""
    page, tests = PAGE.read_text(), by_row("promise")
    promises = [row[1] for row in _ROW.finditer(page) if row[1] != "promise"]
    assert len(promises) == len(set(promises)) >= 40
    assert set(tests) == set(promises)
    assert page == written(page), "run python tests/test_promises.py"
    assert [name for name in promises if all(test.slow for test in tests[name])] == []


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
