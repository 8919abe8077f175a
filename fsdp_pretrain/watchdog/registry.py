"""Builds the storage, data and hardware detectors of a node."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.fetcher_status import status_file
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.metrics import find_step
from fsdp_pretrain.run.step_record import StepRecord
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.watchdog.detectors.base import Detector
from fsdp_pretrain.watchdog.detectors.checkpoint_age import CheckpointAgeDetector
from fsdp_pretrain.watchdog.detectors.checkpoint_saves import SaveDetector, SaveTimes
from fsdp_pretrain.watchdog.detectors.checkpoint_store import StoreWatch
from fsdp_pretrain.watchdog.detectors.corpus_storage import CorpusStorageDetector
from fsdp_pretrain.watchdog.detectors.data_invariants import DataInvariantDetector
from fsdp_pretrain.watchdog.detectors.disk_space import CheckpointSpaceDetector, DiskSpaceDetector
from fsdp_pretrain.watchdog.detectors.evaluations import EvaluationDetector
from fsdp_pretrain.watchdog.detectors.gpu import GpuDetector
from fsdp_pretrain.watchdog.detectors.host import HostDetector
from fsdp_pretrain.watchdog.detectors.mirror import MirrorDetector
from fsdp_pretrain.watchdog.detectors.mounts import DataWaitDetector, MountDetector
from fsdp_pretrain.watchdog.detectors.nvml import find_reader
from fsdp_pretrain.watchdog.hang.rank_monitor import RankMonitor
from fsdp_pretrain.watchdog.notify.alarms import AlarmSink

_SHM = Path("/dev/shm")


def build_detectors(
    config: Config,
    alarms: AlarmSink,
    ranks: RankMonitor,
    *,
    segment: int,
    leads: bool = True,
    devices: int = 0,
) -> list[Detector]:
    """The detectors of one node.

    Args:
        leads: this node also watches what the whole run shares: checkpoints, the data, the run directory.
        devices: GPUs that ranks use on this node; 0 if unknown.
    """
    run, host = RunDir(config.run.dir), socket.gethostname()
    corpora = {source.name: source.path for source in config.data.sources if isinstance(source.path, Path)}
    mounts = MountDetector(alarms, [run.checkpoints] if leads else [], corpora)
    found: list[Detector] = [mounts, HostDetector(alarms, host=host)]
    if len(corpora) < len(config.data.sources):
        found.append(CorpusStorageDetector(alarms, status_file(ranks.pages, ranks.numbers.start), host))
    local = {"tmp": Path(tempfile.gettempdir()), "shm": _SHM}
    if not leads:
        found.append(DiskSpaceDetector(alarms, local))
    else:
        times = SaveTimes()
        age = CheckpointAgeDetector(
            alarms,
            segment,
            run,
            times,
            every=config.schedule.save_every,
            act=config.watchdog.act,
            pids=ranks.pids,
            reached=ranks.reached,
        )
        space = CheckpointSpaceDetector(alarms, segment, run.checkpoints)
        judges = [SaveDetector(alarms, segment, run, times), space, age]
        found += [
            *judges,
            StoreWatch(alarms, run, judges),
            DiskSpaceDetector(alarms, {"run": run.path, **local}, run.checkpoints),
            DataWaitDetector(alarms),
            _data_invariants(config, run, alarms),
        ]
        if config.eval.every is not None or config.eval.loss_on:
            found.append(EvaluationDetector(alarms, run))
        if config.checkpoint.mirror is not None:
            found.append(MirrorDetector(alarms, run, segment))
    if (gpus := _devices(config, alarms, host, devices)) is not None:
        found.append(gpus)
    return found


def _data_invariants(config: Config, run: RunDir, alarms: AlarmSink) -> DataInvariantDetector:
    def before(step: int) -> StepRecord | None:
        kept = [record for record, left_by in find_step(run, step) if left_by is None] if step else []
        return kept[-1] if kept else None

    return DataInvariantDetector(
        alarms,
        causal=config.data.objective.kind == "causal",
        max_quarantined=config.data.max_quarantined,
        before=before,
    )


def _devices(config: Config, alarms: AlarmSink, host: str, expected: int) -> GpuDetector | None:
    try:
        look = find_reader(config.watchdog.gpus)
    except ConfigError as error:
        if config.watchdog.gpus != "auto":
            raise
        alarms.open(f"gpu-blind/{host}", Severity.INFO, error.cause, effect=error.effect, remedy=error.remedy)
        return None
    return None if look is None else GpuDetector(alarms, host=host, expected=expected, look=look)
