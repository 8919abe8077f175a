"""Project structure: which package may import which, what runs without torch, and the effect of a name clash."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib.metadata
import itertools
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from processes import python

pytestmark = pytest.mark.quick
ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"fsdp_pretrain": "fsdp_pretrain", "data": "fsdp_pretrain.data", "eval": "fsdp_pretrain.eval"}
"""Top-level folders with code, and the packages they are imported as."""

TORCH_FREE = [
    "",
    *(f".{name}" for name in "cli config health launch lineage mirror run watchdog views".split()),
    *(f".data{name}" for name in ("", ".corpus", ".fetch", ".packing", ".prepare", ".text", ".validate")),
    *(f".views.{name}" for name in "report trackers watch".split()),
    *(f".watchdog.{name}" for name in "detectors hang notify".split()),
]
"""Packages that need no torch, but for two modules."""
NEED_TORCH = {"fsdp_pretrain.data.packing.batch", "fsdp_pretrain.data.packing.loader", "fsdp_pretrain.launch.doctor"}
TORCH_FREE_TOO = {"fsdp_pretrain.eval.compare", "fsdp_pretrain.eval.jobs", "fsdp_pretrain.checkpoint.store"}
HANDLERS = [
    *("fsdp_pretrain.data.cli", "fsdp_pretrain.cli.main"),
    *("fsdp_pretrain.cli.alarms", "fsdp_pretrain.cli.checkpoints", "fsdp_pretrain.cli.launch"),
    *("fsdp_pretrain.cli.lineage", "fsdp_pretrain.cli.steps", "fsdp_pretrain.cli.views"),
]
"""They import what they run; what needs torch they import by its name in a string."""


@functools.cache
def modules() -> dict[str, Path]:
    found = {}
    for folder, package in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = (package, *path.relative_to(ROOT / folder).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def tree(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text())


@functools.cache
def all_imports(module: str) -> set[str]:
    """Modules that a module imports, anywhere in its code; of other projects' `from` imports the module itself."""
    path, found = modules()[module], set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = (module if path.name == "__init__.py" else module.rpartition(".")[0]).split(".")
            anchor = above[: len(above) - node.level + 1] if node.level else []
            base = ".".join([*anchor, *([node.module] if node.module else [])])
            found |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules() else base for alias in node.names}
    return found


def imports(module: str) -> set[str]:
    """Those of this project."""
    return {name for name in all_imports(module) if name.partition(".")[0] == "fsdp_pretrain"}


def package(module: str) -> str:
    """The package of a module; a package is in itself. `python -m fsdp_pretrain.train` starts the job."""
    if module == "fsdp_pretrain.train.__main__":
        return "fsdp_pretrain.job"
    path = modules()[module]
    return module if path.name == "__init__.py" else module.rpartition(".")[0]


def floors_of_the_docs() -> dict[str, int]:
    """Floor of every package, from the table of docs/architecture.md; 0 is the ground."""
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE)
    return {name: int(floor) for floor, names in rows for name in re.findall(r"`([\w.]+)`", names)}


def test_imports_between_packages_point_down() -> None:
    """So there are no cycles. The floors are those of docs/architecture.md."""
    floors = floors_of_the_docs()
    assert set(floors) == {package(module) for module in modules()} and max(floors.values()) <= 8
    wrong = []
    for module in modules():
        for target in imports(module):
            if package(target) != package(module) and floors[package(target)] >= floors[package(module)]:
                wrong.append(f"{module} -> {target}")
    assert not wrong


def test_no_file_imports_one_that_imports_it() -> None:
    """Not even inside a function, or for its types only."""
    order = graphlib.TopologicalSorter({name: imports(name) - {name} for name in modules()}).static_order()
    assert {*order} == {*modules()}  # a circle raises CycleError, which names it


CORE = {
    f"fsdp_pretrain.{name}"
    for name in "data.corpus data.packing data.text config models parallel checkpoint train".split()
}


def test_the_core_imports_no_service() -> None:
    """What turns text into a trained, saved model: of the rest it knows the record's types."""
    known = CORE | {"fsdp_pretrain", "fsdp_pretrain.data", "fsdp_pretrain.run"}
    core = [name for name in modules() if package(name) in CORE]
    wrong = [f"{name} -> {target}" for name in core for target in imports(name) if package(target) not in known]
    assert not wrong


def test_data_knows_only_configuration_of_the_trainer() -> None:
    for name in modules():
        if name.startswith("fsdp_pretrain.data."):
            outside = {package(target) for target in imports(name) if not target.startswith("fsdp_pretrain.data")}
            assert outside <= {"fsdp_pretrain", "fsdp_pretrain.config"}, name


