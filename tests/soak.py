"""Long runs with a real launcher, real ranks and a real watchdog: either undisturbed or with all kinds of faults.

    python tests/soak.py null --minutes 30
    python tests/soak.py faults --minutes 30 --seed 7

`null` trains the quickstart model with saves and evaluations under default settings: no alarm of WARN or worse.
`faults` breaks a small run every 20 to 60 seconds, one fault after the other, and then compares it with an undisturbed
run: the same curve to the bit, no process left, at most one page per fault, a ledger that adds up, and the documented
exit codes. Exit 0 if all of that holds. The folder of the run is kept, and printed at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import tomli_w

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from endpoint import Endpoint  # noqa: E402
from machines import tmpfs  # noqa: E402
from processes import LAUNCH, SET_CONSTANTS, clean_environment, constants, free_port, python_path, spawn  # noqa: E402
from sight import alarms, rank_of, seeded, until  # noqa: E402

from fsdp_pretrain.record.files import RunDir  # noqa: E402
from fsdp_pretrain.record.metrics import read_metrics  # noqa: E402

NAN_HOOK = """
import os
if os.environ.get("RANK") == "1":
    from pathlib import Path
    from fsdp_pretrain.parallel import optimizer as optim
    from fsdp_pretrain.train import trainer
    step, norm, now = trainer.Trainer.step, optim.local_norm, [0]
    def counted(self):
        now[0] = self.state.step + 1
        step(self)
    def spoilt(model):
        if str(now[0]) in Path(os.environ["SOAK_NAN"]).read_text().split():
            next(p for p in model.parameters() if p.grad.to_local().numel()).grad.to_local().view(-1)[0] = float("nan")
        return norm(model)
    trainer.Trainer.step, optim.local_norm = counted, spoilt
