"""Aim: one Aim run per kept line, with the true times of run and points."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .points import PointValues
from .run_facts import STATES, RunFacts
from .sink import Sink


class AimSink(Sink):
    """An Aim run. What is tracked again replaces the value at that step, so a run that is there is continued; after
    a rollback, of which no point can be removed, another one is begun and the former ones are archived."""

    def __init__(self, place: Path, facts: RunFacts) -> None:
        aim: Any = importlib.import_module("aim")
        place.mkdir(parents=True, exist_ok=True)
        self.watched, self.opened = place / ".aim", place
        self._repo = aim.Repo.from_path(str(place), init=not self.watched.is_dir())
        *former, self._id = (view[:24] for view in facts.views)
        if not self._chunk(self._id).is_dir():
            # Enter a run that began when the run did, which `aim.Run` cannot do; Aim's database holds UTC.
            begun = datetime.fromtimestamp(facts.started, UTC).replace(tzinfo=None)
            self._repo.request_props(self._id, read_only=False, created_at=begun)
            self._chunk(self._id).mkdir(parents=True)  # for Aim to believe that it exists
        for known in former:
            if self._chunk(known).is_dir():
                self._repo.request_props(known, read_only=False).archived = True
        options = {"system_tracking_interval": None, "log_system_params": False, "capture_terminal_logs": False}
        self._run = aim.Run(run_hash=self._id, repo=self._repo, **options)
        self._run["config"] = facts.config
        self._describe(facts)

    def _chunk(self, known: str) -> Path:
        return self.watched / "meta/chunks" / known

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
        """Also index it: without an index, Aim's queries find nothing."""
        self._describe(facts)
        tree = self._run.meta_run_tree
        self._run.close()
        tree["end_time"] = facts.ended  # `close` sets it to now
        del tree
        indexes: Any = importlib.import_module("aim.sdk.index_manager")
        repository: Any = importlib.import_module("aim.sdk.repo").Repo(str(self.opened))
        indexes.RepoIndexManager(repository).index(self._id)


SINK = AimSink
