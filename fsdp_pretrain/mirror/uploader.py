"""The process of a node that copies checkpoints and record to the mirror, beside training.

    python -m fsdp_pretrain.mirror.uploader RUN ID --segment 3 --node 0 --nodes 2 --local-ranks 8

The configuration comes on standard input, then lines: `saved` (look at once) and `finish` (copy what is left, then
end). It ends at once when its input does, with the job. The first node's process decides what is copied, says so in
`RUN/mirror/current.json`, and writes manifests; each process copies the files that ranks of its node have written.
Whatever fails is reported (`record.mirror_status`) and tried again. No torch.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import threading
import time
import tomllib
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from fsdp_pretrain.checkpoint.locations import stores
from fsdp_pretrain.checkpoint.manifest import FileEntry, is_permanent
from fsdp_pretrain.checkpoint.store import MANIFEST, PINNED, Checkpoint, step_of
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.errors import RunGoneError, UserError
from fsdp_pretrain.record import lineage, mirror_status, run_id, state_files
from fsdp_pretrain.record.files import RunDir
from fsdp_pretrain.record.journal import Journal
from fsdp_pretrain.record.mirror_status import MirrorReport, MirrorTask
from fsdp_pretrain.units import human_bytes, human_time

from . import checkpoint_copy
from .checkpoint_copy import LocallyGoneError
from .layout import MirroredCheckpoint, MirrorError, RunMirror, on_line
from .record_copy import RecordCopy
from .relation import refuse_if_not_ours

_PATIENCE = 20.0
"""Seconds for which a call to the storage is repeated before that is a problem."""
_PAUSES = (2.0, 5.0, 15.0, 30.0, 60.0, 120.0)
"""Seconds before a failed pass is repeated; the last one for all later failures."""
_LOOK_SECONDS, _BEAT_SECONDS = 10.0, 10.0
_OTHERS_SECONDS = 1.0


class UploaderArguments(argparse.Namespace):
    """The command-line arguments of an uploader."""

    run: Path
    id: str
    segment: int
    node: int
    nodes: int
    local_ranks: int


class _OtherNodeError(UserError):
    """Another node cannot copy its files."""


class Orders:
    """What the rank that started this process says, read by a thread."""

    def __init__(self) -> None:
        self.finish = False
        self._said = threading.Event()
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


class Reporter:
    """Writes this node's report when it changes, and with a new beat every few seconds."""

    def __init__(self, run: RunDir, report: MirrorReport) -> None:
        self._run, self.report, self._lock = run, report, threading.Lock()
        self.change()
        threading.Thread(target=self._beat, daemon=True).start()

    def change(self, **values: object) -> None:
        with self._lock, contextlib.suppress(OSError):  # of a full disk, or one that is gone
            self.report = self.report.model_copy(update={**values, "beat": self.report.beat + 1})
            state_files.write(mirror_status.report_file(self._run, self.report.node), self.report.model_dump())

    def count(self, size: int) -> None:
        """A file of `size` bytes is in the mirror."""
        with self._lock:
            files, total = self.report.files + 1, self.report.bytes + size
            self.report = self.report.model_copy(update={"files": files, "bytes": total})

    def failed(self, error: UserError | OSError) -> None:
        cause = error.cause if isinstance(error, UserError) else str(error)
        needs_person = isinstance(error, UserError) and not getattr(error, "is_temporary", False)
        needs_person = needs_person and not isinstance(error, _OtherNodeError)
        since = self.report.since if self.report.problem else time.time()
        self.change(problem=cause, since=since, needs_person=needs_person)

    def went_well(self) -> None:
        if self.report.problem:
            self.change(problem="", since=None, needs_person=False)

    def _beat(self) -> None:
        while True:
            time.sleep(_BEAT_SECONDS)
            self.change()