"""
"""In `sitecustomize` of the ranks: a gradient of rank 1 is NaN in the steps that a file lists, on every attempt."""


class Soak:
    """A run under the launcher in a folder, with `settings` over the sections of the quickstart's configuration."""

    def __init__(self, folder: Path, **settings: dict[str, Any]) -> None:
        self.folder, self.run, self.mark = folder, folder / "run", uuid.uuid4().hex
        self.log = folder / "launch.log"
        values = tomllib.loads((ROOT / "configs/runs/quickstart.toml").read_text())
        values["run"]["dir"] = str(self.run)
        values["data"]["sources"][0]["path"] = str(folder / "corpus")
        values["eval"]["heldout"] = str(folder / "text/heldout.jsonl")
        values["eval"]["loss_on"][0]["path"] = str(folder / "heldout")
        values["record"]["aim"] = False
        for section, changes in settings.items():
            merged = {**values.get(section, {}), **changes}
            values[section] = {key: value for key, value in merged.items() if value is not None}
        self.config = folder / "soak.toml"
        self.config.write_text(tomli_w.dumps(values))
        (folder / "hook").mkdir()
        (folder / "hook/sitecustomize.py").write_text(SET_CONSTANTS + NAN_HOOK)
        self.nan = folder / "nan-steps"
        self.nan.touch()
        self.variables = {"SOAK": self.mark, "SOAK_NAN": str(self.nan), "PYTHONPATH": python_path(folder / "hook")}

    def prepare(self) -> None:
        """The quickstart's text, tokenizer and corpora."""
        text, tokens = self.folder / "text", self.folder / "tokenizer"
        for arguments in (
            ["quickstart-corpus", "--out", text],
            ["train-tokenizer", text / "train.jsonl", "--kind", "bpe", "--vocab-size", 2048, "--out", tokens],
            ["prepare", text / "train.jsonl", "--tokenizer", tokens, "--out", self.folder / "corpus", "--quiet"],
            ["prepare", text / "heldout.jsonl", "--tokenizer", tokens, "--out", self.folder / "heldout", "--quiet"],
        ):
            self.command("data.cli", *arguments)

    def command(self, module: str, *arguments: object) -> str:
        """Run `python -m`; its output."""
        line = [sys.executable, "-m", module, *map(str, arguments)]
        environment = clean_environment(**self.variables)
        return subprocess.run(line, env=environment, cwd="/", check=True, stdout=subprocess.PIPE, text=True).stdout

    def launch(self, *overrides: str) -> subprocess.Popen[bytes]:
        """Start `fsdp-pretrain launch` with two ranks."""
        return spawn([*LAUNCH, "--nproc-per-node", 2, self.config, *overrides], self.log, **self.variables)

    def step(self) -> int:
        """The last step of the newest start."""
        for path in sorted(self.run.glob("segments/*/metrics.jsonl"), reverse=True):
            lines = path.read_bytes().split(b"\n")
            return int(json.loads(lines[-2])["step"]) if len(lines) > 1 else 0
        return 0

    def processes(self, module: str = "") -> list[psutil.Process]:
        """All processes started for this soak, or those that run a module."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                ours = process.environ().get("SOAK") == self.mark and process.status() != psutil.STATUS_ZOMBIE
                if ours and (not module or module in process.cmdline()):
                    found.append(process)
        return found

    def ranks(self) -> list[psutil.Process]:
        return [process for process in self.processes("fsdp_pretrain.train") if rank_of(process.pid) is not None]

    def curve(self) -> list[tuple[int, float, float]]:
        """(step, loss, gradient norm) of the kept line, unrounded."""
        return [(r.step, r.loss.sum, r.grad_norm) for r in read_metrics(RunDir(self.run))]


def stop(job: subprocess.Popen[bytes]) -> int:
    """Ask the launcher to save and stop; its exit code."""
    job.send_signal(signal.SIGUSR1)
    return job.wait(300)


def null(folder: Path, minutes: float) -> list[str]:
    """Train undisturbed; the problems found."""
    soak = Soak(folder, train={"duration": "1_000_000 steps"}, optimizer={"curve": "constant", "min_lr": 3e-3})
    soak.prepare()
    job = soak.launch()
    with contextlib.suppress(subprocess.TimeoutExpired):
        return [f"the launcher ended with {job.wait(60 * minutes)}"]
    steps, code = soak.step(), stop(job)
    for alarm in alarms(soak.run):
        print(f"  {alarm['severity']:4} {alarm['state']:9} {alarm['key']}: {alarm['summary']}")
    loud = [alarm for alarm in alarms(soak.run) if alarm["severity"] != "INFO" and alarm["state"] == "open"]
    evaluated = len(list(soak.run.glob("evals/step-*/*/results.json")))
    print(f"null: {steps} steps, {evaluated} evaluations, {len(loud)} alarms of WARN or above, exit {code}")
    wrong = [f"a false alarm: {alarm['key']}: {alarm['summary']}" for alarm in loud]
    return wrong + ([] if code == 75 else [f"exit {code} instead of 75"]) + leaked(soak)


def leaked(soak: Soak) -> list[str]:
    """Processes that outlived the run. Evaluations of its last checkpoints, at low priority, may take longer."""
    with contextlib.suppress(AssertionError):
        others = lambda: set(soak.processes()) - set(soak.processes("eval.cli"))  # noqa: E731
        until(lambda: not others(), 60, "the end of all other processes", every=0.2)
        until(lambda: not soak.processes(), 1200, "the end of the evaluations", every=0.2)
    left = [f"left behind: {process.pid} {' '.join(process.cmdline())[:150]}" for process in soak.processes()]
    for process in soak.processes():
        process.kill()
    return left


# ---------------------------------------------------------------- faults


class Breaker:
    """Breaks a run again and again.

    Attributes:
        job: the running launcher.
        wrong: problems found.
    """

    def __init__(self, soak: Soak, endpoint: Endpoint, seed: int) -> None:
        self.soak, self.endpoint, self.random = soak, endpoint, seeded(seed)
        self.job, self.wrong, self.done = soak.launch(), list[str](), Counter[str]()
        self._left: list[str] = []

    def kill(self) -> None:
        """kill -9 of a rank."""
        self.random.choice(self.soak.ranks()).kill()

    def suspend(self) -> None:
        """SIGSTOP of a rank."""
        self.random.choice(self.soak.ranks()).suspend()

    def agent(self) -> None:
        """kill -9 of the watchdog."""
        for agent in self.soak.processes("fsdp_pretrain.watchdog.agent"):
            with contextlib.suppress(psutil.NoSuchProcess):
                agent.kill()

    def nan(self) -> None:
        """A non-finite gradient, once."""
        with self.soak.nan.open("a") as file:
            file.write(f"{self.soak.step() + 40}\n")

    def disk(self) -> None:
        """The checkpoints' file system is full for eight seconds."""
        hog = self.soak.run / "checkpoints/hog"
        # unbuffered: a buffer would fail once more at the end
        with hog.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"\0" * 65536)
        time.sleep(8)
        hog.unlink()

    def terminate(self) -> None:
        """SIGTERM of a rank: the job stops with 75, and is started again."""
        self.random.choice(self.soak.ranks()).terminate()
        if (code := self.job.wait(120)) != 75:
            self.wrong.append(f"SIGTERM of a rank: exit {code} instead of 75")
        self.job = self.soak.launch()

    def webhook(self) -> None:
        """The webhook is down while a rank is killed."""
        self.endpoint.down()
        self.kill()
        time.sleep(10)
        self.endpoint.up()

    def once(self) -> None:
        """One fault and the recovery from it. Each kind in turn, in random order."""
        if not self._left:
            self._left = ["kill", "suspend", "agent", "nan", "disk", "terminate", "webhook"]
            self.random.shuffle(self._left)
        name, begun, heard = self._left.pop(), time.monotonic(), len(self.endpoint.requests)
        step = self.soak.step()
        getattr(self, name)()
        try:
            on = lambda: self.soak.step() > step + 60 or self.job.poll() is not None  # noqa: E731
            until(on, 180, f"progress after {name}", every=0.2)
        except AssertionError as error:
            self.wrong.append(str(error))
        recovered = time.monotonic() - begun
        time.sleep(max(0.0, self.random.uniform(20, 60) - recovered))
        if self.job.poll() is not None:
            self.wrong.append(f"after {name} the launcher had ended with {self.job.returncode}")
            self.job = self.soak.launch()
        bodies = self.endpoint.bodies()[heard:]
        pages = [body["key"] for body in bodies if body["severity"] == "CRIT" and body["state"] == "open"]
        if len(pages) > 2:  # a full disk, and the save that failed for it
            self.wrong.append(f"{len(pages)} pages for one fault ({name}): {', '.join(pages)}")
        self.done[name] += 1
        reported = ", ".join(f"{body['key']} {body['state']}" for body in bodies) or "nothing"
        print(f"  {name:9} at step {step:6}: on after {recovered:5.1f}s, told: {reported}", flush=True)


