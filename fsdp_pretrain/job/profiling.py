"""Traces chosen steps of a live run: `fsdp-pretrain profile`. See docs/replay.md.

Rank 0 finds the request in its inbox. The other ranks learn of it from the sums of a step, and all agree on the steps
to trace, so every rank's records name the trace. A trace is made in the local temporary directory and copied into the
run directory by a thread: if storage is full, fails or hangs, only the trace is lost. No number of the run changes.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function, schedule

from fsdp_pretrain.checkpoint.state import TrainState
from fsdp_pretrain.files import replacing
from fsdp_pretrain.run.files import make_directory
from fsdp_pretrain.run.journal import Kind
from fsdp_pretrain.run.requests import Request
from fsdp_pretrain.train.observer import AgreedActions, Observer

from .run_context import RunContext

_LARGEST_SHARE = 0.1
"""Share of the free space that one trace may take; the rest is for the next checkpoint."""
_LAST_SECONDS = 30.0
"""Seconds for which the end of a run waits for a trace to be written."""


class StepProfiler(Observer):
    """Makes the traces of one start, on one rank."""

    def __init__(self, run: RunContext) -> None:
        self._world, self._recorder = run.world, run.recorder
        self._pending: list[Request] = []
        self._first = self._last = 0  # steps of the window, on every rank; 0: there is none
        self._mine = False  # whether this rank traces it
        self._profile: profile | None = None
        self._range: record_function | None = None
        self._writer: threading.Thread | None = None
        self._outcome: tuple[Kind, str] | None = None

    def ask(self, request: Request | None) -> bool:
        """On rank 0: keep a new request until all ranks agree on it; returns whether there is one."""
        self._pending += [] if request is None else [request]
        return bool(self._pending)

    def between_steps(self, agreed: AgreedActions) -> None:
        """Agree on the steps of a requested trace. The step before the first warms the profiler up."""
        if not agreed.profile:
            return
        step = agreed.step
        is_writing = any(self._world.gather(self._writer is not None))
        for request in self._world.decide(self._take):
            if self._last > step or is_writing:
                self._report("profile-failed", f"refused, asked by {request.by}: a trace is being made", main_only=True)
                continue
            self._first = max(request.at or 0, step + 2)
            self._last = self._first + request.steps - 1
            self._mine = self._world.rank in request.ranks
            ranks = ", ".join(map(str, request.ranks))
            text = f"tracing steps {self._first} to {self._last} on rank {ranks}, asked by {request.by}"
            self._report("profile", text, main_only=True)

    def _take(self) -> list[Request]:
        requests, self._pending = self._pending, []
        return requests

    def beside(self, step: int) -> list[str]:
        return ["profile"] if self._first - 1 <= step <= self._last else []

    def before_step(self, step: int) -> None:
        if self._mine and step == self._first - 1:
            self._start()
        if self._profile is not None and step >= self._first:
            self._range = record_function(f"step {step}")
            self._range.__enter__()

    def after_step(self, state: TrainState) -> None:
        step = state.step
        if self._profile is not None:
            if self._range is not None:
                self._range.__exit__(None, None, None)
                self._range = None
            self._guard(self._profile.step)
            if self._profile is not None and step == self._last:
                self._write(step)
        self._report_outcome()

    def end(self, step: int) -> None:
        """Write an unfinished trace, as far as it goes."""
        if self._profile is not None and step >= self._first:
            self._write(step)

    def close(self) -> None:
        if self._profile is not None:
            self._guard(self._profile.stop)
            self._profile = None
        if self._writer is not None:
            self._writer.join(_LAST_SECONDS)
            self._report_outcome()

    # ------------------------------------------------------------------ the profiler

    def _start(self) -> None:
        kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self._world.device.type == "cuda" else [])
        active = self._last - self._first + 1
        self._profile = profile(
            activities=kinds, schedule=schedule(wait=0, warmup=1, active=active, repeat=1), record_shapes=True
        )
        self._guard(self._profile.start)

    def _guard(self, act: Callable[[], object]) -> None:
        """Call a method of the profiler; give this trace up if it fails."""
        try:
            act()
        except Exception as error:
            trace, self._profile, self._mine = self._profile, None, False
            with contextlib.suppress(Exception):
                if trace is not None:
                    trace.stop()  # else it goes on recording
            self._report("profile-failed", f"rank {self._world.rank} was not traced: {error}")

    def _write(self, step: int) -> None:
        """Stop tracing, and write the trace in the background. `step`: the last one traced."""
        trace, self._profile, self._mine = self._profile, None, False
        assert trace is not None
        self._guard(trace.stop)
        path = self._recorder.run.profiles / f"step-{self._first:08d}-rank-{self._world.rank}.json.gz"
        text = f"steps {self._first} to {step} of rank {self._world.rank}"
        self._writer = threading.Thread(target=self._export, args=(trace, path, text), name="profile", daemon=True)
        self._writer.start()

    def _export(self, trace: profile, path: Path, text: str) -> None:
        """In the thread: write the file locally, then copy it into the run directory."""
        try:
            with tempfile.TemporaryDirectory(prefix="fsdp-pretrain-") as folder:
                packed = Path(folder) / path.name
                trace.export_chrome_trace(str(packed))
                make_directory(path.parent)
                if packed.stat().st_size > _LARGEST_SHARE * shutil.disk_usage(path.parent).free:
                    raise OSError("the free space is for the next checkpoint")
                with packed.open("rb") as source, replacing(path) as file:
                    shutil.copyfileobj(source, file)
            self._outcome = "profile", f"{text}: {path.name}; open it at https://ui.perfetto.dev"
        except Exception as error:
            self._outcome = "profile-failed", f"{text}: no trace was written: {error}"

    # ------------------------------------------------------------------ the journal

    def _report_outcome(self) -> None:
        if self._outcome is not None:
            self._report(*self._outcome)
            self._outcome = self._writer = None

    def _report(self, kind: Kind, text: str, *, main_only: bool = False) -> None:
        if self._world.is_main:
            self._recorder.event(kind, text)
        elif not main_only:
            self._recorder.note(kind, text)
