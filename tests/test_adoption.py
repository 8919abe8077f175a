"""What a newcomer meets first: versions, completion, a starting set, the wheel, the image, the hooks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import COMMANDS, ROOT, Run, clean_environment

STARTING_SET = ("configs/models", "configs/runs", "configs/alerts", "configs/kubernetes", "scripts/slurm")


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, run_command: Run) -> Path:
    """A directory made by `fsdp-pretrain init`."""
    path = tmp_path_factory.mktemp("started") / "my project"
    done = run_command("fsdp_pretrain.cli", "init", path)
    assert done.returncode == 0 and f"cd '{path}'" in done.stdout, done
    return path


@pytest.mark.quick
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_knows_its_version(command: str) -> None:
    line = [sys.executable, "-m", COMMANDS[command], "--version"]
    done = subprocess.run(line, cwd="/", env=clean_environment(), capture_output=True, text=True)
    torch = r"(torch [\w.+]+|no torch)"
    assert re.fullmatch(rf"{command} \d+\.\d+\.\d+ \(Python [\d.]+, {torch}, .+\)\n", done.stdout), done
    assert done.returncode == 0 and done.stderr == ""


@pytest.mark.quick
def test_the_starting_set_is_that_of_the_repository(started: Path) -> None:
    """Byte by byte, and scripts can be executed."""
    files = {path.relative_to(started) for path in started.rglob("*") if path.is_file()}
    assert files == {path.relative_to(ROOT) for folder in STARTING_SET for path in (ROOT / folder).rglob("*")}
    assert all((started / name).read_bytes() == (ROOT / name).read_bytes() for name in files)
    assert os.access(started / "scripts/slurm/train.sbatch", os.X_OK)


@pytest.mark.quick
def test_init_keeps_what_was_changed(tmp_path: Path, run_command: Run) -> None:
    """Exit 78 that names it, and nothing else is touched; unchanged and other files do not matter."""
    (tmp_path / "notes.txt").write_text("mine")
    run_command("fsdp_pretrain.cli", "init", tmp_path, expect=0)
    changed, missing = tmp_path / "configs/runs/quickstart.toml", tmp_path / "configs/models/llama-7b.toml"
    missing.unlink()
    assert run_command("fsdp_pretrain.cli", "init", tmp_path).returncode == 0 and missing.exists()
    changed.write_text("# mine")
    missing.unlink()
    done = run_command("fsdp_pretrain.cli", "init", tmp_path)
    assert done.returncode == 78 and str(changed) in done.stderr and "nothing was copied" in done.stderr
    assert changed.read_text() == "# mine" and not missing.exists()


@pytest.mark.quick
def test_the_least_configuration_can_be_planned_and_is_never_overwritten(tmp_path: Path, run_command: Run) -> None:
    run_command("fsdp_pretrain.cli", "init", tmp_path, "--minimal", expect=0)
    config = tmp_path / "run.toml"
    assert list(tmp_path.iterdir()) == [config] and len(config.read_text().splitlines()) <= 35
    assert "134_105_856 parameters" in run_command("fsdp_pretrain.cli", "plan", config, cwd=tmp_path).stdout
    config.write_text("# mine")
    again = run_command("fsdp_pretrain.cli", "init", tmp_path, "--minimal")
    assert again.returncode == 78 and "run.toml exists" in again.stderr and config.read_text() == "# mine"


def test_every_configuration_of_the_starting_set_can_be_planned(started: Path, run_command: Run) -> None:
    """Its includes are found where it was copied to."""
    configs = sorted((started / "configs/runs").glob("*.toml"))
    done = {path.name: run_command("fsdp_pretrain.cli", "plan", path, cwd=started) for path in configs}
    assert len(done) == 9 and not [name for name, plan in done.items() if plan.returncode], done


# ---------------------------------------------------------------- completion


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("fsdp-pretrain rollb", "rollback"),
        ("fsdp-data prepare x --out y --split li", "lines"),
        ("fsdp-eval com", "compare"),
        ("fsdp-pretrain plan configs/runs/llama-7b-h", "configs/runs/llama-7b-hsdp.toml"),
    ],
)
def test_a_shell_completes_verbs_files_and_choices(tmp_path: Path, typed: str, expected: str) -> None:
    """As argcomplete's function in the shell asks for it."""
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "answer")}
    asked |= {"COMP_LINE": typed, "COMP_POINT": str(len(typed)), "_ARGCOMPLETE_IFS": "\n"}
    line = [sys.executable, "-m", COMMANDS[typed.split()[0]]]
    subprocess.run(line, cwd=ROOT, env=clean_environment(**asked), timeout=300)
    assert (tmp_path / "answer").read_text().split() == [expected]


# ---------------------------------------------------------------- the repository


@pytest.mark.quick
def test_the_repository_links_to_nothing_outside() -> None:
    """A link to one machine's environment was once committed, and a fresh clone could not be set up."""
    listed = subprocess.run(["git", "ls-files", "--stage"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is not a checkout")
    links = {line.split("\t")[1] for line in listed.stdout.splitlines() if line.startswith("120000")}
    packages = {"fsdp_pretrain/data", "fsdp_pretrain/eval"}
    assert links == packages | {f"fsdp_pretrain/starter/{folder}" for folder in ("extension", *STARTING_SET)}


# ---------------------------------------------------------------- installed


class Installed:
    """A virtual environment, away from the checkout, in which the project was installed."""

    def __init__(self, folder: Path) -> None:
        self.path, self._bin = folder, folder / "venv/bin"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(folder / "source")], check=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
        (folder / "home").mkdir()
        # Packages of the Python that runs this test, without its installed project: no .pth file is read there.
        (site,) = (folder / "venv/lib").glob("python*/site-packages")
        packages = [path for path in sys.path if path.endswith("-packages")]
        (site / "packages.pth").write_text("".join(f"{path}\n" for path in packages))

    def run(self, command: str, cwd: Path | None = None) -> str:
        environment = {"PATH": f"{self._bin}:/usr/bin:/bin", "HOME": str(self.path / "home"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            ["bash", "-euc", command], cwd=cwd or self.path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_installation_starts_a_project(tmp_path: Path) -> None:
    """The commands that `init` prints, as it prints them, up to a run of two steps."""
    here = Installed(tmp_path)
    here.run("pip wheel -q --no-deps -w wheels ./source && pip install -q --no-deps wheels/*.whl && rm -rf source")
    where = here.run("python -c 'import fsdp_pretrain; print(fsdp_pretrain.__file__)'")
    assert "site-packages" in where and str(tmp_path) in where
    told = here.run("fsdp-pretrain init work")
    commands = re.findall(r"^  (.+)$", told.partition("Try it")[2].partition("Your own")[0], re.MULTILINE)
    launch = commands.pop()
    assert launch.startswith("fsdp-pretrain launch ") and len(commands) == 6
    here.run("\n".join(commands))
    less = ' train.duration="2 steps" optimizer.warmup="1 steps" record.aim=false eval.launch=false'
    here.run(launch + less, cwd=tmp_path / "work")
    status = json.loads((tmp_path / "work/runs/quickstart/run/status.json").read_text())
    assert status["exit_intent"]["code"] == 0 and status["step"] == 2
