"""Restores a run directory from its mirror: the newest valid checkpoint, the record, and the run id last. No torch.

Only a checkpoint is needed. What is lost of the record is told; without its lineage the start that wrote the checkpoint
counts as the first one.
Until it has its id, the directory is nobody's run; `RUN/restoring/` marks it. An attempt that was cut off is begun
again, and takes the files of the checkpoint that are whole.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from fsdp_pretrain.checkpoint.store import Checkpoint, Store, sync_directory
from fsdp_pretrain.errors import CheckpointError, Interrupted, StorageError
from fsdp_pretrain.record import journal, lineage, run_id, state_files
from fsdp_pretrain.record.files import RunDir
from fsdp_pretrain.record.lineage import LINEAGE, LineageNode
from fsdp_pretrain.record.lock import hold

from . import checkpoint_copy
from .layout import MirroredCheckpoint
from .record_copy import restore_record
from .start import RESTORING, Restoration, candidates, no_valid_checkpoint


def restore(task: Restoration, run: RunDir, stop: threading.Event | None = None) -> None:
    """Carry out a restoration, with a progress bar, and say what was restored.

    Raises:
        Interrupted: `stop` was set.
        MirrorError: no checkpoint is valid.
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
    lost: list[str] = []
    if task.record:
        size = sum(file.bytes for file in state.record.newest.values())
        with _progress(size, "record", stop) as shown:
            lost = restore_record(task.mirror, state.record, work, shown)
    record = RunDir(work) if task.record else run
    lost += _without_damaged_lineage(record) if task.record else []
    made, passed_over = _restore_checkpoint(task, run, record, stop)
    if task.record and made is not None:
        lost += _complete_lineage(record, made.manifest().segment, state.checkpoints)
    if task.record:
        _move(work, run.path)
    lost = sorted(set(lost))
    text = _told(task, made, passed_over, lost)
    print(f"mirror: restored {text}", flush=True)
    step = None if made is None else made.step
    journal.add(run, "mirror-restored", text, step=step, passed_over=passed_over, lost=lost)
    run_id.assign(run.path, state.run_id or "")
    shutil.rmtree(work)
    sync_directory(run.path)


def _told(task: Restoration, made: Checkpoint | None, passed_over: list[str], lost: list[str]) -> str:
    """What was restored, and what was not."""
    text = f"{'no checkpoint' if made is None else made.path.name} from {task.mirror.url}"
    index = task.state.record.index
    if task.record:
        text += ", with what is there of the record" if index is None else f", with the record of {index.time}"
    text += "".join(f"; passed over {problem}" for problem in passed_over)
    if task.record and not task.state.record.newest:
        text += "; the record is lost: journal, metrics, evaluations, and changes of overrides.toml"
    elif lost:
        more = f" and {len(lost) - 10} more" if len(lost) > 10 else ""
        text += f"; lost of the record: {', '.join(lost[:10])}{more}"
    if any(name.endswith(LINEAGE) for name in lost):
        text += "; whether a rollback had left this checkpoint is not known, nor which steps lead to it"
    return text


def _without_damaged_lineage(record: RunDir) -> list[str]:
    """Remove files of the lineage that were copied damaged: no start would go on beside them. Returns their names."""
    found = [segment / LINEAGE for segment in record.segments if (segment / LINEAGE).exists()]
    damaged = [path for path in found if state_files.view(path, LineageNode) is None]
    for path in damaged:
        path.unlink()
    return [path.relative_to(record.path).as_posix() for path in damaged]


def _complete_lineage(record: RunDir, segment: int | None, every: Sequence[MirroredCheckpoint]) -> list[str]:
    """Make the start that wrote a checkpoint the first one, if its place in the lineage is lost; and let no new start
    have the number of one that wrote any checkpoint. Returns what was lost."""
    numbers = [item.manifest().segment or 0 for item in every if item.problem is None]
    if last := max(numbers, default=0):
        record.segment(last).mkdir(parents=True, exist_ok=True)
    if segment is None or any(node.segment == segment for node in lineage.nodes(record)):
        return []
    folder = record.segment(segment)
    folder.mkdir(parents=True, exist_ok=True)
    lineage.record(folder, parent=None, step=0, kind="start", reason="made by a restoration: its lineage was lost")
    return [f"segments/{folder.name}/{LINEAGE}"]


def _restore_checkpoint(
    task: Restoration, run: RunDir, record: RunDir, stop: threading.Event
) -> tuple[Checkpoint | None, list[str]]:
    """The newest valid checkpoint on the line of `record`, in the run directory; and what was passed over."""
    passed_over: list[str] = []
    store = Store(run.checkpoints)
    known = {node.segment: node for node in lineage.nodes(record)}
    wrote = {item.manifest().segment for item in task.state.checkpoints if item.problem is None}
    needed = {number for number in (*wrote, *(node.parent for node in known.values())) if number is not None}
    for item in candidates(task.state, record, whole_lineage=needed <= known.keys()):
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


def _move(source: Path, target: Path) -> None:
    """Move files into a directory, durably, in place of those of the same names."""
    for path in sorted(source.iterdir()):
        place = target / path.name
        if path.is_dir() and place.is_dir():
            _move(path, place)
        else:
            path.replace(place)
    sync_directory(target)
