"""Long runs with a real launcher, real ranks and a real watchdog: either undisturbed or with all kinds of faults.

    python tests/soak.py null --minutes 30
    python tests/soak.py faults --minutes 30 --seed 7

`null` trains the quickstart model with saves and evaluations under default settings: no alarm of WARN or worse.
`faults` breaks a small run every 20 to 60 seconds, one fault after the other, and then compares it with an undisturbed
run: the same curve to the bit, no process left, at most two pages per fault, a ledger that adds up, and the documented
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

from fsdp_pretrain.run.files import RunDir  # noqa: E402
from fsdp_pretrain.run.metrics import read_metrics  # noqa: E402

NAN_HOOK = """
import os
if os.environ.get("RANK") == "1":
    from fsdp_pretrain.parallel import optimizer
    from fsdp_pretrain.train import trainer
    step, norm, now = trainer.Trainer.step, optimizer.local_norm, [0]
    def counted(self):
        now[0] = self.state.step + 1
        step(self)
    def spoilt(model):
        if now[0] % 700 == 300:
            next(p for p in model.parameters() if p.grad.to_local().numel()).grad.to_local().view(-1)[0] = float("nan")
        return norm(model)
    trainer.Trainer.step, optimizer.local_norm = counted, spoilt
"""
"""In `sitecustomize` of the ranks that are broken: now and then a gradient of rank 1 is NaN, the same on every attempt.
Applied, it would end the run with 93."""
BROKEN: dict[str, dict[str, Any]] = {
    "model": {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "declared_params": None},
    "data": {"sequence_length": 64, "lanes": 8},
    "train": {"duration": "1_000_000 steps", "global_batch": "8 samples", "micro_batch": 2},
    "optimizer": {"curve": "constant", "min_lr": 3e-3},
    "checkpoint": {"every": "40 steps", "keep_last": 3, "retry": "1 s", "max_failures": 1000},
    "launch": {"attempts": 20},
    "watchdog": {"hang": {"soft": "4 s", "hard": "8 s"}, "notify": {"webhook": True}},
    "eval": {"launch": False},
}


class Soak:
    """A run under the launcher in a folder, with `settings` over the sections of the quickstart's configuration."""

    def __init__(self, folder: Path, hook: str = "", **settings: dict[str, Any]) -> None:
        self.folder, self.run, self.mark = folder, folder / "run", uuid.uuid4().hex
        values = tomllib.loads((ROOT / "configs/runs/quickstart.toml").read_text())
        for section, changes in settings.items():
            merged = {**values.get(section, {}), **changes}
            values[section] = {key: value for key, value in merged.items() if value is not None}
        values["run"]["dir"] = str(self.run)
        values["data"]["sources"][0]["path"] = str(folder / "corpus")
        values["eval"]["heldout"] = str(folder / "text/heldout.jsonl")
        values["eval"]["loss_on"][0]["path"] = str(folder / "heldout")
        values["record"]["aim"] = False
        self.config = folder / "soak.toml"
        self.config.write_text(tomli_w.dumps(values))
        (folder / "hook").mkdir()
        (folder / "hook/sitecustomize.py").write_text(SET_CONSTANTS + hook)
        self.variables = {"SOAK": self.mark, "PYTHONPATH": python_path(folder / "hook")}
        text, tokens = folder / "text", folder / "tokenizer"
        for arguments in (
            ["quickstart-corpus", "--out", text],
            ["train-tokenizer", text / "train.jsonl", "--kind", "bpe", "--vocab-size", 2048, "--out", tokens],
            ["prepare", text / "train.jsonl", "--tokenizer", tokens, "--out", folder / "corpus", "--quiet"],
            ["prepare", text / "heldout.jsonl", "--tokenizer", tokens, "--out", folder / "heldout", "--quiet"],
        ):
            self.command("fsdp_pretrain.data.cli", *arguments)

    def command(self, module: str, *arguments: object) -> str:
        """Run `python -m`; its output."""
        line = [sys.executable, "-m", module, *map(str, arguments)]
        environment = clean_environment(**self.variables)
        return subprocess.run(line, env=environment, cwd="/", check=True, stdout=subprocess.PIPE, text=True).stdout

    def launch(self, *overrides: str) -> subprocess.Popen[bytes]:
        """Start `fsdp-pretrain launch` with two ranks."""
        line = [*LAUNCH, "--nproc-per-node", 2, self.config, *overrides]
        return spawn(line, self.folder / "launch.log", **self.variables)

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

    def end(self, job: subprocess.Popen[bytes], patience: float = 60.0) -> list[str]:
        """Ask the launcher to save and stop; what is wrong: its exit code, and processes left after `patience`
        seconds."""
        job.send_signal(signal.SIGUSR1)
        code = job.wait(300)
        wrong = [] if code == 75 else [f"exit {code} instead of 75 at the end"]
        with contextlib.suppress(AssertionError):
            until(lambda: not self.processes(), patience, every=0.2)
        for process in self.processes():
            with contextlib.suppress(psutil.Error):  # it may end just now
                wrong.append(f"left behind: {process.pid} {' '.join(process.cmdline())[:150]}")
                process.kill()
        return wrong

    def curve(self) -> list[tuple[int, float, float]]:
        """(step, loss, gradient norm) of the kept line, unrounded."""
        return [(r.step, r.loss.sum, r.grad_norm) for r in read_metrics(RunDir(self.run))]


