"""Compares the run directory with its mirror at a start, and restores an empty one.

The record is restored first, then the newest valid checkpoint, the run id last. Only a checkpoint is required: losses
of the record are reported, and without its lineage the segment that wrote the checkpoint counts as the first one.
Until the run id is written, `RUN/restoring/` marks the directory, and an interrupted restoration is begun again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from tqdm import tqdm

from fsdp_pretrain.checkpoint.manifest import FileEntry
from fsdp_pretrain.checkpoint.store import Checkpoint, Store, directory_name
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.errors import CheckpointError, Interrupted, StorageError
from fsdp_pretrain.files import sync
from fsdp_pretrain.remote import PATIENCE, RemoteError, Url
from fsdp_pretrain.run import journal, lineage, run_id
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.lock import hold
from fsdp_pretrain.units import counted

from .layout import MirroredCheckpoint, MirrorError, MirrorState, RunMirror
from .record_copy import restore_record

AT_ONCE = 4
"""Number of files that are copied at the same time."""
RESTORING = "restoring"
"""Directory in a run directory that is being restored, until the run id is written."""
_NO_HURRY = 15.0
"""Seconds for which a start waits for a mirror that it does not need."""
Restoration = tuple[RunMirror, MirrorState]
"""The mirror that `--from-mirror` restores from, and its contents."""


def restore(task: Restoration, run: RunDir, stop: threading.Event | None = None) -> None:
    """Restore an empty run directory, with a progress bar, and report what was restored.

    Raises:
        Interrupted: `stop` was set.
        MirrorError: no checkpoint is valid.
        RemoteError: the mirror has stopped answering.
        BusyError: another process holds the run directory.
        StorageError: the run directory cannot be written.
    """
    run_id.unbind(run.path)
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        with hold(run, "restore"):
            _restore(*task, run, stop or threading.Event())
    except OSError as error:
        raise StorageError(
            f"cannot restore into {run.path}: {error}", remedy="free space or repair it, then start again"
        ) from None


def _restore(mirror: RunMirror, state: MirrorState, run: RunDir, stop: threading.Event) -> None:
    work = run.path / RESTORING
    identifier = state.records[0].run_id if state.records else ""
    work.mkdir(exist_ok=True)
    sync(run.path)
    with _progress(sum(record.entry.bytes for record in state.records[:1]), "record", stop) as shown:
        copy = restore_record(mirror, state, run.path, work, shown)
    run.status.unlink(missing_ok=True)  # of a job that was elsewhere
    checkpoint, rejected = _restore_checkpoint(mirror, state, run, lineage.nodes(run), stop)
    text = f"{'no checkpoint' if checkpoint is None else checkpoint.path.name} from {mirror.url}"
    if copy is None:
        text += "; the record is lost: journal, metrics, evaluations, and changes of overrides.toml"
    else:
        text += f", with the record of {copy}"
        text += f", as the one of {state.records[0]} is damaged" if copy != state.records[0] else ""
    if _complete_lineage(run, None if checkpoint is None else checkpoint.manifest().segment, state):
        text += "; whether a rollback had left this checkpoint is not known, nor which steps lead to it"
    text += "".join(f"; passed over {problem}" for problem in rejected)
    os.sync()  # the record; checkpoints are durable
    print(f"mirror: restored {text}", flush=True)
    journal.add(
        run, "mirror-restored", text, step=None if checkpoint is None else checkpoint.step, passed_over=rejected
    )
    run_id.assign(run.path, identifier)
    shutil.rmtree(work, ignore_errors=True)


def _complete_lineage(record: RunDir, segment: int | None, state: MirrorState) -> bool:
    """Record the segment that wrote the checkpoint as the first one if its place in the lineage is lost, and reserve
    the numbers of all segments that wrote checkpoints. Returns whether the place was lost."""
    if last := max((item.manifest().segment or 0 for item in state.whole), default=0):
        record.segment(last).mkdir(parents=True, exist_ok=True)
    if segment is None or any(node.segment == segment for node in lineage.nodes(record)):
        return False
    record.segment(segment).mkdir(parents=True, exist_ok=True)
    reason = "made by a restoration: its lineage was lost"
    lineage.record(record.segment(segment), parent=None, step=0, kind="start", reason=reason)
    return True


def _restore_checkpoint(
    mirror: RunMirror, state: MirrorState, run: RunDir, nodes: list[lineage.LineageNode], stop: threading.Event
) -> tuple[Checkpoint | None, list[str]]:
    """Restore the newest valid checkpoint. Returns it, and why others were rejected.

    Checkpoints of later segments are tried first: no rollback before can have abandoned them, known or not.
    """
    rejected = list[str]()
    checkpoint = None
    store = Store(run.checkpoints)
    store.sweep()
    for item in sorted(state.whole, key=lambda item: (item.manifest().segment or 0, item.step), reverse=True):
        if not item.is_abandoned(nodes):
            try:
                checkpoint = _fetch(mirror, item, store, stop)
                break
            except CheckpointError as error:
                rejected.append(f"step {item.step}: {error.cause}")
    for item in state.checkpoints:
        if item.problem is not None and (checkpoint is None or item.step > checkpoint.step):
            rejected.insert(0, f"step {item.step}: {item.problem}")
    if checkpoint is None and any(item.raw is not None for item in state.checkpoints):
        raise MirrorError(
            "\n    ".join(
                [f"{mirror.url} holds {counted(len(rejected), 'checkpoint')}, none of them valid:", *rejected]
            ),
            effect="nothing was restored: training would begin at step 0",
            remedy="restore the objects, if the bucket keeps versions",
        )
    return checkpoint, rejected


def _fetch(mirror: RunMirror, item: MirroredCheckpoint, store: Store, stop: threading.Event) -> Checkpoint:
    """Copy a checkpoint that looks whole into a store, and commit it there, verified.

    Raises:
        CheckpointError: a file is missing or damaged in the mirror; nothing was committed.
        RemoteError: the mirror does not answer.
        StorageError, OSError: the store cannot be written.
    """
    manifest, attempt = item.manifest(), store.begin(item.step)
    with _progress(sum(entry.bytes for entry in manifest.files), directory_name(item.step), stop) as shown:

        def fetch(entry: FileEntry) -> str:
            return mirror.fetch(f"{item.name}/{entry.name}", entry, attempt / entry.name, shown)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            wrong = [problem for problem in pool.map(fetch, manifest.files) if problem]
    if wrong:
        store.discard(attempt)
        raise CheckpointError(wrong[0])
    return store.commit(attempt, manifest).mark_verified()


@contextlib.contextmanager
def _progress(size: int, what: str, stop: threading.Event) -> Iterator[Callable[[int], None]]:
    """Show a progress bar; yields a function to call with the number of bytes of each part copied."""
    bar: tqdm[None] = tqdm(total=size, desc=f"mirror: {what}", unit="B", unit_scale=True, delay=2, disable=None)
    with bar:

        def shown(size: int) -> None:
            if stop.is_set():  # else the threads of the copy would keep this process alive
                raise Interrupted("asked to stop during a restoration")
            bar.update(size)

        yield shown


def compare_with_mirror(config: Config, *, restore: bool, fresh: bool) -> Restoration | None:
    """Compare the run directory with its mirror, if there is one, and print what the mirror holds. Changes nothing.

    Args:
        restore: an empty run directory may be restored (`--from-mirror`).
        fresh: the start may begin again at step 0 (`--allow-fresh`).

    Returns:
        The restoration to carry out; None if there is none.

    Raises:
        MirrorError: the mirror is another run's, holds what the run directory lacks, or holds nothing to restore.
        RemoteError: the mirror does not answer, and the run directory has no run.
    """
    run = RunDir(config.run.dir)
    interrupted = run_id.read(run.path) is None and (run.path / RESTORING).is_dir()
    empty = interrupted or (run_id.read(run.path) is None and not _holds_anything(run))
    if config.checkpoint.mirror is None:
        if restore or interrupted:
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
        print(f"mirror: {error.cause}; continuing with {run.path}, which may lack what the mirror has", flush=True)
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
        return mirror, state
    raise MirrorError(
        f"{run.path} {'was being restored and is not complete' if interrupted else 'is empty'}, and its mirror "
        f"{mirror.url} holds {state}",
        effect="nothing was done: training would begin at step 0, and replace what the mirror holds",
        remedy="if the run directory should hold the run, check that its file system is mounted; otherwise the same "
        "command with --from-mirror restores it. For a new run, give it another run.name",
    )


def _holds_anything(run: RunDir) -> bool:
    """Whether a directory has a start or a checkpoint of some run. Its folders may be mounts, and empty."""
    folders = (run.path / "segments", run.checkpoints)
    return any(folder.is_dir() and any(folder.iterdir()) for folder in folders)


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
    """Raise MirrorError if the mirror has a later checkpoint of the kept line, or one of a segment that is not here."""
    local, nodes = Store(run.checkpoints).newest(), lineage.nodes(run)
    parts, last = lineage.line(nodes), max((node.segment for node in nodes), default=0)
    step = -1 if local is None else local.step
    for item in state.whole:
        segment = item.manifest().segment or 0
        if segment > last or (item.step > step and lineage.holds(parts, segment, item.step)):
            raise MirrorError(
                f"{url} holds step {item.step:_} of start {segment}, and {run.path} has "
                + ("no whole checkpoint" if local is None else f"step {step:_} and {last} starts"),
                effect="nothing was done: training would continue from an older state, over what the mirror holds",
                remedy="to continue from the mirror, move the run directory aside and start with --from-mirror; to "
                "continue without it, name another checkpoint.mirror",
            )


def _nothing_to_restore(run: RunDir, why: str) -> MirrorError:
    return MirrorError(
        f"there is nothing to restore {run.path} from: {why}",
        effect="nothing was done: training would begin at step 0",
        remedy="correct checkpoint.mirror and run.name; to begin a new run, leave --from-mirror out, and remove "
        f"{run.path / RESTORING} if there is one",
    )
