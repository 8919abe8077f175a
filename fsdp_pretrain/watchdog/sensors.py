"""The detectors of storage, data and hardware of a run, put together. No torch."""

from __future__ import annotations

import socket
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
from .accounts import Accounts
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
    alarms: Alarms,
    *,
    segment: int,
    leads: bool = True,
    devices: int = 0,
    pids: Callable[[], list[int]] = list,
    reached: Callable[[], int] = int,
) -> list[Detector]:
    """The detectors of one node.

    Args:
        leads: this node watches what the whole run has in common: checkpoints, the data, the run directory.
        devices: GPUs that ranks use on this node; 0 if unknown.
        pids: processes of the ranks on this node, now.
        reached: the newest step that a rank of this node has begun.
    """
    run, host, section, looks = RunDir(config.run.dir), socket.gethostname(), config.watchdog.storage, Looks()
    corpora = {source.name: source.path for source in config.data.sources}
    mounts = Mounts(alarms, section, looks, [run.checkpoints] if leads else [], corpora)
    found: list[Detector] = [mounts, Host(alarms, host=host, pids=pids)]
    local = [("tmp", Path(tempfile.gettempdir()), False), ("shm", _SHM, False)]
    if not leads:
        found.append(Space(alarms, section, looks, local))
    else:
        directories = [store.directory for store in stores(run).all]
        places = [("checkpoints", run.checkpoints, True), ("run", run.path, False)]
        if (other := fallback(config)) is not None:
            places.append(("fallback", other.directory, True))
            directories += [] if other.directory in directories else [other.directory]
        checkpoints = Checkpoints(
            alarms,
            section,
            looks,
            run=run.path,
            segment=segment,
            stores=directories,
            every=config.checkpoint.every,
            verify=config.checkpoint.verify,
            prune=config.checkpoint.prune,
            pids=pids,
            reached=reached,
        )
        found += [
            checkpoints,
            Space(alarms, section, looks, [*places, *local], checkpoints),
            Waits(alarms),
            _sentinels(config, run, alarms, mounts),
        ]
        if config.eval.every is not None:
            found.append(Evaluations(alarms, section, looks, run.path))
        shown = config.watchdog.notify.prometheus
        if shown.port is not None or shown.textfile is not None:
            found.append(Accounts(alarms, looks, run.path))
    if (gpus := _devices(config, run, alarms, host, devices)) is not None:
        found.append(gpus)
    return found


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