def null(folder: Path, minutes: float) -> list[str]:
    """Train undisturbed; the problems found."""
    soak = Soak(folder, train={"duration": "1_000_000 steps"}, optimizer={"curve": "constant", "min_lr": 3e-3})
    job = soak.launch()
    with contextlib.suppress(subprocess.TimeoutExpired):
        return [f"the launcher ended with {job.wait(60 * minutes)}"]
    wrong = soak.end(job, patience=1200.0)  # the last evaluations have a low priority
    loud = [alarm for alarm in alarms(soak.run) if alarm["severity"] != "INFO" and alarm["state"] == "open"]
    evaluated = len(list(soak.run.glob("evals/step-*/*/results.json")))
    print(f"null: {soak.step()} steps, {evaluated} evaluations, {len(loud)} alarms of WARN or above")
    return wrong + [f"a false alarm: {alarm['key']}: {alarm['summary']}" for alarm in loud]


# ---------------------------------------------------------------- faults


class Breaker:
    """Breaks a run again and again. `job` is the running launcher, `wrong` the problems found."""

    def __init__(self, soak: Soak, endpoint: Endpoint, seed: int) -> None:
        self.soak, self.endpoint, self.random = soak, endpoint, seeded(seed)
        self.job, self.wrong, self.done = soak.launch(), list[str](), Counter[str]()
        self._left: list[str] = []

    def _rank(self) -> psutil.Process:
        trainers = self.soak.processes("fsdp_pretrain.train")
        return self.random.choice([process for process in trainers if rank_of(process.pid) is not None])

    def kill(self) -> None:
        """kill -9 of a rank."""
        self._rank().kill()

    def suspend(self) -> None:
        """SIGSTOP of a rank."""
        self._rank().suspend()

    def agent(self) -> None:
        """kill -9 of the watchdog."""
        for agent in self.soak.processes("fsdp_pretrain.watchdog.agent"):
            with contextlib.suppress(psutil.NoSuchProcess):
                agent.kill()

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
        self._rank().terminate()
        if (code := self.job.wait(600)) != 75:
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
            self._left = ["kill", "suspend", "agent", "disk", "terminate", "webhook"]
            self.random.shuffle(self._left)
        name, begun, heard, step = self._left.pop(), time.monotonic(), len(self.endpoint.requests), self.soak.step()
        getattr(self, name)()
        try:
            on = lambda: self.soak.step() > step + 60 or self.job.poll() is not None  # noqa: E731
            until(on, 600, f"progress after {name}", every=0.2)
        except AssertionError as error:
            self.wrong.append(str(error))
        recovered = time.monotonic() - begun
        time.sleep(max(0.0, self.random.uniform(20, 60) - recovered))
        if self.job.poll() is not None:
            self.wrong.append(f"after {name} the launcher had ended with {self.job.returncode}")
            self.job = self.soak.launch()
        told = [f"{body['severity']} {body['key']} {body['state']}" for body in self.endpoint.bodies()[heard:]]
        # A full disk and a failed save are two.
        if sum(text.startswith("CRIT") and text.endswith("open") for text in told) > 2:
            self.wrong.append(f"too many pages for one fault ({name}): {told}")
        self.done[name] += 1
        print(f"  {name:9} at step {step:6}: on after {recovered:5.1f}s, told: {', '.join(told)}", flush=True)


def faults(folder: Path, minutes: float, seed: int) -> list[str]:
    """Break a run for some minutes and compare it with an undisturbed one; the problems found."""
    soak, endpoint = Soak(folder, NAN_HOOK, **BROKEN), Endpoint(free_port())
    endpoint.up()
    soak.variables["ALARM_WEBHOOK_URL"] = f"http://127.0.0.1:{endpoint.port}/alarms"
    end = time.monotonic() + 60 * minutes
    with (
        tmpfs(soak.run / "checkpoints"),
        constants("fsdp_pretrain.launch.policy", PAUSES=[0.2], RESTARTS=10_000),
        constants("fsdp_pretrain.launch.watch", END_SECONDS=20.0),
        constants("fsdp_pretrain.checkpoint.upcoming", CHECK_SECONDS=2.0),
        constants("fsdp_pretrain.watchdog.pass_runner", INTERVAL=0.5),
    ):
        breaker = Breaker(soak, endpoint, seed)
        until(lambda: soak.step() > 50, 600, "the first steps", every=0.2)
        while time.monotonic() < end:
            breaker.once()
        wrong = breaker.wrong + soak.end(breaker.job)
        ledger = json.loads(soak.command("fsdp_pretrain.cli", "goodput", soak.run, "--json"))
        if abs(sum(ledger["states"].values()) - ledger["wall_seconds"]) > 0.001 * ledger["wall_seconds"]:
            wrong.append(f"the ledger does not add up: {ledger}")
        curve = soak.curve()
    print(f"faults: {breaker.done}, {len(curve)} steps, {len(list(soak.run.glob('segments/*')))} starts")
    soak.run = folder / "whole"
    job = soak.launch("checkpoint.every='100_000 steps'", "watchdog.enabled=false", f"run.dir={soak.run}")
    until(lambda: soak.step() >= len(curve) or job.poll() is not None, 3600, "the untouched run", every=0.2)
    wrong += soak.end(job)
    endpoint.down()
    if curve != (whole := soak.curve()[: len(curve)]):
        first = next((a for a, b in zip(curve, whole, strict=False) if a != b), ("none: a shorter curve",))
        wrong.append(f"the curve differs from an untouched run, first in step {first[0]}")
    return wrong


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
