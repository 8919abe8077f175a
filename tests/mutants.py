"""Small changes of the product that the default suite must notice: how many of a sample do its tests kill?

    python tests/mutants.py                                12 changes of each subject, seed 1
    python tests/mutants.py --seed 7 --each 20 --only mirror evaluation
    python tests/mutants.py --only mirror --tests tests/test_mirror.py tests/test_mirror_damage.py
    python tests/mutants.py --seed 7 --list                only show the changes
    python tests/mutants.py --repeat 'data/packing/mixture.py::Mixture.source_of: < -> <='

A change swaps an operator, negates a condition, moves a number by one, or drops a statement. It is made in a copy of the
working tree. The default suite runs once, unchanged but for a note at the start of every function with a change of the
sample: which tests come by there, in any process. Then each change meets these tests, fast ones first and as many as
take `--budget` seconds, until one fails: that kills it. What no test comes by survives. Changes that change no behaviour are named, with the reason, in
`equivalent_mutants.toml`, and are not counted. Exit 0 if every subject reaches `--least` percent.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from xml.etree import ElementTree

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
EQUIVALENT = ROOT / "tests/equivalent_mutants.toml"
HANGS = 240
"""Seconds for one test; one that takes longer hangs, and is noticed."""


SUBJECTS = {
    "schedules": [
        *("fsdp_pretrain/config/schedule.py", "fsdp_pretrain/config/curves.py", "fsdp_pretrain/config/timeline.py"),
        *("fsdp_pretrain/config/steering.py", "fsdp_pretrain/config/live_set.py", "fsdp_pretrain/config/skips.py"),
        *("fsdp_pretrain/config/sequence_stages.py", "fsdp_pretrain/config/piecewise.py"),
    ],
    "models and training": [f"fsdp_pretrain/{package}/*.py" for package in ("models", "parallel", "train", "health")],
    "data": ["data/packing/*.py", "data/corpus/*.py", "data/fetch/*.py"],
    "checkpoint": ["fsdp_pretrain/checkpoint/*.py", "fsdp_pretrain/lineage/*.py"],
    "mirror": ["fsdp_pretrain/mirror/*.py", "fsdp_pretrain/train/mirroring.py"],
    "watchdog": ["fsdp_pretrain/watchdog/**/*.py"],
    "evaluation": ["eval/*.py"],
}
"""The files of each subject, as patterns."""


# ------------------------------------------------------------------- changes


@dataclass(frozen=True)
class Mutant:
    """One small change: text `[start, end)` of a file, in characters, becomes `text`."""

    name: str
    file: str
    start: int
    end: int
    text: str
    function: int
    """Where the body of its function begins, in characters."""

    def apply(self, root: Path) -> None:
        path = root / self.file
        content = path.read_text()
        path.write_text(content[: self.start] + self.text + content[self.end :])


_SWAPS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"), ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"), ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "//"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
}  # fmt: skip
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


class _Sites(ast.NodeVisitor):
    """Collects the changes of one file. Messages, docstrings and constants of modules and classes are left alone."""

    def __init__(self, file: str, content: str) -> None:
        self.file, self.content, self.scope = file, content, list[str]()
        self.found: list[Mutant] = []
        self._bodies = list[int]()
        self._statement = ""
        self._lines = content.splitlines(keepends=True)
        self._begins = [0, *itertools.accumulate(map(len, self._lines))]

    def at(self, line: int, column: int) -> int:
        """Place in the text, in characters, of a place that ast gives: lines from 1, columns in bytes."""
        return self._begins[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno or 0, node.end_col_offset or 0)

    def add(self, span: tuple[int, int], text: str, what: str) -> None:
        name = f"{self.file}::{'.'.join(self.scope)}: {what}"
        self.found.append(Mutant(name, self.file, *span, text, self._bodies[-1]))

    def swap(self, left: ast.expr, right: ast.expr, kind: type[ast.AST]) -> None:
        """Another operator between two operands."""
        start, end = self.span(left)[1], self.span(right)[0]
        symbol, other = _SWAPS.get(kind, ("", ""))
        at = start + self.content[start:end].find(symbol)
        if symbol and at >= start:
            self.add(
                (at, at + len(symbol)), other, f"{symbol} -> {other} in {self.short(left)} {symbol} {self.short(right)}"
            )

    def short(self, node: ast.AST) -> str:
        return " ".join(ast.unparse(node).split())[:70]

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            is_function = bool(body) and not isinstance(node, ast.ClassDef)
            self.scope.append(node.name)
            if is_function:
                self._bodies.append(self.span(body[0])[0])
            for statement in body:
                self.visit(statement)
            if is_function:
                self._bodies.pop()
            self.scope.pop()
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self._statement = self.short(node)
                self.visit(node.value)
        elif not isinstance(node, ast.Raise | ast.JoinedStr):
            if isinstance(node, ast.stmt):
                self._statement = self.short(node).partition(":")[0] if hasattr(node, "body") else self.short(node)
            if self._bodies:
                self.change(node)
            for child in ast.iter_child_nodes(node):
                self.visit(child)

    def change(self, node: ast.AST) -> None:
        """The changes of one node, in a function."""
        match node:
            case ast.Compare():
                for left, operator, right in zip(
                    [node.left, *node.comparators], node.ops, node.comparators, strict=False
                ):
                    self.swap(left, right, type(operator))
            case ast.BinOp() if not isinstance(node.left, ast.JoinedStr) and not isinstance(node.right, ast.JoinedStr):
                self.swap(node.left, node.right, type(node.op))
            case ast.BoolOp(values=[left, right]):
                self.swap(left, right, type(node.op))
            case ast.UnaryOp(op=ast.Not()):
                self.add((self.span(node)[0], self.span(node.operand)[0]), "", f"dropped not of {self.short(node)}")
            case ast.Constant(value=bool() | int() | float() as value):
                other = (
                    not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else 2 * value or 1.0
                )
                self.add(self.span(node), repr(other), f"{value} -> {other} in {self._statement}")
            case ast.Call(func=ast.Name(id=name)) if name in _NAMES:
                self.add(self.span(node.func), _NAMES[name], f"{name} -> {_NAMES[name]} in {self._statement}")
            case ast.If() | ast.IfExp():
                start, end = self.span(node.test)
                self.add((start, end), f"not ({self.content[start:end]})", f"if not {self.short(node.test)}")
            case ast.AugAssign() | ast.Expr(value=ast.Call()) if "print(" not in self._statement:
                self.add(self.span(node), "pass", f"dropped {self._statement}")
            case ast.Continue():
                self.add(self.span(node), "break", "break, not continue")
            case ast.Break():
                self.add(self.span(node), "continue", "continue, not break")
            case ast.Return(value=ast.Name() | ast.Attribute() | ast.Call() | ast.Subscript() as value):
                self.add(self.span(node), "return None", f"returned None, not {self.short(value)}")


def mutants_of(patterns: list[str]) -> list[Mutant]:
    """All changes of a subject; of several with the same name the first."""
    found: dict[str, Mutant] = {}
    for path in sorted({path for pattern in patterns for path in ROOT.glob(pattern)}):
        file = str(path.relative_to(ROOT))
        sites = _Sites(file, path.read_text())
        sites.visit(ast.parse(sites.content))
        for mutant in sites.found:
            found.setdefault(mutant.name, mutant)
    return list(found.values())


# ------------------------------------------------------------------- which tests come by

NOTE = "__import__('mutants').note({number})\n"


def note(number: int) -> None:
    """Called in the noted copy: the test that runs now came by here. `FILE::TEST` or, in a fixture, the test it is for."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if test and (number, test) not in _noted:
        _noted.add((number, test))
        with (ROOT / "came-by" / str(number)).open("a") as file:
            file.write(test + "\n")


