"""`checkpoint.on_commit`: a command that runs for every new checkpoint, for copies to other storage. No torch.

The command runs beside training in its own session: nothing waits for it, and a failure is a journal entry. Its
checkpoint is not deleted while it runs. The path is passed as a parameter: inserted into the command text, the shell
could execute parts of it.
"""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from fsdp_pretrain.record.recorder import Recorder
from fsdp_pretrain.units import human_time

_AT_ONCE = 4


@dataclass
class _Running:
    step: int
    process: subprocess.Popen[bytes]
    started: float


class CommitHook:
    """Runs a run's shell command with the checkpoint's path as `$1` and its step as `$2`.

    The commands' output is appended to `log`.
    """

    def __init__(self, command: str, log: Path, recorder: Recorder) -> None:
        self._command, self._log, self._recorder = command, log, recorder
        self._running: list[_Running] = []

    def start(self, path: Path, step: int) -> None:
        """Start the command for a checkpoint; if `_AT_ONCE` others still run, record a failure instead."""
        self._reap()
        if len(self._running) >= _AT_ONCE:
            oldest = self._running[0]
            self._recorder.event(
                "on-commit-failed",
                f"not started for step {step}: {_AT_ONCE} earlier ones still run, that of step {oldest.step} since "
                f"{human_time(time.monotonic() - oldest.started)}",
                step=step,
            )
            return
        try:
            with self._log.open("ab") as log:
                process = subprocess.Popen(
                    ["/bin/sh", "-c", self._command, "on_commit", str(path), str(step)],
                    env={**os.environ, "CHECKPOINT_PATH": str(path), "CHECKPOINT_STEP": str(step)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            self._recorder.event("on-commit-failed", f"step {step}: {error}", step=step)
            return
        self._running.append(_Running(step, process, time.monotonic()))

    def busy(self) -> list[int]:
        """Steps of the commands that still run; another thread may call this."""
        return [running.step for running in self._running if running.process.poll() is None]

    def _reap(self) -> None:
        for running in list(self._running):
            code = running.process.poll()
            if code is None:
                continue
            self._running.remove(running)
            if code:
                self._recorder.event(
                    "on-commit-failed",
                    f"step {running.step}: exit {code} after {human_time(time.monotonic() - running.started)}, "
                    f"see {self._log}",
                    step=running.step,
                    code=code,
                )
