"""`fsdp-pretrain launch` and `doctor`: start a run, or the hardware check of its nodes, under torchrun."""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from fsdp_pretrain.console import JSON, Argument, argument, seconds, verb
from fsdp_pretrain.errors import BusyError, ConfigError
from fsdp_pretrain.run.arguments import parse_trainer, run_directory


def _ranks(text: str) -> str:
    if text not in ("gpu", "cpu", "auto") and not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of ranks nor gpu, cpu or auto")
    return text


def torchrun_options(usage: str, **defaults: Any) -> Argument:
    """The torchrun options that a verb fills in or reads; all others are in `passed_on`, for torchrun.

    `usage`: the command line after the verb; `defaults`: default values of other options.
    """

    def add(parser: argparse.ArgumentParser) -> None:
        """Add these options after those of the verb."""
        options = parser.add_argument_group("torchrun options (any other is passed on as it is)")
        options.add_argument("--nnodes", default="1", help="number of nodes, or MIN:MAX (default: 1)")
        options.add_argument(
            "--nproc-per-node",
            "--nproc_per_node",
            type=_ranks,
            default="gpu",
            help="ranks per node: a number, gpu, cpu or auto (default: gpu)",
        )
        options.add_argument(
            "--rdzv-endpoint", "--rdzv_endpoint", metavar="HOST[:PORT]", help="first node; the same on every node"
        )
        options.add_argument(
            "--rdzv-conf",
            "--rdzv_conf",
            default="",
            metavar="KEY=VALUE,...",
            help="further settings of the rendezvous; is_host=false for a second launcher on the first node",
        )
        options.add_argument("--rdzv-id", "--rdzv_id", help="name of the job (default: the configuration's file name)")
        parser.usage = f"{parser.prog} {usage}"
        parser.set_defaults(passed_on=[], **defaults)

    return add


def _refuse_overrides(options: Sequence[str], config: str) -> None:
    """Raise ConfigError if an override stands before the configuration: torchrun would take it for its program."""
    for before, text in pairwise(["", *options]):
        is_value = before.startswith("-") and "=" not in before
        if re.match(r"[a-z_]+(\.[A-Za-z0-9_-]+)+=", text) and not is_value:
            raise ConfigError(f"{text} stands before {config}", remedy=f"put it behind: launch {config} {text}")


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(options of torchrun, configuration and arguments of the trainer). Raises ConfigError."""
    for at, text in enumerate(arguments):
        if text.endswith(".toml") and not text.startswith("-"):
            _refuse_overrides(arguments[:at], text)
            return list(arguments[:at]), list(arguments[at:])
    raise ConfigError("no configuration: none of the arguments is a .toml file", remedy="fsdp-pretrain launch --help")


@verb(
    "launch",
    "--nproc-per-node 4 configs/runs/quickstart.toml train.micro_batch=2\n"
    "  fsdp-pretrain launch --nnodes 16 --rdzv-endpoint node001 my-run.toml   # the same on every node",
    argument(
        "--time-limit",
        type=seconds,
        metavar="TIME",
        help="save and end before this much time has passed, such as '24 h' (default: the time limit of a Slurm job)",
    ),
    argument("--print-run", action="store_true", help="print the run directory, for scripts, and exit"),
    argument("--no-preflight", action="store_true", help="start without the checks of storage and devices"),
    torchrun_options("[options] [torchrun options] CONFIG [key=value ...] [trainer options]"),
)
def launch(args: argparse.Namespace) -> int:
    """Train under torchrun, and restart it when it ends early, unless that was intended or a restart cannot help.
    Everything before CONFIG that is not listed here goes to torchrun; what follows CONFIG goes to the trainer. Exit 0
    complete, 75 start again to continue, 76 the same without the hosts in RUN/avoid_hosts, 78 refused, 93 a person must
    look."""
    from fsdp_pretrain.config import world_sizes
    from fsdp_pretrain.launch.launcher import Launcher
    from fsdp_pretrain.launch.torchrun import most_nodes
    from fsdp_pretrain.run.overrides import load_run

    options, job = _split(args.passed_on)
    parsed = parse_trainer(job)  # report a mistake here, once, and not on every rank
    config, _ = load_run(parsed.config, parsed.overrides)
    if args.print_run:
        print(config.run.dir)
        return 0
    nodes = most_nodes(args.nnodes)
    if args.nproc_per_node.isdecimal() and ":" not in args.nnodes:  # here, once, for the same reason
        world_sizes.check(config, int(args.nproc_per_node) * nodes)
    args.rdzv_id = args.rdzv_id or Path(job[0]).stem
    with tempfile.TemporaryDirectory(prefix="fsdp-pretrain-") as notes:
        return Launcher(args, options, job, config, Path(notes)).run()


@verb(
    "doctor",
    "--nproc-per-node 2 --run runs/quickstart/run\n"
    "  fsdp-pretrain doctor --nnodes 16 --rdzv-endpoint node001   # the same on every node",
    argument("--run", type=run_directory, metavar="RUN", help="refuse if a job of this run directory is running"),
    JSON,
    torchrun_options("[options] [torchrun options]"),
)
def doctor(args: argparse.Namespace) -> int:
    """Check the hardware of a stopped job: GPUs and memory of every rank, a timed matrix product, and sums over pairs
    of nodes, for their correctness and speed. Names the bad host or pair. Exit 0 if nothing is wrong, 1 otherwise. What
    is not listed here goes to torchrun."""
    from fsdp_pretrain.launch import torchrun
    from fsdp_pretrain.launch.preflight import check_devices
    from fsdp_pretrain.views.status import inspect

    if args.run is not None and inspect(args.run).running:
        raise BusyError(
            f"a job of {args.run.path} is running",
            effect="the check would take its devices' time, or fail for want of memory",
            remedy=f"stop it first: fsdp-pretrain control {args.run.path} stop",
        )
    if args.nproc_per_node == "gpu":  # with a number of ranks the check itself says what is missing
        check_devices("gpu")
    args.rdzv_id = args.rdzv_id or "doctor"
    options = ["--json"] if args.json else []
    return torchrun.run_once(torchrun.command(args, args.passed_on, "fsdp_pretrain.launch.doctor", options))
