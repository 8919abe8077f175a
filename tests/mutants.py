"""Small changes of the product that the default suite must notice: how many of a sample do its tests kill?

    python tests/mutants.py                                12 changes of each subject, seed 1
    python tests/mutants.py --seed 7 --each 20 --only mirror evaluation
    python tests/mutants.py --only mirror --tests tests/test_mirror.py tests/test_mirror_damage.py

A change swaps an operator, negates a condition, moves a number by one, or drops a statement. It is made in a copy of the
working tree. The default suite runs once, unchanged but for a note at the start of every function with a change of the
sample: which tests come by there, in any process. Then each change meets these tests, fast ones first and as many as
take `--budget` seconds, until one fails: that kills it. What no test comes by survives. Exit 0 if at least 75% of each
subject are killed.
"""

from __future__ import annotations

import argparse
import ast
import copy
import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
JOBS = 2
HANGS = 240  # seconds for one test; one that takes longer hangs, and is noticed
LEAST = 75  # percent of each subject

SUBJECTS = {
    "schedules": [
        *("fsdp_pretrain/config/schedule.py", "fsdp_pretrain/config/curves.py", "fsdp_pretrain/config/timeline.py"),
        *("fsdp_pretrain/config/live_set.py", "fsdp_pretrain/config/skips.py"),
        *("fsdp_pretrain/config/sequence_stages.py", "fsdp_pretrain/config/piecewise.py"),
    ],
    "models and training": [f"fsdp_pretrain/{package}/*.py" for package in ("models", "parallel", "train", "health")],
    "data": ["data/packing/*.py", "data/corpus/*.py", "data/fetch/*.py"],
    "checkpoint": ["fsdp_pretrain/checkpoint/*.py", "fsdp_pretrain/lineage/*.py"],
    "mirror": ["fsdp_pretrain/mirror/*.py", "fsdp_pretrain/job/mirroring.py"],
    "watchdog": ["fsdp_pretrain/watchdog/**/*.py"],
    "evaluation": ["eval/*.py"],
}
"""The files of each subject, as patterns."""


# ------------------------------------------------------------------- changes

_PAIRS = [
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn), (ast.Is, ast.IsNot)),
    *((ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.And, ast.Or)),
]
_SWAPS: dict[type[ast.AST], Any] = {
    **dict(_PAIRS), **{b: a for a, b in _PAIRS}, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv
}  # fmt: skip
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """One small change: the one with this number in its file, below the `def` in the line `function`."""

    file: str
    number: int
    name: str
    function: int

    @property
    def came_by(self) -> str:
        """The file with the names of the tests that come by the function."""
        return f"{self.file.replace('/', '.')}-{self.function}"


def _with(node: ast.AST, **fields: Any) -> ast.AST:
    """A copy with other fields."""
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def _others(node: ast.AST) -> Iterator[ast.AST]:
    """What a node may become."""
    match node:
        case ast.Compare(ops=ops):
            for place, old in enumerate(ops):
                yield _with(node, ops=[*ops[:place], _SWAPS[type(old)](), *ops[place + 1 :]])
        case ast.BinOp(op=old) | ast.BoolOp(op=old) if type(old) in _SWAPS:
            yield _with(node, op=_SWAPS[type(old)]())
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.Constant(value=bool() as value):
            yield _with(node, value=not value)
        case ast.Constant(value=int() | float() as value):
            yield _with(node, value=value + 1 if isinstance(value, int) else 2 * value or 1.0)
        case ast.Call(func=ast.Name(id=name)) if name in _NAMES:
            yield _with(node, func=ast.Name(_NAMES[name]))
        case ast.If() | ast.IfExp():
            yield _with(node, test=ast.UnaryOp(ast.Not(), node.test))
        case ast.Continue():
            yield ast.Break()
        case ast.Break():
            yield ast.Continue()
        case ast.AugAssign() | ast.Expr(value=ast.Call()):
            yield ast.Pass()
        case ast.Return(value=ast.Name() | ast.Attribute() | ast.Call() | ast.Subscript()):
            yield ast.Return(ast.Constant(None))


class _Changes(ast.NodeTransformer):
    """Finds the changes in the functions of a file, and makes the one with the number `make`. Messages, docstrings and
    defaults are left alone."""

    def __init__(self, file: str, make: int = -1) -> None:
        self.file, self.make, self.found = file, make, list[Mutant]()
        self._scope, self._functions = list[str](), list[int]()

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = [] if isinstance(node, ast.ClassDef) else [node.lineno]
            self._scope.append(node.name)
            self._functions += inside
            begin = ast.get_docstring(node) is not None
            node.body[begin:] = [self.visit(statement) for statement in node.body[begin:]]  # type: ignore[misc]
            del self._functions[len(self._functions) - len(inside) :]
            self._scope.pop()
        elif isinstance(node, ast.AnnAssign):
            node.value = node.value and self.visit(node.value)  # type: ignore[assignment]
        elif isinstance(node, ast.Module) or not self._functions:
            self.generic_visit(node)
        elif not isinstance(node, ast.Raise | ast.JoinedStr) and not ast.unparse(node).startswith("print("):
            mine = [(self._found(node, other), other) for other in _others(node)]
            self.generic_visit(node)
            return next((other for number, other in mine if number == self.make), node)
        return node

    def _found(self, node: ast.AST, other: ast.AST) -> int:
        old, new = (" ".join(ast.unparse(each).partition(":\n")[0].split())[:90] for each in (node, other))
        name = f"{self.file}:{getattr(node, 'lineno', 0)} {'.'.join(self._scope)}: {old} -> {new}"
        self.found.append(Mutant(self.file, len(self.found), name, self._functions[-1]))
        return len(self.found) - 1


