"""`fsdp-pretrain doctor`: starts the hardware check (`fsdp_pretrain.launch.doctor`) under torchrun. No torch."""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
from pathlib import Path

from fsdp_pretrain.console import CommandLine
from fsdp_pretrain.errors import BusyError, Exit
from fsdp_pretrain.record import state_files
from fsdp_pretrain.record.arguments import run_directory
from fsdp_pretrain.record.exit_intent import ExitIntent
from fsdp_pretrain.watchdog.status import inspect

from . import torchrun
from .preflight import check_devices
from .torchrun import Torchrun


def add(command: CommandLine) -> None:
    """Add the verb `doctor`."""
    parser = command.verb(
        "doctor",
        _doctor,
        "Check the hardware of a stopped job: devices and memory of every rank, a timed matrix product, sums inside "
        "nodes, between all nodes and in pairs of nodes, for their correctness and speed. Names the bad host or pair. "
        "Exit 0 if nothing is wrong, 1 otherwise. What is not listed here goes to torchrun.",
        "fsdp-pretrain doctor --nproc-per-node 2 --run runs/quickstart/run\n"
        "  fsdp-pretrain doctor --nnodes 16 --rdzv-endpoint node001   # the same on every node",
    )
    parser.set_defaults(passed_on=[])
    parser.usage = "fsdp-pretrain doctor [options] [torchrun options]"
    parser.add_argument(
        "--run", type=run_directory, metavar="RUN", help="refuse if a job of this run directory is running"
    )
    add_options(parser)
    torchrun.add_options(parser)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of the check, as `fsdp_pretrain.launch.doctor` takes them too."""
    parser.add_argument(
        "--slow",
        type=float,
        default=1.15,
        help="a matrix product that takes this many times the median is slow (default: 1.15)",
    )
    parser.add_argument("--slow-sum", type=float, default=1.5, help="the same for all-reduce sums (default: 1.5)")
    parser.add_argument("--megabytes", type=float, help="size of the tensor that is summed (default: 256, on CPU 1)")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that a collective may take")
    parser.add_argument("--json", action="store_true")


def _doctor(args: argparse.Namespace) -> int:
    if args.run is not None and inspect(args.run).running:
        raise BusyError(
            f"a job of {args.run.path} is running",
            effect="the check would take its devices' time, or fail for want of memory",
            remedy=f"stop it first: fsdp-pretrain control {args.run.path} stop",
        )
    if args.nproc_per_node == "gpu":  # with a number of ranks the check itself says what is missing
        check_devices("gpu")
    args.rdzv_id = args.rdzv_id or "doctor"
    options = ["--slow", str(args.slow), "--slow-sum", str(args.slow_sum), "--timeout", str(args.timeout)]
    options += ["--megabytes", str(args.megabytes)] if args.megabytes else []
    options += ["--json"] if args.json else []
    command = torchrun.command(args, args.passed_on, "fsdp_pretrain.launch.doctor", options)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="fsdp-pretrain-") as notes:
        note = Path(notes) / "doctor.json"
        child = Torchrun(command, torchrun.environment(os.environ, note))
        try:
            code = child.wait()
        finally:
            if child.poll() is None:
                child.kill()
        found = state_files.view(note, ExitIntent)
    if found is not None:
        return found.code
    return int(Exit.REFUSED if code == torchrun.WRONG_OPTIONS else Exit.UNEXPECTED if code else Exit.COMPLETE)
