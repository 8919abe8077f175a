"""The documentation is true: its commands run, its files exist, its tables match the code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from data.findings import CATALOGUE
from fsdp_pretrain.errors import Exit

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *("docs/data.md", "docs/training.md", "docs/launch.md", "docs/evaluation.md", "docs/plan.md"),
    "docs/huggingface.md",
]


def blocks(page: str) -> list[str]:
    """The blocks of a page marked as run."""
    return re.findall(r"^```bash run\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


class Reader:
    """Types the commands of page after page into one directory."""

    def __init__(self, path: Path, environment: dict[str, str]) -> None:
        self.path, self._environment, self._read = path, environment, 0

    def read_up_to(self, page: str) -> None:
        """Run the pages up to this one that have not been run yet."""
        for name in PAGES[self._read : PAGES.index(page) + 1]:
            self._read += 1
            for block in blocks(name):
                ran = subprocess.run(
                    ["bash", "-euo", "pipefail", "-c", block],
                    cwd=self.path, env=self._environment, capture_output=True, text=True,
                )  # fmt: skip
                assert ran.returncode == 0, f"{name}:\n{block}\n{ran.stdout}\n{ran.stderr}"


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory, helpers: Any) -> Reader:
    path = tmp_path_factory.mktemp("reader")
    (path / "configs").symlink_to(ROOT / "configs")
    binaries = Path(sys.executable).parent
    if not (binaries / "fsdp-data").exists():
        pytest.skip("the project is not installed here; scripts/test.sh installs it")
    return Reader(path, helpers.environment(PATH=f"{binaries}{os.pathsep}{os.environ['PATH']}"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("page", "made"),
    [
        ("docs/data.md", "runs/demo/corpus/manifest.json"),
        ("docs/training.md", "runs/demo/run/checkpoints/step-00000008/manifest.json"),
        pytest.param("docs/launch.md", "runs/demo/run/status.json", marks=pytest.mark.slow),
        pytest.param("docs/evaluation.md", "runs/demo/run/evals/step-00000008", marks=pytest.mark.slow),
        pytest.param("docs/huggingface.md", "runs/demo/hf/config.json", marks=pytest.mark.slow),
    ],
)
def test_commands_of_the_documentation_run(reader: Reader, page: str, made: str) -> None:
    """As a user would: real console scripts and a real torchrun, page after page."""
    assert blocks(page)
    reader.read_up_to(page)
    assert (reader.path / made).exists()


@pytest.mark.quick
def test_files_named_in_the_documentation_exist() -> None:
    for page in [
        "README.md",
        *PAGES,
        *(
            "docs/alarms.md",
            "docs/families.md",
            "docs/performance.md",
            "docs/incidents.md",
            "docs/decisions.md",
            "docs/faults.md",
            "docs/trust.md",
        ),
    ]:
        text = (ROOT / page).read_text()
        for name in re.findall(r"(?:scripts|configs|docs)/[\w./-]+\.(?:sh|sbatch|toml|md)", text):
            if "my-run" not in name:
                assert (ROOT / name).exists(), f"{page} names {name}"
        for target in re.findall(r"\]\(([\w./-]+\.md)\)", text):
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"


@pytest.mark.quick
def test_tables_match_the_code() -> None:
    data, training = (ROOT / "docs/data.md").read_text(), (ROOT / "docs/training.md").read_text()
    for code in CATALOGUE:
        assert f"`{code}`" in data or f"`-{code.partition('-')[2]}`" in data, code
    for code in (Exit.COMPLETE, Exit.RESUME, Exit.REFUSED, Exit.NEEDS_PERSON, Exit.UNEXPECTED):
        assert f"| {int(code)} |" in training


@pytest.mark.quick
def test_scripts_are_sound_shell() -> None:
    for path in [*(ROOT / "scripts").glob("*.sh"), *(ROOT / "scripts").glob("slurm/*"), ROOT / ".ci/run"]:
        subprocess.run(["bash", "-n", path], check=True)
        assert path.name == "environment.sh" or os.access(path, os.X_OK), f"{path} is not executable"
