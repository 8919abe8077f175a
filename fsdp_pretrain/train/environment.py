"""The environment of a start: hosts, devices, versions, state of the code.

Most failures after a restart come from an unintended change. So every start records its environment, and the journal
lists how it differs from that of the start before.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from fsdp_pretrain import __version__, hardware
from fsdp_pretrain.config.config import load
from fsdp_pretrain.config.resume_rules import changes, differences
from fsdp_pretrain.errors import UserError
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.processes import launched_at, run_program
from fsdp_pretrain.run import environment, state_files
from fsdp_pretrain.run.environment import CORPORA, ENVIRONMENT, Corpora
from fsdp_pretrain.run.files import RunDir, now, stamp
from fsdp_pretrain.run.lineage import LINEAGE

_RECORDED_VARIABLES = (
    "CUDA_",
    "NCCL_",
    "GLOO_",
    "FI_",
    "TORCH",
    "PYTORCH",
    "OMP_",
    "SLURM_JOB",
    "SLURM_NODE",
    "SLURM_PROCID",
)
_COMPARED = {"world", "device", "python", "torch", "cuda", "nccl", "driver", "fsdp_pretrain"}
_ALWAYS_NEW = re.compile(r"SLURM_|TORCHELASTIC_|CUDA_VISIBLE|.*_ADDR$|.*_PORT$|TORCH_.*_(TEMP|PIPE)_FILE$")
_SHOWN_HOSTS, _SHOWN_FILES = 20, 3
_GIT_SECONDS = 60.0


def describe(world: World, hosts: list[str]) -> dict[str, Any]:
    """The content of a segment's `environment.json`; `hosts`: name of each rank's host, in rank order."""
    variables = {key: value for key, value in sorted(os.environ.items()) if key.startswith(_RECORDED_VARIABLES)}
    return {
        "time": now(),
        "launched": stamp(launched_at(os.getpid())),
        "command": sys.argv,
        "directory": str(Path.cwd()),
        "host": socket.gethostname(),
        "hosts": dict(sorted(Counter(hosts).items())),
        "world": {"size": world.size, "replicas": world.replicas, "shards": world.shards},
        "device": hardware.device_name(world.device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": _nccl(),
        "driver": _driver(),
        "fsdp_pretrain": __version__,
        "git": _git_state(),
        "variables": variables,
    }


def _nccl() -> str | None:
    if not torch.cuda.is_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _driver() -> str | None:
    """Version of the NVIDIA kernel driver; None without one."""
    try:
        match = re.search(r"\b\d+\.\d+(\.\d+)?\b", Path("/proc/driver/nvidia/version").read_text(encoding="utf-8"))
    except OSError:
        return None
    return match[0] if match else None


def _git_state() -> dict[str, Any] | None:
    """Commit of this program's checkout and its uncommitted changes; None outside a checkout."""
    # Without the locks that `git status` takes to refresh the index: a killed rank would leave one behind.
    git = ["git", "-C", str(Path(__file__).resolve().parent.parent), "--no-optional-locks"]
    try:
        answers = [
            run_program([*git, *question], _GIT_SECONDS, output=subprocess.PIPE)
            for question in (("rev-parse", "HEAD"), ("status", "--porcelain"))
        ]
    except OSError:
        return None
    if any(answer.returncode for answer in answers):
        return None
    commit, changed = (answer.stdout.decode(errors="replace") for answer in answers)
    return {"commit": commit.strip(), "changed": sorted(line[3:] for line in changed.splitlines())[:50]}


def compare(run: RunDir, number: int, data: Corpora) -> tuple[int, list[str]] | None:
    """Changes since the last segment that joined the lineage. Records the data, also for the next start to compare.

    Args:
        number: this segment's.
        data: its data.

    Returns:
        The number of that last segment, and the changes as `what: old -> new`; None if this is the first.
    """
    with contextlib.suppress(OSError):  # a full disk must not stop a start here
        state_files.write(run.segment(number) / CORPORA, data)
    joined = (path for path in run.segments if (path / LINEAGE).exists())
    recorded = [int(path.name) for path in joined if (path / ENVIRONMENT).exists()]
    last = max((n for n in recorded if n < number), default=None)
    if last is None:
        return None
    before, after = (environment.view(run, n) for n in (last, number))
    changed = _configuration(run, last, number)
    changed += _hosts(before.hosts, after.hosts)
    changed += differences(before.model_dump(include=_COMPARED), after.model_dump(include=_COMPARED))
    changed += _code(before.git or {}, after.git or {})
    changed += differences(_variables(before), _variables(after), "environment")
    old = state_files.view(run.segment(last) / CORPORA, Corpora)
    if old is not None:  # it is missing if the disk was full then
        changed += differences(old.corpora, data.corpora, "corpora")
    return last, changed


def _variables(recorded: environment.Environment) -> dict[str, str]:
    return {key: value for key, value in recorded.variables.items() if not _ALWAYS_NEW.match(key)}


def _configuration(run: RunDir, last: int, number: int) -> list[str]:
    try:
        old, new = (load(run.segment(n) / "config.toml") for n in (last, number))
    except UserError as error:  # written by another version of this program
        return [f"the configuration of segment {last} cannot be compared: {error.cause.splitlines()[0]}"]
    return [change.text for change in changes(old, new)]


def _hosts(before: dict[str, int], after: dict[str, int]) -> list[str]:
    changed = []
    for word, names in (("gone", [*before.keys() - after.keys()]), ("new", [*after.keys() - before.keys()])):
        if names:
            changed.append(f"hosts {word}: {_few(names, _SHOWN_HOSTS)}")
    return changed


def _few(names: list[str], limit: int) -> str:
    return ", ".join(sorted(names)[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _code(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    changed = differences({"commit": before.get("commit")}, {"commit": after.get("commit")}, "code")
    if before.get("changed") != after.get("changed"):
        files = _few(after.get("changed") or [], _SHOWN_FILES)
        changed.append(f"uncommitted changes to the code: {files or 'none any more'}")
    return changed