def faults(folder: Path, minutes: float, seed: int) -> list[str]:
    """Break a run for some minutes and compare it with an undisturbed one; the problems found."""
    quick: dict[str, dict[str, Any]] = {
        "model": {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "declared_params": None},
        "train": {"duration": "1_000_000 steps", "global_batch": "8 samples", "micro_batch": 2},
        "optimizer": {"curve": "constant", "min_lr": 3e-3},
        "checkpoint": {"every": "40 steps", "keep_last": 3, "retry": "1 s", "max_failures": 1000},
        "launch": {"attempts": 20},
        "watchdog": {
            "hang": {"soft": "4 s", "hard": "8 s"},
            "notify": {"webhook": True},
        },
        "eval": {"launch": False},
    }
    quick["data"] = {"sequence_length": 64, "lanes": 8, "sources": [{"name": "python", "path": str(folder / "corpus")}]}
    soak = Soak(folder, **quick)
    soak.prepare()
    endpoint = Endpoint(free_port())
    endpoint.up()
    soak.variables["ALARM_WEBHOOK_URL"] = f"http://127.0.0.1:{endpoint.port}/alarms"
    end = time.monotonic() + 60 * minutes
    with (
        tmpfs(soak.run / "checkpoints"),
        constants("fsdp_pretrain.launch.policy", PAUSES=[0.2], RESTARTS=10_000),
        constants("fsdp_pretrain.launch.watch", END_SECONDS=20.0),
        constants("fsdp_pretrain.checkpoint.upcoming", CHECK_SECONDS=2.0),
        constants("fsdp_pretrain.watchdog.agent.pass_runner", INTERVAL=0.5),
    ):
        breaker = Breaker(soak, endpoint, seed)
        until(lambda: soak.step() > 50, 120, "the first steps", every=0.2)
        while time.monotonic() < end:
            breaker.once()
        code, wrong = stop(breaker.job), breaker.wrong
        wrong += [] if code == 75 else [f"exit {code} instead of 75 at the end"]
        wrong += leaked(soak)
        wrong += judge_ledger(soak) + unnoticed(soak)
        curve = soak.curve()
        whole = untouched(soak, len(curve))
    if curve != whole[: len(curve)]:
        first = next((a for a, b in zip(curve, whole, strict=False) if a != b), ("none: a shorter curve",))
        wrong.append(f"the curve differs from an untouched run, first in step {first[0]}")
    shown = ", ".join(f"{name} {count}" for name, count in breaker.done.items())
    pages = sum(body["severity"] == "CRIT" and body["state"] == "open" for body in endpoint.bodies())
    starts = len(list(soak.run.glob("segments/*")))
    print(f"faults: {sum(breaker.done.values())} ({shown}), {len(curve)} steps, {starts} starts, {pages} pages")
    endpoint.down()
    return wrong


