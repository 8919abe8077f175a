"""`checkpoint.on_commit`: a command for every new checkpoint, for copies to other storage. No torch.

The command runs beside training, in a session of its own: nothing waits for it, and its failure is a line in the
journal. While it runs, its checkpoint is not deleted.
"""

from __future__ import annotations

import shlex
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from ..record.recorder import Recorder
from ..units import human_time

_AT_ONCE = 4


@dataclass
class _Running:
    step: int
    process: subprocess.Popen[bytes]
    started: float


class CommitHook:
    """Runs the command of one run.

    Args:
        command: shell command; `{path}` and `{step}` are replaced.
        log: file that collects what the commands print.
        recorder: where beginnings and failures are told.
    """

    def __init__(self, command: str, log: Path, recorder: Recorder) -> None:
        self._command, self._log, self._recorder = command, log, recorder
        self._running: list[_Running] = []

    def start(self, path: Path, step: int) -> None:
        """Run the command for a checkpoint; passed over, and said so, while `_AT_ONCE` others still run."""
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
        command = self._command.replace("{path}", shlex.quote(str(path))).replace("{step}", str(step))
        try:
            with self._log.open("ab") as log:
                process = subprocess.Popen(
                    command, shell=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
        except OSError as error:
            self._recorder.event("on-commit-failed", f"step {step}: {error}", step=step)
            return
        self._running.append(_Running(step, process, time.monotonic()))

    def busy(self) -> list[int]:
        """Steps whose checkpoints commands still work on; may be asked by another thread."""
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
