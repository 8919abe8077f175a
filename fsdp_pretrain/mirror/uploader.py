"""The process of a node that copies checkpoints and record to the mirror, beside training: a storage that hangs never
touches a rank. No torch.

    python -m fsdp_pretrain.mirror.uploader RUN ID SEGMENT NODE NODES LOCAL_RANKS

The first node says in its report (`record.mirror_status`) which checkpoint is copied; each node sends the files that
its ranks wrote, reads them back and says so in its own; then the first one writes the manifest. What fails is reported
and tried again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fsdp_pretrain.checkpoint.locations import stores
from fsdp_pretrain.checkpoint.manifest import FileEntry, is_permanent
from fsdp_pretrain.checkpoint.store import MANIFEST, PINNED, Checkpoint, step_of
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.resume_rules import load_compatible
from fsdp_pretrain.errors import CheckpointError, RunGoneError, UserError
from fsdp_pretrain.record import lineage, mirror_status, run_id, state_files
from fsdp_pretrain.record.files import RunDir
from fsdp_pretrain.record.journal import Journal
from fsdp_pretrain.record.mirror_status import MirrorReport, MirrorTask
from fsdp_pretrain.units import human_bytes, human_time

from .layout import MirroredCheckpoint, MirrorError, RunMirror, SourceDamagedError
from .record_copy import RecordCopy
from .start import refuse_if_not_ours

AT_ONCE = 4
"""Files that are copied at the same time."""
_PATIENCE = 20.0
"""Seconds for which a call to the storage is repeated before that is a problem."""
_PAUSES = (2.0, 5.0, 15.0, 30.0, 60.0, 120.0)
"""Seconds before a failed pass is repeated; the last one for all later failures."""
_LOOK_SECONDS, _OTHERS_SECONDS, _BEAT_SECONDS = 10.0, 1.0, 10.0


class OtherNodeError(UserError):
    """Another node cannot copy its files."""


@dataclass(frozen=True)
class Place:
    """Where an uploader works: the run, the id and segment of this start, and which node of how many it serves."""

    run: RunDir
    id: str
    segment: int
    node: int
    nodes: int
    local_ranks: int

    def owns(self, name: str) -> bool:
        """Whether this node copies a file of a checkpoint: that of the rank in its name, if there is one, else 0."""
        head = name.removeprefix("__").partition("_")[0]
        node = int(head) // self.local_ranks if name.startswith("__") and head.isdecimal() else 0
        return self.node == (node if node < self.nodes else 0)


class Reporter:
    """Writes this node's report when it changes, and with a new beat every few seconds."""

    def __init__(self, place: Place, url: str) -> None:
        self._run, self._lock = place.run, threading.Lock()
        self.report = MirrorReport(
            node=place.node, host=socket.gethostname(), pid=os.getpid(), segment=place.segment, url=url
        )
        self.change()
        threading.Thread(target=self._beat, daemon=True).start()

    def change(self, **values: object) -> None:
        with self._lock, contextlib.suppress(OSError):  # of a full disk, or one that is gone
            self.report = self.report.model_copy(update={**values, "beat": self.report.beat + 1})
            state_files.write(mirror_status.report_file(self._run, self.report.node), self.report.model_dump())

    def failed(self, error: UserError | OSError) -> None:
        cause = error.cause if isinstance(error, UserError) else str(error)
        passes = getattr(error, "is_temporary", False) or isinstance(error, OSError | OtherNodeError)
        since = self.report.since if self.report.problem else time.time()
        self.change(problem=cause, since=since, needs_person=not passes)

    def _beat(self) -> None:
        while True:
            time.sleep(_BEAT_SECONDS)
            self.change()