class Sender:
    """Sends this node's files of checkpoints; remembers which files of the last task are done."""

    def __init__(self, config: Config, args: UploaderArguments, mirror: RunMirror, reporter: Reporter) -> None:
        self._config, self._args, self._mirror, self._reporter = config, args, mirror, reporter
        self._done: set[tuple[str, str]] = set()

    def send(self, task: MirrorTask, checkpoint: Checkpoint, there: dict[str, int]) -> None:
        """Send them, and report that. Raises LocallyGoneError, RemoteError, OSError."""
        self._done = {key for key in self._done if key[0] == task.id}
        try:
            files = checkpoint.files()
        except UserError as error:
            raise LocallyGoneError(error.cause) from None
        own = [e for e in files if checkpoint_copy.owner(e.name, self._args.local_ranks, self._args.nodes) == self.node]
        with ThreadPoolExecutor(checkpoint_copy.AT_ONCE) as pool:
            list(pool.map(partial(self._send, task, checkpoint, there), own))
        self._reporter.change(task=task.id)

    @property
    def node(self) -> int:
        return self._args.node

    def _send(self, task: MirrorTask, checkpoint: Checkpoint, there: dict[str, int], entry: FileEntry) -> None:
        if (task.id, entry.name) in self._done:
            return
        size = checkpoint_copy.send(
            self._mirror,
            checkpoint.path,
            entry,
            f"checkpoints/{checkpoint.path.name}/{entry.name}",
            read_back=self._config.checkpoint.mirror_read_back,
            there=there.get(entry.name),
        )
        self._done.add((task.id, entry.name))
        self._reporter.count(size)


