"""What the uploaders of all nodes do: send their node's files of a checkpoint, and report how it goes. No torch."""

from __future__ import annotations

import argparse
import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from fsdp_pretrain.checkpoint.manifest import FileEntry
from fsdp_pretrain.checkpoint.store import Checkpoint
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.errors import UserError
from fsdp_pretrain.record import mirror_status, state_files
from fsdp_pretrain.record.files import RunDir
from fsdp_pretrain.record.mirror_status import MirrorReport, MirrorTask

from . import checkpoint_copy
from .checkpoint_copy import LocallyGoneError
from .layout import RunMirror

_BEAT_SECONDS = 10.0


class UploaderArguments(argparse.Namespace):
    """The command-line arguments of an uploader."""

    run: Path
    id: str
    segment: int
    node: int
    nodes: int
    local_ranks: int


class OtherNodeError(UserError):
    """Another node cannot copy its files."""


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
        needs_person = needs_person and not isinstance(error, OtherNodeError)
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