class Uploader:
    """Any node's: sends its files of the checkpoint that the first one names."""

    def __init__(self, place: Place, mirror: RunMirror, reporter: Reporter) -> None:
        self._place, self._run, self._mirror, self._reporter = place, place.run, mirror, reporter
        self._sent: set[tuple[str, str]] = set()

    def work(self, *, finish: bool) -> float | None:
        """A pass. Returns the seconds until the next one; None: all is copied, and the run `finish`es.

        Raises UserError, OSError.
        """
        first = mirror_status.read_reports(self._run, self._place.segment).get(0)
        if first is None or first.task is None or first.task.id == self._reporter.report.copied:
            return None if finish and first is not None and first.ended else _OTHERS_SECONDS
        path = Path(first.task.path)
        there = self._mirror.remote.list(f"checkpoints/{path.name}")
        sizes = {name.rpartition("/")[2]: info.size for name, info in there.items()}
        with contextlib.suppress(SourceDamagedError):  # the first node sees that, too
            self.send(first.task, Checkpoint(step_of(path.name) or 0, path, None, True), sizes)
        return _OTHERS_SECONDS

    def send(self, task: MirrorTask, checkpoint: Checkpoint, there: dict[str, int]) -> None:
        """Send this node's files of a checkpoint, and report that. `there`: sizes of objects that may be whole.

        Raises SourceDamagedError, RemoteError, OSError.
        """
        self._sent = {key for key in self._sent if key[0] == task.id}

        def send(entry: FileEntry) -> None:
            if (task.id, entry.name) not in self._sent:
                name, known = f"checkpoints/{checkpoint.path.name}/{entry.name}", there.get(entry.name) == entry.bytes
                self._mirror.put(name, checkpoint.path / entry.name, entry, there=known)
                self._sent.add((task.id, entry.name))

        try:
            own = [entry for entry in checkpoint.files() if self._place.owns(entry.name)]
        except CheckpointError as error:
            raise SourceDamagedError(error.cause) from None
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(send, own))
        self._reporter.change(copied=task.id, files=self._reporter.report.files + len(own))


