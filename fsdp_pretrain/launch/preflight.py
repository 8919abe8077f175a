"""Checks of a node before ranks start: storage, disk space, devices."""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path

from fsdp_pretrain.checkpoint.upcoming import next_fit
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.errors import ConfigError, Exit, raising
from fsdp_pretrain.hardware import gpu_count
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.severity import Severity

from .outcome import avoided


def preflight(config: Config, run: RunDir, nproc: str) -> list[str]:
    """Check this node, to run `nproc` ranks (a number, `gpu`, `cpu` or `auto`); returns warnings. Raises UserError if
    the start would fail; exit 76 if this host is to be avoided."""
    host = socket.gethostname()
    if host in avoided(run):
        error = ConfigError(
            f"host {host} is in {run.avoid_hosts}",
            effect="an earlier start found it broken",
            remedy="start on other hosts; once it is repaired (fsdp-pretrain doctor), remove its line from the file",
        )
        error.exit = Exit.RESUME_AVOIDING_HOSTS
        raise error
    _write_test(run.path)
    _write_test(run.checkpoints)
    check_devices(nproc)
    fit = next_fit(run, config)
    if fit is not None and fit.severity is Severity.CRIT:
        raise ConfigError(
            fit.text,
            effect="training would run without new checkpoints, and end with exit 93",
            remedy="free space there, or keep fewer checkpoints (checkpoint.keep_last)",
        )
    return [fit.text] if fit is not None and fit.severity is not None else []


def _write_test(directory: Path) -> None:
    """Write and sync a file there, or in the nearest existing parent. Raises ConfigError."""
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    probe = existing / f".preflight-{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
    effect = "the run could not be recorded, or no checkpoint saved"
    remedy = "repair the mount or its permissions, or set run.dir to other storage"
    with raising(ConfigError, f"{socket.gethostname()} cannot write to {directory}", effect, remedy):
        try:
            with probe.open("w") as file:
                file.write("preflight\n")
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)


def check_devices(nproc: str) -> None:
    """Raise ConfigError if this node shows fewer GPUs than ranks, or none for `gpu`."""
    gpus = gpu_count()
    if nproc == "gpu" and not gpus:
        raise ConfigError(
            f"{socket.gethostname()} shows no GPU",
            remedy="check the driver and CUDA_VISIBLE_DEVICES; on CPU, AMD and WSL2, whose GPUs it cannot count, say "
            "how many ranks: --nproc-per-node 4",
        )
    if gpus and nproc.isdecimal() and int(nproc) > gpus:
        raise ConfigError(
            f"--nproc-per-node {nproc} on {socket.gethostname()}, which shows {gpus} GPUs",
            effect="two ranks would share a device, or find none",
            remedy="start one rank per GPU; if one is missing, check the driver and run fsdp-pretrain doctor",
        )
