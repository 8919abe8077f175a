"""Which tests are marked to show a row of a page: `@pytest.mark.shows("A4")`, `@pytest.mark.promise("exact-loss")`."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from processes import ROOT


@dataclass(frozen=True)
class Marked:
    """A test with such a mark, in the file `file` below `tests/`."""

    file: str
    name: str
    rows: tuple[str, ...]
    slow: bool

    def __str__(self) -> str:
        return f"`{self.file}::{self.name}`" + " (slow)" * self.slow


@functools.cache
def functions() -> list[tuple[str, ast.FunctionDef]]:
    """(file, function) of all tests, in the order of files."""
    files = sorted(Path(ROOT / "tests").rglob("test_*.py"))
    nodes = [
        (str(path.relative_to(ROOT / "tests")), node) for path in files for node in ast.parse(path.read_text()).body
    ]
    return [(file, node) for file, node in nodes if isinstance(node, ast.FunctionDef)]


def marked(mark: str) -> list[Marked]:
    """The marked tests, in the order of files."""
    found = []
    for file, node in functions():
        marks = {ast.unparse(getattr(each, "func", each)): each for each in node.decorator_list}
        named = marks.get(f"pytest.mark.{mark}")
        if isinstance(named, ast.Call):
            rows = tuple(ast.literal_eval(row) for row in named.args)
            found.append(Marked(file, node.name, rows, "pytest.mark.slow" in marks))
    return found


def by_row(mark: str) -> dict[str, list[Marked]]:
    """The marked tests of each row; a row without tests has none."""
    tests = defaultdict[str, list[Marked]](list)
    for test in marked(mark):
        for row in test.rows:
            tests[row].append(test)
    return tests
