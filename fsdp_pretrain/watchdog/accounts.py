"""Where the time of the run went, for metrics: worked out now and then by a process of its own. No torch.

The account reads the whole record, with numpy; the agent has neither the time nor the memory for that.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from ..child_process import start_module

_FIRST, _EVERY = 300.0, 3600.0
"""Seconds of a start until the first account, and between two."""
_KEPT = "step_kept"


class Accounts:
    """Has `fsdp-pretrain goodput RUN --json` run once an hour.

    Args:
        run: the run directory.
    """

    def __init__(self, run: Path) -> None:
        self._command = ("fsdp_pretrain.cli", "goodput", str(run), "--json")
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self._next = time.monotonic() + _FIRST
        self._known: dict[str, Any] = {}

    def look(self) -> dict[str, Any]:
        """Fields of a `Snapshot`: `goodput`, `ettr`, `badput_seconds`, as known now. Never blocks."""
        if self._process is None and time.monotonic() >= self._next:
            self._next = time.monotonic() + _EVERY
            with contextlib.suppress(OSError):
                self._output = tempfile.TemporaryFile()  # noqa: SIM115 (read when the process has ended)
                self._process = start_module(*self._command, stdout=self._output, stderr=subprocess.DEVNULL)
        elif self._process is not None and self._process.poll() is not None:
            self._take()
        return self._known

    def _take(self) -> None:
        assert self._output is not None
        with self._output as output, contextlib.suppress(ValueError, KeyError, TypeError):
            output.seek(0)
            found = json.load(output)
            lost = {state: seconds for state, seconds in found["states"].items() if state != _KEPT and seconds}
            self._known = {"goodput": found["goodput"], "ettr": found["ettr"], "badput_seconds": lost}
        self._process = self._output = None

    def close(self) -> None:
        """End what is under way."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
