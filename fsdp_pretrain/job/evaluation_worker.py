"""Starts evaluations of new checkpoints, and notes new checkpoints for the launcher. Training does not wait for it."""

from __future__ import annotations

import subprocess

from fsdp_pretrain.checkpoint.dcp import SaveResult
from fsdp_pretrain.checkpoint.manifest import CheckpointManifest, evaluation_due
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.eval import jobs
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.recorder import Recorder
from fsdp_pretrain.run.run_id import LauncherMemory
from fsdp_pretrain.train.observer import Observer


class EvaluationWorker(Observer):
    """Starts an evaluation worker after a save that makes an evaluation due, unless one is still running.

    Args:
        memory: remembers every checkpoint for the next start under the same launcher.
        main: whether this is rank 0, which starts workers.
    """

    def __init__(self, config: Config, recorder: Recorder, memory: LauncherMemory, *, main: bool) -> None:
        self._config, self._run, self._recorder = config, RunDir(config.run.dir), recorder
        self._memory, self._main = memory, main
        self._process: subprocess.Popen[bytes] | None = None

    def saved(self, result: SaveResult) -> None:
        self._memory.remember(checkpoint=result.checkpoint.step)
        if not self._main:
            return
        assert result.manifest is not None
        if self._config.eval.launch and evaluation_due(self._config, result.manifest):
            self._start(result.manifest)

    def beside(self, step: int) -> list[str]:
        return ["evaluation"] if self._is_running else []

    @property
    def _is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _start(self, manifest: CheckpointManifest) -> None:
        """Start a worker unless one runs: that one, or the next, will find the checkpoint."""
        if self._is_running and not manifest.final:
            return
        try:
            self._process = jobs.start_worker(self._run, self._config)
        except OSError as error:
            self._recorder.event("eval-failed", f"could not start the evaluation process: {error}", step=manifest.step)
        else:
            self._recorder.say(f"[eval] a worker was started for step {manifest.step:_}")
