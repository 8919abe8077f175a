"""Starting another module of this program as a child process, and dying with its parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
_OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL_", "OMP_NUM")
"""Prefixes of variables that torchrun sets for a rank."""
_PR_SET_PDEATHSIG = 1


def start_module(
    module: str, *arguments: str, nice: int = 0, environment: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[bytes]:
    """Start `python -m MODULE` from this source tree, installed or not, without torchrun's variables of a rank.

    Args:
        module, arguments: to run.
        nice: increment of its niceness.
        environment: variables to add.
        options: of `subprocess.Popen`. The child has its own session, so signals to the job do not reach it.

    Raises:
        OSError: it cannot be started.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_A_RANK)}
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    command = [*(["nice", "-n", str(nice)] if nice else []), sys.executable, "-m", module, *arguments]
    return subprocess.Popen(
        command,
        env={**kept, "PYTHONPATH": path, **(environment or {})},
        start_new_session=True,
        **options,
    )


def start_helper(module: str, *arguments: str, log: Path, nice: int = 0) -> subprocess.Popen[bytes]:
    """Start a module whose input stays open: its end tells it that this process has ended.

    What it says goes to a log, unless its run directory is full, or gone. Raises OSError: it cannot be started.
    """
    with contextlib.ExitStack() as stack:
        try:
            log.parent.mkdir(exist_ok=True)
            output = stack.enter_context(log.open("ab"))
        except OSError:
            output = stack.enter_context(Path(os.devnull).open("wb"))
        return start_module(module, *arguments, nice=nice, stdin=subprocess.PIPE, stdout=output, stderr=output)


def run_module(
    module: str, *arguments: str, limit: float, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run `python -m MODULE` to its end and capture its outputs; nothing of its process group is left afterwards.

    Raises:
        subprocess.TimeoutExpired: it has not ended after `limit` seconds.
    """
    process = start_module(module, *arguments, environment=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        output, errors = process.communicate(timeout=limit)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent dies; exit now if the parent is no longer `parent`. Linux only;
    elsewhere nothing happens."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)