class FirstUploader(Uploader):
    """That of the first node: it decides what is copied, writes manifests, and keeps the mirror's policy."""

    def __init__(self, config: Config, place: Place, mirror: RunMirror, reporter: Reporter) -> None:
        super().__init__(place, mirror, reporter)
        self._config, self._journal = config, Journal(self._run, place.segment)
        self._record: RecordCopy | None = None
        self._found: dict[int, MirroredCheckpoint] = {}
        self._waited: set[int] = set()
        self._given_up: set[int] = set()
        self._record_due = 0.0

    def work(self, *, finish: bool) -> float | None:
        """See `Uploader.work`."""
        if self._record is None:
            state = self._mirror.look()
            refuse_if_not_ours(self._run, state, self._mirror.url)
            self._found = {item.step: item for item in state.checkpoints}
            self._record = RecordCopy(self._run, self._mirror, self._place.id)
            self._push_record()  # which makes the mirror that of this run
            self._report_newest()
        if waiting := self._waiting():
            with contextlib.suppress(SourceDamagedError):
                self._upload(waiting[0])
            return 0.0
        self._set_task(None)
        if finish or time.monotonic() >= self._record_due:
            self._push_record()
            self._retain()
        self._reporter.change(ended=finish)
        return None if finish else _LOOK_SECONDS

    def _push_record(self) -> None:
        assert self._record is not None
        every, begun = self._config.checkpoint.mirror_record_every.value, time.monotonic()
        self._record.push(every)
        ended = time.monotonic()
        self._record_due = ended + max(every, 10 * (ended - begun))  # of a long run it takes longer

    def _whole(self) -> list[MirroredCheckpoint]:
        """The whole checkpoints of the kept line in the mirror, oldest first."""
        nodes = lineage.nodes(self._run)
        return [item for _, item in sorted(self._found.items()) if item.is_on_line(nodes)]

    def _report_newest(self) -> None:
        whole = self._whole()
        self._reporter.change(newest=whole[-1].step if whole else None)

    def _set_task(self, task: MirrorTask | None) -> None:
        if self._reporter.report.task != task:
            self._reporter.change(task=task)

    # ------------------------------------------------------------------ checkpoints

    def _waiting(self) -> list[Checkpoint]:
        """Local checkpoints that the mirror should have and has not, newest first; tells of those that were deleted
        before they were copied."""
        policy, found = self._config.checkpoint, stores(self._run).scan()
        local = {item.step: item for item in found if not item.problem and (item.verified or not policy.verify)}
        recent = sorted(local)[-policy.mirror_keep_last :]
        wanted = [
            item
            for step, item in sorted(local.items(), reverse=True)
            if step in recent or item.pinned or self._is_permanent(item) or self._is_damaged(step)
        ]
        waiting = [item for item in wanted if item.step not in self._given_up and not self._has(item)]
        gone = {step for step in self._waited if step not in local and not self._holds(step)}
        self._waited = {item.step for item in waiting}
        for step in sorted(gone):
            self._tell_missed(step, "retention deleted it before it was in the mirror, which is too slow or away")
        return waiting

    def _tell_missed(self, step: int, text: str) -> None:
        self._journal.write("mirror-missed", f"{self._mirror.url} will not get this checkpoint: {text}", step=step)

    def _is_permanent(self, item: Checkpoint | MirroredCheckpoint) -> bool:
        return is_permanent(self._config, item.manifest(), self._config.checkpoint.kept_intervals)

    def _is_damaged(self, step: int) -> bool:
        """Whether the mirror has a manifest of this step, and it or a file is wrong."""
        found = self._found.get(step)
        return found is not None and found.problem is not None and found.raw is not None

    def _holds(self, step: int) -> bool:
        return step in self._found and self._found[step].problem is None

    def _has(self, item: Checkpoint) -> bool:
        """Whether the mirror has this checkpoint, and not one of the same step that a rollback left."""
        try:
            return self._holds(item.step) and self._found[item.step].raw == (item.path / MANIFEST).read_bytes()
        except OSError:
            return True  # deleted just now

    def _upload(self, item: Checkpoint) -> None:
        """Copy a checkpoint, record and manifest last. Raises SourceDamagedError if it was deleted meanwhile."""
        begun, task, found = time.monotonic(), self._reporter.report.task, self._found.get(item.step)
        try:
            raw = (item.path / MANIFEST).read_bytes()
        except OSError as error:
            raise SourceDamagedError(str(error)) from None
        name = f"checkpoints/{item.path.name}"
        if found is not None and found.raw is not None:  # it must not vouch for other files
            self._mirror.remote.delete([f"{name}/{MANIFEST}"])
            found = self._found[item.step] = MirroredCheckpoint.of(item.step, None, found.objects)
        if task is None or task.path != str(item.path):
            task = MirrorTask(id=uuid.uuid4().hex, step=item.step, path=str(item.path))
            self._set_task(task)
        try:
            self.send(task, item, found.objects if found is not None else {})
            self._wait_for_others(task, item)
        except SourceDamagedError as error:
            if item.path.exists():
                self._given_up.add(item.step)
                self._tell_missed(item.step, error.cause)
            raise
        self._push_record()  # what leads to it, before it
        listed = {path.rpartition("/")[2]: at.size for path, at in self._mirror.remote.list(name).items()}
        made = MirroredCheckpoint.of(item.step, raw, listed | {MANIFEST: len(raw)})
        if made.problem is not None:  # deleted by someone else meanwhile
            self._set_task(None)
            raise MirrorError(f"{self._mirror.url / name}, which was just written: {made.problem}")
        self._mirror.put(f"{name}/{MANIFEST}", raw)
        self._set_task(None)
        self._found[item.step] = made
        self._report_newest()
        files = made.manifest().files
        stray = made.objects.keys() - {MANIFEST, PINNED, *(entry.name for entry in files)}
        self._mirror.remote.delete(f"{name}/{stranger}" for stranger in sorted(stray))
        size, seconds = sum(entry.bytes for entry in files), time.monotonic() - begun
        text = f"{item.path.name} is in {self._mirror.url}: {human_bytes(size)} in {human_time(seconds)}"
        self._journal.write("mirror", text, step=item.step, bytes=size, seconds=seconds)
        self._retain()

    def _wait_for_others(self, task: MirrorTask, item: Checkpoint) -> None:
        while True:
            reports = mirror_status.read_reports(self._run, self._place.segment)
            late = {
                node for node in range(1, self._place.nodes) if node not in reports or reports[node].copied != task.id
            }
            if not late:
                return
            for report in (reports[node] for node in late & reports.keys()):
                if report.problem:
                    raise OtherNodeError(f"{report.host}: {report.problem}")
            if not item.path.exists():
                raise SourceDamagedError(f"{item.path} is gone")
            time.sleep(_OTHERS_SECONDS)

    # ------------------------------------------------------------------ retention

    def _copy_pins(self) -> None:
        """Give the mirror's checkpoints the marks of the local ones."""
        for item in stores(self._run).scan():
            there = self._found.get(item.step)
            if there is None or there.problem is not None or there.pinned == item.pinned:
                continue
            if item.pinned:
                self._mirror.remote.write(f"{there.name}/{PINNED}", b"{}\n")
                there.objects[PINNED] = 3
            else:
                self._mirror.remote.delete([f"{there.name}/{PINNED}"])
                del there.objects[PINNED]

    def _retain(self) -> None:
        """Delete from the mirror what its policy does not keep: as `Store.retain`, and what is left of copies that were
        given up."""
        self._copy_pins()
        kept, whole = self._config.checkpoint.mirror_keep_last, self._whole()
        recent = {item.step for item in whole[-kept:]}
        if len(recent) < kept:
            return
        for step, item in list(self._found.items()):
            spared = step in recent or step > min(recent) or item.pinned or step in self._waited
            if not spared and not self._stays(item, whole):  # the manifest first: what is left never looks whole
                names = (MANIFEST, *sorted(item.objects.keys() - {MANIFEST}))
                self._mirror.remote.delete(f"{item.name}/{name}" for name in names)
                self._mirror.remote.remove_folder(item.name)
                del self._found[step]

    def _stays(self, item: MirroredCheckpoint, whole: list[MirroredCheckpoint]) -> bool:
        """Whether an old one stays: a permanent one of the kept line, and a damaged one that may be permanent, for a
        person to see."""
        if item.raw is None or item.objects.keys() <= {MANIFEST, PINNED}:
            return False
        try:
            return (item.problem is not None or item in whole) and self._is_permanent(item)
        except CheckpointError:  # its manifest does not say
            return True