class FirstNode:
    """The uploader of the first node."""

    def __init__(self, config: Config, args: UploaderArguments, mirror: RunMirror, reporter: Reporter) -> None:
        self._config, self._run, self._args = config, RunDir(config.run.dir), args
        self._mirror, self._reporter = mirror, reporter
        self._sender = Sender(config, args, mirror, reporter)
        self._journal = Journal(self._run, args.segment)
        self._record: RecordCopy | None = None
        self._found: dict[int, MirroredCheckpoint] = {}
        self._task = MirrorTask()
        self._seen: set[int] = set()
        self._hopeless: set[int] = set()
        self._record_due = 0.0
        mirror_status.task_file(self._run).unlink(missing_ok=True)

    def work(self, *, finish: bool) -> bool:
        """A pass. Returns whether nothing is left to do. Raises UserError, OSError."""
        if self._record is None:
            self._open()
        waiting = self._waiting()
        if waiting:
            with contextlib.suppress(LocallyGoneError):
                self._upload(waiting[0])
            return False
        self._clear_task()
        self._copy_pins()
        if finish or time.monotonic() >= self._record_due:
            self._push_record()
        return True

    def close(self) -> None:
        """Let the other nodes end, too."""
        state_files.write(mirror_status.task_file(self._run), MirrorTask(id="").model_dump())

    def _open(self) -> None:
        """Claim the mirror and read what is there."""
        self._mirror.claim(self._args.id)
        index = self._mirror.index()
        refuse_if_not_ours(self._run, index, self._mirror.url)
        self._found = {item.step: item for item in self._mirror.scan()}
        self._report_newest()
        self._record = RecordCopy(self._run, self._mirror, index, self._args.id)

    def _report_newest(self) -> None:
        whole = self._whole()
        self._reporter.change(newest=whole[-1].step if whole else None)

    def _whole(self) -> list[MirroredCheckpoint]:
        """The whole checkpoints of the kept line in the mirror, oldest first."""
        nodes = lineage.nodes(self._run)
        found = (item for _, item in sorted(self._found.items()))
        return [item for item in found if item.problem is None and on_line(item, nodes)]

    def _push_record(self) -> None:
        assert self._record is not None
        every = self._config.checkpoint.mirror_record_every.value
        self._record.push(every)
        self._record_due = time.monotonic() + every

    # ------------------------------------------------------------------ checkpoints

    def _waiting(self) -> list[Checkpoint]:
        """Local checkpoints that the mirror should have and has not, newest first; tells of those that were deleted
        before they were copied."""
        policy = self._config.checkpoint
        local = {
            item.step: item
            for item in stores(self._run).scan()
            if item.problem is None and (item.verified or not policy.verify)
        }
        recent = sorted(local)[-policy.mirror_keep_last :]
        wanted = [
            item
            for step, item in sorted(local.items(), reverse=True)
            if step in recent or item.pinned or self._is_permanent(item)
        ]
        waiting = [item for item in wanted if item.step not in self._hopeless and not self._has(item)]
        gone = {step for step in self._seen if step not in local and not self._holds(step)}
        self._seen = {item.step for item in waiting}
        for step in sorted(gone):
            text = "retention deleted it before it was in the mirror, which is too slow or away"
            self._journal.write("mirror-missed", f"{self._mirror.url} will not get this checkpoint: {text}", step=step)
        return waiting

    def _is_permanent(self, item: Checkpoint | MirroredCheckpoint) -> bool:
        return is_permanent(self._config, item.manifest(), self._config.checkpoint.mirror_kept_intervals)

    def _holds(self, step: int) -> bool:
        return step in self._found and self._found[step].problem is None

    def _has(self, item: Checkpoint) -> bool:
        """Whether the mirror has this checkpoint, and not one of the same step that a rollback left."""
        try:
            return self._holds(item.step) and self._found[item.step].raw == (item.path / MANIFEST).read_bytes()
        except OSError:
            return True  # deleted just now

    def _upload(self, item: Checkpoint) -> None:
        """Copy a checkpoint, record and manifest last. Raises LocallyGoneError if it was deleted meanwhile."""
        begun = time.monotonic()
        try:
            raw = (item.path / MANIFEST).read_bytes()
        except OSError as error:
            raise LocallyGoneError(str(error)) from None
        found = self._found.get(item.step)
        if found is not None and found.raw is not None:  # it must not vouch for other files
            self._mirror.remote.delete([f"{found.name}/{MANIFEST}"])
        if self._task.step != item.step or self._task.path != str(item.path):
            self._task = MirrorTask(id=uuid.uuid4().hex, step=item.step, path=str(item.path))
            state_files.write(mirror_status.task_file(self._run), self._task.model_dump())
        try:
            self._sender.send(self._task, item, found.objects if found is not None else {})
            self._wait_for_others(item)
        except LocallyGoneError as error:
            if item.path.exists():
                self._hopeless.add(item.step)
                self._journal.write("mirror-missed", f"not copied to {self._mirror.url}: {error.cause}", step=item.step)
            raise
        self._push_record()  # what leads to it, before it
        name = f"checkpoints/{item.path.name}"
        listed = self._mirror.remote.list(name)
        made = MirroredCheckpoint.of(item.step, raw, {path.rpartition("/")[2]: at.size for path, at in listed.items()})
        if made.problem is not None:  # deleted by someone else meanwhile
            self._task = MirrorTask()
            raise MirrorError(f"{self._mirror.url / name}, which was just written: {made.problem}")
        self._mirror.remote.write(f"{name}/{MANIFEST}", raw)
        self._clear_task()
        self._found[item.step] = made
        self._report_newest()
        files = made.manifest().files
        stray = made.objects.keys() - {MANIFEST, PINNED, *(entry.name for entry in files)}
        self._mirror.remote.delete(f"{name}/{stranger}" for stranger in sorted(stray))
        size, seconds = sum(entry.bytes for entry in files), time.monotonic() - begun
        text = f"{item.path.name} is in {self._mirror.url}: {human_bytes(size)} in {human_time(seconds)}"
        self._journal.write("mirror", text, step=item.step, bytes=size, seconds=seconds)
        self._retain()

    def _wait_for_others(self, item: Checkpoint) -> None:
        others = set(range(1, self._args.nodes))
        while others:
            reports = {report.node: report for report in mirror_status.read_reports(self._run)}
            mine = {node: reports[node] for node in others & reports.keys()}
            others -= {node for node, report in mine.items() if report.task == self._task.id}
            for node in others & mine.keys():
                if mine[node].problem and mine[node].segment == self._args.segment:
                    raise _OtherNodeError(f"{mine[node].host}: {mine[node].problem}")
            if others and not item.path.exists():
                raise LocallyGoneError(f"{item.path} is gone")
            if others:
                time.sleep(_OTHERS_SECONDS)

    def _clear_task(self) -> None:
        if self._task.id:
            self._task = MirrorTask()
            mirror_status.task_file(self._run).unlink(missing_ok=True)

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
            if step in recent or step > min(recent) or item.pinned or step in self._seen:
                continue
            if item.problem is None and item in whole and self._is_permanent(item):
                continue
            if item.problem is None or item.raw is None:  # damaged ones stay, for a person to see
                checkpoint_copy.delete(self._mirror, item)
                del self._found[step]


