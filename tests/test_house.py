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
        "fsdp_pretrain.config.base",
        "fsdp_pretrain.severity",
        "fsdp_pretrain.child_process",
        "fsdp_pretrain.deadline",
        "fsdp_pretrain.atomic",
        "fsdp_pretrain.statistics",
    ],
    ["fsdp_pretrain.config.notify"],
    [
        "fsdp_pretrain.config.schedule",
        "fsdp_pretrain.config.sections",
        "fsdp_pretrain.config.model",
        "fsdp_pretrain.config.operations",
        "fsdp_pretrain.console",
        "fsdp_pretrain.config.toml_file",
    ],
    ["fsdp_pretrain.config.config"],
    ["fsdp_pretrain.config.resume_rules"],
    [
        "data.text.splitting",
        "fsdp_pretrain.config.reference",
        "fsdp_pretrain.record",
        "data.corpus.mapping",
        "data.corpus.hashing",
        "data.corpus.shards",
        "data.corpus.reading",
        "data.text.tokenizer",
        "data.text.files",
    ],
    [
        "fsdp_pretrain.checkpoint.disk_space",
        "data.text.inputs",
        "fsdp_pretrain.checkpoint.manifest",
        "fsdp_pretrain.checkpoint.store",
        "fsdp_pretrain.checkpoint.locations",
        "fsdp_pretrain.record.arguments",
        "fsdp_pretrain.record.requests",
        "fsdp_pretrain.watchdog",
        "data.corpus.corpus",
        "data.packing.mixture",
        "data.skip",
        "data.packing.position",
        "data.prepare.quickstart",
    ],
    ["fsdp_pretrain.checkpoint.locations", "fsdp_pretrain.checkpoint.expected", "fsdp_pretrain.checkpoint.upcoming"],
    [
        "fsdp_pretrain.watchdog.status",
        "fsdp_pretrain.watchdog.probes.worker",
        "fsdp_pretrain.watchdog.detectors.checkpoint_age",
        "fsdp_pretrain.watchdog.detectors.disk_space",
        "fsdp_pretrain.watchdog.agent.registry",
        "data.packing.unigrams",
        "data.packing.source",
        "data.packing.pairs",
        "data.packing.packer",
        "data.packing.objectives",
        "data.prepare.jobs",
        "data.corpus.formats",
    ],
    ["fsdp_pretrain.watchdog.agent.leader", "fsdp_pretrain.watchdog.agent"],
    [
        "data.text.documents",
        "data.validate.findings",
        "data.validate.measure",
        "data.validate.meter",
        "data.validate.report",
        "data.validate.totals",
        "data.validate.validate",
    ],
    [
        "data.bench",
        "data.prepare.prepare",
        "data.prepare.import_corpus",
        "data.simulate",
        "data.packing.opening",
        "fsdp_pretrain.checkpoint.state",
        "fsdp_pretrain.record.overrides",
        "data.prepare.train_tokenizer",
        "fsdp_pretrain.health.rules",
        "data.packing.loader",
        "fsdp_pretrain.models",
        "fsdp_pretrain.parallel.mesh",
        "fsdp_pretrain.plan.flops",
        "fsdp_pretrain.train.device_timing",
    ],
    [
        "data.cli",
        "fsdp_pretrain.lineage.provenance",
        "fsdp_pretrain.lineage.continuation",
        "fsdp_pretrain.parallel.fsdp",
        "fsdp_pretrain.parallel.optimizer",
        "fsdp_pretrain.parallel.replica_check",
        "fsdp_pretrain.health.monitor",
        "fsdp_pretrain.plan.warnings",
        "fsdp_pretrain.train.environment",
    ],
    ["fsdp_pretrain.plan.memory"],
    ["fsdp_pretrain.plan.plan"],
    ["fsdp_pretrain.checkpoint", "fsdp_pretrain.lineage.rollback", "fsdp_pretrain.lineage.fork"],
    [
        *(
            "fsdp_pretrain.train.checkpointing",
            "fsdp_pretrain.launch",
            "fsdp_pretrain.train.straggler_timing",
            "fsdp_pretrain.train.run_context",
        ),
        *("fsdp_pretrain.train.step_metrics", "fsdp_pretrain.train.step_sums", "fsdp_pretrain.train.step_clock"),
        *(
            "fsdp_pretrain.health.journal",
            "fsdp_pretrain.train.exit_status",
            "fsdp_pretrain.health.history",
            "fsdp_pretrain.health.auto_rollback",
        ),
    ],
    [
        "fsdp_pretrain.train.trainer",
        "fsdp_pretrain.train.start",
        "fsdp_pretrain.cli.checkpoints",
        "fsdp_pretrain.cli.alarms",
    ],
    ["fsdp_pretrain.cli"],
    ["eval", "fsdp_pretrain.bench.checkpoints", "fsdp_pretrain.bench.watchdog"],
    ["fsdp_pretrain.train", "fsdp_pretrain.bench", "fsdp_pretrain.launch.doctor"],
]
TORCH_FREE = [
    "fsdp_pretrain.cli",
    "fsdp_pretrain.watchdog.status",
    "fsdp_pretrain.lineage.provenance",
    "fsdp_pretrain.lineage.rollback",
    "fsdp_pretrain.health.auto_rollback",
    "fsdp_pretrain.lineage.fork",
    "fsdp_pretrain.launch.command",
    "fsdp_pretrain.config.reference",
    "fsdp_pretrain.checkpoint.store",
    "fsdp_pretrain.record.aim",
    "fsdp_pretrain.record.goodput",
    "fsdp_pretrain.record.recorder",
    "fsdp_pretrain.watchdog.agent",
    "fsdp_pretrain.watchdog.heartbeat.rank_client",
    "fsdp_pretrain.watchdog.detectors.base",
    "fsdp_pretrain.watchdog.notify.notifier",
    "fsdp_pretrain.watchdog.notify.prometheus",
    "fsdp_pretrain.watchdog.probes.worker",
    "fsdp_pretrain.watchdog.detectors.nvml",
    "fsdp_pretrain.watchdog.agent.registry",
    "data.cli",
    "data.packing.packer",
    "data.validate.validate",
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
    roots = {"fsdp_pretrain.train", "fsdp_pretrain.bench", "fsdp_pretrain.launch.doctor"}
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
    assert users["torchdata"] == {"data.packing.loader"}
    assert {name for name in users["torch"] if name.startswith("data.")} == {"data.packing.loader"}


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
