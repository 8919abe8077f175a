"""Rollbacks and forks in any order, killed anywhere, leave one lineage."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import records
from sight import tree
from traps import killed_at

from data.packing.opening import open_packer
from fsdp_pretrain.checkpoint.expected import missing
from fsdp_pretrain.checkpoint.state import TrainState, identity
from fsdp_pretrain.checkpoint.store import CONFIG, TRAIN_STATE, Store
from fsdp_pretrain.config.config import load
from fsdp_pretrain.lineage.fork import fork
from fsdp_pretrain.lineage.rollback import finish, rollback
from fsdp_pretrain.record import lineage, overrides
from fsdp_pretrain.record.files import RunDir, replace_file
from fsdp_pretrain.record.journal import Journal
from fsdp_pretrain.record.lock import hold
from fsdp_pretrain.record.metrics import read_metrics


@pytest.fixture(scope="module")
def config(module_lab: Any) -> Path:
    path: Path = module_lab.config(eval={"every": "6 steps", "launch": False, "heldout": str(module_lab.heldout)})
    return path


class Simulation:
    """A run directory in which training is written instead of done, and its expected kept line."""

    def __init__(self, config: Path, path: Path, seed: int) -> None:
        self.rng, self.path, self.run, self.forks, self.marks = random.Random(seed), path, RunDir(path / "run-0"), 0, 0
        self.run.path.mkdir(parents=True)
        loaded = load(config, [f"run.dir={json.dumps(str(self.run.path))}"])
        replace_file(self.run.config, loaded.to_toml())
        self._identity = identity(loaded, open_packer(loaded))
        self.kept: list[tuple[int, int]] = []

    def train(self) -> None:
        """A start: continues from the newest checkpoint, saves at multiples of 5, dies somewhere after."""
        store = Store(self.run.checkpoints)
        with hold(self.run, "training"):
            finish(self.run)
            newest, segment = store.newest(), self.run.new_segment()
            step = newest.step if newest else 0
            if self.rng.random() < 0.2:
                return  # before it had a state
            parent = newest.manifest().segment if newest else None
            lineage.record(segment, parent=parent, step=step, kind="start")
            del self.kept[step:]
            lines = []
            for _ in range(self.rng.randrange(1, 13)):
                step, self.marks = step + 1, self.marks + 1
                self.kept.append((step, self.marks))
                lines.append(json.dumps(records.metric(step, documents=self.marks, segment=int(segment.name))) + "\n")
                if step % 5 == 0:
                    self._save(store, step, int(segment.name))
            (segment / "metrics.jsonl").write_text("".join(lines))

    def _save(self, store: Store, step: int, segment: int) -> None:
        state = TrainState(step, step * 8, step * 8, 8)
        text = state.to_json(identity=self._identity, tokens=step * 256, world=records.WORLD)
        files = {TRAIN_STATE: text.encode(), CONFIG: self.run.config.read_bytes()}
        records.commit(store, step, files, verified=False, segment=segment)
        journal = Journal(self.run, segment)
        journal.write("checkpoint", "", step=step)
        journal.close()

    def branch(self, verb: str) -> None:
        """A rollback or fork to any checkpoint, killed somewhere or not, then repeated."""
        steps = [checkpoint.step for checkpoint in Store(self.run.checkpoints).scan()]
        if not steps:
            return
        step, last = self.rng.choice(steps), len(self.kept)
        skip = (step + 1, last) if last > step and self.rng.random() < 0.5 else None
        lr = [f"optimizer.lr={self.rng.randrange(20, 90) / 10000}"]
        self.forks += verb == "fork"
        target = self.path / f"run-{self.forks}"

        def act() -> object:
            if verb == "rollback":
                return rollback(self.run, step, changes=lr, skip_steps=skip)
            return fork(self.run, step, target, changes=lr, skip_steps=skip)

        before = tree(self.run.path)
        if killed_at(act, self.rng.randrange(1, 50)) and not target.exists() * (verb == "fork"):
            if verb == "rollback" and self.run.rollback.exists() and self.rng.random() < 0.5:
                with hold(self.run, "training"):
                    finish(self.run)
            else:
                act()
        if verb == "fork":
            assert tree(self.run.path) == before
            self.run = RunDir(target)
        del self.kept[step:]
        settled = overrides.read(self.run)
        assert lr[0] in settled.set, settled
        assert skip is None or any(s.first <= step * 8 and last * 8 <= s.stop for s in settled.skip), settled

    def check(self) -> None:
        """One consistent lineage."""
        assert [(record.step, record.documents) for record in read_metrics(self.run)] == self.kept
        checkpoints = Store(self.run.checkpoints).scan()
        assert all(c.problem is None and c.step <= len(self.kept) for c in checkpoints)
        parts = lineage.line(lineage.nodes(self.run))
        assert all(lineage.holds(parts, c.manifest().segment, c.step) for c in checkpoints)
        assert missing(self.run) is None  # what the record says was saved on the kept line is there
        assert not self.run.rollback.exists() and not self.run.lock.exists()
        assert not list(self.path.glob("*.forking"))


@pytest.mark.shows("A34")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 30))])
def test_rollbacks_and_forks_in_any_order_leave_one_lineage(config: Path, tmp_path: Path, seed: int) -> None:
    simulation = Simulation(config, tmp_path, seed)
    branches = 0
    while branches < 20:
        simulation.train()
        simulation.check()
        if simulation.rng.random() < 0.6 and Store(simulation.run.checkpoints).scan():
            simulation.branch(simulation.rng.choice(["rollback", "rollback", "fork"]))
            simulation.check()
            branches += 1