_noted: set[tuple[int, str]] = set()


def add_notes(tree: Path, mutants: list[Mutant]) -> None:
    """Note who comes by the function of each change."""
    (tree / "came-by").mkdir()
    for file in {mutant.file for mutant in mutants}:
        content = (tree / file).read_text()
        at = {mutant.function for mutant in mutants if mutant.file == file}
        for start in sorted(at, reverse=True):
            number = next(i for i, mutant in enumerate(mutants) if (mutant.file, mutant.function) == (file, start))
            indent = content[content.rindex("\n", 0, start) + 1 : start]
            content = content[:start] + NOTE.format(number=number) + indent + content[start:]
        (tree / file).write_text(content)


def tests_by(tree: Path, mutants: list[Mutant], among: list[str], budget: float) -> dict[Mutant, list[str]]:
    """The tests that come by each change, fast ones first, as many as take `budget` seconds; `among` these files, if
    any are named."""
    add_notes(tree, mutants)
    report = tree / "came-by" / "report.xml"
    run(tree, ["-n3", "--dist=loadfile", "--no-loadscope-reorder", f"--junitxml={report}", *among], quiet=False)
    seconds = dict[str, float]()
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.get("classname", "").replace(".", "/") + ".py"
        seconds[f"{file}::{case.get('name')}"] = float(case.get("time", 0))
    first = {(mutant.file, mutant.function): number for number, mutant in reversed(list(enumerate(mutants)))}
    found = {}
    for mutant in mutants:
        path = tree / "came-by" / str(first[mutant.file, mutant.function])
        tests = sorted(
            set(path.read_text().splitlines()) if path.exists() else (), key=lambda test: seconds.get(test, 0)
        )
        spent = itertools.accumulate(seconds.get(test, 0) for test in tests)
        found[mutant] = [test for test, total in zip(tests, spent, strict=True) if total <= budget] or tests[:1]
    return found


