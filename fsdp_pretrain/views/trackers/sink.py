"""The supported trackers, and how each stores the points of a run. A tracker is imported when its view is begun."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fsdp_pretrain.errors import ConfigError, install
from fsdp_pretrain.run.files import RunDir, stamp

from .points import PointValues
from .run_facts import STATES, RunFacts, read_config

_QUIET = {
    "console": "off", "silent": True, "disable_git": True, "disable_code": True, "x_disable_stats": True,
    "x_disable_meta": True, "x_disable_machine_info": True, "x_save_requirements": False,
}  # fmt: skip
"""Settings of W&B: nothing of this machine, and no output."""


class Sink(ABC):
    """The view of a run in one tracker, to which all points are given each time. All methods may raise anything.

    Attributes:
        watched: a file or directory that exists as long as the view does.
        opened: the path to open in the tracker.
    """

    watched: Path
    opened: Path

    @abstractmethod
    def __init__(self, place: Path, facts: RunFacts) -> None:
        """Begin the view in a directory, replacing one that exists."""

    @abstractmethod
    def write(self, points: Sequence[PointValues]) -> None:
        """Add points."""

    @abstractmethod
    def close(self, facts: RunFacts) -> None:
        """Finish the view, with the state and the times of the run."""


class AimSink(Sink):
    """Aim: a run for the kept line, with the true times of run and points. A value tracked again replaces
    that at its step, so an existing run is continued. Points cannot be removed, so after a rollback another run is
    begun and the former ones are archived."""

    def __init__(self, place: Path, facts: RunFacts) -> None:
        aim: Any = importlib.import_module("aim")
        place.mkdir(parents=True, exist_ok=True)
        self.watched, self.opened = place / ".aim", place
        self._repo = aim.Repo.from_path(str(place), init=not self.watched.is_dir())
        *former, self._id = (view[:24] for view in facts.views)
        if not self._chunk(self._id).is_dir():
            # Create the Aim run with the run's true beginning, which `aim.Run` cannot; Aim's database holds UTC.
            begun = datetime.fromtimestamp(facts.started, UTC).replace(tzinfo=None)
            self._repo.request_props(self._id, read_only=False, created_at=begun)
            self._chunk(self._id).mkdir(parents=True)  # so that Aim takes it for an existing run
        for identifier in former:
            if self._chunk(identifier).is_dir():
                self._repo.request_props(identifier, read_only=False).archived = True
        options = {"system_tracking_interval": None, "log_system_params": False, "capture_terminal_logs": False}
        self._run = aim.Run(run_hash=self._id, repo=self._repo, **options)
        self._run["config"] = facts.config
        self._describe(facts)

    def _chunk(self, identifier: str) -> Path:
        return self.watched / "meta/chunks" / identifier

    def _describe(self, facts: RunFacts) -> None:
        self._run.name = self._run.experiment = facts.name
        for tag in STATES.intersection(self._run.tags) - {facts.state}:
            self._run.remove_tag(tag)
        for tag in dict.fromkeys(facts.tags):
            if tag not in self._run.tags:
                self._run.add_tag(tag)

    def write(self, points: Sequence[PointValues]) -> None:
        track = self._run._tracker._track  # as Aim's converters do: `Run.track` has no argument for the time
        for point in points:
            for name, value in point.values.items():
                track(value, point.time, name, point.step)

    def close(self, facts: RunFacts) -> None:
        """Finish the view, and index it: without an index, Aim's queries find nothing."""
        self._describe(facts)
        tree = self._run.meta_run_tree
        self._run.close()
        tree["end_time"] = facts.ended  # `close` sets it to now
        del tree
        indexes: Any = importlib.import_module("aim.sdk.index_manager")
        repository: Any = importlib.import_module("aim.sdk.repo").Repo(str(self.opened))
        indexes.RepoIndexManager(repository).index(self._id)


class TensorboardSink(Sink):
    """TensorBoard: the directory `kept`, written by TensorBoard's own record writer, without torch or TensorFlow.
    Points in event files cannot be replaced, so it is always written anew."""

    def __init__(self, place: Path, facts: RunFacts) -> None:
        writer: Any = importlib.import_module("tensorboard.summary.writer.record_writer")
        self._events: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self.opened, folder = place, place / "kept"
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        self.watched = folder / f"events.out.tfevents.{time.time_ns()}.{os.uname().nodename}"
        self._file = self.watched.open("xb")
        self._records = writer.RecordWriter(self._file)
        self._write(time.time(), file_version="brain.Event:2")

    def write(self, points: Sequence[PointValues]) -> None:
        for point in points:
            summary = self._summaries.Summary()
            for name, value in point.values.items():
                summary.value.add(tag=name, simple_value=value)
            self._write(point.time, step=point.step, summary=summary)
        self._records.flush()

    def _write(self, at: float, **content: Any) -> None:
        self._records.write(self._events.Event(wall_time=at, **content).SerializeToString())

    def close(self, facts: RunFacts) -> None:
        self._records.flush()
        os.fsync(self._file.fileno())
        self._records.close()


class WandbSink(Sink):
    """Weights & Biases: an offline run, `RUN/wandb/offline-run-TIME-ID`; uploading it with `wandb sync` is up to the
    user. W&B cannot add to an offline run: the whole line is written again, as the same run, and the former directory
    is removed. After a rollback it is another run."""

    def __init__(self, place: Path, facts: RunFacts) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        wandb: Any = importlib.import_module("wandb")
        identifier = facts.views[-1][:12]
        for former in place.glob(f"offline-run-*-{identifier}"):
            shutil.rmtree(former)
        place.mkdir(parents=True, exist_ok=True)
        names = {"id": identifier, "name": facts.name, "tags": _tags(facts)}
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


SINKS: dict[str, type[Sink]] = {"aim": AimSink, "tensorboard": TensorboardSink, "wandb": WandbSink}
"""Trackers by name, which is that of the package, and the configuration key `record.NAME`."""


def place(run: RunDir, name: str) -> Path:
    """The directory of a run's views in a tracker: `RUN/NAME`, or `record.aim_repo`. Raises OSError."""
    record: dict[str, Any] = read_config(run).get("record", {})
    repo = record.get("aim_repo") if name == "aim" else None
    return Path(repo or run.path / name).absolute()


def wanted(run: RunDir) -> list[str]:
    """Names of the trackers that a run's configuration enables; none if it cannot be read."""
    try:
        record = read_config(run).get("record", {})
    except (OSError, ValueError):
        return []
    return [name for name in SINKS if record.get(name)]


def is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def check_installed(names: Iterable[str]) -> None:
    """Raise ConfigError if the package of a tracker is missing."""
    for name in names:
        if not is_installed(name):
            limit = " (Python 3.11 or 3.12)" if name == "aim" else ""
            raise ConfigError(
                f"{name} is not installed",
                remedy=f"{install(name)}{limit}; or train with record.{name}=false and "
                f"build the same view later, wherever {name} is, with `fsdp-pretrain track RUN --to {name}`",
            )
