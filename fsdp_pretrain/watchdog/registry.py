"""Builds the detectors of a node."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.fetcher_status import status_file
from fsdp_pretrain.run import environment
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.metrics import find_step
from fsdp_pretrain.run.step_record import StepRecord
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.watchdog.detectors.base import Detector
from fsdp_pretrain.watchdog.detectors.checkpoint_age import CheckpointAgeDetector
from fsdp_pretrain.watchdog.detectors.checkpoint_saves import SaveDetector
from fsdp_pretrain.watchdog.detectors.checkpoint_store import StoreWatch
from fsdp_pretrain.watchdog.detectors.corpus_storage import CorpusStorageDetector
from fsdp_pretrain.watchdog.detectors.data_invariants import DataInvariantDetector
from fsdp_pretrain.watchdog.detectors.disk_space import CheckpointSpaceDetector, DiskSpaceDetector
from fsdp_pretrain.watchdog.detectors.evaluations import EvaluationDetector, evaluates
from fsdp_pretrain.watchdog.detectors.gpu import GpuDetector
from fsdp_pretrain.watchdog.detectors.health import HealthDetector
from fsdp_pretrain.watchdog.detectors.host import HostDetector
from fsdp_pretrain.watchdog.detectors.judged import Judged
from fsdp_pretrain.watchdog.detectors.mirror import MirrorDetector
from fsdp_pretrain.watchdog.detectors.mounts import DataWaitDetector, MountDetector
from fsdp_pretrain.watchdog.detectors.nodes import NodeDetector
from fsdp_pretrain.watchdog.detectors.nvml import find_reader
from fsdp_pretrain.watchdog.detectors.slowdown import SlowdownDetector, StragglerDetector, Windows
from fsdp_pretrain.watchdog.hang.peers import PeerNodes
from fsdp_pretrain.watchdog.hang.rank_monitor import RankMonitor
from fsdp_pretrain.watchdog.notify.alarms import Alarms, AlarmSink

_SHM = Path("/dev/shm")


def build_detectors(
    config: Config, alarms: AlarmSink, ranks: RankMonitor, nodes: PeerNodes, segment: int, judged: Judged | None = None
) -> list[Detector]:
    """The detectors of one node. On node 0 they also watch what all nodes share: checkpoints, data, run directory.

    `judged`: how far the record and the journal were judged; kept up to date.
    """
    run, host, leads = RunDir(config.run.dir), socket.gethostname(), nodes.leader is None
    corpora = {source.name: source.path for source in config.data.sources if isinstance(source.path, Path)}
    local = {"tmp": Path(tempfile.gettempdir()), "shm": _SHM}
    detectors: list[Detector] = []
    if leads and isinstance(alarms, Alarms):
        detectors = [HealthDetector(alarms), NodeDetector(alarms, nodes)]
    detectors += [MountDetector(alarms, [run.checkpoints] if leads else [], corpora), HostDetector(alarms, host=host)]
    if len(corpora) < len(config.data.sources):
        detectors.append(CorpusStorageDetector(alarms, status_file(ranks.pages, ranks.numbers.start), host))
    begun = environment.view(run, segment)
    if leads:
        detectors += [
            *_pace(config, alarms, ranks, nodes, list(begun.hosts or [host])),
            *_checkpoints(config, alarms, ranks, segment, judged),
            DiskSpaceDetector(alarms, {"run": run.path, **local}, run.checkpoints),
            DataWaitDetector(alarms),
            _data_invariants(config, run, alarms),
        ]
        if evaluates(config):
            detectors.append(EvaluationDetector(alarms, run))
        if config.checkpoint.mirror is not None:
            detectors.append(MirrorDetector(alarms, run, segment))
    else:
        detectors.append(DiskSpaceDetector(alarms, local))
    used = len(ranks.all) if leads and "cpu" not in (begun.device or "cpu") else 0
    return [*detectors, *_gpus(config, alarms, host, used)]


def _pace(
    config: Config, alarms: AlarmSink, ranks: RankMonitor, nodes: PeerNodes, hosts: Sequence[str]
) -> list[Detector]:
    def windows() -> Windows:
        host = socket.gethostname()
        return {rank: (host, *window) for rank, window in ranks.windows.items()} | nodes.windows

    if not config.watchdog.pace:
        return []
    return [
        SlowdownDetector(alarms, config.run.dir / "watchdog/pace.json", hosts),
        StragglerDetector(alarms, windows),
    ]


def _checkpoints(
    config: Config, alarms: AlarmSink, ranks: RankMonitor, segment: int, judged: Judged | None
) -> list[Detector]:
    run = RunDir(config.run.dir)
    saves = SaveDetector(alarms, segment, run)
    age = CheckpointAgeDetector(
        alarms,
        segment,
        run,
        every=config.schedule.save_every,
        longest_save=saves.longest_save,
        act=config.watchdog.act,
        pids=ranks.pids,
        reached=ranks.reached,
    )
    space = CheckpointSpaceDetector(alarms, segment, run.checkpoints)
    judges = [saves, space, age]
    return [*judges, StoreWatch(alarms, run, judges, judged)]


def _data_invariants(config: Config, run: RunDir, alarms: AlarmSink) -> DataInvariantDetector:
    def before(step: int) -> StepRecord | None:
        kept = [record for record, left_by in find_step(run, step) if left_by is None] if step else []
        return kept[-1] if kept else None

    return DataInvariantDetector(
        alarms,
        causal=config.data.objective.kind == "causal" and config.data.exclude is None,
        max_quarantined=config.data.max_quarantined,
        before=before,
    )


def _gpus(config: Config, alarms: AlarmSink, host: str, expected: int) -> list[Detector]:
    try:
        look = find_reader(config.watchdog.gpus)
    except ConfigError as error:
        if config.watchdog.gpus != "auto":
            raise
        alarms.open(f"gpu-blind/{host}", Severity.INFO, error.cause, effect=error.effect, remedy=error.remedy)
        return []
    return [] if look is None else [GpuDetector(alarms, host=host, expected=expected, look=look)]
