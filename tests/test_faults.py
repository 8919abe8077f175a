"""docs/faults.md names for every fault exactly the tests that show it; their docstrings say "Fault matrix N".

python tests/test_faults.py    # rewrites the names in the page
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick
ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/faults.md"
ROWS = 51
_ROW = re.compile(r"^\| (\d+) \|(.*)\|([^|]*)\|$", re.MULTILINE)
_SHOWS = re.compile(r"Fault matrix (\d+(?:(?:,? and|,) \d+)*)")


def shown() -> dict[int, list[str]]:
    """The tests that show a fault, by its number."""
    found = defaultdict(list)
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            slow = any(ast.unparse(mark) == "pytest.mark.slow" for mark in node.decorator_list)
            matches = _SHOWS.findall(" ".join((ast.get_docstring(node) or "").split()))
            for number in {int(number) for numbers in matches for number in re.findall(r"\d+", numbers)}:
                found[number].append(f"`{path.stem}::{node.name}`" + " (slow)" * slow)
    return found


def written(page: str) -> str:
    """The page with the correct last column."""
    tests = shown()
    return _ROW.sub(lambda row: f"| {row[1]} |{row[2]}| {', '.join(tests.get(int(row[1]), ['to come']))} |", page)


def test_every_fault_names_the_tests_that_show_it() -> None:
    page = PAGE.read_text()
    assert [int(row[1]) for row in _ROW.finditer(page)] == list(range(1, ROWS + 1))
    assert set(shown()) <= set(range(1, ROWS + 1))
    assert page == written(page), "run python tests/test_faults.py"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
