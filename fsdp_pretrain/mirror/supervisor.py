"""Starts the uploader of a node and restarts it if it dies, in the first rank of that node. No torch."""

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
    """The uploader of this node. It is started again when it dies, and dies with this process.

    Args:
        run: of a configuration with a mirror, which its segment has.
        segment: of this start.
        node, nodes: number of this node, and how many there are.
        local_ranks: ranks per node.
    """

    def __init__(self, run: RunDir, *, segment: int, node: int, nodes: int, local_ranks: int) -> None:
        self._run, self._segment = run, segment
        numbers = (segment, node, nodes, local_ranks)
        self._command = [str(run.path), run_id.bound_to(run.path) or "", *map(str, numbers)]
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
    def pid(self) -> int | None:
        """Of the process that runs now, if one does."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    @property
    def ended(self) -> bool:
        """Whether it has copied everything and ended."""
        return self._ended.is_set()

    def steps_in_use(self) -> list[int]:
        """Steps whose checkpoints are being copied."""
        reports = mirror_status.read_reports(self._run, self._segment).values()
        return [report.copying for report in reports if report.copying is not None]

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