class Orders:
    """What the rank that started this process says, read by a thread."""

    def __init__(self) -> None:
        self.finish, self._said = False, threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def wait(self, seconds: float) -> None:
        """Wait for a word from the rank, or the time."""
        self._said.wait(seconds)
        self._said.clear()

    def _read(self) -> None:
        for line in sys.stdin:
            self.finish = self.finish or line.strip() == "finish"
            self._said.set()
        os._exit(0)  # the rank is gone: the job goes on elsewhere or later, with an uploader of its own


def main(run: str, own_id: str, *numbers: str) -> int:
    """Copy until the rank says that it ends, and everything is copied."""
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):  # requests to stop, to every process of a job
        signal.signal(number, signal.SIG_IGN)
    orders, place = Orders(), Place(RunDir(Path(run)), own_id, *map(int, numbers))
    run_id.bind(place.run.path, own_id)
    config = load_compatible(place.run.segment(place.segment) / "config.toml")
    mirror = RunMirror(config, patience=_PATIENCE)
    reporter, failures = Reporter(place, str(mirror.url)), 0
    worker = Uploader(place, mirror, reporter) if place.node else FirstUploader(config, place, mirror, reporter)
    while True:
        try:
            pause = worker.work(finish=orders.finish)
            if reporter.report.problem:
                reporter.change(problem="", since=None, needs_person=False)
            failures = 0
        except RunGoneError:
            return 0
        except (UserError, OSError) as error:
            reporter.failed(error)
            pause, failures = _PAUSES[min(failures, len(_PAUSES) - 1)], failures + 1
        if pause is None:
            return 0
        orders.wait(pause)


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # threads of the storage's library could keep it alive
