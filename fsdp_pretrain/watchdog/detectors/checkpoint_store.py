"""Reads the checkpoint store and the journal, independently of the trainer, for several detectors at once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fsdp_pretrain.checkpoint import upcoming
from fsdp_pretrain.checkpoint.disk_space import Room, SpaceNeeded, attempts, prunable
from fsdp_pretrain.checkpoint.manifest import CheckpointManifest
from fsdp_pretrain.checkpoint.store import Store, verify_files
from fsdp_pretrain.run import journal
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.watchdog.notify.alarms import AlarmSink

from .base import Detector
from .judged import Judged
from .periodic import AUDIT_DEADLINE, AUDIT_SECONDS, PeriodicProbe

_ENTRIES = 40
_SETTINGS = ("start", "control")
_KINDS = (*_SETTINGS, "checkpoint", "checkpoint-failed", "checkpoint-missing")
"""Of all kinds the last entries are read; of the settings all, as they hold until they are changed."""


@dataclass(frozen=True)
class StoreState:
    """The state of the store."""

    names: list[str]  # names of all checkpoints
    damaged: dict[str, str]  # the problem of every damaged checkpoint, by name
    # this and the next: manifests of the newest undamaged checkpoint, and of the newest verified one
    newest: CheckpointManifest | None
    verified: CheckpointManifest | None
    writing: dict[str, int]  # bytes written by every save in flight
    room: Room  # space of the file system
    prunable: SpaceNeeded  # space that can be freed for another checkpoint
    entries: list[dict[str, Any]]  # journal entries since the last look
    offset: int  # byte offset in the journal after these entries
    known: int = 0  # how many of these entries an earlier agent of this start has judged


def look(run: RunDir, offset: int, judged: int = 0) -> StoreState:
    """Read the store of a run, and its journal from byte `offset` on; up to `judged` it is known."""
    store = Store(run.checkpoints)
    checkpoints = store.scan()
    whole = [item for item in checkpoints if item.problem is None]
    proved = [item for item in whole if item.verified]
    entries, known = [], 0
    for entry, behind in journal.entries(run.journal, offset):
        offset = behind
        if entry["kind"] in _KINDS and journal.is_whole(entry):
            entries.append(entry)
            known += offset <= judged
    settings = [entry for entry in entries[:-_ENTRIES] if entry["kind"] in _SETTINGS]
    last = entries[-_ENTRIES:]
    return StoreState(
        names=[item.path.name for item in checkpoints],
        # a checkpoint loses its name before it is deleted
        damaged={item.path.name: item.problem for item in checkpoints if item.problem and item.path.is_dir()},
        newest=whole[-1].manifest() if whole else None,
        verified=proved[-1].manifest() if proved else None,
        writing=attempts(store.directory),
        room=Room.of(store.directory),
        prunable=prunable(checkpoints),
        entries=settings + last,
        offset=offset,
        known=len(settings) + max(0, known - len(entries) + len(last)),  # settings open nothing
    )


def verify_one_file(directory: Path) -> dict[str, str]:
    """Read back one file of the newest verified checkpoint. Returns the checkpoint's name and problem, if any."""
    proved = [item for item in Store(directory).scan() if item.verified and item.problem is None]
    if not proved:
        return {}
    newest = proved[-1]
    wrong = verify_files(newest.path, random.sample(newest.files(), 1))
    return {newest.path.name: "; ".join(wrong)} if wrong and newest.path.is_dir() else {}


class StoreDetector(Detector):
    """Base class of detectors that judge the state of the store, in the start with number `segment`."""

    def __init__(self, alarms: AlarmSink, segment: int) -> None:
        super().__init__(alarms)
        self._segment = segment

    def judge(self, state: StoreState, now: float) -> None:
        """Judge a new state of the store."""

    def is_mine(self, entry: dict[str, Any]) -> bool:
        """Whether an entry of the journal is of this start."""
        return entry.get("segment") == self._segment


class StoreWatch(Detector):
    """Reads the store of a run regularly for `judges`, more often during a save. Reads back one file every hour.

    `judged`: how far the journal was judged; kept up to date.
    """

    def __init__(
        self, alarms: AlarmSink, run: RunDir, judges: Sequence[StoreDetector], judged: Judged | None = None
    ) -> None:
        super().__init__(alarms)
        self._run, self._judges, self._decayed = run, judges, dict[str, str]()
        self._judged = judged or Judged(0)
        self._probe = PeriodicProbe(partial(look, run, 0, self._judged.journal))
        self._audit = PeriodicProbe(partial(verify_one_file, run.checkpoints), AUDIT_SECONDS, AUDIT_DEADLINE)

    def tick(self, now: float) -> None:
        """Start due reads, and pass the results of earlier ones on to the judges."""
        if (state := self._probe.result(now)) is not None:
            self._probe.look = partial(look, self._run, state.offset)
            self._probe.every = upcoming.CHECK_SECONDS / (4 if state.writing else 1)
            self._decayed = {name: why for name, why in self._decayed.items() if name in state.names}
            for judge in self._judges:
                judge.judge(replace(state, damaged=state.damaged | self._decayed), now)
            self._judged.journal = state.offset
        if decayed := self._audit.result(now):
            self._decayed |= decayed
            self._probe.due = 0.0
