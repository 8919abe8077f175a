"""Weights & Biases, offline: a directory for `wandb sync`, which is the user's to run."""

from __future__ import annotations

import importlib
import os
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp_pretrain.record.files import stamp

from .points import Point, PointValues, StepText
from .run_facts import RunFacts
from .sink import Sink


class WandbSink(Sink):
    """An offline run, `RUN/wandb/offline-run-TIME-ID`. W&B cannot add to one: each start of the sink writes the whole
    line again, as the same run, and removes the former directory."""

    name, title = "wandb", "Weights & Biases"

    def __init__(self, place: Path, facts: RunFacts, known: str | None, *, fresh: bool) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        wandb: Any = importlib.import_module("wandb")
        self._table = wandb.Table
        self.id = known or uuid.uuid4().hex[:12]
        for former in _folders(place, self.id):
            shutil.rmtree(former)
        place.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            mode="offline",
            dir=str(place.parent),
            id=self.id,
            name=facts.name,
            group=facts.experiment,
            tags=[tag[:64] for tag in dict.fromkeys(facts.tags)],
            config=facts.config,
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                x_disable_stats=True,
                x_disable_meta=True,
                x_disable_machine_info=True,
                x_save_requirements=False,
            ),
        )
        self.watched = self.opened = Path(self._run.settings.sync_dir)
        if self.watched.resolve().parent != place.resolve():
            raise OSError(f"{place} cannot be written; W&B wanted to write to {self.watched.parent}")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._lines: dict[tuple[str, int], list[str]] = {}

    @classmethod
    def can_continue(cls, place: Path, known: str, *, in_order: bool) -> bool:
        return False

    @classmethod
    def set_aside(cls, place: Path, known: str, why: str) -> None:
        """Its directory stays: its id differs from that of the kept line."""

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            if isinstance(point, StepText):
                self._lines[point.name, point.step] = point.lines
            elif isinstance(point, PointValues):
                values = {each.path: each.value for each in point.scalars}
                self._run.log({**values, "step": point.step, "_timestamp": point.time})

    def close(self, facts: RunFacts) -> None:
        """The journal becomes two tables."""
        for name in ("incidents", "journal"):
            rows = [[step, line] for (of, step), lines in self._lines.items() if of == name for line in lines]
            if rows:
                self._run.log({name: self._table(columns=["step", "text"], data=rows)})
        self._run.tags = tuple(tag[:64] for tag in dict.fromkeys(facts.tags))
        self._run.summary["started"] = stamp(facts.started)
        self._run.summary["ended"] = None if facts.ended is None else stamp(facts.ended)
        self._run.finish(exit_code=int(facts.state in ("failed", "killed")))


def _folders(place: Path, known: str) -> list[Path]:
    return [path for path in place.glob(f"offline-run-*-{known}") if path.is_dir()]


SINK = WandbSink
