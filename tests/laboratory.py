"""Small real corpora, run configurations, training jobs, and runs under a fast watchdog."""

from __future__ import annotations

import json
import random
import re
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from processes import ROOT, Job, Zygotes

WORDS = (
    *"the run writes every checkpoint before it reads a shard and the loss falls while the mesh of ranks sums".split(),
    *"its gradients over replicas def return import class self None True data = ( ) [ ] : . , 0 1 2 3 state".split(),
    "\n",
    "   ",
    "",
)


def make_text(seed: int, words: int) -> str:
    """Reproducible text with white space, code and a little non-ASCII."""
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(words)) + rng.choice(["\n", "", " é", " 文\n"])


def write_jsonl(path: Path, texts: list[str]) -> Path:
    """One `{"text": ...}` per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def write_tokens(path: Path, documents: list[list[int]], tokenizer: Any, dtype: str = "<u2", shards: int = 2) -> Path:
    """A corpus of the given token lists, unchanged, dealt over its shards in turn."""
    import numpy as np

    from data.corpus.corpus import write_corpus
    from data.corpus.shards import ShardWriter

    (path / "shards").mkdir(parents=True)
    entries = []
    for number in range(shards):
        with ShardWriter(path / "shards" / f"s{number}", np.dtype(dtype)) as writer:
            for document in documents[number::shards]:
                writer.append(np.array(document, dtype=dtype))
            entries.append(writer.finish())
    write_corpus(path, tokenizer, entries, np.dtype(dtype), {})
    return path


class Lab:
    """A directory with a corpus and what is needed to train on it.

    Attributes:
        path: of the laboratory.
        corpus: a prepared corpus with a 512-token tokenizer.
        tokenizer: its tokenizer directory.
        heldout: held-out JSONL.
    """

    def __init__(self, path: Path, shared: Path, zygotes: Zygotes) -> None:
        self.path, self._zygotes = path, zygotes
        self.corpus, self.tokenizer, self.heldout = shared / "corpus", shared / "tokenizer", shared / "heldout.jsonl"
        self._jobs: list[Job] = []

    def config(self, name: str = "run", **sections: dict[str, Any]) -> Path:
        """A run configuration of a tiny Llama; keyword arguments replace values of its sections."""
        values: dict[str, Any] = {
            "run": {"name": name, "dir": str(self.path / name)},
            "model": {"family": "llama", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "vocab": 512},
            "data": {"sequence_length": 32, "lanes": 8, "sources": [{"name": "text", "path": str(self.corpus)}]},
            "train": {"duration": "20 steps", "global_batch": "8 samples", "micro_batch": 2},
            "optimizer": {"lr": 1e-2, "min_lr": 1e-3, "warmup": "4 steps"},
            "parallel": {"timeout": "60 s"},
            "checkpoint": {"every": "10 steps"},
            "record": {"console_every": 5},
            "watchdog": {"enabled": False},  # one process more per run: tests of the watchdog turn it on
        }
        for section, changes in sections.items():
            values[section] = {**values.get(section, {}), **changes}
            values[section] = {key: value for key, value in values[section].items() if value is not None}
        path = self.path / f"{name}.toml"
        path.write_text(tomli_w.dumps(values))
        return path

    def start(self, config: Path, *overrides: str, ranks: int = 1, flags: tuple[str, ...] = (), nodes: int = 1) -> Job:
        """Start a training job, as if on `nodes` nodes (their host names: `hostname.py`)."""
        job = Job(self._zygotes, config, overrides, ranks, self.path / f"log-{len(self._jobs)}", flags, nodes)
        self._jobs.append(job)
        return job

    def train(self, config: Path, *overrides: str, ranks: int = 1, expect: int = 0, flags: tuple[str, ...] = ()) -> str:
        """Run a training job to its end and return its output. Fails the test on another exit code."""
        job = self.start(config, *overrides, ranks=ranks, flags=flags)
        codes = job.wait()
        assert codes == [expect] * ranks, f"exit codes {codes}\n{job.output()}"
        return job.output()

    def close(self) -> None:
        for job in self._jobs:
            job.kill()


STORAGE = {"interval": "0.2 s", "audit": "1 s"}
NOISE = {"gradient", "loss", "pace", "straggler", "stolen-time", "memory", "mount-slow", "data-wait", "blind"}
Transitions = list[tuple[str, str]]
CRIT_AND_RESOLVED: Transitions = [("CRIT", "open"), ("CRIT", "resolved")]


class Watched:
    """A run with a fast watchdog, and ranks that can be given a fault."""

    def __init__(self, lab: Any, helpers: Any, run_command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lab, self.helpers, self._command, self._patch = lab, helpers, run_command, monkeypatch
        self.run: Path = lab.path / "run"
        self.ranks = 1

    def configure(self, *, ranks: int = 1, watchdog: dict[str, Any] | None = None, **sections: dict[str, Any]) -> None:
        """Settings that every start of the run shares."""
        changes = {"enabled": True, "interval": "0.1 s", "storage": STORAGE, **(watchdog or {})}
        checkpoint = {"every": "20 steps", "retry": "0.1 s", "max_failures": 1000, **sections.pop("checkpoint", {})}
        train = {"duration": "100000 steps", "micro_batch": 8 // ranks}
        self.ranks = ranks
        self._config = self.lab.config(train=train, checkpoint=checkpoint, watchdog=changes, **sections)

    def start(self, *overrides: str, trap: dict[str, Any] | None = None, fault: dict[str, Any] | None = None) -> Any:
        """Start it, without a fault or with one of storage (see traps.py) or of another kind (see faults.py)."""
        for name, content, file in (("TRAP", trap, "traps.py"), ("FAULT", fault, "faults.py")):
            if content is not None:
                self._patch.setenv(name, json.dumps(content))
                self._patch.setenv("EXECUTE_FIRST", str(ROOT / "tests" / file))
        job = self.lab.start(self._config, f"run.dir={self.run}", *overrides, ranks=self.ranks)
        for name in ("TRAP", "FAULT", "EXECUTE_FIRST"):
            self._patch.delenv(name, raising=False)
        return job

    def stop(self, job: Any) -> None:
        """Ask it to stop; it saves and exits with 75."""
        job.kill(0, signal.SIGTERM)
        self.ends(job, 75)

    def ends(self, job: Any, code: int) -> None:
        """Wait for an exit code, and for the end of the watchdog."""
        assert job.wait() == [code] * self.ranks, job.output()[-3000:]
        self.helpers.wait_for(lambda: not self.helpers.agents(self.run), what="the end of the watchdog")
        self.is_consistent()

    def until(self, key: str, state: str = "open", severity: str = "") -> dict[str, Any]:
        """Wait for a state of an alarm; the transition."""

        def standing() -> Any:
            alarm = (self.helpers.alarms(self.run, key) or [{}])[-1]
            return alarm if alarm.get("state") == state and severity in ("", alarm["severity"]) else None

        found: dict[str, Any] = self.helpers.wait_for(standing, what=f"{key} {state} {severity}")
        return found

    def reaches(self, steps: int, more: bool = False) -> None:
        """Wait for a step, or for that many more."""
        begin = self.step if more else 0
        self.helpers.wait_for(lambda: self.step >= begin + steps, what=f"step {begin} + {steps}")

    @property
    def step(self) -> int:
        records = sorted(self.run.glob("segments/*/metrics.jsonl"))
        last = records[-1].read_bytes().rpartition(b"\n")[0].rpartition(b"\n")[2] if records else b""
        return json.loads(last)["step"] if last else 0

    def saved(self) -> list[int]:
        """Steps of the verified checkpoints on storage."""
        names = (path.parent.name for path in (self.run / "checkpoints").glob("step-*/verified.json"))
        return sorted(int(name[5:]) for name in names if re.fullmatch(r"step-\d{8}", name))

    def transitions(self, key: str) -> Transitions:
        """Severity and state of every transition of an alarm."""
        return [(alarm["severity"], alarm["state"]) for alarm in self.helpers.alarms(self.run, key)]

    def warnings(self) -> set[str]:
        """Keys of all alarms of WARN or worse, except those typical of a tiny model or a busy machine."""
        found = {alarm["key"] for alarm in self.helpers.alarms(self.run) if alarm["severity"] != "INFO"}
        return {key for key in found if key.partition("/")[0] not in NOISE}

    def is_consistent(self) -> None:
        """Every transition is valid and in the journal; every second is in one state; nothing half-written is left."""
        changes = [(a["key"], a["severity"], a["state"]) for a in self.helpers.alarms(self.run)]
        for key in {key for key, _, _ in changes}:
            mine = self.transitions(key)
            assert all(one != next_ for one, next_ in pairwise(mine)), (key, mine)
        by_trainer = {entry["key"] for entry in self.helpers.journal(self.run, "health")}  # these are no alarms there
        entries = [e for e in self.helpers.journal(self.run, "alarm") if e["key"] not in by_trainer]
        changes = [alarm for alarm in changes if alarm[0] not in by_trainer]
        assert sorted((e["key"], e["severity"], e["state"]) for e in entries) == sorted(changes)
        done = self._command("fsdp_pretrain.cli", "goodput", self.run, "--json")
        found = json.loads(done.stdout)
        assert sum(found["states"].values()) == pytest.approx(found["wall_seconds"], rel=1e-3)
        assert not list((self.run / "checkpoints").glob("*.writing-*"))
        verified = self._command("fsdp_pretrain.cli", "checkpoints", self.run, "verify")
        assert verified.returncode == 0, verified.stdout

    def learned_as(self, whole: list[Any]) -> None:
        """The curve is that of an undisturbed run."""
        losses = self.helpers.losses(self.run)
        assert [step for step, _, _ in losses] == list(range(1, len(losses) + 1))
        assert losses[: len(whole)] == whole[: len(losses)]