class OtherNode:
    """The uploader of any other node: sends its files of the checkpoint that the first node names."""

    def __init__(self, config: Config, args: UploaderArguments, mirror: RunMirror, reporter: Reporter) -> None:
        self._run, self._mirror, self._reporter = RunDir(config.run.dir), mirror, reporter
        self._sender = Sender(config, args, mirror, reporter)

    def work(self, *, finish: bool) -> bool:
        """A pass. Returns whether nothing is left to do. Raises UserError, OSError."""
        task = state_files.view(mirror_status.task_file(self._run), MirrorTask)
        if task is None or task.id == self._reporter.report.task:
            return False
        if not task.id:
            return finish
        path = Path(task.path)
        there = self._mirror.remote.list(f"checkpoints/{path.name}")
        sizes = {name.rpartition("/")[2]: info.size for name, info in there.items()}
        with contextlib.suppress(LocallyGoneError):  # the first node sees that, too
            self._sender.send(task, Checkpoint(step_of(path.name) or 0, path, None, True), sizes)
        return False

    def close(self) -> None:
        """Nothing is to be done."""


def main() -> int:
    """Run an uploader to its end."""
    parser = argparse.ArgumentParser(prog="python -m fsdp_pretrain.mirror.uploader", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("id", help="of the run directory")
    for name, text in (("segment", "of this start"), ("node", "number"), ("nodes", "how many")):
        parser.add_argument(f"--{name}", type=int, required=True, help=text)
    parser.add_argument("--local-ranks", type=int, required=True, help="ranks per node")
    args = parser.parse_args(namespace=UploaderArguments())
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):  # requests to stop, to every process of a job
        signal.signal(number, signal.SIG_IGN)
    size = int(sys.stdin.readline())
    config = Config.model_validate(tomllib.loads(sys.stdin.read(size)))
    run_id.bind(args.run, args.id)
    return upload(config, args, Orders())


def upload(config: Config, args: UploaderArguments, orders: Orders) -> int:
    """Copy until the orders say that it ends, and everything is copied."""
    mirror = RunMirror(config, patience=_PATIENCE)
    report = MirrorReport(
        node=args.node, host=socket.gethostname(), pid=os.getpid(), segment=args.segment, url=str(mirror.url)
    )
    reporter = Reporter(RunDir(args.run), report)
    worker: FirstNode | OtherNode | None = None
    failures = 0
    while True:
        finish = orders.finish
        try:
            if worker is None:
                worker = (FirstNode if args.node == 0 else OtherNode)(config, args, mirror, reporter)
            done = worker.work(finish=finish)
            reporter.went_well()
            failures = 0
        except RunGoneError:
            return 0
        except (UserError, OSError) as error:
            reporter.failed(error)
            orders.wait(_PAUSES[min(failures, len(_PAUSES) - 1)])
            failures += 1
            continue
        if done and finish:
            worker.close()
            return 0
        if args.node != 0:
            orders.wait(_OTHERS_SECONDS)
        elif done:
            orders.wait(_LOOK_SECONDS)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads of the storage's library could keep it alive
