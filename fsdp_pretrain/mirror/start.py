"""What a start does about the mirror, before it touches the run directory. No torch.

Which of the two is ahead is decided by their starts: each has an `environment.json` of its own. A directory that lacks
a start of the mirror is an older copy; one that has another start of the same number went another way. With the same
starts, by the newest checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_pretrain.checkpoint.locations import stores
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.record import lineage, run_id
from fsdp_pretrain.record.files import RunDir
from fsdp_pretrain.remote import PATIENCE, RemoteError, Url

from .layout import MirroredCheckpoint, MirrorError, MirrorState, RunMirror, taken
from .record_copy import starts

RESTORING = "restoring"
"""Directory in a run directory that exists while it is restored."""

_NO_HURRY = 15.0
"""Seconds for which a start waits for a mirror that it can do without."""


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


def compare_with_mirror(config: Config, *, restore: bool, fresh: bool) -> Restoration | None:
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
    no_run = cut_off or (known is None and not run.begun)
    if config.checkpoint.mirror is None:
        if restore or cut_off:
            raise _nothing_to_restore(run, "checkpoint.mirror is not set")
        return None
    try:
        mirror = RunMirror(config, patience=PATIENCE if no_run else _NO_HURRY)
        state = mirror.look()
        if not state.records and state.newest is None:
            if restore and no_run:
                raise _nothing_to_restore(run, f"{mirror.url} holds no run")
            if no_run:
                mirror.try_to_write()
            return None
    except RemoteError as error:
        if no_run:
            error.effect = "nothing was started: whether its mirror holds this run, or takes it, is not known"
            error.remedy = "start again when the storage answers, with its credentials"
            raise
        print(f"mirror: {error.cause}; going on with {run.path}, which may lack what the mirror has", flush=True)
        return None
    behind = no_run or _lacks_starts(run, state, known, mirror.url)
    later = None if behind else _later_checkpoint(run, state, restore=restore)
    if not behind and later is None:
        return None
    print(f"mirror: {mirror.url} holds {state}", flush=True)
    if restore:
        return Restoration(mirror, state, record=behind)
    if fresh and not no_run:
        return None
    raise _behind(run, mirror, state, later, no_run=no_run)


def _lacks_starts(run: RunDir, state: MirrorState, known: str | None, url: Url) -> bool:
    """Whether the mirror has starts that the run directory lacks. Raises MirrorError if they are not of one run."""
    if state.run_id not in (None, known):
        raise taken(url, str(state.run_id))
    theirs, ours = state.records[0].starts if state.records else {}, starts(run)
    if any(ours[number] != theirs[number] for number in ours.keys() & theirs.keys()):
        raise MirrorError(
            f"{run.path} and its mirror {url} went different ways: both have starts that the other lacks",
            effect="nothing was done or copied: one of them would be lost",
            remedy="to go on from the mirror, move the run directory aside and start with --from-mirror; to go on "
            "without it, move the mirror aside, or give the run another run.name",
        )
    return any(not run.segment(int(number)).is_dir() for number in theirs)


def refuse_if_not_ours(run: RunDir, state: MirrorState, url: Url) -> None:
    """Raise MirrorError if the record in the mirror is not an earlier state of that in the run directory."""
    if _lacks_starts(run, state, run_id.read(run.path), url):
        raise MirrorError(
            f"{url} holds a later state of this run than {run.path} had when it was started",
            effect="nothing is copied: it would replace what is in the mirror",
            remedy="stop the run; to go on from the mirror, move the run directory aside and start with --from-mirror; "
            "to go on without it, move the mirror aside",
        )


def _later_checkpoint(run: RunDir, state: MirrorState, *, restore: bool) -> MirroredCheckpoint | None:
    """The newest whole checkpoint of the mirror, if the run directory should have it, or a later one, and has not.

    With `restore` also one that a later start did without: it was damaged in the mirror, or the mirror did not answer.
    """
    nodes = lineage.nodes(run)
    parts = lineage.line(nodes)

    def is_expected(item: MirroredCheckpoint) -> bool:
        segment = item.manifest().segment
        return restore or segment is None or not parts or lineage.holds(parts, segment, item.step)

    whole = (item for item in reversed(state.checkpoints) if item.is_on_line(nodes) and is_expected(item))
    newest, local = next(whole, None), stores(run).newest()
    return newest if newest is not None and (local is None or local.step < newest.step) else None


def _behind(
    run: RunDir, mirror: RunMirror, state: MirrorState, later: MirroredCheckpoint | None, *, no_run: bool
) -> MirrorError:
    local = None if no_run else stores(run).newest()
    if (run.path / RESTORING).is_dir():
        cause = f"{run.path} was being restored from {mirror.url}, and that was cut off"
    elif no_run:
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


def _nothing_to_restore(run: RunDir, why: str) -> MirrorError:
    cut_off = (run.path / RESTORING).is_dir()
    cause = f"{run.path} was being restored from a mirror, and that was cut off" if cut_off else "--from-mirror"
    return MirrorError(
        f"{cause}, and there is nothing to restore from: {why}",
        effect="nothing was done: training would begin at step 0",
        remedy="correct checkpoint.mirror and run.name; to begin a new run, leave --from-mirror out",
    )
