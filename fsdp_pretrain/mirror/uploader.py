"""The process of a node that copies checkpoints and record to the mirror, beside training: a storage that hangs never
touches a rank. No torch.

    python -m fsdp_pretrain.mirror.uploader RUN ID SEGMENT NODE NODES LOCAL_RANKS

Each node sends the files that its ranks wrote, the newest checkpoint first, reads them back, and leaves a note beside
them; when those of all nodes are there, the first one writes the manifest. What fails is reported
(`record.mirror_status`) and tried again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

from fsdp_pretrain.checkpoint.locations import stores
from fsdp_pretrain.checkpoint.manifest import CheckpointManifest, FileEntry, is_permanent
from fsdp_pretrain.checkpoint.store import MANIFEST, PINNED, Checkpoint
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.resume_rules import load_compatible
from fsdp_pretrain.errors import CheckpointError, RunGoneError, UserError
from fsdp_pretrain.record import lineage, mirror_status, run_id, state_files
from fsdp_pretrain.record.files import RunDir
from fsdp_pretrain.record.journal import Journal
from fsdp_pretrain.record.mirror_status import MirrorReport
from fsdp_pretrain.units import human_bytes, human_time

from .layout import MirroredCheckpoint, MirrorError, NodeNote, RunMirror, SourceDamagedError
from .record_copy import RecordCopy
from .start import refuse_if_not_ours

AT_ONCE = 4
"""Files that are copied at the same time."""
_PATIENCE = 20.0
"""Seconds for which a call to the storage is repeated before that is a problem."""
_PAUSES = (2.0, 5.0, 15.0, 30.0, 60.0, 120.0)
"""Seconds before a failed pass is repeated; the last one for all later failures."""
_LOOK_SECONDS, _OTHERS_SECONDS, _BEAT_SECONDS = 10.0, 2.0, 10.0


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
        passes = getattr(error, "is_temporary", False) or isinstance(error, OSError)
        since = self.report.since if self.report.problem else time.time()
        self.change(problem=cause, since=since, needs_person=not passes)

    def _beat(self) -> None:
        while True:
            time.sleep(_BEAT_SECONDS)
            self.change()


class Uploader:
    """Sends this node's files of checkpoints; that of the first node also writes manifests, copies the record, and
    keeps the mirror's policy.
    """

    def __init__(self, config: Config, place: Place, mirror: RunMirror, reporter: Reporter) -> None:
        self._config, self._place, self._run = config, place, place.run
        self._mirror, self._reporter, self._journal = mirror, reporter, Journal(place.run, place.segment)
        self._record = RecordCopy(self._run, mirror, place.id)
        self._record_due = 0.0
        self._found: dict[int, MirroredCheckpoint] | None = None
        self._sent: set[tuple[str, str]] = set()
        self._done: set[str] = set()
        self._begun: dict[str, float] = {}
        self._waited: set[int] = set()

    def work(self, *, finish: bool) -> float | None:
        """A pass. Returns the seconds until the next one; None: all is copied, and the run `finish`es.

        Raises UserError, OSError.
        """
        if self._found is None:
            self._open()
        waiting = self._waiting()
        if (step := waiting[0].step if waiting else None) != self._reporter.report.copying:
            self._reporter.change(copying=step)
        if waiting:
            with contextlib.suppress(FileNotFoundError):  # retention has deleted it
                return 0.0 if self._upload(waiting[0]) else _OTHERS_SECONDS
            return 0.0
        if not self._place.node and (finish or time.monotonic() >= self._record_due):
            self._push_record()
            self._retain()
        return None if finish else _LOOK_SECONDS

    def _open(self) -> None:
        """Read what is there, and make it the mirror of this run."""
        state = self._mirror.look()
        refuse_if_not_ours(self._run, state, self._mirror.url)
        if not self._place.node:
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
        if not self._place.node and (whole := self._whole()):
            self._reporter.change(newest=whole[-1].step)

    # ------------------------------------------------------------------ checkpoints

    def _waiting(self) -> list[Checkpoint]:
        """Local checkpoints that the mirror should have from this node and has not, newest first; tells of those that
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
        if not self._place.node:
            for step in sorted(self._waited - local.keys() - {step for step in self._waited if self._holds(step)}):
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
        return _digest(raw) in self._done or (self._holds(item.step) and self._there[item.step].raw == raw)

    def _upload(self, item: Checkpoint) -> bool:
        """Send this node's files of a checkpoint, and a note; on the first node the manifest, when all notes are there.
        Returns whether this node is done with it. Raises FileNotFoundError if it was deleted meanwhile."""
        raw, name = (item.path / MANIFEST).read_bytes(), f"checkpoints/{item.path.name}"
        there = self._mirror.objects(item.step)
        if MANIFEST in there:  # it must not vouch for other files
            if self._place.node:  # the first one deletes it, or has written it since this process looked
                self._there[item.step] = self._mirror.inspect(item.step, there)
                return False
            self._mirror.remote.delete([f"{name}/{MANIFEST}"])
            self._there[item.step] = MirroredCheckpoint(item.step, None, there)
        note = NodeNote(manifest=_digest(raw), nodes=self._place.nodes, local_ranks=self._place.local_ranks)
        self._begun.setdefault(note.manifest, time.monotonic())
        if (note.manifest, "") not in self._sent:
            note = self._send(item, raw, note, there)
            self._mirror.put(f"{name}/node-{self._place.node}.json", state_files.seal(note).encode())
            self._sent.add((note.manifest, ""))
        if self._place.node:
            self._done.add(note.manifest)
            return True
        return self._complete(item, raw, note)

    def _send(self, item: Checkpoint, raw: bytes, note: NodeNote, there: Mapping[str, int]) -> NodeNote:
        """Send this node's files. Returns the note, with a problem if one is not what it was. Raises RemoteError."""

        def send(entry: FileEntry) -> None:
            if (note.manifest, entry.name) not in self._sent:
                name, known = f"checkpoints/{item.path.name}/{entry.name}", there.get(entry.name) == entry.bytes
                self._mirror.put(name, item.path / entry.name, entry, there=known)
                self._sent.add((note.manifest, entry.name))

        files = state_files.parse(raw, CheckpointManifest).files
        own = [entry for entry in files if self._place.owns(entry.name)]
        try:
            with ThreadPoolExecutor(AT_ONCE) as pool:
                list(pool.map(send, own))
        except SourceDamagedError as error:
            (item.path / MANIFEST).stat()  # else it was deleted
            return note.model_copy(update={"problem": error.cause})
        self._reporter.change(files=self._reporter.report.files + len(own))
        return note

    def _complete(self, item: Checkpoint, raw: bytes, own: NodeNote) -> bool:
        """Copy the record and write the manifest, if all nodes have sent their files. Returns whether it is done."""
        name, objects = f"checkpoints/{item.path.name}", self._mirror.objects(item.step)
        names = [f"node-{node}.json" for node in range(self._place.nodes)]
        if not objects.keys() >= set(names):
            return False
        for each in names:
            try:
                note = state_files.parse(self._mirror.read_sealed(f"{name}/{each}") or b"", NodeNote)
            except ValueError:
                return False
            if note.model_copy(update={"problem": ""}) != own.model_copy(update={"problem": ""}):
                return False  # of an earlier attempt
            if note.problem:
                self._done.add(note.manifest)
                self._tell_missed(item.step, note.problem)
                return True
        self._push_record()  # what leads to it, before it
        made = MirroredCheckpoint(item.step, raw, objects | {MANIFEST: len(raw)})
        if made.problem is not None:  # deleted by someone else meanwhile
            self._sent.clear()
            raise MirrorError(f"{self._mirror.url / name}, which was just written: {made.problem}")
        self._mirror.put(f"{name}/{MANIFEST}", raw)
        self._there[item.step] = made
        files = made.manifest().files
        stray = made.objects.keys() - {MANIFEST, PINNED, *(entry.name for entry in files)}  # the notes, too
        self._mirror.remote.delete(f"{name}/{stranger}" for stranger in sorted(stray))
        self._report_newest()
        size, seconds = sum(entry.bytes for entry in files), time.monotonic() - self._begun[own.manifest]
        text = f"{item.path.name} is in {self._mirror.url}: {human_bytes(size)} in {human_time(seconds)}"
        self._journal.write("mirror", text, step=item.step, bytes=size, seconds=seconds)
        self._retain()
        return True

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
    worker = Uploader(config, place, mirror, reporter)
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
