"""What a start does about the mirror, before it touches the run directory. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_pretrain.checkpoint.locations import stores
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.record import lineage, run_id
from fsdp_pretrain.record.files import RunDir
from fsdp_pretrain.record.lineage import LineageNode
from fsdp_pretrain.remote import PATIENCE, RemoteError
from fsdp_pretrain.units import human_count

from .layout import MirroredCheckpoint, MirroredRecord, MirrorError, RunMirror, on_line, taken
from .relation import Relation, compare

RESTORING = "restoring"
"""Directory in a run directory that exists while it is restored."""

_NO_HURRY = 15.0
"""Seconds for which a start waits for a mirror that it can do without."""


@dataclass(frozen=True)
class MirrorState:
    """What the mirror holds of a run.

    Attributes:
        run_id: None: it is lost.
        checkpoints: all directories, oldest step first.
    """

    run_id: str | None
    record: MirroredRecord
    checkpoints: list[MirroredCheckpoint]

    @property
    def newest(self) -> MirroredCheckpoint | None:
        """The newest that looks whole."""
        return next((item for item in reversed(self.checkpoints) if item.problem is None), None)

    def __str__(self) -> str:
        index, files = self.record.index, len(self.record.newest)
        record = f"its record of {index.time}" if index is not None else f"no index of its record ({files} files)"
        text = f"run {self.run_id or 'without an id'}, {record}"
        if (newest := self.newest) is None:
            return f"{text}, no whole checkpoint"
        manifest = newest.manifest()
        text += f", {sum(item.problem is None for item in self.checkpoints)} whole checkpoints, the newest of step "
        return f"{text}{newest.step:_} ({human_count(manifest.tokens)} tokens), written {manifest.committed}"


@dataclass(frozen=True)
class Restoration:
    """What `--from-mirror` has to do.

    Attributes:
        mirror, state: from where.
        record: the record is restored, too; else the run directory has all of it.
    """

    mirror: RunMirror
    state: MirrorState
    record: bool


def look(config: Config, *, restore: bool, fresh: bool) -> Restoration | None:
    """Compare the run directory with its mirror, if there is one; says what it finds. Changes nothing.

    Args:
        restore: the start may restore what is missing (`--from-mirror`).
        fresh: the start may begin again at step 0 (`--allow-fresh`).

    Returns:
        What is to be restored; None: nothing.

    Raises:
        MirrorError: the mirror holds a later state and `restore` is not set, is another run's, or holds nothing to
            restore.
        RemoteError: it does not answer, and the run directory has no run.
    """
    run = RunDir(config.run.dir)
    known, cut_off = run_id.read(run.path), (run.path / RESTORING).is_dir()
    empty = known is None and not run.begun
    if config.checkpoint.mirror is None:
        if restore or cut_off:
            raise _nothing_to_restore_from(run, cut_off=cut_off)
        return None
    try:
        mirror = RunMirror(config, patience=PATIENCE if empty or cut_off else _NO_HURRY)
        state = _read(mirror)
        if state is None and empty:
            mirror.try_to_write()
    except RemoteError as error:
        if empty or cut_off:
            error.effect = "nothing was started: whether its mirror holds this run, or takes it, is not known"
            error.remedy = "start again when the storage answers, with its credentials"
            raise
        print(f"mirror: {error.cause}; going on with {run.path}, which may lack what the mirror has", flush=True)
        return None
    if state is None:
        if restore and (empty or cut_off):
            raise _nothing_to_restore_from(run, cut_off=cut_off, mirror=mirror)
        return None
    if not empty and not cut_off and state.run_id not in (None, known):
        raise taken(mirror.url, str(state.run_id))
    relation = Relation.BEHIND if empty or cut_off else compare(run, state.record)
    if relation is Relation.APART:
        raise MirrorError(
            f"{run.path} and its mirror {mirror.url} went different ways: both have starts that the other lacks",
            effect="nothing was done: one of them would be lost",
            remedy="to go on from the mirror, move the run directory aside and start with --from-mirror; to go on "
            "without it, move the mirror aside, or give the run another run.name",
        )
    later = _later(run, state, restore=restore) if relation is Relation.CURRENT else None
    if relation is Relation.CURRENT and later is None:
        return None
    print(f"mirror: {mirror.url} holds {state}", flush=True)
    if restore:
        return Restoration(mirror, state, record=relation is Relation.BEHIND)
    if fresh and not empty and not cut_off:
        return None
    raise _behind(run, mirror, state, later, empty=empty, cut_off=cut_off)


def _read(mirror: RunMirror) -> MirrorState | None:
    state = MirrorState(mirror.run_id(), mirror.record(), mirror.scan())
    return None if state.run_id is None and state.newest is None else state


def _later(run: RunDir, state: MirrorState, *, restore: bool) -> MirroredCheckpoint | None:
    """The newest whole checkpoint of the mirror, if the run directory should have it, or a later one, and has not.

    With `restore` also one that a later start did without: it was damaged in the mirror, or the mirror did not answer.
    """
    nodes = lineage.nodes(run)
    whole = [item for item in reversed(state.checkpoints) if item.problem is None and on_line(item, nodes)]
    newest = next((item for item in whole if restore or _is_expected(item, nodes)), None)
    local = stores(run).newest()
    return newest if newest is not None and (local is None or local.step < newest.step) else None


def _is_expected(item: MirroredCheckpoint, nodes: Sequence[LineageNode]) -> bool:
    segment, parts = item.manifest().segment, lineage.line(nodes)
    return segment is None or not parts or lineage.holds(parts, segment, item.step)


def _behind(
    run: RunDir, mirror: RunMirror, state: MirrorState, later: MirroredCheckpoint | None, *, empty: bool, cut_off: bool
) -> MirrorError:
    local = None if empty or cut_off else stores(run).newest()
    if cut_off:
        cause = f"{run.path} was being restored from {mirror.url}, and that was cut off"
    elif empty:
        cause = f"{run.path} is empty, and its mirror {mirror.url} holds {state}"
    else:
        has = "no whole checkpoint" if local is None else f"step {local.step:_}"
        what = f"step {later.step:_}" if later is not None else "later starts"
        cause = f"{mirror.url} holds a later state of the run than {run.path}: {what}, the run directory {has}"
    begin = "at step 0" if local is None else f"after step {local.step:_}"
    return MirrorError(
        cause,
        effect=f"nothing was done: training would begin {begin}, and replace what the mirror holds",
        remedy="if the run directory should hold it, check that its file system is mounted; otherwise the same command "
        "with --from-mirror restores it. For a new run, give it another run.name",
    )


def _nothing_to_restore_from(run: RunDir, *, cut_off: bool, mirror: RunMirror | None = None) -> MirrorError:
    if cut_off:
        cause = f"{run.path} was being restored from a mirror, and that was cut off"
    else:
        cause = "--from-mirror, and there is nothing to restore from"
    where = "checkpoint.mirror is not set" if mirror is None else f"{mirror.url} holds no run"
    return MirrorError(
        f"{cause}: {where}",
        effect="nothing was done: training would begin at step 0",
        remedy="correct checkpoint.mirror and run.name; to begin a new run, leave --from-mirror out",
    )


def candidates(state: MirrorState, run: RunDir, *, whole_lineage: bool) -> Sequence[MirroredCheckpoint]:
    """The directories of checkpoints that a restoration may use, newest first: all but those that the record in `run`
    says were left on purpose. If its lineage is not whole, those of later starts first: what a start has saved, no
    rollback before it has left."""
    nodes = lineage.nodes(run)
    found = [item for item in state.checkpoints if item.problem is not None or on_line(item, nodes)]

    def order(item: MirroredCheckpoint) -> tuple[int, int]:
        return 0 if whole_lineage or item.problem is not None else item.manifest().segment or 0, item.step

    return sorted(found, key=order, reverse=True)


def no_valid_checkpoint(mirror: RunMirror, passed_over: Sequence[str]) -> MirrorError:
    """The error if none of the checkpoints can be restored."""
    return MirrorError(
        f"{mirror.url} holds {len(passed_over)} checkpoints, none of them valid:\n    " + "\n    ".join(passed_over),
        effect="nothing was restored: training would begin at step 0",
        remedy="restore the objects, if the bucket keeps versions",
    )
