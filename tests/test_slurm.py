"""The Slurm scripts on a real Slurm: jobs of one and two nodes that are stopped, queued again, and completed."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import ROOT, python_path
from sight import PATIENCE, until
from slurm import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
NOISE = r"Traceback|FAILED|Root Cause|closing signal|^error|exitcode"
LONG = 4 * PATIENCE


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if not all(map(shutil.which, ("slurmctld", "slurmd", "munged", "mungekey"))):
        pytest.skip("slurm-wlm is not installed")
    if os.geteuid():
        pytest.skip("namespaces need root")
    base = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    made = Cluster(base, nodes=3)
    try:
        made.wait()
        yield made
    finally:
        made.close()
        shutil.rmtree(base)


class Project:
    """A directory made by `fsdp-pretrain init`, and its jobs. `env.sh` is all that finds the project's Python.

    Args:
        gates: before these steps every start waits for `open`.
    """

    def __init__(self, cluster: Cluster, lab: Any, run_command: Any, *gates: int) -> None:
        self._cluster, self.path = cluster, lab.path / "project"
        run_command("fsdp_pretrain.cli", "init", self.path, expect=0)
        commands = {
            "fsdp-pretrain": "fsdp_pretrain.cli",
            "fsdp-eval": "fsdp_pretrain.eval.cli",
            "torchrun": "torch.distributed.run",
        }
        for name, module in commands.items():
            command = self.path / "bin" / name
            command.parent.mkdir(exist_ok=True)
            command.write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
            command.chmod(0o755)
        waits = [
            {"rank": "all", "step": step, "kind": "await_file", "path": str(self.path / f"gate-{step}")}
            for step in gates
        ]
        (self.path / "sitecustomize.py").write_text(
            f"import os, runpy\nif 'RANK' in os.environ: runpy.run_path({str(ROOT / 'tests/faults.py')!r})\n"
        )
        (self.path / "env.sh").write_text(
            f"export PATH={self.path}/bin:$PATH PYTHONPATH={python_path(self.path)} FAULT='{json.dumps(waits)}'\n"
            "NOT_SET=$NOT_SET # as conda does\n"
        )

    def open(self, step: int) -> None:
        (self.path / f"gate-{step}").touch()

    def submit(self, *arguments: object, nodes: int = 1, options: tuple[str, ...] = ()) -> str:
        """Submit the training script; the number of the job."""
        options = ("--parsable", f"--nodes={nodes}", "--gpus-per-node=2", "--cpus-per-task=2", "--time=60", *options)
        line = ("sbatch", *options, "scripts/slurm/train.sbatch", "--nproc-per-node", 2, *arguments)
        return self._cluster.run(*line, cwd=self.path, ENV_FILE="env.sh").strip()

    def log(self, job: str) -> str:
        path = self.path / f"fsdp-pretrain-{job}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def says(self, job: str, text: str, times: int = 1) -> None:
        """Wait until a text is in the log of a job."""
        until(lambda: self.log(job).count(text) >= times, LONG, lambda: f"{text}\n{self.log(job)}", every=0.1)


def test_a_job_is_stopped_queued_again_and_completed(
    cluster: Cluster, lab: Any, helpers: Any, run_command: Any
) -> None:
    """Two nodes. Slurm's signal before a limit, a signal to all processes, a bad host: after each the job waits in the
    queue and goes on where it was, as if nothing had happened. The log holds no report of a failure."""
    project = Project(cluster, lab, run_command, 6, 14, 22)
    run = lab.path / "run"
    config = lab.config(checkpoint={"every": "1000 steps"}, train={"duration": "30 steps", "micro_batch": 2})
    job = project.submit(config, nodes=2)

    def goes_on(restarts: int) -> dict[str, str]:
        """Wait until it is queued again, and have it start soon: Slurm lets two minutes pass, and a node refuses a job
        in the second in which it ended there."""
        until(lambda: cluster.job(job)["JobState"] == "PENDING", LONG, lambda: project.log(job), every=0.2)
        found = until(lambda: (now := cluster.job(job))["Reason"] == "BeginTime" and now, LONG, every=0.2)
        assert found["Restarts"] == str(restarts) and (project.log(job).count("the launcher ended with")) == restarts
        cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now+5")
        return dict(found)

    until(lambda: helpers.metrics(run) if run.exists() else None, LONG, lambda: project.log(job), every=0.1)
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    project.says(job, "asking the ranks to save and stop", 2)
    project.open(6)
    assert goes_on(1)["ExcNodeList"] == "(null)"
    project.says(job, "[ready]", 2)
    cluster.run("scancel", "--signal=TERM", job)
    project.says(job, "launch: SIGTERM", 2)
    project.open(14)
    goes_on(2)
    project.says(job, "[ready]", 3)
    code = "import sys; from pathlib import Path; from fsdp_pretrain.run import requests, files; "
    code += "requests.send(files.RunDir(Path(sys.argv[1])), 'stop', reason='bad', by='me', avoid_hosts=['n2'])"
    cluster.run(sys.executable, "-c", code, run, PYTHONPATH=python_path())
    until(lambda: not list((run / "control").iterdir()), LONG)
    project.open(22)
    assert goes_on(3)["ExcNodeList"] == "n2"
    until(lambda: cluster.job(job)["JobState"] == "COMPLETED", LONG, lambda: project.log(job), every=0.2)
    assert cluster.job(job)["NodeList"] == "n[1,3]"
    assert not [line for line in project.log(job).splitlines() if re.search(NOISE, line)]
    whole = lab.config("whole", checkpoint={"every": "1000 steps"}, train={"duration": "30 steps", "micro_batch": 2})
    assert lab.start(whole, ranks=4, nodes=2).wait() == [0] * 4
    assert helpers.losses(run) == helpers.losses(lab.path / "whole")


@pytest.mark.shows("B19")
def test_a_chain_goes_on_at_the_time_limit_and_ends_with_the_run(
    cluster: Cluster, lab: Any, helpers: Any, run_command: Any
) -> None:
    """An array of which one job runs at a time. The first stops before its limit of three minutes, the second completes
    the run, the third is cancelled. Each has a log of its own."""
    project, run = Project(cluster, lab, run_command, 6), lab.path / "run"
    config = lab.config(checkpoint={"every": "1000 steps"}, train={"micro_batch": 2})
    array = project.submit("--time-limit", "150s", config, options=("--array=1-3%1", "--time=3", "--signal=B:USR1@10"))

    def jobs() -> list[str]:
        return sorted(path.stem.rpartition("-")[2] for path in project.path.glob("fsdp-pretrain-*.log"))

    until(jobs, LONG, every=0.2)
    (first,) = jobs()
    project.says(first, "launch: time limit in")
    project.open(6)
    until(lambda: len(jobs()) == 2, LONG, lambda: project.log(first), every=0.2)
    (second,) = set(jobs()) - {first}
    project.says(second, "the launcher ended with 0")
    assert "[resume] from step-0000000" in project.log(second) and helpers.metrics(run)[-1]["step"] == 20
    until(lambda: not cluster.run("squeue", "--noheader"), LONG, every=0.2)
    states = cluster.run("scontrol", "--oneliner", "show", "job", array)
    found = sorted(word.partition("=")[2] for word in states.split() if word.startswith("JobState="))
    assert found == ["CANCELLED", "COMPLETED", "FAILED"] and len(jobs()) == 2  # Slurm calls every code but 0 a failure


def test_a_job_that_is_not_to_be_queued_again(cluster: Cluster, lab: Any, helpers: Any, run_command: Any) -> None:
    """It saves and ends, as its owner said. Submitted again, it completes. Then a job
    evaluates what is due, and another one checkpoint."""
    project, run = Project(cluster, lab, run_command, 6), lab.path / "run"
    evaluation = {"every": "20 steps", "heldout": str(lab.heldout), "limit": 1, "launch": False}
    config = lab.config(
        checkpoint={"every": "1000 steps"}, train={"micro_batch": 2}, eval={**evaluation, "device": "cpu"}
    )
    job = project.submit(config)
    project.says(job, "[ready]")
    cluster.run("scontrol", "update", f"JobId={job}", "Requeue=0")
    cluster.run("scancel", "--signal=TERM", job)
    project.says(job, "launch: SIGTERM")
    project.open(6)
    until(lambda: cluster.job(job)["JobState"] == "FAILED", LONG, lambda: project.log(job), every=0.2)
    assert cluster.job(job)["ExitCode"] == "75:0" and helpers.metrics(run)[-1]["step"] < 20
    job = project.submit(config)
    until(lambda: cluster.job(job)["JobState"] == "COMPLETED", LONG, lambda: project.log(job), every=0.2)
    checkpoint, results = run / "checkpoints/step-00000020", lab.path / "results.json"
    names = {"EVAL_CHECKPOINT": checkpoint, "EVAL_TASKS": "heldout_bpb", "EVAL_RESULTS": results}
    for script, argument in (("eval", run), ("eval_checkpoint", "")):
        line = (
            "sbatch",
            "--wait",
            "--gpus-per-node=1",
            "--cpus-per-task=1",
            f"scripts/slurm/{script}.sbatch",
            argument,
        )
        variables = {name: str(value) for name, value in names.items()}
        cluster.run(*line, cwd=project.path, ENV_FILE="env.sh", DEVICE="cpu", **variables)
    assert results.exists() and list(run.glob("evals/step-00000020/*/results.json"))
