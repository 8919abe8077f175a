"""Random sequences of what operators do to a tiny run, beside a twin: a run whose configuration has the lasting entries
as its timeline, and that nobody touches. Every record of the kept line must be equal to the bit, and so must every
replay.
"""

from __future__ import annotations

import json
import random
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import tomli_w
from laboratory import Lab
from processes import CLI, Run, scripted

from fsdp_pretrain.checkpoint.store import Store
from fsdp_pretrain.config.live_set import ramped
from fsdp_pretrain.errors import Exit
from fsdp_pretrain.lineage.fork import fork
from fsdp_pretrain.lineage.rollback import rollback
from fsdp_pretrain.run import lineage
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.metrics import METRICS, read_metrics, records

CHOICES: dict[str, list[Any]] = {
    "optimizer.lr": [4e-3, 2e-2],
    "optimizer.min_lr": [1e-4, 2e-3],
    "optimizer.lr_scale": [0.3, 0.7, 1.5],
    "optimizer.weight_decay": [0.0, 0.05, 0.2],
    "optimizer.betas": [[0.85, 0.99], [0.9, 0.9]],
    "optimizer.embedding_shrink": [0.1, 0.9],
    "optimizer.shrink_paths": ["input"],
    "train.grad_clip": [0.1, 0.5, 2.0],
    "train.z_loss": [1e-4, 1e-3],
    "checkpoint.every": ["3 steps", "5 steps"],
}
REWARM = 'optimizer.lr_scale={from=0.0, to=1.0, over="5 steps"}'
AT_ONCE = ("optimizer.betas", "optimizer.shrink_paths", "checkpoint.every")
"""Keys that cannot ramp."""
KILLED = -9


