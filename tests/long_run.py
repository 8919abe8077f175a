"""Writes the record of a long run that was never trained: starts that crash, hang, are stopped and rolled back."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import records
import tomli_w

from fsdp_pretrain.checkpoint.store import Store
from fsdp_pretrain.run import state_files
from fsdp_pretrain.run.files import RunDir, stamp

BEGIN, LENGTH, PACE = 1_780_000_000.0, 2048, 2.0
SOURCES = {"web": 0.7, "code": 0.2, "books": 0.1}
CONFIG: dict[str, Any] = {
    "model": {"family": "llama", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "vocab": 512},
    "optimizer": {"lr": 3e-4, "warmup": "100 steps"},
    "checkpoint": {"every": "500 steps"},
}


@dataclass
class LongRun:
    """What was written."""

    run: RunDir
    spikes: list[int] = field(default_factory=list)  # steps with a loss of 9; all but the last were rolled back
    starts: int = 0  # number of segments
    left: int = 0  # steps that were left behind


class _Writer:
    """The clock, the position and the files of the run."""

    def __init__(self, path: Path, name: str, steps: int, rng: np.random.Generator) -> None:
        self.made, self.name, self.steps, self.rng = LongRun(RunDir(path)), name, steps, rng
        self.run, self.clock, self.step, self.saved, self.number = self.made.run, BEGIN, 0, 0, 0
        self._consumed = np.concatenate([[0], np.cumsum([self.batch(step) for step in range(1, steps + 1)])])
        path.mkdir(parents=True)
        self.times: dict[int, float] = {}  # when steps ended
        self._journal = self.run.journal.open("a", encoding="utf-8")

    def batch(self, step: int) -> int:
        return 256 if step * 20 < self.steps else 512 if step * 8 < self.steps else 1024

    def tell(self, kind: str, text: str, *, outside: bool = False, **facts: Any) -> None:
        place = {} if outside else {"segment": self.number}
        self._journal.write(
            json.dumps({"time": stamp(self.clock), "kind": kind, "text": text, **place, **facts}) + "\n"
        )
        self._journal.flush()

    def alarm(self, key: str, severity: str, state: str, text: str) -> None:
        said = f"{severity} {key} {state}: {text}"
        self.tell("alarm", said, outside=True, key=key, severity=severity, state=state, step=self.step, facts={})
        times = {"opened": stamp(self.clock), "changed": stamp(self.clock)}
        line = {"key": key, "severity": severity, "state": state, "summary": text, "step": self.step, **times}
        path = self.run.path / "watchdog/alarms.jsonl"
        path.parent.mkdir(exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def start(self, kind: str = "start", **facts: Any) -> None:
        """Launch, connect, load."""
        launched, parent = self.clock, self.number or None
        self.clock, self.number = self.clock + 40, self.number + 1
        self.made.starts, self.made.left = self.number, self.made.left + self.step - self.saved
        self.step = self.saved
        folder = self.run.segment(self.number)
        folder.mkdir(parents=True)
        world = {"size": 64, "replicas": 8, "shards": 8}
        times = {"time": stamp(self.clock), "launched": stamp(launched), "host": "node-3", "world": world}
        if kind != "rollback":
            state_files.write(folder / "environment.json", times)
        place = {"segment": self.number, "parent": parent, "step": self.step, "kind": kind, "consumed": 0, "cursor": 0}
        state_files.write(folder / "lineage.json", {**place, **facts})
        if kind == "rollback":
            return
        size = f"{self.name}: llama with 6.74B parameters on 64 x H100 (8 replicas x 8 shards), {self.steps:_} steps"
        self.tell("start", size, world=64)
        if parent is not None:
            self.tell("resume", f"from step-{self.step:08d}", step=self.step)
        self.clock += 50
        self.tell("ready", "40s until all ranks connected, 50s to build and load", step=self.step)

    def train(self, until: int, *, spike: int | None = None, save: bool = True) -> None:
        """Steps, with a checkpoint every 500."""
        until = min(until, self.steps)
        with (self.run.segment(self.number) / "metrics.jsonl").open("a", encoding="utf-8") as file:
            while self.step < until:
                self.step += 1
                file.write(json.dumps(self._record(spike)) + "\n")
                if save and self.step % 500 == 0:
                    self.save()

    def _record(self, spike: int | None) -> dict[str, Any]:
        step, noise = self.step, self.rng.standard_normal(5)
        share, batch = step / self.steps, self.batch(step)
        loss = 1.9 + 9 * (step + 3) ** -0.42 + 0.015 * noise[0]
        norm = (0.35 + 4 / (step + 5) ** 0.5) * float(np.exp(0.15 * noise[1]))
        if spike is not None and step >= spike:
            loss, norm = (9.0, 80.0) if step == spike else (loss + 2.5 * 0.995 ** (step - spike), norm * 3)
        wait = 0.004 * float(np.exp(noise[2])) + (1.5 if step % 7919 == 0 else 0.0)
        stall = 0.4 if step % 500 == 1 else 0.0
        measured = step % 250 == 0
        compute = PACE * batch / 1024 * (1 + 0.01 * noise[3]) * (1.2 if 0.55 < share < 0.58 else 1.0)
        parts = {"forward_backward": compute * 0.93, "optimizer": compute * 0.05, "other": compute * 0.02}
        seconds = {**parts, "data": wait, "checkpoint": stall, "heldout": 3.0 * measured}
        seconds["iteration"] = sum(seconds.values())
        self.clock += seconds["iteration"]
        self.times[step] = self.clock
        shares = SOURCES if share < 0.8 else {"web": 0.5, "code": 0.3, "books": 0.2}
        tokens, rate = batch * LENGTH, batch * LENGTH / (seconds["iteration"] - seconds["heldout"])
        losses = {"web": loss + 0.1, "code": loss - 0.9, "books": loss + 0.3}
        lr = 3e-4 * min(1.0, step / 100) * (0.1 + 0.9 * (1 + np.cos(np.pi * share)) / 2)
        consumed = int(self._consumed[step])
        return {
            "schema": 1, "step": step, "consumed": consumed, "cursor": consumed, "tokens": consumed * LENGTH,
            "loss": {"sum": loss * tokens, "count": tokens},
            "sources": {name: {"sum": value * 1000, "count": 1000} for name, value in losses.items()},
            "heldout": {"web": {"sum": (loss + 0.12) * 10, "count": 10}} if measured else None,
            "grad_norm": norm, "clip": min(1.0, 1.0 / norm), "loss_scale": None, "skipped": False, "not_finite": None,
            "lr": lr, "ramps": {"shares": shares, "embedding_shrink": min(1.0, 0.1 + 3 * share)}, "batch": batch,
            "sequence_length": LENGTH, "mixture": shares, "data_digest": f"{step:016x}", "documents": 1, "separators": 1,
            "adjacent_specials": 0, "quarantined": 0, "data_read": {}, "world": 64, "seconds": seconds,
            "tokens_per_second": rate, "mfu": rate * 4.6e10 / (64 * 989e12), "memory_bytes": int(61e9 + 1e8 * noise[4]),
            "segment": self.number, "host": "node-3", "time": stamp(self.clock),
        }  # fmt: skip

    def save(self) -> None:
        self.saved, took = self.step, 38 + 4 * abs(float(self.rng.standard_normal()))
        text = f"step-{self.step:08d}: 75.3 GiB in {took:.2f}s, verified"
        facts = {"consumed": int(self._consumed[self.step]), "bytes": 80_852_000_000, "seconds": took, "verified": True}
        self.tell("checkpoint", text, step=self.step, **facts)

    def stop(self, code: int, text: str) -> None:
        self.clock += 5
        self.tell("stop", f"{text}, exit {code}", code=code, step=self.step)
        self._intend(code, text)

    def hang(self) -> None:
        self.clock += 300
        self.alarm("hang", "CRIT", "open", f"no progress for 300s in step {self.step + 1}: rank 17 (node-2) is stopped")
        self.clock += 20
        self._intend(75, "hang")
        self.alarm("hang", "CRIT", "resolved", "the job was ended")

    def _intend(self, code: int, reason: str) -> None:
        intent = {"code": code, "reason": reason, "time": stamp(self.clock)}
        state_files.write(self.run.segment(self.number) / "exit_intent.json", intent)

    def roll_back(self, to: int) -> None:
        lost, self.saved = self.step - to, to
        self.start("rollback", reason="loss spike")
        facts = {"lost": {"steps": lost, "tokens": lost * 10**6}, "by": "ada"}
        self.tell(
            "rollback", f"back to step {to:_}; because: loss spike; {lost:_} steps are left behind", step=to, **facts
        )

    def evaluate(self, every: int) -> None:
        """Scores of every so many steps, as at the end."""
        for step in range(every, self.step + 1, every):
            share = step / self.steps
            acc, bits = 0.25 + 0.45 * share**0.5, 0.55 + 0.6 * (step + 50) ** -0.2
            scores = {"hellaswag": {"acc_norm": acc, "acc_norm_stderr": 0.007}, "heldout_bpb": {"bits_per_byte": bits}}
            self.tell("eval", f"hellaswag acc_norm {acc:.4f}", step=step, scores=scores, tasks="tasks")

    def finish(self, state: str, total: int) -> None:
        """The state files and the newest checkpoint."""
        sources = [{"name": name, "path": f"/corpora/{name}", "weight": weight} for name, weight in SOURCES.items()]
        config = {
            "run": {"name": self.name, "dir": str(self.run.path)},
            "data": {"sequence_length": LENGTH, "sources": sources},
            "train": {"duration": f"{total} steps", "global_batch": "1024 samples", "micro_batch": 16},
            **CONFIG,
        }
        self.run.config.write_text(tomli_w.dumps(config))
        facts = {"run": self.name, "segment": self.number, "state": state, "step": self.step, "total_steps": total}
        live = {
            "heartbeat": stamp(self.clock),
            "iteration_seconds": PACE,
            "seconds_left": (total - self.step) * PACE,
            "host": "node-3",
            "pid": 1,
            "tokens": 1,
        }
        state_files.write(self.run.status, {**facts, **live})
        if self.saved:
            records.commit(Store(self.run.checkpoints), self.saved)
        self._journal.close()


def write_long_run(path: Path, *, steps: int = 100_000, starts: int = 40, seed: int = 0, name: str = "long") -> LongRun:
    """Write a finished run of so many steps and starts. Each start ends by a crash, a stop, a hang or a rollback in
    turn; a spike of the loss is just before every rollback, and one that nobody acted on is in the last start."""
    writer = _Writer(path, name, steps, np.random.default_rng(seed))
    each = max(20, steps // starts)
    for number in range(starts):
        if writer.made.starts == starts - 1:
            break
        writer.start()
        target = (number + 1) * each
        match number % 4 if writer.made.starts + 1 < starts else 0:  # a rollback takes two
            case 0:
                writer.train(target)
                writer.clock += 90  # nothing recorded it
            case 1:
                writer.train(target)
                writer.save()
                writer.stop(75, "stopped by the scheduler")
                writer.clock += 3600
            case 2:
                writer.train(target - each // 2)
                writer.alarm("slow-steps", "WARN", "open", "steps are 12% slower than the baseline")
                writer.train(target)
                writer.alarm("slow-steps", "WARN", "resolved", "back to the baseline")
                writer.hang()
            case _:
                writer.made.spikes.append(spike := max(writer.step + 2, target - each // 5))
                writer.train(spike - 1)
                good = writer.saved
                writer.train(target, spike=spike, save=False)
                writer.alarm("loss/spike", "CRIT", "open", "loss 9.00 is 40 deviations above the usual 2.10")
                writer.stop(93, "a person must look")
                writer.clock += 1800
                writer.roll_back(good)
                writer.alarm("loss/spike", "CRIT", "resolved", "rolled back")
                writer.tell("note", "skipped the shard with the repeated licence headers", outside=True, by="ada")
    writer.start()
    writer.made.spikes.append(spike := steps - max(3, steps // 50))
    writer.train(spike - 1)
    writer.train(spike, spike=spike)
    writer.train(steps)
    writer.save()
    writer.evaluate(max(1, steps // 50))
    writer.stop(0, "complete")
    writer.finish("complete", steps)
    return writer.made
