"""Starts the uploader and restarts it if it dies, in rank 0. No torch."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time

from fsdp_pretrain.child_process import start_module
from fsdp_pretrain.record import mirror_status, run_id
from fsdp_pretrain.record.files import RunDir, make_directory

_PAUSES = (1.0, 5.0, 30.0, 60.0)
"""Seconds before an uploader that died is started again."""


class UploaderProcess:
    """The uploader of a run. It is started again when it dies, and dies with this process.

    Args:
        run: of a configuration with a mirror, which its segment has.
        segment: of this start.
    """

    def __init__(self, run: RunDir, segment: int) -> None:
        self._run, self._segment = run, segment
        self._command = [str(run.path), run_id.bound_to(run.path) or "", str(segment)]
        self._finishing = False
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._supervise, name="mirror", daemon=True).start()

    def saved(self) -> None:
        """There is a new checkpoint."""
        self._say("saved")

    def finish(self) -> None:
        """Ask it to copy what is left and to end; see `ended`."""
        self._finishing = True
        self._say("finish")

    @property
    def ended(self) -> bool:
        """Whether it has copied everything and ended."""
        return self._ended.is_set()

    def steps_in_use(self) -> list[int]:
        """The step whose checkpoint is being copied, if one is."""
        report = mirror_status.read(self._run, self._segment)
        return [] if report is None or report.copying is None else [report.copying]

    def _say(self, word: str) -> None:
        process = self._process
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                process.stdin.write(f"{word}\n".encode())
                process.stdin.flush()

    def _supervise(self) -> None:
        starts = 0
        while True:
            begun = time.monotonic()
            with contextlib.suppress(OSError):
                self._process = self._start()
                if self._finishing:  # perhaps since it was started
                    self._say("finish")
                if self._process.wait() == 0 and self._finishing:
                    self._ended.set()
                    return
            starts = 0 if time.monotonic() - begun > _PAUSES[-1] else starts
            time.sleep(_PAUSES[min(starts, len(_PAUSES) - 1)])
            starts += 1

    def _start(self) -> subprocess.Popen[bytes]:
        make_directory(mirror_status.folder(self._run))
        with (mirror_status.folder(self._run) / "log").open("ab") as log:
            module = "fsdp_pretrain.mirror.uploader"
            return start_module(module, *self._command, nice=10, stdin=subprocess.PIPE, stdout=log, stderr=log)
