"""The process that copies checkpoints and record to the mirror, beside training: a storage that hangs never touches a
rank. No torch.

    python -m fsdp_pretrain.mirror.uploader RUN ID SEGMENT

There is one, on the first node. It copies the newest checkpoint first, reads every file back, and writes the manifest
last. What fails is reported (`record.mirror_status`) and tried again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from fsdp_pretrain.checkpoint.locations import stores
from fsdp_pretrain.checkpoint.manifest import CheckpointManifest, FileEntry, is_permanent
from fsdp_pretrain.checkpoint.store import MANIFEST, PINNED, Checkpoint
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.resume_rules import load_recorded
from fsdp_pretrain.errors import CheckpointError, RunGoneError, UserError
from fsdp_pretrain.record import lineage, mirror_status, run_id, state_files
from fsdp_pretrain.record.files import RunDir
from fsdp_pretrain.record.journal import Journal
from fsdp_pretrain.record.mirror_status import MirrorReport
from fsdp_pretrain.units import human_bytes, human_time

from .layout import MirroredCheckpoint, MirrorError, RunMirror, SourceDamagedError
from .record_copy import RecordCopy
from .start import refuse_if_not_ours

AT_ONCE = 8
"""Files that are copied at the same time."""
_PATIENCE = 20.0
"""Seconds for which a call to the storage is repeated before that is a problem."""
_PAUSES = (2.0, 5.0, 15.0, 30.0, 60.0, 120.0)
"""Seconds before a failed pass is repeated; the last one for all later failures."""
_LOOK_SECONDS, _BEAT_SECONDS = 10.0, 10.0


class Reporter:
    """Writes the report when it changes, and with a new beat every few seconds."""

    def __init__(self, run: RunDir, segment: int) -> None:
        self._run, self._lock = run, threading.Lock()
        self.report = MirrorReport(host=socket.gethostname(), pid=os.getpid(), segment=segment)
        self.change()
        threading.Thread(target=self._beat, daemon=True).start()

    def change(self, **values: object) -> None:
        with self._lock, contextlib.suppress(OSError):  # of a full disk, or one that is gone
            self.report = self.report.model_copy(update={**values, "beat": self.report.beat + 1})
            state_files.write(mirror_status.report_file(self._run), self.report.model_dump())

    def failed(self, error: UserError | OSError) -> None:
        cause = error.cause if isinstance(error, UserError) else str(error)
        passes = getattr(error, "is_temporary", False) or isinstance(error, OSError)
        since = self.report.since if self.report.problem else time.time()
        self.change(problem=cause, since=since, needs_person=not passes)

    def _beat(self) -> None:
        while True:
            time.sleep(_BEAT_SECONDS)
            self.change()


class Uploader:
    """Copies checkpoints and record, and keeps the mirror's policy.

    Args:
        own_id: of the run directory.
        segment: of this start.
    """

    def __init__(self, config: Config, run: RunDir, own_id: str, segment: int, mirror: RunMirror) -> None:
        self._config, self._run, self._mirror = config, run, mirror
        self.reporter, self._journal = Reporter(run, segment), Journal(run, segment)
        self._record = RecordCopy(run, mirror, own_id)
        self._record_due = 0.0
        self._found: dict[int, MirroredCheckpoint] | None = None
        self._sent: set[tuple[str, str]] = set()
        self._given_up: set[str] = set()
        self._waited: set[int] = set()

    def work(self, *, finish: bool) -> float | None:
        """A pass. Returns the seconds until the next one; None: all is copied, and the run `finish`es.

        Raises UserError, OSError.
        """
        if self._found is None:
            self._open()
        waiting = self._waiting()
        if (step := waiting[0].step if waiting else None) != self.reporter.report.copying:
            self.reporter.change(copying=step)
        if waiting:
            with contextlib.suppress(FileNotFoundError):  # retention has deleted it
                self._upload(waiting[0])
            return 0.0
        if finish or time.monotonic() >= self._record_due:
            self._push_record()
            self._retain()
        return None if finish else _LOOK_SECONDS

    def _open(self) -> None:
        """Read what is there, and make it the mirror of this run."""
        state = self._mirror.look()
        refuse_if_not_ours(self._run, state, self._mirror.url)
        self._push_record()
        self._found = {item.step: item for item in state.checkpoints}
        self._report_newest()

    def _push_record(self) -> None:
        every, begun = self._config.checkpoint.mirror_record_every.value, time.monotonic()
        self._record.push(every)
        ended = time.monotonic()
        self._record_due = ended + max(every, 10 * (ended - begun))  # of a long run it takes longer

    def _whole(self) -> list[MirroredCheckpoint]:
        """The whole checkpoints of the kept line in the mirror, oldest first."""
        nodes = lineage.nodes(self._run)
        return [item for _, item in sorted(self._there.items()) if item.is_on_line(nodes)]

    @property
    def _there(self) -> dict[int, MirroredCheckpoint]:
        """What the mirror has, by step."""
        assert self._found is not None
        return self._found

    def _report_newest(self) -> None:
        if whole := self._whole():
            self.reporter.change(newest=whole[-1].step)

    # ------------------------------------------------------------------ checkpoints

    def _waiting(self) -> list[Checkpoint]:
        """Local checkpoints that the mirror should have and has not, newest first; tells of those that
        were deleted before they were copied."""
        policy, found = self._config.checkpoint, stores(self._run).scan()
        local = {item.step: item for item in found if not item.problem and item.verified}
        recent = sorted(local)[-policy.mirror_keep_last :]
        wanted = [
            item
            for step, item in sorted(local.items(), reverse=True)
            if step in recent or item.pinned or self._is_permanent(item) or self._is_damaged(step)
        ]
        waiting = [item for item in wanted if not self._has(item)]
        for step in sorted(self._waited - local.keys()):
            if not self._holds(step):
                self._tell_missed(step, "retention deleted it before it was in the mirror, which is too slow or away")
        self._waited = {item.step for item in waiting}
        return waiting

    def _tell_missed(self, step: int, text: str) -> None:
        self._journal.write("mirror-missed", f"{self._mirror.url} will not get this checkpoint: {text}", step=step)

    def _is_permanent(self, item: Checkpoint | MirroredCheckpoint) -> bool:
        return is_permanent(self._config, item.manifest(), self._config.checkpoint.kept_intervals)

    def _is_damaged(self, step: int) -> bool:
        """Whether the mirror has a manifest of this step, and it or a file is wrong."""
        found = self._there.get(step)
        return found is not None and found.problem is not None and found.raw is not None

    def _holds(self, step: int) -> bool:
        return step in self._there and self._there[step].problem is None

    def _has(self, item: Checkpoint) -> bool:
        """Whether the mirror has this checkpoint, and not one of the same step that a rollback left."""
        try:
            raw = (item.path / MANIFEST).read_bytes()
        except OSError:
            return True  # deleted just now
        return _digest(raw) in self._given_up or (self._holds(item.step) and self._there[item.step].raw == raw)

    def _upload(self, item: Checkpoint) -> None:
        """Copy the files of a checkpoint, then the record that leads to it, then its manifest. Raises FileNotFoundError
        if it was deleted meanwhile."""
        raw, name = (item.path / MANIFEST).read_bytes(), f"checkpoints/{item.path.name}"
        digest, there, begun = _digest(raw), self._mirror.objects(item.step), time.monotonic()
        if MANIFEST in there:  # it must not vouch for other files
            self._mirror.remote.delete([f"{name}/{MANIFEST}"])
            self._there[item.step] = MirroredCheckpoint(item.step, None, there)
        try:
            self._send(item, raw)
        except SourceDamagedError as error:
            (item.path / MANIFEST).stat()  # else it was deleted
            self._given_up.add(digest)
            self._tell_missed(item.step, error.cause)
            return
        self._push_record()
        made = MirroredCheckpoint(item.step, raw, self._mirror.objects(item.step) | {MANIFEST: len(raw)})
        if made.problem is not None:  # deleted by someone else meanwhile
            self._sent.clear()
            raise MirrorError(f"{self._mirror.url / name}, which was just written: {made.problem}")
        self._mirror.put(f"{name}/{MANIFEST}", raw)
        self._there[item.step] = made
        files = made.manifest().files
        stray = made.objects.keys() - {MANIFEST, PINNED, *(entry.name for entry in files)}
        self._mirror.remote.delete(f"{name}/{stranger}" for stranger in sorted(stray))
        self._report_newest()
        size, seconds = sum(entry.bytes for entry in files), time.monotonic() - begun
        text = f"{item.path.name} is in {self._mirror.url}: {human_bytes(size)} in {human_time(seconds)}"
        self._journal.write("mirror", text, step=item.step, bytes=size, seconds=seconds)
        self._retain()

    def _send(self, item: Checkpoint, raw: bytes) -> None:
        """Copy the files that this process has not copied. Raises RemoteError, SourceDamagedError."""

        def send(entry: FileEntry) -> None:
            if (_digest(raw), entry.name) not in self._sent:
                self._mirror.put(f"checkpoints/{item.path.name}/{entry.name}", item.path / entry.name, entry)
                self._sent.add((_digest(raw), entry.name))

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(send, state_files.parse(raw, CheckpointManifest).files))

    # ------------------------------------------------------------------ retention

    def _copy_pins(self) -> None:
        """Give the mirror's checkpoints the marks of the local ones."""
        for item in stores(self._run).scan():
            there = self._there.get(item.step)
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
        for step, item in list(self._there.items()):
            spared = step in recent or step > min(recent) or item.pinned or step in self._waited
            if not spared and not self._stays(item, whole):  # the manifest first: what is left never looks whole
                names = (MANIFEST, *sorted(item.objects.keys() - {MANIFEST}))
                self._mirror.remote.delete(f"{item.name}/{name}" for name in names)
                self._mirror.remote.remove_folder(item.name)
                del self._there[step]

    def _stays(self, item: MirroredCheckpoint, whole: list[MirroredCheckpoint]) -> bool:
        """Whether an old one stays: a permanent one of the kept line, and a damaged one that may be permanent, for a
        person to see."""
        if item.raw is None or item.objects.keys() <= {MANIFEST, PINNED}:
            return False
        try:
            return (item.problem is not None or item in whole) and self._is_permanent(item)
        except CheckpointError:  # its manifest does not say
            return True


def _digest(raw: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(raw)


class StdinCommands:
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


def main(path: str, own_id: str, number: str) -> int:
    """Copy until the rank says that it ends, and everything is copied."""
    for stop in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):  # requests to stop, to every process of a job
        signal.signal(stop, signal.SIG_IGN)
    orders, run, segment, failures = StdinCommands(), RunDir(Path(path)), int(number), 0
    run_id.bind(run.path, own_id)
    config = load_recorded(run.segment(segment) / "config.toml")
    worker = Uploader(config, run, own_id, segment, RunMirror(config, patience=_PATIENCE))
    reporter = worker.reporter
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
