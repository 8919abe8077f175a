"""Writes the record of a run on rank 0: metrics, journal, status, and console output, which is also the log."""

from __future__ import annotations

import math
import os
import socket
import sys
import time
from collections import deque
from pathlib import Path
from statistics import fmean
from typing import Any

from fsdp_pretrain.units import human_count

from . import state_files, status
from .console_line import console_lines
from .files import AppendFile, RunDir, now
from .journal import Journal, Kind
from .metrics import METRICS
from .step_record import StepRecord, number, pace

_STATUS_INTERVAL = 1.0
_RECENT = 100
"""Steps whose mean pace is that of the status, and gives the time left."""
_IN_STATUS = ("step", "consumed", "cursor", "tokens", "grad_norm", "lr")


class Recorder:
    """The record of one segment, with a console line every `console_every` steps."""

    def __init__(self, run: RunDir, segment: Path, *, name: str, console_every: int, total_steps: int) -> None:
        self.run, self.segment, self.number = run, segment, int(segment.name)
        self._console_every = console_every
        self._journal = Journal(run, self.number)
        self._metrics = AppendFile(segment / METRICS)
        self._log = AppendFile(segment / "log")
        self._status: dict[str, Any] = {
            "total_steps": total_steps,
            **status.taken_over(run),
            "run": name,
            "segment": self.number,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": now(),
        }
        self._status_written = -math.inf
        self._status_fails = False
        self._steps_shown, self._unshown = 0, list[StepRecord]()
        self._recent: deque[StepRecord] = deque(maxlen=_RECENT)

    def say(self, text: str) -> None:
        """Print a line, after the time of day (UTC), and add it to the log."""
        time = now()
        print(f"{time[11:19]} {text}", flush=True)
        self._log.write(f"{time} {text}")

    def event(self, kind: Kind, text: str, **data: Any) -> None:
        """Write a journal entry and print it."""
        self._journal.write(kind, text, **data)
        self.say(f"[{kind}] {text}")

    def note(self, kind: Kind, text: str, **data: Any) -> None:
        """Write a journal entry without console output, on any rank: for events that a rank has printed itself."""
        self._journal.write(kind, text, **data)

    def step(self, record: StepRecord, *, target: int) -> None:
        """Record one optimiser step; `target` is the run's last step."""
        written = {"segment": self.number, "host": socket.gethostname(), "time": now()}
        self._metrics.write(record.model_copy(update=written).to_line())
        step = record.step
        if self._steps_shown:  # the first step of a start is slower
            self._recent.append(record)
        recent = self._recent or [record]
        left, mean = (target - step) * fmean(each.seconds.iteration for each in recent), pace(recent)
        self._status.pop("before", None)  # from the first step on, the status describes this start
        self._unshown.append(record)
        if step % self._console_every == 0 or self._steps_shown == 0 or step == target or record.heldout:
            for line in console_lines(self._unshown, target, left):
                self.say(line)
            self._unshown.clear()
            self._steps_shown += 1
        means = {name: number(loss.mean) for name, loss in (record.heldout or {}).items()}
        measured: dict[str, Any] = {"heldout": {"step": step, "loss": means}} if means else {}
        self.status(
            state="running",
            total_steps=target,
            loss=number(record.loss.mean),
            iteration_seconds=mean.seconds,
            tokens_per_second=mean.tokens_per_second,
            mfu=mean.mfu,
            seconds_left=left,
            **{key: getattr(record, key) for key in _IN_STATUS},
            **measured,
        )

    def ended(self, text: str, *, code: int, refused: bool = False, **facts: Any) -> None:
        """Record the end; if this start trained, with the tokens trained and those in no verified checkpoint.

        `refused`: the reason is printed as an error, so that a start that did not train need not print it again.
        """
        known, saved = self._status, self._status.get("checkpoint") or {}
        if self._steps_shown:
            tokens, behind = known["tokens"], known["step"] - (saved.get("step") or 0)
            risk = tokens - (saved.get("tokens") or 0)
            text += f"; {human_count(tokens)} tokens trained" + (
                f", of which {human_count(risk)} ({behind:_} steps) are in no verified checkpoint"
                if behind > 0
                else ", all saved"
            )
            facts |= {"tokens": tokens, "at_risk": {"steps": behind, "tokens": risk}}
        if refused and not self._steps_shown:
            self._journal.write("stop", text, code=code, **facts)
            self._log.write(f"{now()} [stop] {text}")
        else:
            self.event("stop", text, code=code, **facts)

    def status(self, *, force: bool = False, **fields: Any) -> None:
        """Update `status.json`, at most once a second unless forced."""
        self._status.update(fields)
        if not force and time.monotonic() - self._status_written < _STATUS_INTERVAL:
            return
        self._status_written = time.monotonic()
        try:
            if force and self.run.segments[-1:] != [self.segment]:
                return  # a later start exists (this process was suspended), or the run directory is gone
            state_files.write(self.run.status, {**self._status, "heartbeat": now()})
            self._status_fails = False
        except OSError as error:
            if not self._status_fails:  # report once, not every second
                print(f"cannot write {self.run.status}: {error.strerror}", file=sys.stderr)
            self._status_fails = True

    def close(self) -> None:
        self.status(force=True)
        for file in (self._metrics, self._log, self._journal):
            file.close()


class NotesOnlyRecorder(Recorder):
    """The recorder of ranks other than 0, which writes only notes."""

    def __init__(self, run: RunDir, segment: Path) -> None:
        self.run, self.number = run, int(segment.name)

    def note(self, kind: Kind, text: str, **data: Any) -> None:
        """Open the journal for one entry only, since notes are rare and ranks are many."""
        journal = Journal(self.run, self.number)
        journal.write(kind, text, **data)
        journal.close()

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    say = event = step = status = ended = close = _nothing


class SilentRecorder(NotesOnlyRecorder):
    """Drops everything: for benchmarks and replays."""

    def __init__(self) -> None:
        pass

    def note(self, kind: Kind, text: str, **data: Any) -> None:
        """Drop it."""