@functools.cache
def users() -> dict[str, set[str]]:
    """The modules that import each package of others, by its name."""
    found: dict[str, set[str]] = {}
    for module in modules():
        for name in {target.partition(".")[0] for target in all_imports(module)} - sys.stdlib_module_names:
            found.setdefault(name, set()).add(module)
    return found


def test_only_the_loader_uses_torch_in_data_and_torchdata_anywhere() -> None:
    assert users()["torchdata"] == {"fsdp_pretrain.data.packing.loader"}
    assert {name for name in users()["torch"] if name.startswith("fsdp_pretrain.data.")} == {
        "fsdp_pretrain.data.packing.batch",
        "fsdp_pretrain.data.packing.loader",
    }


COMES_WITH = {"pydantic_core": "pydantic", "botocore": "s3fs", "aiohttp": "s3fs", "datasets": "lm-eval"}
"""Packages that are imported and belong to a declared one."""
OPTIONAL = {"torchao", "transformers"}
"""Without them a choice of the configuration or of the benchmark is refused."""


def test_what_is_imported_is_installed_with_the_project() -> None:
    """A package that only another one happened to bring is gone with that one's next version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: lines for name, lines in project["optional-dependencies"].items() if name not in ("dev", "docs")}
    lines = [*project["dependencies"], *itertools.chain.from_iterable(extras.values())]
    declared = {re.match(r"[\w.-]+", line)[0].lower() for line in lines}  # type: ignore[index]
    known, missing = importlib.metadata.packages_distributions(), set()
    for name in users().keys() - OPTIONAL - {"fsdp_pretrain"}:
        sources = {COMES_WITH.get(name, source).lower().replace("_", "-") for source in known.get(name, [name])}
        if not sources & declared:
            missing.add(name)
    assert not missing


def test_the_versions_of_the_release_are_within_the_declared_ranges() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: lines for name, lines in project["optional-dependencies"].items() if name not in ("dev", "docs")}
    pinned = [line.partition(" ;")[0].split("==") for line in (ROOT / "constraints.txt").read_text().splitlines()]
    versions = {name: version for name, version, *_ in (line for line in pinned if len(line) == 2)}
    for line in [*project["dependencies"], *itertools.chain.from_iterable(extras.values())]:
        if (wanted := Requirement(line)).name != project["name"]:
            assert versions[canonicalize_name(wanted.name)] in wanted.specifier, line


@pytest.mark.promise("no-torch")
def test_torch_free_modules_do_not_import_torch() -> None:
    heavy = {"torch", "lm_eval", "aim", "tensorboard", "wandb"}
    free = {
        name
        for name in modules()
        if package(name).removeprefix("fsdp_pretrain") in TORCH_FREE and not name.endswith("__main__")
    } - NEED_TORCH
    used = sorted((free | TORCH_FREE_TOO).union(*(imports(name) for name in HANDLERS)))
    code = f"import sys\nfor m in {used!r}: __import__(m)\nassert not {heavy!r} & set(sys.modules)"
    python("-c", code)


def test_modules_called_data_and_eval_are_left_to_the_user(tmp_path: Path) -> None:
    for name in ("data", "eval"):
        (tmp_path / f"{name}.py").write_text("")
    code = "import data, eval, fsdp_pretrain.data.cli, fsdp_pretrain.eval.jobs; print(data.__file__)"
    assert python("-c", code, cwd=tmp_path).stdout.strip() == str(tmp_path / "data.py")


def test_only_gpu_tests_see_gpus() -> None:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_files_fit_a_head() -> None:
    long = {name: n for name, path in modules().items() if (n := path.read_text().count("\n")) > 520}
    assert not long


def test_what_a_name_does_not_say_a_docstring_does() -> None:
    """Every module and public class has a docstring; so does a public function of more than ten lines."""
    bare = []
    for name in modules():
        bare += [name] if tree(name).body and not ast.get_docstring(tree(name)) else []
        for node in ast.walk(tree(name)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                short = isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno < 10
                nested = node.col_offset > 4
                bare += [] if short or nested or ast.get_docstring(node) else [f"{name}.{node.name}"]
    assert not bare


@pytest.mark.parametrize(
    "arguments",
    [["fsdp_pretrain.data.cli", "inspect", "--help"], ["fsdp_pretrain.cli", "status", "/nowhere"]],
    ids=" ".join,
)
def test_forked_commands_are_those_of_a_user(arguments: list[str], run_command: Any) -> None:
    """What `run_command` gives is what a fresh Python gives."""
    real = python("-m", *arguments, expect=None)
    forked = run_command(*arguments)
    assert (forked.returncode, forked.stdout, forked.stderr) == (real.returncode, real.stdout, real.stderr)