# ------------------------------------------------------------------- running


def run(tree: Path, tests: list[str], *, quiet: bool = True) -> str:
    """How tests end in a tree: the first that fails, `error N`, or empty if all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider"]
    command += [f"--timeout={HANGS}"] if quiet else []
    with tempfile.TemporaryDirectory() as scratch:
        process = subprocess.Popen(
            [*command, f"--basetemp={scratch}/tests", "-m", "not slow and not gpu", *(["-x"] if quiet else []), *tests],
            cwd=tree, env={**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{tree / 'tests'}"},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE if quiet else None, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate()
        finally:
            subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=False)
            process.wait()
    if process.returncode == 0:
        return ""
    failed = [line for line in (output or "").splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0] if failed else f"error {process.returncode}"


def copies(number: int, parent: Path) -> Iterator[Path]:
    """Copies of the working tree: the files that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for index in range(number):
        tree = parent / str(index) / "tree"
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_symlink() or (ROOT / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)
        yield tree


def verdicts(mutants: list[Mutant], jobs: int, among: list[str], budget: float) -> Iterator[tuple[Mutant, int, str]]:
    """For each change how many tests come by, and which kills it."""
    with tempfile.TemporaryDirectory(prefix="mutants") as parent, ThreadPoolExecutor(jobs) as pool:
        noted, *others = copies(jobs + 1, Path(parent))
        tests = tests_by(noted, mutants, among, budget)
        free: SimpleQueue[Path] = SimpleQueue()
        for tree in others:
            free.put(tree)

        def judge(mutant: Mutant) -> tuple[Mutant, int, str]:
            if not tests[mutant]:
                return mutant, 0, ""
            tree = free.get()
            try:
                mutant.apply(tree)
                return mutant, len(tests[mutant]), run(tree, tests[mutant])
            finally:
                shutil.copy2(ROOT / mutant.file, tree / mutant.file)
                free.put(tree)

        yield from pool.map(judge, mutants)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--each", type=int, default=12, help="changes of each subject")
    parser.add_argument("--only", nargs="*", choices=list(SUBJECTS), default=list(SUBJECTS), metavar="SUBJECT")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--budget", type=float, default=200.0, help="seconds of tests for each change")
    parser.add_argument("--tests", nargs="*", default=[], metavar="FILE", help="only these, not the default suite")
    parser.add_argument("--least", type=float, default=75.0, help="percent of each subject")
    parser.add_argument("--list", action="store_true", help="show the sample, run nothing")
    parser.add_argument("--repeat", metavar="NAME", help="only this change")
    options = parser.parse_args()
    equivalent = tomllib.loads(EQUIVALENT.read_text())["equivalent"]
    sample = dict[str, list[Mutant]]()
    for subject in options.only:
        every = [mutant for mutant in mutants_of(SUBJECTS[subject]) if mutant.name not in equivalent]
        if options.repeat:
            sample[subject] = [mutant for mutant in every if mutant.name == options.repeat]
        else:
            chance = random.Random(f"{options.seed} {subject}")
            sample[subject] = chance.sample(every, min(options.each, len(every)))
        print(f"{subject}: {len(sample[subject])} of {len(every)} changes", flush=True)
    mutants = [mutant for chosen in sample.values() for mutant in chosen]
    if options.list:
        print(*(mutant.name for mutant in mutants), sep="\n")
        return 0
    survived = set[Mutant]()
    for mutant, tests, killer in tqdm(
        verdicts(mutants, options.jobs, options.tests, options.budget), total=len(mutants), unit="change"
    ):
        if not killer:
            survived.add(mutant)
        tqdm.write(f"{killer or 'SURVIVED'} ({tests} tests come by)\t{mutant.name}")
    poor = False
    for subject, chosen in sample.items():
        left = [mutant.name for mutant in chosen if mutant in survived]
        share = 100 * (1 - len(left) / len(chosen)) if chosen else 100.0
        poor |= share < options.least
        print(
            f"{subject}: {len(chosen) - len(left)} of {len(chosen)} killed ({share:.0f}%)", *left, sep="\n  survived "
        )
    return int(poor)


if __name__ == "__main__":
    sys.exit(main())
