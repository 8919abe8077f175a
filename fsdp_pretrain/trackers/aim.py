"""Aim: one Aim run per kept line, with the true times of run and points."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fsdp_pretrain.record import state_files
from fsdp_pretrain.record.files import RunDir
from fsdp_pretrain.record.state_files import StateFile

from .points import Point, StepText
from .run_facts import RunFacts
from .sink import Sink

_STATES = {"running", "complete", "stopped", "failed", "killed"}


class _Earlier(StateFile):
    """`RUN/aim.json` of earlier releases, which had other names of metrics."""

    repo: str
    hash: str


class AimSink(Sink):
    """An Aim run. What is tracked again replaces the value at that step, so any position can be continued from."""

    name, title = "aim", "Aim"

    def __init__(self, place: Path, facts: RunFacts, known: str | None, *, fresh: bool) -> None:
        aim: Any = importlib.import_module("aim")
        self._text = aim.Text
        place.mkdir(parents=True, exist_ok=True)
        self._repo = aim.Repo.from_path(str(place), init=not (place / ".aim").is_dir())
        self.id = known if known is not None and _chunk(place, known).is_dir() else self._make(place, facts)
        self._run = aim.Run(
            run_hash=self.id,
            repo=self._repo,
            system_tracking_interval=None,
            log_system_params=False,
            capture_terminal_logs=False,
        )
        self.watched, self.opened = place / ".aim", place
        self._run["config"] = facts.config
        self._describe(facts)

    def _make(self, place: Path, facts: RunFacts) -> str:
        """Enter a run that began when the run did, which `aim.Run` cannot do; returns its hash."""
        made: str = importlib.import_module("aim.sdk.utils").generate_run_hash()
        begun = datetime.fromtimestamp(facts.started, UTC).replace(tzinfo=None)  # Aim's database holds UTC
        self._repo.request_props(made, read_only=False, created_at=begun)
        _chunk(place, made).mkdir(parents=True)  # for Aim to believe that it exists
        return made

    def _describe(self, facts: RunFacts) -> None:
        self._run.name, self._run.experiment = facts.name, facts.experiment
        for tag in _STATES.intersection(self._run.tags) - {facts.state}:
            self._run.remove_tag(tag)
        for tag in dict.fromkeys(facts.tags):
            if tag not in self._run.tags:
                self._run.add_tag(tag)

    @classmethod
    def place(cls, run: RunDir, record: dict[str, Any]) -> Path:
        """`record.aim_repo`, or `RUN/aim`."""
        return Path(record.get("aim_repo", run.path / "aim"))

    @classmethod
    def can_continue(cls, place: Path, known: str, *, in_order: bool) -> bool:
        return _chunk(place, known).is_dir()

    @classmethod
    def set_aside(cls, place: Path, known: str, why: str) -> None:
        """Archive it: points cannot be removed from an Aim run."""
        if _chunk(place, known).is_dir():
            aim: Any = importlib.import_module("aim")
            repository = aim.Repo.from_path(str(place))
            props = repository.request_props(known, read_only=False)
            props.name, props.archived = f"{props.name} ({why})", True
            tree = repository.request_tree("meta", known, read_only=False).subtree(("meta", "chunks", known))
            if tree.get("end_time") is None:  # its writer was killed
                tree["end_time"] = time.time()

    @classmethod
    def adopt(cls, run: RunDir) -> None:
        note = run.path / "aim.json"
        if (earlier := state_files.view(note, _Earlier)) is not None:
            cls.set_aside(Path(earlier.repo), earlier.hash, "of an earlier release")
            note.unlink()

    def write(self, points: Sequence[Point]) -> None:
        track = self._run._tracker._track  # as Aim's converters do: `Run.track` has no argument for the time
        for point in points:
            if isinstance(point, StepText):
                track([self._text(line) for line in point.lines], point.time, point.name, point.step)
                continue
            for each in point.scalars:
                track(each.value, point.time, each.name, point.step, context=dict(each.context))

    def close(self, facts: RunFacts) -> None:
        """Also index it: without an index, Aim's queries find nothing."""
        self._describe(facts)
        tree = self._run.meta_run_tree
        self._run.close()
        tree["end_time"] = facts.ended  # `close` sets it to now
        del tree
        indexes: Any = importlib.import_module("aim.sdk.index_manager")
        repository: Any = importlib.import_module("aim.sdk.repo").Repo(str(self.watched.parent))
        indexes.RepoIndexManager(repository).index(self.id)


def _chunk(place: Path, known: str) -> Path:
    return place / ".aim/meta/chunks" / known


SINK = AimSink
