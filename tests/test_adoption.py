"""What a newcomer meets first: versions, completion, a starting set, the wheel, the image, the hooks."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from processes import ROOT, Run, clean_environment, python_path
from sight import until

COMMANDS = {"fsdp-pretrain": "fsdp_pretrain.cli", "fsdp-data": "data.cli", "fsdp-eval": "eval.cli"}
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
    assert run_command("fsdp_pretrain.cli", "init", tmp_path).returncode == 0
    changed, missing = tmp_path / "configs/runs/quickstart.toml", tmp_path / "configs/models/llama-7b.toml"
    missing.unlink()
    assert run_command("fsdp_pretrain.cli", "init", tmp_path).returncode == 0 and missing.exists()
    changed.write_text("# mine")
    missing.unlink()
    done = run_command("fsdp_pretrain.cli", "init", tmp_path)
    assert done.returncode == 78 and str(changed) in done.stderr and "nothing was copied" in done.stderr
    assert changed.read_text() == "# mine" and not missing.exists()


def test_every_configuration_of_the_starting_set_can_be_planned(started: Path, run_command: Run) -> None:
    """Its includes are found where it was copied to."""
    configs = sorted((started / "configs/runs").glob("*.toml"))
    done = {path.name: run_command("fsdp_pretrain.cli", "plan", path, cwd=started) for path in configs}
    assert len(done) == 8 and not [name for name, plan in done.items() if plan.returncode], done


# ---------------------------------------------------------------- completion


class Shell:
    """A bash on a terminal of its own, with completion as docs/README.md says."""

    def __init__(self, folder: Path) -> None:
        for command, module in COMMANDS.items():
            path = folder / command
            path.write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
            path.chmod(0o755)
        environment = {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "PYTHONPATH": python_path(),
            "PS1": "$ ",
            "TERM": "dumb",
        }
        self._pid, self._terminal = pty.fork()
        if self._pid == 0:
            os.chdir(ROOT)
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], environment)
        self._seen = ""
        register = f"{sys.executable} -m argcomplete.scripts.register_python_argcomplete"
        self.type(f'eval "$({register} {" ".join(COMMANDS)})"; echo rea""dy\n', "ready")

    def type(self, keys: str, expected: str) -> str:
        """Type, and wait for what the terminal must show then; clears the line. Returns what it showed."""
        self._seen = ""
        os.write(self._terminal, keys.encode())
        until(lambda: expected in self._read(), 60, lambda: repr(self._seen))
        os.write(self._terminal, b"\x15")
        return self._seen

    def _read(self) -> str:
        while select.select([self._terminal], [], [], 0)[0]:
            self._seen += os.read(self._terminal, 4096).decode(errors="replace")
        return self._seen

    def close(self) -> None:
        os.close(self._terminal)
        os.waitpid(self._pid, 0)


def test_a_shell_completes_verbs_files_and_choices(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    completed = {
        "fsdp-pretrain rollb": "rollback ",
        "fsdp-data prep": "prepare ",
        "fsdp-eval com": "compare ",
        "fsdp-pretrain plan configs/runs/llama-7b-h": "llama-7b-hsdp.toml ",
        "fsdp-pretrain plan configs/runs/llama-7b-hsdp.toml --world-s": "--world-size ",
        "fsdp-data prepare x --out y --split li": "lines ",
    }
    try:
        for typed, expected in completed.items():
            assert expected in shell.type(f"{typed}\t", expected)
    finally:
        shell.close()


# ---------------------------------------------------------------- the repository


@pytest.mark.quick
def test_the_repository_says_what_a_visitor_asks() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license"]
    assert declared == "Apache-2.0" and "Apache License\n" in (ROOT / "LICENSE").read_text()
    assert all((ROOT / package / "py.typed").exists() for package in ("fsdp_pretrain", "data", "eval"))
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["license"] == declared and {"cff-version", "message", "title", "authors"} <= citation.keys()
    forms = [path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config"]
    assert len(forms) == 2
    for form in forms:
        found = yaml.safe_load(form.read_text())
        assert {"name", "description", "body"} <= found.keys()
        assert all({"type", "id", "attributes"} <= field.keys() for field in found["body"])


@pytest.mark.quick
def test_the_repository_links_to_nothing_outside() -> None:
    """A link to one machine's environment was once committed, and a fresh clone could not be set up."""
    listed = subprocess.run(["git", "ls-files", "--stage"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is not a checkout")
    links = {line.split("\t")[1] for line in listed.stdout.splitlines() if line.startswith("120000")}
    assert links == {f"fsdp_pretrain/starter/{folder}" for folder in STARTING_SET}


@pytest.mark.quick
def test_hooks_run_the_tools_of_the_tests() -> None:
    pytest.importorskip("pre_commit")
    yaml = pytest.importorskip("yaml")
    checked = subprocess.run(
        [sys.executable, "-m", "pre_commit", "validate-config", ".pre-commit-config.yaml"],
        cwd=ROOT,
        capture_output=True,
    )
    assert checked.returncode == 0, checked.stdout
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert local["repo"] == "local"
    suite = (ROOT / "scripts/test.sh").read_text()
    for hook in local["hooks"]:
        assert hook["language"] == "system" and f'"$python" -m {hook["entry"]}' in suite


# ---------------------------------------------------------------- installed


class Installed:
    """A virtual environment, away from the checkout, in which the project was installed."""

    def __init__(self, folder: Path, *, with_packages: bool) -> None:
        self.path, self._bin = folder, folder / "venv/bin"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(folder / "source")], check=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
        (folder / "home").mkdir()
        if (
            with_packages
        ):  # of the Python that runs this test, without its installed project: no .pth file is read there
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
@pytest.mark.parametrize("install", ["wheel", "editable"])
def test_an_installation_starts_a_project(tmp_path: Path, install: str) -> None:
    """The commands that `init` prints, as it prints them, up to a run of two steps."""
    here = Installed(tmp_path, with_packages=True)
    if install == "wheel":
        here.run("pip wheel -q --no-deps -w wheels ./source && pip install -q --no-deps wheels/*.whl && rm -rf source")
    else:
        here.run("pip install -q --no-deps -e ./source")
    where = here.run("python -c 'import fsdp_pretrain; print(fsdp_pretrain.__file__)'")
    assert ("site-packages" if install == "wheel" else "source") in where and str(tmp_path) in where
    told = here.run("fsdp-pretrain init work")
    commands = re.findall(r"^  (.+)$", told.partition("Try it")[2].partition("Your own")[0], re.MULTILINE)
    launch = commands.pop()
    assert launch.startswith("fsdp-pretrain launch ") and len(commands) == 6
    here.run("\n".join(commands))
    for config in (tmp_path / "work/configs/runs").glob("*.toml"):
        here.run(f"fsdp-pretrain plan {config}", cwd=tmp_path / "work")
    less = ' train.duration="2 steps" optimizer.warmup="1 steps" record.aim=false eval.launch=false'
    here.run(launch + less, cwd=tmp_path / "work")
    status = json.loads((tmp_path / "work/runs/quickstart/run/status.json").read_text())
    assert status["exit_intent"]["code"] == 0 and status["step"] == 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_images_can_be_built(tmp_path: Path) -> None:
    """The steps of the Dockerfile in a fresh environment: `COPY . .` is a clone, `/work` is a folder. Then the command
    of the development container in the same clone and environment."""
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    steps = [line.split(None, 1) for line in lines if line and not line.startswith("#")]
    assert [step[0] for step in steps] == "ARG FROM ENV WORKDIR COPY RUN RUN WORKDIR CMD".split()
    here = Installed(tmp_path, with_packages=False)
    for kind, rest in steps:
        if kind == "RUN":
            here.run(rest.replace("/work", f"{tmp_path}/work").replace("--no-cache-dir ", ""), cwd=tmp_path / "source")
    shown = here.run(" ".join(json.loads(steps[-1][1])), cwd=tmp_path / "work")
    assert "usage: fsdp-pretrain" in shown and "torch 2." in here.run("fsdp-pretrain --version")
    assert (tmp_path / "work/scripts/slurm/train.sbatch").exists()
    (tmp_path / "source/.venv").symlink_to(tmp_path / "venv")
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    here.run(container["postCreateCommand"], cwd=tmp_path / "source")
    here.run("pytest --version && ruff --version && mypy --version", cwd=tmp_path / "source")
    assert os.access(tmp_path / "source/.git/hooks/pre-commit", os.X_OK)