def unnoticed(soak: Soak) -> list[str]:
    """Planted non-finite gradients of the kept line that were applied."""
    planted = {int(step) for step in soak.nan.read_text().split()}
    applied = [
        record.step for record in read_metrics(RunDir(soak.run)) if record.step in planted and not record.skipped
    ]
    return [f"the gradient of step {step} was spoilt, and the step was not skipped" for step in applied]


def judge_ledger(soak: Soak) -> list[str]:
    """States of the account sum to the wall clock."""
    found = json.loads(soak.command("fsdp_pretrain.cli", "goodput", soak.run, "--json"))
    wall, total = found["wall_seconds"], sum(found["states"].values())
    shares = ", ".join(f"{name} {value / wall:.1%}" for name, value in found["states"].items() if value > 0.001 * wall)
    print(f"ledger: {wall:.1f}s: {shares}")
    return [] if abs(total - wall) <= 0.001 * wall else [f"the ledger sums to {total:.2f}s of {wall:.2f}s"]


def untouched(soak: Soak, steps: int) -> list[tuple[int, float, float]]:
    """The curve of the same run without faults, except those of the data and the numbers."""
    other, soak.run = soak.run, soak.folder / "whole"
    settings = ("checkpoint.every='100_000 steps'", "watchdog.enabled=false", f"run.dir={soak.run}")
    job = soak.launch(*settings)
    try:
        until(lambda: soak.step() >= steps or job.poll() is not None, 3600, "the untouched run", every=0.2)
        stop(job)
        return soak.curve()
    finally:
        soak.run = other


def main() -> int:
    """Soak; 0 if all invariants held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["null", "faults"])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix=f"soak-{args.kind}-"))
    wrong = null(folder, args.minutes) if args.kind == "null" else faults(folder, args.minutes, args.seed)
    for line in wrong:
        print(f"WRONG: {line}")
    print(f"{'FAILED' if wrong else 'all invariants held'}: {folder}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
