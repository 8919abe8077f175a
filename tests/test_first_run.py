"""docs/first-run.md: its commands, as they stand there, from an empty directory to an exported model."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import COMMANDS, ROOT, Run

PAGE = (ROOT / "docs/first-run.md").read_text()
OPERATIONS = (ROOT / "docs/operations.md").read_text()
JOBSET = ROOT / "configs/kubernetes/jobset.yaml"
REPORTS = re.compile(r"^(fsdp-pretrain (watch|status) .*)$", re.MULTILINE)
"""Commands whose exit codes 1 and 2 are findings."""


def blocks(kind: str) -> list[str]:
    """The page's blocks of shell of one kind: `run`, `laptop`, or "" for those that need a cluster or a network."""
    return re.findall(rf"^```bash{' ' * bool(kind)}{kind}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def files() -> dict[str, str]:
    """The configurations on the page, by the name before each."""
    return dict(re.findall(r"`([\w.-]+\.toml)`[^`\n]*:\n\n```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))


def small(command: str) -> str:
    """A command at the size of a laptop, by the page's table."""
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|$", PAGE.partition("## At the size of a laptop")[2], re.MULTILINE)
    assert len(rows) >= 5
    for here, there in rows:
        command = command.replace(here, there)
    return command


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_page_leads_from_text_to_a_model(tmp_path: Path, helpers: Any) -> None:
    binaries = Path(sys.executable).parent
    if not (binaries / "fsdp-data").exists():
        pytest.skip("the project is not installed here; scripts/test.sh installs it")
    assert set(files()) == {"7b.toml", "small.toml"}
    start, *rest = [small(block) for block in blocks("run")]
    written = [f"cat > {name} <<'TOML'\n{content}TOML\n" for name, content in files().items()]
    script = REPORTS.sub(r"\1 || [ $? -le 2 ]", "".join([start, *blocks("laptop"), *written, *rest]))
    script = script.replace("--against small.toml", "--against small.toml || [ $? = 1 ]")  # modules share passages
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", script],
        cwd=tmp_path,
        env=helpers.environment(PATH=f"{binaries}{os.pathsep}{os.environ['PATH']}"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    made = tmp_path / "my-7b"
    steps = [record["step"] for record in helpers.metrics(made / "runs/small")]
    assert steps == list(range(1, 61))
    losses = [record["heldout"] for record in helpers.metrics(made / "runs/small") if record.get("heldout")]
    assert len(losses) == 3
    for step in (40, 60):
        assert list((made / f"runs/small/evals/step-{step:08d}").glob("*/results.json"))
    assert (made / "hf/model.safetensors").exists() and (made / "hf/tokenizer.json").exists()
    assert "read 0." in done.stdout and "held out (5%)" in done.stdout


def commands(text: str) -> list[list[str]]:
    """The command lines of this project in a page: in blocks of shell, and in code inside sentences."""
    shell = "\n".join(re.findall(r"^```bash.*?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)).replace("\\\n", " ")
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    inside = [code.replace("\n", " ") for code in re.findall(r"`([^`]+)`", prose)]
    found = [
        match
        for line in [*shell.splitlines(), *inside]
        for match in re.findall(r"(?:^|['&] ?)(fsdp-[a-z]+ [a-z][^'&]*)", line)
    ]
    return [words for line in found if (words := shlex.split(line, comments=True))[0] in COMMANDS]


@pytest.mark.quick
@pytest.mark.parametrize("page", [PAGE, OPERATIONS], ids=["first-run", "operations"])
def test_every_command_of_the_page_exists(run_command: Run, page: str) -> None:
    """Also those that need a cluster: verbs and options as `--help` lists them."""
    lines = commands(page)
    assert len(lines) > 20
    helps: dict[tuple[str, str], str] = {}
    wrong = []
    for command, verb, *arguments in lines:
        if (command, verb) not in helps:
            shown = run_command(COMMANDS[command], verb, "--help")
            helps[command, verb] = shown.stdout if shown.returncode == 0 else ""
        options = [part.partition("=")[0] for part in arguments if part.startswith("--")]
        if not helps[command, verb] or [option for option in options if option not in helps[command, verb]]:
            wrong.append([command, verb, *arguments])
    assert not wrong


@pytest.mark.quick
def test_the_jobset_is_sound(run_command: Run) -> None:
    """It parses, its numbers agree, its command is one of ours, and its exit codes are those of the launcher."""
    yaml = pytest.importorskip("yaml")
    (document,) = yaml.safe_load_all(JOBSET.read_text())
    name = document["metadata"]["name"]
    (group,) = document["spec"]["replicatedJobs"]
    job = group["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    command, verb, *arguments = container["command"]
    options = dict(part.removeprefix("--").split("=") for part in arguments if part.startswith("--"))
    assert (command, verb, arguments[-1]) == ("fsdp-pretrain", "launch", "7b.toml")
    shown = run_command(COMMANDS[command], verb, "--help").stdout
    assert all(f"--{option}" in shown for option in options)
    assert int(options["nnodes"]) == job["parallelism"] == job["completions"]
    assert int(options["nproc-per-node"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert options["rdzv-endpoint"] == f"{name}-{group['name']}-0-0.{document['spec']['network']['subdomain']}"
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["containerName"] == container["name"]
    refused = [
        int(row)
        for row in re.findall(r"^\| (\d+) \| (?:refused|a person)", (ROOT / "docs/launch.md").read_text(), re.MULTILINE)
    ]
    assert rule["onExitCodes"]["values"] == sorted(set(refused)) == [78, 93]
    assert document["spec"]["failurePolicy"]["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
