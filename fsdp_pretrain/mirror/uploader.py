"""Copies checkpoints and record to the mirror in a process of its own, so that storage that hangs cannot block a rank.

A job has one, on the first node. Each pass lists the mirror, applies retention and copies one checkpoint, the newest
first. Failures are reported (`run.mirror_status`) and retried.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from fsdp_pretrain.checkpoint.manifest import CheckpointManifest, FileEntry, is_permanent
from fsdp_pretrain.checkpoint.store import MANIFEST, Checkpoint, Store
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.resume_rules import load_recorded
from fsdp_pretrain.errors import CheckpointError, RunGoneError, UserError
from fsdp_pretrain.helper_process import end_with_input, read_settings
from fsdp_pretrain.processes import exit_now
from fsdp_pretrain.run import lineage, mirror_status, run_id, state_files
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.journal import Journal
from fsdp_pretrain.run.mirror_status import MirrorReport
from fsdp_pretrain.units import human_bytes, human_time

from .layout import MirroredCheckpoint, MirrorError, MirrorState, RunMirror
from .record_copy import Versions, push_record
from .restore import refuse_another

AT_ONCE = 8
"""Number of files that are copied at the same time."""
_PATIENCE = 20.0
"""Seconds for which a failing call to the storage is repeated before it counts as a problem."""
_PAUSES = (2.0, 5.0, 15.0, 30.0, 60.0, 120.0)
"""Seconds before a failed pass is repeated; the last one for all later failures."""
_LOOK_SECONDS, _RECORD_SECONDS = 5.0, 300.0
"""Seconds between looks for new checkpoints, and between copies of the record if there are none."""


class UploaderSettings(NamedTuple):
    """The settings of an uploader."""

    run: str
    """Run directory; its id is `run_id`."""
    run_id: str
    segment: int
    """Number of this start's segment, whose configuration holds."""


