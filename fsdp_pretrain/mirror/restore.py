"""Restores a run directory from its mirror: the newest valid checkpoint, the record, and the run id last. No torch.

Until it has its id, the directory is nobody's run; `RUN/restoring/` marks it. An attempt that was cut off is begun
again, and takes the files of the checkpoint that are whole.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from tqdm import tqdm

from fsdp_pretrain.checkpoint.store import Checkpoint, Store, sync_directory
from fsdp_pretrain.errors import CheckpointError, Interrupted, StorageError
from fsdp_pretrain.record import journal, run_id
from fsdp_pretrain.record.files import RunDir, seconds_of
from fsdp_pretrain.record.lock import hold

from . import checkpoint_copy
from .layout import MirroredCheckpoint
from .record_copy import restore_record
from .start import RESTORING, Restoration, candidates, no_valid_checkpoint


def restore(task: Restoration, run: RunDir, stop: threading.Event | None = None) -> None:
    """Carry out a restoration, with a progress bar, and say what was restored.

    Raises:
        Interrupted: `stop` was set.
        MirrorError: the record is damaged, or no checkpoint is valid.
        RemoteError: the mirror does not answer any more; a later start continues.
        BusyError: another process works in the run directory.
        StorageError: it cannot be written.
    """
    run_id.unbind(run.path)
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        with hold(run, "restore"):
            _restore(task, run, stop or threading.Event())
    except OSError as error:
        raise StorageError(
            f"cannot restore into {run.path}: {error}", remedy="free space or repair it, then start again"
        ) from None


def _restore(task: Restoration, run: RunDir, stop: threading.Event) -> None:
    work, state = run.path / RESTORING, task.state
    work.mkdir(exist_ok=True)
    sync_directory(run.path)
    for path in work.iterdir():  # of an attempt that was cut off, which the directory itself says until the end
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if task.record and state.index is not None:
        size = sum(file.size for file in state.index.files)
        with _progress(size, "record", stop) as shown:
            restore_record(task.mirror, state.index, work, shown)
        _give_times(work, seconds_of(state.index.time))
    record = RunDir(work) if task.record else run
    made, passed_over = _restore_checkpoint(task, run, record, stop)
    if task.record:
        _move(work, run.path)
    told = "nothing but the record" if made is None else made.path.name
    text = f"{told} from {task.mirror.url}, with the record of {state.index.time}" if state.index else told
    text += "".join(f"; passed over {problem}" for problem in passed_over)
    print(f"mirror: restored {text}", flush=True)
    journal.add(run, "mirror-restored", text, step=None if made is None else made.step, passed_over=passed_over)
    run_id.assign(run.path, state.run_id)
    shutil.rmtree(work)
    sync_directory(run.path)


def _restore_checkpoint(
    task: Restoration, run: RunDir, record: RunDir, stop: threading.Event
) -> tuple[Checkpoint | None, list[str]]:
    """The newest valid checkpoint on the line of `record`, in the run directory; and what was passed over."""
    passed_over: list[str] = []
    store = Store(run.checkpoints)
    for item in candidates(task.state, record):
        problem = item.problem
        if problem is None:
            try:
                return _fetch(task, store, item, stop), passed_over
            except CheckpointError as error:
                problem = error.cause
        passed_over.append(f"step {item.step}: {problem}")
        print(f"mirror: passed over {passed_over[-1]}", flush=True)
    if any(item.raw is not None for item in task.state.checkpoints):
        raise no_valid_checkpoint(task.mirror, passed_over)
    return None, passed_over


def _fetch(task: Restoration, store: Store, item: MirroredCheckpoint, stop: threading.Event) -> Checkpoint:
    there = next((found for found in store.scan() if found.step == item.step and found.problem is None), None)
    if there is not None and there.verified:  # of an attempt that was cut off after it
        return there
    with _progress(sum(entry.bytes for entry in item.manifest().files), item.name.rpartition("/")[2], stop) as shown:
        return checkpoint_copy.fetch(task.mirror, item, store, shown)


@contextlib.contextmanager
def _progress(size: int, what: str, stop: threading.Event) -> Iterator[Callable[[int], None]]:
    """What a copy calls with bytes."""
    bar: tqdm[None] = tqdm(total=size, desc=f"mirror: {what}", unit="B", unit_scale=True, delay=2, disable=None)
    with bar:

        def shown(size: int) -> None:
            if stop.is_set():  # or the threads of the copy would keep this process until it is complete
                raise Interrupted("asked to stop during a restoration")
            bar.update(size)

        yield shown


def _give_times(folder: Path, seconds: float | None) -> None:
    """Let the files be as old as the record: a restart must not take the end of an earlier start for its own."""
    for path in folder.rglob("*"):
        if path.is_file() and seconds is not None:
            os.utime(path, (seconds, seconds))


def _move(source: Path, target: Path) -> None:
    """Move files into a directory, durably, in place of those of the same names."""
    for path in sorted(source.iterdir()):
        place = target / path.name
        if path.is_dir() and place.is_dir():
            _move(path, place)
        else:
            path.replace(place)
    sync_directory(target)
