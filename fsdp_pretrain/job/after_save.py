"""What follows a checkpoint: the launcher's memory of it, and its evaluation. Training waits for neither."""

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


class AfterSave(Observer):
    """Starts what a new checkpoint makes due, and tracks what is still running.

    Args:
        config: the run's configuration.
        recorder: writes the record.
        memory: told of every checkpoint.
        main: this is rank 0, which starts evaluations.
    """

    def __init__(self, config: Config, recorder: Recorder, memory: LauncherMemory, *, main: bool) -> None:
        self._config, self._run, self._recorder = config, RunDir(config.run.dir), recorder
        self._memory, self._main = memory, main
        self._worker: subprocess.Popen[bytes] | None = None

    def saved(self, result: SaveResult) -> None:
        self._memory.remember(checkpoint=result.checkpoint.step)
        if not self._main:
            return
        assert result.manifest is not None
        if self._config.eval.launch and evaluation_due(self._config, result.manifest):
            self._evaluate(result.manifest)

    def beside(self, step: int) -> list[str]:
        return ["evaluation"] if self._evaluating else []

    @property
    def _evaluating(self) -> bool:
        return self._worker is not None and self._worker.poll() is None

    def _evaluate(self, manifest: CheckpointManifest) -> None:
        """Start a worker unless one runs: that one, or the next, will find the checkpoint."""
        if self._evaluating and not manifest.final:
            return
        try:
            self._worker = jobs.start_worker(self._run, self._config)
        except OSError as error:
            self._recorder.event("eval-failed", f"could not start the evaluation process: {error}", step=manifest.step)
