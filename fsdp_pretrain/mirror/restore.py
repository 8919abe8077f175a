"""Restores a run directory from its mirror: the record, the newest valid checkpoint, and the run id last. No torch.

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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from fsdp_pretrain.checkpoint.manifest import FileEntry
from fsdp_pretrain.checkpoint.store import (
    Checkpoint,
    Store,
    describe_file,
    difference,
    directory_name,
    sync_directory,
    sync_file,
)
from fsdp_pretrain.errors import CheckpointError, Interrupted, StorageError
from fsdp_pretrain.record import journal, lineage, run_id
from fsdp_pretrain.record.files import RunDir
from fsdp_pretrain.record.lock import hold

from .layout import MirroredCheckpoint, MirrorError, RecordManifest, RunMirror
from .record_copy import restore_record
from .start import RESTORING, Restoration

AT_ONCE = 4
"""Files that are copied at the same time."""


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
    copy: RecordManifest | None = None
    if task.record:
        with _progress(sum(record.archive.bytes for record in state.records[:1]), "record", stop) as shown:
            copy = restore_record(task.mirror, state, work, shown)
    record = RunDir(work) if task.record else run
    made, passed_over = _restore_checkpoint(task, run, record, stop)
    text = f"{'no checkpoint' if made is None else made.path.name} from {task.mirror.url}"
    if task.record:
        lost = _complete_lineage(record, None if made is None else made.manifest().segment, state.checkpoints)
        _move(work, run.path)
        text += _what_of_the_record(task, copy, lost)
    text += "".join(f"; passed over {problem}" for problem in passed_over)
    print(f"mirror: restored {text}", flush=True)
    journal.add(run, "mirror-restored", text, step=None if made is None else made.step, passed_over=passed_over)
    run_id.assign(run.path, state.run_id or "")
    shutil.rmtree(work)
    sync_directory(run.path)


def _what_of_the_record(task: Restoration, copy: RecordManifest | None, lost: bool) -> str:
    if copy is None:
        text = "; the record is lost: journal, metrics, evaluations, and changes of overrides.toml"
    elif copy != task.state.records[0]:
        text = f", with the record of {copy.time}, as the one of {task.state.records[0].time} is damaged"
    else:
        text = f", with the record of {copy.time}"
    return text + (
        "; whether a rollback had left this checkpoint is not known, nor which steps lead to it" if lost else ""
    )


def _complete_lineage(record: RunDir, segment: int | None, every: Sequence[MirroredCheckpoint]) -> bool:
    """Make the start that wrote a checkpoint the first one, if its place in the lineage is lost; and let no new start
    have the number of one that wrote any checkpoint. Returns whether it was lost."""
    numbers = [item.manifest().segment or 0 for item in every if item.problem is None]
    if last := max(numbers, default=0):
        record.segment(last).mkdir(parents=True, exist_ok=True)
    if segment is None or any(node.segment == segment for node in lineage.nodes(record)):
        return False
    record.segment(segment).mkdir(parents=True, exist_ok=True)
    why = "made by a restoration: its lineage was lost"
    lineage.record(record.segment(segment), parent=None, step=0, kind="start", reason=why)
    return True


def _restore_checkpoint(
    task: Restoration, run: RunDir, record: RunDir, stop: threading.Event
) -> tuple[Checkpoint | None, list[str]]:
    """The newest valid checkpoint on the line of `record`, in the run directory; and what was passed over.

    Of later starts first, if the lineage is not whole: what a start has saved, no rollback before it has left.
    """
    every, passed_over, store = task.state.checkpoints, list[str](), Store(run.checkpoints)
    nodes = lineage.nodes(record)
    begun = {int(number) for copy in task.state.records[:1] for number in copy.starts}
    begun |= {item.manifest().segment or 0 for item in every if item.problem is None} - {0}
    lineage_is_whole = begun <= {node.segment for node in nodes}

    def order(item: MirroredCheckpoint) -> tuple[int, int]:
        return 0 if lineage_is_whole or item.problem is not None else item.manifest().segment or 0, item.step

    for item in sorted(every, key=order, reverse=True):
        if item.problem is None and not item.is_on_line(nodes):
            continue
        problem = item.problem
        if problem is None:
            try:
                return _fetch_unless_there(task.mirror, store, item, stop), passed_over
            except CheckpointError as error:
                problem = error.cause
        passed_over.append(f"step {item.step}: {problem}")
        print(f"mirror: passed over {passed_over[-1]}", flush=True)
    if any(item.raw is not None for item in every):
        raise MirrorError(
            f"{task.mirror.url} holds {len(passed_over)} checkpoints, none of them valid:\n    "
            + "\n    ".join(passed_over),
            effect="nothing was restored: training would begin at step 0",
            remedy="restore the objects, if the bucket keeps versions",
        )
    return None, passed_over


def _fetch_unless_there(mirror: RunMirror, store: Store, item: MirroredCheckpoint, stop: threading.Event) -> Checkpoint:
    there = next((found for found in store.scan() if found.step == item.step and found.problem is None), None)
    if there is not None and there.verified:  # of an attempt that was cut off after it
        return there
    with _progress(sum(entry.bytes for entry in item.manifest().files), directory_name(item.step), stop) as shown:
        return _fetch(mirror, item, store, shown)


def _fetch(mirror: RunMirror, item: MirroredCheckpoint, store: Store, shown: Callable[[int], object]) -> Checkpoint:
    """Copy a checkpoint that looks whole into a store, and commit it there, verified.

    Files of an attempt that was cut off are taken if they are whole. `shown` is called with bytes, from several
    threads.

    Raises:
        CheckpointError: a file is missing or damaged in the mirror; nothing was committed.
        RemoteError: the mirror does not answer.
        StorageError, OSError: of the store.
    """
    left = sorted(store.directory.glob(f"{directory_name(item.step)}.writing-*"))
    attempt = left[0] if left else store.begin(item.step)

    def one(entry: FileEntry) -> str:
        path = attempt / entry.name
        if path.is_file() and not difference(entry, describe_file(path)):
            shown(entry.bytes)
            return ""
        return mirror.fetch(f"{item.name}/{entry.name}", entry, path, shown)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        wrong = [problem for problem in pool.map(one, item.manifest().files) if problem]
    if wrong:
        raise CheckpointError(wrong[0])
    made = store.commit(attempt, item.manifest()).mark_verified()
    made.pin(item.pinned)
    return made


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
            continue
        for file in path.rglob("*") if path.is_dir() else [path]:
            if file.is_file():
                sync_file(file)
        path.replace(place)
    sync_directory(target)
