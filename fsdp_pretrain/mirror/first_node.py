"""What the uploader of the first node does: it decides what is copied, writes manifests, and keeps the mirror's policy.
No torch."""

from __future__ import annotations

import contextlib
import time
import uuid

from fsdp_pretrain.checkpoint.locations import stores
from fsdp_pretrain.checkpoint.manifest import is_permanent
from fsdp_pretrain.checkpoint.store import MANIFEST, PINNED, Checkpoint
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.errors import CheckpointError
from fsdp_pretrain.record import lineage, mirror_status, state_files
from fsdp_pretrain.record.files import RunDir
from fsdp_pretrain.record.journal import Journal
from fsdp_pretrain.record.mirror_status import MirrorTask
from fsdp_pretrain.units import human_bytes, human_time

from . import checkpoint_copy
from .checkpoint_copy import LocallyGoneError
from .layout import MirroredCheckpoint, MirrorError, RunMirror, on_line
from .record_copy import RecordCopy
from .relation import refuse_if_not_ours
from .sender import OtherNodeError, Reporter, Sender, UploaderArguments

_OTHERS_SECONDS = 1.0
"""Seconds between two looks at the reports of the other nodes."""


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
            self._retain()
        return True

    def close(self) -> None:
        """Let the other nodes end, too."""
        state_files.write(mirror_status.task_file(self._run), MirrorTask(id="").model_dump())

    def _open(self) -> None:
        """Claim the mirror and read what is there."""
        record = self._mirror.record()
        refuse_if_not_ours(self._run, record, self._mirror.url)
        self._mirror.claim(self._args.id)
        self._found = {item.step: item for item in self._mirror.scan()}
        self._report_newest()
        self._record = RecordCopy(self._run, self._mirror, record, self._args.id)

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
            if step in recent or item.pinned or self._is_permanent(item) or self._is_damaged(step)
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
        """Copy a checkpoint, record and manifest last. Raises LocallyGoneError if it was deleted meanwhile."""
        begun = time.monotonic()
        try:
            raw = (item.path / MANIFEST).read_bytes()
        except OSError as error:
            raise LocallyGoneError(str(error)) from None
        found = self._found.get(item.step)
        if found is not None and found.raw is not None:  # it must not vouch for other files
            self._mirror.remote.delete([f"{found.name}/{MANIFEST}"])
            self._found[item.step] = MirroredCheckpoint.of(item.step, None, found.objects)
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
        objects = {path.rpartition("/")[2]: at.size for path, at in listed.items()} | {MANIFEST: len(raw)}
        made = MirroredCheckpoint.of(item.step, raw, objects)
        if made.problem is not None:  # deleted by someone else meanwhile
            self._task = MirrorTask()
            raise MirrorError(f"{self._mirror.url / name}, which was just written: {made.problem}")
        self._mirror.put(f"{name}/{MANIFEST}", raw)
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
                    raise OtherNodeError(f"{mine[node].host}: {mine[node].problem}")
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
            if not self._is_kept(item, whole):
                checkpoint_copy.delete(self._mirror, item)
                del self._found[step]

    def _is_kept(self, item: MirroredCheckpoint, whole: list[MirroredCheckpoint]) -> bool:
        """Whether an old one stays: a permanent one of the kept line, and a damaged one that may be permanent, for a
        person to see."""
        if item.raw is None or item.objects.keys() <= {MANIFEST, PINNED}:
            return False
        try:
            return (item.problem is not None or item in whole) and self._is_permanent(item)
        except CheckpointError:  # its manifest does not say
            return True
