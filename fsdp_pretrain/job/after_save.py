"""What follows a checkpoint: its evaluation. Training does not wait for it or fail with it."""

from __future__ import annotations

import subprocess

from fsdp_pretrain.checkpoint.dcp import SaveResult
from fsdp_pretrain.checkpoint.manifest import CheckpointManifest, evaluation_due
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.eval import jobs
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.recorder import Recorder


class AfterSave:
    """Starts what a new checkpoint makes due, and tracks what is still running."""

    def __init__(self, config: Config, recorder: Recorder) -> None:
        self._config, self._run, self._recorder = config, RunDir(config.run.dir), recorder
        self._worker: subprocess.Popen[bytes] | None = None

    def start(self, saved: SaveResult) -> None:
        """Start what is due; on rank 0."""
        assert saved.manifest is not None
        if self._config.eval.launch and evaluation_due(self._config, saved.manifest):
            self._evaluate(saved.manifest)

    def running(self) -> list[str]:
        """Names of what runs beside training now."""
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
