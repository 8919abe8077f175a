"""Weights & Biases, offline: a directory for `wandb sync`, which is the user's to run."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp_pretrain.run.files import stamp

from .points import PointValues
from .run_facts import RunFacts
from .sink import Sink

_QUIET = {
    "console": "off", "silent": True, "disable_git": True, "disable_code": True, "x_disable_stats": True,
    "x_disable_meta": True, "x_disable_machine_info": True, "x_save_requirements": False,
}  # fmt: skip


class WandbSink(Sink):
    """An offline run, `RUN/wandb/offline-run-TIME-ID`. W&B cannot add to one: the whole line is written again, as the
    same run, and the former directory is removed. After a rollback it is another run."""

    def __init__(self, place: Path, facts: RunFacts) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        wandb: Any = importlib.import_module("wandb")
        known = facts.views[-1][:12]
        for former in place.glob(f"offline-run-*-{known}"):
            shutil.rmtree(former)
        place.mkdir(parents=True, exist_ok=True)
        names = {"id": known, "name": facts.name, "tags": _tags(facts)}
        settings = wandb.Settings(**_QUIET)
        self._run = wandb.init(mode="offline", dir=str(place.parent), config=facts.config, settings=settings, **names)
        self.watched = self.opened = Path(self._run.settings.sync_dir)
        if self.watched.resolve().parent != place.resolve():
            raise OSError(f"{place} cannot be written; W&B wanted to write to {self.watched.parent}")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, points: Sequence[PointValues]) -> None:
        for point in points:
            self._run.log({**point.values, "step": point.step, "_timestamp": point.time})

    def close(self, facts: RunFacts) -> None:
        self._run.tags = _tags(facts)
        self._run.summary["started"] = stamp(facts.started)
        self._run.summary["ended"] = None if facts.ended is None else stamp(facts.ended)
        self._run.finish(exit_code=int(facts.state in ("failed", "killed")))


def _tags(facts: RunFacts) -> tuple[str, ...]:
    return tuple(tag[:64] for tag in dict.fromkeys(facts.tags))


SINK = WandbSink