def mutants_of(patterns: list[str]) -> list[Mutant]:
    """All changes of a subject."""
    found = []
    for path in sorted({path for pattern in patterns for path in ROOT.glob(pattern)}):
        changes = _Changes(str(path.relative_to(ROOT)))
        changes.visit(ast.parse(path.read_text()))
        found += changes.found
    return found


def make_change(tree: Path, mutant: Mutant) -> None:
    changed = _Changes(mutant.file, mutant.number).visit(ast.parse((ROOT / mutant.file).read_text()))
    (tree / mutant.file).write_text(ast.unparse(ast.fix_missing_locations(changed)))


# ------------------------------------------------------------------- which tests come by


def note(function: str) -> None:
    """Called in the noted copy: the test that runs now came by here. `FILE::TEST` or, in a fixture, the test it is for."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if test and (function, test) not in _noted:
        _noted.add((function, test))
        with (ROOT / "came-by" / function).open("a") as file:
            file.write(test + "\n")


_noted: set[tuple[str, str]] = set()


def add_notes(tree: Path, mutants: list[Mutant]) -> None:
    """Note who comes by the function of each change."""
    (tree / "came-by").mkdir()
    for file in {mutant.file for mutant in mutants}:
        functions = {mutant.function: mutant.came_by for mutant in mutants if mutant.file == file}
        module = ast.parse((tree / file).read_text())
        imports = (name.name for node in module.body if isinstance(node, ast.Import) for name in node.names)
        unless = "torch.compiler.is_compiling() or " if "torch" in imports else ""  # Dynamo cannot trace a note
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.lineno in functions:
                line = f"{unless}__import__('mutants').note({functions[node.lineno]!r})"
                node.body[ast.get_docstring(node) is not None : 0] = ast.parse(line).body
        (tree / file).write_text(ast.unparse(module))


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
    found = {}
    for mutant in mutants:
        path = tree / "came-by" / mutant.came_by
        names = set(path.read_text().splitlines()) if path.exists() else set[str]()
        tests = sorted(names, key=lambda test: seconds.get(test, 0))
        spent = itertools.accumulate(seconds.get(test, 0) for test in tests)
        found[mutant] = [test for test, total in zip(tests, spent, strict=True) if total <= budget] or tests[:1]
    return found


# ------------------------------------------------------------------- running


def run(tree: Path, tests: list[str], *, quiet: bool = True) -> str:
    """How tests end in a tree: the first that fails, `error N`, or empty if all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider"]
    command += ["-x", f"--timeout={HANGS}"] if quiet else []
    with tempfile.TemporaryDirectory() as scratch:
        process = subprocess.Popen(
            [*command, f"--basetemp={scratch}/tests", "-m", "not slow and not gpu", *tests],
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


def copy_to(tree: Path) -> Path:
    """Copy the working tree: the files that git tracks or would track."""
    tree.mkdir(parents=True)
    listed = "git ls-files -z --cached --others --exclude-standard | xargs -0 cp -a --parents"
    subprocess.run(f"{listed} -t {tree}", shell=True, cwd=ROOT, check=True)
    return tree


def verdicts(mutants: list[Mutant], among: list[str], budget: float) -> Iterator[tuple[Mutant, int, str]]:
    """For each change how many tests come by, and which kills it."""
    with tempfile.TemporaryDirectory(prefix="mutants") as parent, ThreadPoolExecutor(JOBS) as pool:
        tests = tests_by(copy_to(Path(parent) / "noted/tree"), mutants, among, budget)
        free: SimpleQueue[Path] = SimpleQueue()
        for job in range(JOBS):
            free.put(copy_to(Path(parent) / str(job) / "tree"))

        def judge(mutant: Mutant) -> tuple[Mutant, int, str]:
            tree = free.get()
            try:
                make_change(tree, mutant)
                return mutant, len(tests[mutant]), run(tree, tests[mutant]) if tests[mutant] else ""
            finally:
                shutil.copy2(ROOT / mutant.file, tree / mutant.file)
                free.put(tree)

        yield from pool.map(judge, mutants)


def main() -> int:
    from tqdm import tqdm  # not above: a test of what a process imports would see it in a noted one

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--each", type=int, default=12, help="changes of each subject")
    parser.add_argument("--only", nargs="*", choices=list(SUBJECTS), default=list(SUBJECTS), metavar="SUBJECT")
    parser.add_argument("--budget", type=float, default=200.0, help="seconds of tests for each change")
    parser.add_argument("--tests", nargs="*", default=[], metavar="FILE", help="only these, not the default suite")
    options = parser.parse_args()
    sample = dict[str, list[Mutant]]()
    for subject in options.only:
        every = mutants_of(SUBJECTS[subject])
        sample[subject] = random.Random(f"{options.seed} {subject}").sample(every, min(options.each, len(every)))
        print(f"{subject}: {len(sample[subject])} of {len(every)} changes", flush=True)
    mutants, survived = list(itertools.chain(*sample.values())), set[Mutant]()
    judged = verdicts(mutants, options.tests, options.budget)
    for mutant, tests, killer in tqdm(judged, total=len(mutants), unit="change"):
        survived |= set() if killer else {mutant}
        tqdm.write(f"{killer or 'SURVIVED'} ({tests} tests come by)\t{mutant.name}")
    shares = []
    for subject, chosen in sample.items():
        left = [mutant.name for mutant in chosen if mutant in survived]
        shares.append(100 * (1 - len(left) / len(chosen)))
        killed = f"{subject}: {len(chosen) - len(left)} of {len(chosen)} killed ({shares[-1]:.0f}%)"
        print(killed, *left, sep="\n  survived ")
    return int(min(shares) < LEAST)


if __name__ == "__main__":
    sys.exit(main())
