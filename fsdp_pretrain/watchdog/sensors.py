"""The detectors of storage, data and hardware of a run, put together. No torch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from ..checkpoint.stores import fallback, stores
from ..config import Config
from ..errors import ConfigError
from ..record.files import RunDir
from ..record.metrics import find_step
from ..record.step_record import StepRecord
from ..severity import Severity
from .alarms import Alarms
from .checkpoints import Checkpoints
from .detector import Detector
from .evaluations import Evaluations
from .hardware import Devices
from .host import Host
from .mounts import Mounts, Waits
from .nvml import resolve
from .probe import Looks
from .sentinels import Sentinels
from .storage import Space

_SHM = Path("/dev/shm")


def sensors(
    config: Config,
    run: RunDir,
    alarms: Alarms,
    *,
    segment: int,
    host: str,
    leads: bool = True,
    devices: int = 0,
    pids: Callable[[], list[int]] = list,
    reached: Callable[[], int] = int,
) -> list[Detector]:
    """The detectors of one node.

    Args:
        config: the run.
        run: its directory.
        alarms: where incidents are told.
        segment: number of this start.
        host: name of this host.
        leads: this node watches what the whole run has in common: checkpoints, the data, the run directory.
        devices: GPUs that ranks use on this node; 0 if unknown.
        pids: processes of the ranks on this node, now.
        reached: the newest step that a rank of this node has begun.
    """
    watchdog, looks = config.watchdog, Looks()
    corpora = {source.name: source.path for source in config.data.sources}
    mounts = Mounts(alarms, watchdog.storage, looks, [run.checkpoints] if leads else [], corpora)
    found: list[Detector] = [mounts, Host(alarms, host=host, pids=pids)]
    local = [("tmp", Path(tempfile.gettempdir()), False), ("shm", _SHM, False)]
    if leads:
        checkpoints = _checkpoints(config, run, alarms, looks, segment, pids, reached)
        other = fallback(config)
        places = [("checkpoints", run.checkpoints, True), ("run", run.path, False)]
        places += [("fallback", other.directory, True)] if other is not None else []
        found += [
            checkpoints,
            Space(alarms, watchdog.storage, looks, [*places, *local], checkpoints),
            Waits(alarms),
            _sentinels(config, run, alarms, mounts),
        ]
        if config.eval.every is not None:
            found.append(Evaluations(alarms, watchdog.storage, looks, run.path))
    else:
        found.append(Space(alarms, watchdog.storage, looks, local))
    if (gpus := _devices(config, run, alarms, host, devices)) is not None:
        found.append(gpus)
    return found


def _checkpoints(
    config: Config,
    run: RunDir,
    alarms: Alarms,
    looks: Looks,
    segment: int,
    pids: Callable[[], list[int]],
    reached: Callable[[], int],
) -> Checkpoints:
    places = [store.directory for store in stores(run).all]
    other = fallback(config)
    if other is not None and other.directory not in places:
        places.append(other.directory)
    return Checkpoints(
        alarms,
        config.watchdog.storage,
        looks,
        run=run.path,
        segment=segment,
        stores=places,
        every=config.checkpoint.every,
        verify=config.checkpoint.verify,
        prune=config.checkpoint.prune,
        pids=pids,
        reached=reached,
    )


def _sentinels(config: Config, run: RunDir, alarms: Alarms, mounts: Mounts) -> Sentinels:
    def before(step: int) -> StepRecord | None:
        kept = [record for record, left_by in find_step(run, step) if left_by is None] if step else []
        return kept[-1] if kept else None

    return Sentinels(
        alarms,
        config.watchdog.sentinels,
        rates=mounts.rates,
        row=config.data.row,
        causal=config.data.objective.kind == "causal",
        max_quarantined=config.data.max_quarantined,
        before=before,
    )


def _devices(config: Config, run: RunDir, alarms: Alarms, host: str, expected: int) -> Devices | None:
    section = config.watchdog.hardware
    try:
        provider = resolve(section.provider)
    except ConfigError as error:
        if section.provider != "auto":
            raise
        alarms.open(f"gpu-blind/{host}", Severity.INFO, error.cause, effect=error.effect, remedy=error.remedy)
        return None
    if provider is None:
        return None
    memory = section.hosts or run.path / "watchdog/hosts.json"
    return Devices(alarms, section, host=host, memory=memory, expected=expected, provider=provider)