@dataclass
class RandomSequence:
    """One sequence, from its seed alone."""

    lab: Lab
    run_command: Run
    seed: int
    figures: Counter[str]
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.last = self.rng.randrange(18, 34)
        schedule = {"lr": 1e-2, "min_lr": 1e-3, "warmup": "4 steps", "curve": self.rng.choice(["cosine", "linear"])}
        self.config = self.lab.config(
            f"run-{self.seed}",
            model={"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "ffn": 32},
            data={"sequence_length": 16},
            train={"duration": f"{self.last} steps", "global_batch": "4 samples", "micro_batch": 4},
            optimizer=schedule,
            checkpoint={"every": f"{self.rng.randrange(3, 7)} steps", "keep_last": 50},
            health={"rollback": False},
        )
        self.run = RunDir(self.lab.path / f"run-{self.seed}")

    def play(self) -> None:
        """Carry it out, and check everything. Raises AssertionError, which says what was done."""
        try:
            self._play()
        except AssertionError as error:
            raise AssertionError("\n".join([f"sequence {self.seed}", *self.said, str(error)])) from error
        self.figures["sequences"] += 1

    def _play(self) -> None:
        rng = self.rng
        for number in range(rng.randrange(2, 5)):
            self._start(last=False)
            if rng.random() < 0.5:
                self._replay()
            steps = self._checkpoints()
            if number and steps and rng.random() < 0.3:
                self._fork(rng.choice(steps))
            elif steps and rng.random() < 0.6:
                self._roll_back(rng.choice(steps))
        self._start(last=True)
        self._compare_with_twin()
        for _ in range(2):
            self._replay()

    # ------------------------------------------------------------------ operations

    def _start(self, *, last: bool) -> None:
        """Train, with requests at random steps, up to a stop, a kill, or the end."""
        rng, step = self.rng, max([0, *(record.step for record in read_metrics(self.run))])
        step = min([step, *self._checkpoints()[-1:]]) if self._checkpoints() else 0
        until = self.last if last else rng.randrange(step + 1, self.last + 1) if step < self.last else self.last
        script: dict[int, list[Any]] = {}
        held: list[Any] = []
        for _ in range(rng.randrange(1, 5)):
            at = rng.randrange(step + 1, until + 1) if step < until else self.last
            verb = rng.choice(["set", "set", "set", "save", "pause"])
            if verb == "pause":
                held += [self._request(rng.choice(["set", "set", "save"]), at) for _ in range(rng.randrange(3))]
                held += [("kill", {})] * (not last and rng.random() < 0.2)
            script.setdefault(at, []).append(self._request(verb, at))
        if not last:
            script.setdefault(until, []).append((rng.choice(["stop", "kill"]), {}))
        self.said.append(f"start from step {step}: {script}, held {held}")
        self.figures["starts"] += 1
        job = self.lab.start(self.config, variables=scripted(script, held))
        (code,) = job.wait()
        assert code in ({0} if last else {0, int(Exit.RESUME), KILLED}), f"exit {code}\n{job.output()}"

    def _request(self, verb: str, at: int) -> tuple[str, dict[str, Any]]:
        if verb != "set":
            return verb, {}
        rng, key = self.rng, self.rng.choice([*CHOICES, REWARM])
        change = key if key == REWARM else f"{key}={json.dumps(rng.choice(CHOICES[key]))}"
        content: dict[str, Any] = {"changes": [change], "reason": ""}
        if rng.random() < 0.5:
            content["at"] = at + rng.randrange(2, 12)
        if key not in (*AT_ONCE, REWARM) and rng.random() < 0.4:
            content["changes"] = [ramped(change, f"{rng.randrange(1, 9)} steps")]
        return verb, content

    def _roll_back(self, step: int) -> None:
        self.said.append(f"rollback to {step}")
        self.figures["rollbacks"] += 1
        rollback(self.run, step)

    def _fork(self, step: int) -> None:
        """Go on with the fork."""
        target = self.run.path.with_name(f"{self.run.path.name}-fork")
        if target.exists():
            return
        self.said.append(f"fork at {step}")
        self.figures["forks"] += 1
        fork(self.run, step, target)
        self.run, self.config = RunDir(target), target / "config.toml"

    def _checkpoints(self) -> list[int]:
        return sorted(item.step for item in Store(self.run.checkpoints).scan() if item.problem is None)

    # ------------------------------------------------------------------ checks

    def _replay(self) -> None:
        """A window of the kept line, or of a branch that was left."""
        rng, known = self.rng, lineage.nodes(self.run)
        head = rng.choice([None, None, *(node.segment for node in known if node.kind == "start")])
        parts = lineage.line(known, head)
        trained = {
            record.step
            for part in parts
            for record, _ in records(self.run.segment(part.segment) / METRICS)
            if part.after < record.step <= part.until
        }
        every = [*Store(self.run.checkpoints).abandoned(), *Store(self.run.checkpoints).scan()]
        starts = {
            item.step
            for item in every
            if item.problem is None and lineage.holds(parts, item.manifest().segment or 0, item.step)
        }
        starts = {step for step in {0, *starts} if step + 1 in trained}
        if not starts:
            return
        start = rng.choice(sorted(starts))
        steps = rng.randrange(1, max(trained) - start + 1)
        chosen = ["--segment", head] if head is not None else []
        what = f"replay --from {start} --steps {steps} {chosen}"
        self.said.append(what)
        done = self.run_command(CLI, "replay", self.run.path, "--from", start, "--steps", steps, *chosen, expect=0)
        self.figures["replays"] += 1
        self.figures["replayed"] += done.stdout.count(" equal\n")

    def _compare_with_twin(self) -> None:
        overrides = self.run.overrides
        timeline = tomllib.loads(overrides.read_text()).get("timeline", []) if overrides.exists() else []
        self.figures["entries"] += len(timeline)
        values = tomllib.loads(self.config.read_text())
        twin = RunDir(self.lab.path / f"twin-{self.seed}")
        values["run"] = {**values["run"], "name": "twin", "dir": str(twin.path)}
        path = self.lab.path / f"twin-{self.seed}.toml"
        path.write_text(tomli_w.dumps({**values, "timeline": timeline}))
        self.lab.train(path, "checkpoint.every=1000 steps")
        mine, its = ({record.step: record for record in read_metrics(run)} for run in (self.run, twin))
        assert [*mine] == [*its] == [*range(1, self.last + 1)], ([*mine], [*its])
        for step in mine:
            ours, theirs = (
                (record.loss, record.loss_sequence, record.grad_norm, record.lr, record.data_digest, record.consumed)
                for record in (mine[step], its[step])
            )
            assert ours == theirs, f"step {step}: {ours} and not {theirs}; timeline {timeline}"
        self.figures["steps"] += len(mine)
