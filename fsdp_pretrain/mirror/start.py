"""What a start does about the mirror, before it touches the run directory. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_pretrain.checkpoint.store import Store
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.record import lineage, run_id
from fsdp_pretrain.record.files import RunDir
from fsdp_pretrain.remote import PATIENCE, RemoteError, Url

from .layout import MirrorError, MirrorState, RunMirror

RESTORING = "restoring"
"""Directory in a run directory, until the run id is there: it is being restored."""
_NO_HURRY = 15.0
"""Seconds for which a start waits for a mirror that it can do without."""


@dataclass(frozen=True)
class Restoration:
    """From where `--from-mirror` has to restore."""

    mirror: RunMirror
    state: MirrorState


def compare_with_mirror(config: Config, *, restore: bool, fresh: bool) -> Restoration | None:
    """Compare the run directory with its mirror, if there is one; says what it finds. Changes nothing.

    Args:
        restore: an empty run directory may be restored (`--from-mirror`).
        fresh: the start may begin again at step 0 (`--allow-fresh`).

    Returns:
        What is to be restored; None: nothing.

    Raises:
        MirrorError: the mirror is another run's, holds what the run directory lacks, or holds nothing to restore.
        RemoteError: it does not answer, and the run directory has no run.
    """
    run = RunDir(config.run.dir)
    cut_off = run_id.read(run.path) is None and (run.path / RESTORING).is_dir()
    empty = cut_off or (run_id.read(run.path) is None and not run.begun)
    if config.checkpoint.mirror is None:
        if restore or cut_off:
            raise _nothing_to_restore(run, "checkpoint.mirror is not set")
        return None
    try:
        mirror = RunMirror(config, patience=PATIENCE if empty else _NO_HURRY)
        state = mirror.look()
    except RemoteError as error:
        if empty:
            error.effect = "nothing was started: whether its mirror holds this run is not known"
            error.remedy = "start again when the storage answers, with its credentials"
            raise
        print(f"mirror: {error.cause}; going on with {run.path}, which may lack what the mirror has", flush=True)
        return None
    if not empty:
        refuse_another(run, state, mirror.url)
        if not fresh:
            _refuse_later(run, state, mirror.url)
        return None
    if not state.records and not state.whole:
        if restore:
            raise _nothing_to_restore(run, f"{mirror.url} holds no run")
        return None
    print(f"mirror: {mirror.url} holds {state}", flush=True)
    if restore:
        return Restoration(mirror, state)
    raise MirrorError(
        f"{run.path} {'was being restored and is not complete' if cut_off else 'is empty'}, and its mirror "
        f"{mirror.url} holds {state}",
        effect="nothing was done: training would begin at step 0, and replace what the mirror holds",
        remedy="if the run directory should hold the run, check that its file system is mounted; otherwise the same "
        "command with --from-mirror restores it. For a new run, give it another run.name",
    )


def refuse_another(run: RunDir, state: MirrorState, url: Url) -> None:
    """Raise MirrorError if the mirror is known to be another run's."""
    if state.records and state.records[0].run_id != run_id.read(run.path):
        raise MirrorError(
            f"{url} is the mirror of another run, with the id {state.records[0].run_id}",
            effect="nothing was done or copied: two runs in one mirror would replace each other's checkpoints",
            remedy="give this run another run.name or another checkpoint.mirror. To continue the run of the mirror, "
            "name an empty run directory and pass --from-mirror",
        )


def _refuse_later(run: RunDir, state: MirrorState, url: Url) -> None:
    """Raise MirrorError if the mirror has a later checkpoint of the kept line, or one of a start that is not here."""
    local, nodes = Store(run.checkpoints).newest(), lineage.nodes(run)
    parts, last = lineage.line(nodes), max((node.segment for node in nodes), default=0)
    step = -1 if local is None else local.step
    for item in state.whole:
        segment = item.manifest().segment or 0
        if segment > last or (item.step > step and lineage.holds(parts, segment, item.step)):
            raise MirrorError(
                f"{url} holds step {item.step:_} of start {segment}, and {run.path} has "
                + ("no whole checkpoint" if local is None else f"step {step:_} and {last} starts"),
                effect="nothing was done: training would go on from an older state, and replace what the mirror holds",
                remedy="to go on from the mirror, move the run directory aside and start with --from-mirror; to go on "
                "without it, name another checkpoint.mirror",
            )


def _nothing_to_restore(run: RunDir, why: str) -> MirrorError:
    return MirrorError(
        f"there is nothing to restore {run.path} from: {why}",
        effect="nothing was done: training would begin at step 0",
        remedy="correct checkpoint.mirror and run.name; to begin a new run, leave --from-mirror out, and remove "
        f"{run.path / RESTORING} if there is one",
    )
