"""The house: which module may import which, what runs without torch, and what a clash of names does."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.quick
ROOT = Path(__file__).resolve().parent.parent

# Level by level: a module may import modules of lower levels, and of its own level where listed in SIDEWAYS.
LEVELS = [
    [
        "fsdp_pretrain.errors",
        "fsdp_pretrain.units",
        "fsdp_pretrain.section",
        "fsdp_pretrain.severity",
        "fsdp_pretrain.child_process",
        "fsdp_pretrain.deadline",
        "fsdp_pretrain.atomic",
        "fsdp_pretrain.statistics",
    ],
    ["fsdp_pretrain.notify_sections"],
    [
        "fsdp_pretrain.schedule",
        "fsdp_pretrain.sections",
        "fsdp_pretrain.model_sections",
        "fsdp_pretrain.watchdog_sections",
        "fsdp_pretrain.console",
        "fsdp_pretrain.config_file",
    ],
    ["fsdp_pretrain.config"],
    ["fsdp_pretrain.changes"],
    [
        "data.splitting",
        "fsdp_pretrain.config_reference",
        "fsdp_pretrain.record",
        "data.mapping",
        "data.hashing",
        "data.shards",
        "data.reading",
        "data.tokenizer",
        "data.files",
    ],
    [
        "fsdp_pretrain.checkpoint.space",
        "data.inputs",
        "fsdp_pretrain.checkpoint.manifest",
        "fsdp_pretrain.checkpoint.store",
        "fsdp_pretrain.checkpoint.stores",
        "fsdp_pretrain.arguments",
        "fsdp_pretrain.control",
        "fsdp_pretrain.watchdog",
        "data.corpus",
        "data.mixture",
        "data.skip",
        "data.position",
        "data.quickstart",
    ],
    ["fsdp_pretrain.checkpoint.stores", "fsdp_pretrain.checkpoint.expected", "fsdp_pretrain.checkpoint.upcoming"],
    [
        "fsdp_pretrain.status",
        "fsdp_pretrain.watchdog.looks",
        "fsdp_pretrain.watchdog.checkpoints",
        "fsdp_pretrain.watchdog.storage",
        "fsdp_pretrain.watchdog.sensors",
        "data.unigrams",
        "data.source",
        "data.pairs",
        "data.packer",
        "data.objectives",
        "data.jobs",
        "data.formats",
    ],
    ["fsdp_pretrain.watchdog.leader", "fsdp_pretrain.watchdog.agent"],
    ["data.documents", "data.findings", "data.measure", "data.meter", "data.report", "data.totals", "data.validate"],
    [
        "data.bench",
        "data.prepare",
        "data.adopt",
        "data.simulate",
        "data.opening",
        "fsdp_pretrain.state",
        "fsdp_pretrain.overrides",
        "data.train_tokenizer",
        "fsdp_pretrain.health_rules",
        "data.loader",
        "fsdp_pretrain.models",
        "fsdp_pretrain.mesh",
        "fsdp_pretrain.throughput",
        "fsdp_pretrain.marks",
    ],
    [
        "data.cli",
        "fsdp_pretrain.where",
        "fsdp_pretrain.branch",
        "fsdp_pretrain.parallel",
        "fsdp_pretrain.optim",
        "fsdp_pretrain.replicas",
        "fsdp_pretrain.health",
        "fsdp_pretrain.advice",
        "fsdp_pretrain.environment",
    ],
    ["fsdp_pretrain.memory"],
    ["fsdp_pretrain.plan"],
    ["fsdp_pretrain.checkpoint", "fsdp_pretrain.rollback", "fsdp_pretrain.fork"],
    [
        *("fsdp_pretrain.saves", "fsdp_pretrain.launch", "fsdp_pretrain.own_time", "fsdp_pretrain.run_context"),
        *("fsdp_pretrain.step_records", "fsdp_pretrain.step_sums", "fsdp_pretrain.step_clock"),
        *(
            "fsdp_pretrain.health_journal",
            "fsdp_pretrain.ending",
            "fsdp_pretrain.health_memory",
            "fsdp_pretrain.retreat",
        ),
    ],
    ["fsdp_pretrain.trainer", "fsdp_pretrain.starting", "fsdp_pretrain.checkpoints_cli", "fsdp_pretrain.alarms_cli"],
    ["fsdp_pretrain.cli"],
    ["eval", "fsdp_pretrain.bench_saves", "fsdp_pretrain.bench_watchdog"],
    ["fsdp_pretrain.train", "fsdp_pretrain.bench", "fsdp_pretrain.doctor"],
]
TORCH_FREE = [
    "fsdp_pretrain.cli",
    "fsdp_pretrain.status",
    "fsdp_pretrain.where",
    "fsdp_pretrain.rollback",
    "fsdp_pretrain.retreat",
    "fsdp_pretrain.fork",
    "fsdp_pretrain.launch.command",
    "fsdp_pretrain.config_reference",
    "fsdp_pretrain.checkpoint.store",
    "fsdp_pretrain.record.aim",
    "fsdp_pretrain.record.goodput",
    "fsdp_pretrain.record.recorder",
    "fsdp_pretrain.watchdog.agent",
    "fsdp_pretrain.watchdog.heart",
    "fsdp_pretrain.watchdog.detector",
    "fsdp_pretrain.watchdog.notify",
    "fsdp_pretrain.watchdog.exporter",
    "fsdp_pretrain.watchdog.looks",
    "fsdp_pretrain.watchdog.nvml",
    "fsdp_pretrain.watchdog.sensors",
    "data.cli",
    "data.packer",
    "data.validate",
    "eval.jobs",
]


def modules() -> dict[str, Path]:
    found = {}
    for package in ("fsdp_pretrain", "data", "eval"):
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def level_of(module: str) -> int | None:
    """The level of the longest listed prefix."""
    named = [
        (len(name), level)
        for level, names in enumerate(LEVELS)
        for name in names
        if (module + ".").startswith(name + ".")
    ]
    return max(named)[1] if named else None


def imports(module: str, path: Path) -> set[str]:
    """Modules of this project that a file imports, at any depth of its code."""
    found = set()
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1])
                base = f"{anchor}.{base}" if base else anchor
            found |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules() else base for alias in node.names}
    return {name for name in found if name.partition(".")[0] in ("fsdp_pretrain", "data", "eval")}


def test_every_module_has_a_level() -> None:
    unplaced = [name for name in modules() if level_of(name) is None and name not in ("fsdp_pretrain", "data", "eval")]
    assert not unplaced


def test_arrows_point_down() -> None:
    wrong = []
    for module, path in modules().items():
        if module in ("fsdp_pretrain", "data", "eval"):
            continue
        for target in imports(module, path) - {"fsdp_pretrain"}:
            related = module.rpartition(".")[0] == target.rpartition(".")[0] or target.startswith(module + ".")
            if not (related and level_of(module) == level_of(target)) and level_of(target) >= level_of(module):
                wrong.append(f"{module} -> {target}")
    assert not wrong


def test_nothing_imports_the_composition_roots() -> None:
    roots = {"fsdp_pretrain.train", "fsdp_pretrain.bench", "fsdp_pretrain.doctor"}
    assert not [name for name, path in modules().items() if imports(name, path) & roots]


def test_data_knows_only_configuration_of_the_trainer() -> None:
    allowed = {
        f"fsdp_pretrain.{name}"
        for name in (
            "atomic",
            "config",
            "deadline",
            "statistics",
            "section",
            "sections",
            "model_sections",
            "schedule",
            "errors",
            "units",
            "console",
        )
    }
    for name, path in modules().items():
        if name.startswith("data."):
            outside = {target for target in imports(name, path) if target.startswith("fsdp_pretrain")}
            assert outside <= allowed, name


def test_only_the_loader_uses_torch_in_data_and_torchdata_anywhere() -> None:
    users: dict[str, set[str]] = {"torch": set(), "torchdata": set()}
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            targets = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                targets = [node.module or ""]
            for target in targets:
                if target.partition(".")[0] in users:
                    users[target.partition(".")[0]].add(name)
    assert users["torchdata"] == {"data.loader"}
    assert {name for name in users["torch"] if name.startswith("data.")} == {"data.loader"}


def test_packages_with_common_names_are_empty() -> None:
    assert (ROOT / "data/__init__.py").read_text() == ""
    assert (ROOT / "eval/__init__.py").read_text() == ""
    assert not (ROOT / "tests/__init__.py").exists()


def test_torch_free_modules_do_not_import_torch(helpers: Any) -> None:
    heavy = {"torch", "lm_eval", "aim"}
    code = f"import sys\nfor m in {TORCH_FREE!r}: __import__(m)\nassert not {heavy!r} & set(sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd="/", env=helpers.environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("intruder", ["data.py", "data/packer_of_another.py", "eval.py"])
def test_a_foreign_package_of_the_same_name_is_named(tmp_path: Path, helpers: Any, intruder: str) -> None:
    (tmp_path / intruder).parent.mkdir(exist_ok=True)
    (tmp_path / intruder).write_text("")
    if "/" in intruder:
        (tmp_path / "data/__init__.py").write_text("")
    environment = helpers.environment(PYTHONPATH=helpers.python_path(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", "import fsdp_pretrain"], env=environment, cwd="/", capture_output=True, text=True
    )
    assert done.returncode == 1
    assert str(tmp_path) in done.stderr and "PYTHONSAFEPATH" in done.stderr


def test_the_guard_does_not_mind_a_folder_called_data(tmp_path: Path, helpers: Any) -> None:
    (tmp_path / "data").mkdir()
    environment = helpers.environment(PYTHONSAFEPATH="")
    done = subprocess.run([sys.executable, "-c", "import fsdp_pretrain"], env=environment, cwd=tmp_path)
    assert done.returncode == 0


def test_files_fit_a_head() -> None:
    long = {name: n for name, path in modules().items() if (n := path.read_text().count("\n")) > 520}
    assert not long


def test_what_a_name_does_not_say_a_docstring_does() -> None:
    """Every module and public class says what it is for; so does a public function of more than ten lines."""
    bare = []
    for name, path in modules().items():
        tree = ast.parse(path.read_text())
        if path.read_text() and not ast.get_docstring(tree):
            bare.append(name)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                short = isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno < 10
                nested = node.col_offset > 4
                bare += [] if short or nested or ast.get_docstring(node) else [f"{name}.{node.name}"]
    assert not bare


@pytest.mark.parametrize(
    "arguments",
    [["data.cli", "inspect", "--help"], ["data.cli", "prepare"], ["fsdp_pretrain.cli", "status", "/nowhere"]],
    ids=" ".join,
)
def test_forked_commands_are_those_of_a_user(arguments: list[str], run_command: Any, helpers: Any) -> None:
    """What `run_command` gives is what a fresh Python gives."""
    real = subprocess.run(
        [sys.executable, "-m", *arguments], capture_output=True, text=True, cwd="/", env=helpers.environment()
    )
    forked = run_command(*arguments)
    assert (forked.returncode, forked.stdout, forked.stderr) == (real.returncode, real.stdout, real.stderr)
