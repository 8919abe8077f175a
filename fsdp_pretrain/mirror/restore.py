"""Restores a run directory from its mirror: the record, the newest valid checkpoint, and the run id last. No torch.

Only a checkpoint is needed. What is lost of the record is told; without its lineage the start that wrote the checkpoint
counts as the first one. Until it has its id, the directory is nobody's run, and `RUN/restoring/` marks it: an attempt
that was cut off is begun again.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from fsdp_pretrain.checkpoint.manifest import FileEntry
from fsdp_pretrain.checkpoint.store import Checkpoint, Store, directory_name, sync_directory, sync_file
from fsdp_pretrain.errors import CheckpointError, Interrupted, StorageError
from fsdp_pretrain.record import journal, lineage, run_id
from fsdp_pretrain.record.files import RunDir
from fsdp_pretrain.record.lock import hold

from .layout import MirroredCheckpoint, MirrorError, MirrorState, RunMirror
from .record_copy import restore_record
from .start import RESTORING, Restoration

AT_ONCE = 4
"""Files that are copied at the same time."""


def restore(task: Restoration, run: RunDir, stop: threading.Event | None = None) -> None:
    """Restore an empty run directory, with a progress bar, and say what was restored.

    Raises:
        Interrupted: `stop` was set.
        MirrorError: no checkpoint is valid.
        RemoteError: the mirror does not answer any more.
        BusyError: another process works in the run directory.
        StorageError: it cannot be written.
    """
    run_id.unbind(run.path)
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        with hold(run, "restore"):
            _restore(task.mirror, task.state, run, stop or threading.Event())
    except OSError as error:
        raise StorageError(
            f"cannot restore into {run.path}: {error}", remedy="free space or repair it, then start again"
        ) from None


def _restore(mirror: RunMirror, state: MirrorState, run: RunDir, stop: threading.Event) -> None:
    work, known = run.path / RESTORING, state.records[0].run_id if state.records else ""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    sync_directory(run.path)
    with _progress(sum(record.entry.bytes for record in state.records[:1]), "record", stop) as shown:
        copy = restore_record(mirror, state, work, shown)
    made, passed_over = _restore_checkpoint(mirror, state, run, lineage.nodes(RunDir(work)), stop)
    text = f"{'no checkpoint' if made is None else made.path.name} from {mirror.url}"
    if copy is None:
        text += "; the record is lost: journal, metrics, evaluations, and changes of overrides.toml"
    else:
        text += f", with the record of {copy}"
        text += f", as the one of {state.records[0]} is damaged" if copy != state.records[0] else ""
    if _complete_lineage(RunDir(work), None if made is None else made.manifest().segment, state):
        text += "; whether a rollback had left this checkpoint is not known, nor which steps lead to it"
    text += "".join(f"; passed over {problem}" for problem in passed_over)
    _move(work, run.path)
    print(f"mirror: restored {text}", flush=True)
    journal.add(run, "mirror-restored", text, step=None if made is None else made.step, passed_over=passed_over)
    run_id.assign(run.path, known)
    shutil.rmtree(work, ignore_errors=True)


def _complete_lineage(record: RunDir, segment: int | None, state: MirrorState) -> bool:
    """Make the start that wrote a checkpoint the first one, if its place in the lineage is lost; and let no new start
    have the number of one that wrote any checkpoint. Returns whether it was lost."""
    if last := max((item.manifest().segment or 0 for item in state.whole), default=0):
        record.segment(last).mkdir(parents=True, exist_ok=True)
    if segment is None or any(node.segment == segment for node in lineage.nodes(record)):
        return False
    record.segment(segment).mkdir(parents=True, exist_ok=True)
    why = "made by a restoration: its lineage was lost"
    lineage.record(record.segment(segment), parent=None, step=0, kind="start", reason=why)
    return True


def _restore_checkpoint(
    mirror: RunMirror, state: MirrorState, run: RunDir, nodes: list[lineage.LineageNode], stop: threading.Event
) -> tuple[Checkpoint | None, list[str]]:
    """The newest valid checkpoint, in the run directory; and what was passed over.

    Those of later starts are first: what a start has saved, no rollback before it has left, also if that is not known.
    """
    passed_over, made, store = list[str](), None, Store(run.checkpoints)
    store.sweep()
    for item in sorted(state.whole, key=lambda item: (item.manifest().segment or 0, item.step), reverse=True):
        if not item.is_left(nodes):
            try:
                made = _fetch(mirror, item, store, stop)
                break
            except CheckpointError as error:
                passed_over.append(f"step {item.step}: {error.cause}")
    for item in state.checkpoints:
        if item.problem is not None and (made is None or item.step > made.step):
            passed_over.insert(0, f"step {item.step}: {item.problem}")
    for text in passed_over:
        print(f"mirror: passed over {text}", flush=True)
    if made is None and any(item.raw is not None for item in state.checkpoints):
        raise MirrorError(
            f"{mirror.url} holds {len(passed_over)} checkpoints, none of them valid:\n    "
            + "\n    ".join(passed_over),
            effect="nothing was restored: training would begin at step 0",
            remedy="restore the objects, if the bucket keeps versions",
        )
    return made, passed_over


def _fetch(mirror: RunMirror, item: MirroredCheckpoint, store: Store, stop: threading.Event) -> Checkpoint:
    """Copy a checkpoint that looks whole into a store, and commit it there, verified.

    Raises:
        CheckpointError: a file is missing or damaged in the mirror; nothing was committed.
        RemoteError: the mirror does not answer.
        StorageError, OSError: of the store.
    """
    manifest, attempt = item.manifest(), store.begin(item.step)
    with _progress(sum(entry.bytes for entry in manifest.files), directory_name(item.step), stop) as shown:

        def one(entry: FileEntry) -> str:
            return mirror.fetch(f"{item.name}/{entry.name}", entry, attempt / entry.name, shown)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            wrong = [problem for problem in pool.map(one, manifest.files) if problem]
    if wrong:
        store.discard(attempt)
        raise CheckpointError(wrong[0])
    return store.commit(attempt, manifest).mark_verified()


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