class Uploader:
    """Copies checkpoints and record, and keeps the retention policy in the mirror.

    Args:
        own_id: id of the run directory.
        segment: number of this start.
    """

    def __init__(self, config: Config, run: RunDir, own_id: str, segment: int, mirror: RunMirror) -> None:
        self._config, self._run, self._mirror, self._segment = config, run, mirror, segment
        self._journal, self._id = Journal(run, segment), own_id
        self._record_versions: Versions = {}
        self._known_records = set[str]()  # found by the first look, or written by this process
        # What ended an uploader of this start is not over before a pass has succeeded.
        self._report = mirror_status.read(run, segment) or MirrorReport(segment=segment)
        self._reported: MirrorReport | None = None
        self._mirrored: list[Checkpoint] = []
        self._record_due = 0.0
        self._sent: set[tuple[bytes, str]] = set()
        self._given_up: set[bytes] = set()

    def work(self, *, finish: bool) -> float | None:
        """Make a pass. Returns the seconds until the next one; None if `finish` is set and all is copied.

        Raises UserError, OSError.
        """
        run_id.check()
        local = [item for item in Store(self._run.checkpoints).scan() if not item.problem and item.verified]
        if local == self._mirrored and time.monotonic() < self._record_due and not finish:
            return _LOOK_SECONDS
        state = self._mirror.look()
        refuse_another(self._run, state, self._mirror.url)
        self._refuse_other_job(state)
        self._mirror.remote.delete(state.partial)
        waiting, nodes = self._waiting(local, state), lineage.nodes(self._run)
        on_line = [item for item in state.whole if not item.is_abandoned(nodes)]
        self._retain(state, on_line, {item.step for item in waiting})
        newest = on_line[-1].step if on_line else None
        copying = waiting[0].step if waiting else None
        self.report(newest=newest, copying=copying)
        if waiting:
            try:
                self._push_record_if_due(state)  # it does not wait for checkpoints, which may take hours, or fail
                self._upload(waiting[0], state)
            except (UserError, OSError):
                if (waiting[0].path / MANIFEST).exists():  # otherwise retention has deleted it
                    raise
            return 0.0
        self._push_record(state)
        self._mirrored = local
        return None if finish else _LOOK_SECONDS

    def _refuse_other_job(self, state: MirrorState) -> None:
        """Raise MirrorError if another job of this run copies to the mirror, such as one restored from it while this
        one lives: the mirror has a checkpoint of a later start, or a new copy of the record that is not its own."""
        records = {record.entry.name for record in state.records}
        self._known_records = self._known_records or records
        later = max((item.manifest().segment or 0 for item in state.whole), default=0)
        if later > self._segment or records - self._known_records:
            what = f"checkpoints of start {later}" if later > self._segment else "a newer record, not of this job"
            raise MirrorError(
                f"another job continues this run: {self._mirror.url} holds {what}; this job is start {self._segment}",
                effect="nothing more is copied: two jobs in one mirror would replace each other's checkpoints",
                remedy="stop this job; or stop the other one, and start this one again",
            )

    def _push_record(self, state: MirrorState) -> None:
        begun = time.monotonic()
        self._record_versions = push_record(
            self._run, self._mirror, self._id, state.records, self._record_versions, self._known_records
        )
        took = time.monotonic() - begun  # grows with the length of the run
        self._record_due = begun + max(_RECORD_SECONDS, 10 * took)

    def _push_record_if_due(self, state: MirrorState | None = None) -> None:
        """Copy the record if its time has come. `state`: of the mirror, if it was just looked at."""
        if time.monotonic() >= self._record_due:
            self._push_record(state or self._mirror.look())

    def report(self, **values: object) -> None:
        """Change the report, and write it if it is new."""
        self._report = self._report.model_copy(update=values)
        if self._report != self._reported:
            with contextlib.suppress(OSError):  # the disk may be full or gone
                state_files.write(mirror_status.report_file(self._run), self._report.model_dump())
                self._reported = self._report

    def failed(self, error: UserError | OSError) -> None:
        """Report why a pass has failed."""
        cause = error.cause if isinstance(error, UserError) else str(error)
        self.report(problem=cause, needs_person=not getattr(error, "is_temporary", isinstance(error, OSError)))

    # ------------------------------------------------------------------ checkpoints

    def _waiting(self, local: list[Checkpoint], state: MirrorState) -> list[Checkpoint]:
        """Local checkpoints that the mirror lacks, newest first. They are compared by manifest, since the mirror may
        hold an abandoned checkpoint of the same step."""
        mirrored = {item.raw for item in state.whole}
        recent = {item.step for item in local[-self._config.checkpoint.keep_last :]}
        wanted = [item for item in local if item.step in recent or self._is_permanent(item)]
        return [item for item in reversed(wanted) if _raw(item) not in mirrored | self._given_up]

    def _is_permanent(self, item: Checkpoint | MirroredCheckpoint) -> bool:
        return is_permanent(self._config, item.manifest(), self._config.checkpoint.kept_intervals)

    def _upload(self, item: Checkpoint, state: MirrorState) -> None:
        """Copy the files of a checkpoint, then the record that leads to it, then its manifest."""
        raw, name, begun = (item.path / MANIFEST).read_bytes(), f"checkpoints/{item.path.name}", time.monotonic()
        present = next((other.objects for other in state.checkpoints if other.step == item.step), {})
        if MANIFEST in present:  # a manifest of other files
            self._mirror.remote.delete([f"{name}/{MANIFEST}"])

        def send(entry: FileEntry) -> None:
            if (raw, entry.name) not in self._sent or present.get(entry.name) != entry.bytes:
                self._mirror.put(f"{name}/{entry.name}", item.path / entry.name, entry)
                self._sent.add((raw, entry.name))

        files = state_files.parse(raw, CheckpointManifest).files
        try:
            with ThreadPoolExecutor(AT_ONCE) as pool:
                for _ in pool.map(send, files):
                    self._push_record_if_due()
        except CheckpointError as error:
            self._given_up.add(raw)
            self._journal.write("mirror-missed", f"{self._mirror.url} will not get it: {error.cause}", step=item.step)
            return
        self._push_record(state)
        self._mirror.put(f"{name}/{MANIFEST}", raw)
        self._sent.clear()
        size, seconds = sum(entry.bytes for entry in files), time.monotonic() - begun
        text = f"{item.path.name} is in {self._mirror.url}: {human_bytes(size)} in {human_time(seconds)}"
        self._journal.write("mirror", text, step=item.step, bytes=size, seconds=seconds)

    # ------------------------------------------------------------------ retention

    def _retain(self, state: MirrorState, on_line: list[MirroredCheckpoint], waiting: set[int]) -> None:
        """Delete from the mirror what the policy does not keep, as `Store.retain` does, and unfinished copies. Damaged
        checkpoints that may be permanent are kept for inspection."""
        recent = {item.step for item in on_line[-self._config.checkpoint.keep_last :]}
        if len(recent) < self._config.checkpoint.keep_last:
            return
        for item in state.checkpoints:
            kept = item.step >= min(recent) or item.step in waiting
            if not kept and not ((item.problem is not None or item in on_line) and self._may_be_permanent(item)):
                self._mirror.remove(item)

    def _may_be_permanent(self, item: MirroredCheckpoint) -> bool:
        try:
            return item.raw is not None and self._is_permanent(item)
        except CheckpointError:  # its manifest is damaged
            return True


def _raw(item: Checkpoint) -> bytes:
    """The bytes of its manifest; empty if it has just been deleted."""
    with contextlib.suppress(OSError):
        return (item.path / MANIFEST).read_bytes()
    return b""


def main() -> int:
    """Copy until the rank writes a line to standard input, and everything is copied."""
    settings = read_settings(UploaderSettings)
    run = RunDir(Path(settings.run))
    finish = threading.Event()
    failures = 0
    end_with_input(finish.set)  # if the rank dies, so does this process; the next start has its own uploader
    run_id.bind(run.path, settings.run_id)
    config = load_recorded(run.segment(settings.segment) / "config.toml")
    worker = Uploader(config, run, settings.run_id, settings.segment, RunMirror(config, patience=_PATIENCE))
    while True:
        try:
            pause, failures = worker.work(finish=finish.is_set()), 0
            worker.report(problem="", needs_person=False)
        except RunGoneError:
            return 1  # started again, perhaps when the directory is back
        except (UserError, OSError) as error:
            worker.failed(error)
            pause, failures = _PAUSES[min(failures, len(_PAUSES) - 1)], failures + 1
        if pause is None:
            return 0
        if finish.is_set():
            time.sleep(pause)
        else:
            finish.wait(pause)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    exit_now(code)
