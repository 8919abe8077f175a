"""Arguments that several commands share."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from fsdp_pretrain.console import Parser, argument
from fsdp_pretrain.errors import ConfigError, install

from .files import RunDir


def run_directory(text: str) -> RunDir:
    """An existing run directory. Raises ArgumentTypeError."""
    run = RunDir(Path(text))
    try:
        check_begun(run)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(error.cause) from None
    return run


RUN = argument("run", type=run_directory, metavar="RUN", help="run directory")
SEGMENT = argument("--segment", type=int, help="the start that trained it, to see a step that a resume replaced")


def check_begun(run: RunDir) -> None:
    """Raise ConfigError if a directory holds no run."""
    if not run.begun:
        problem = "it has neither segments/ nor checkpoints/" if run.path.is_dir() else "there is no such directory"
        raise ConfigError(f"{run.path} is not a run directory: {problem}")


def import_extra(module: str, what: str) -> ModuleType:
    """Import a module of this program that needs torch; `what` is for the message. Raises ConfigError."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{what} with torch, which is not installed ({error.name})",
            remedy=install("train"),
        ) from None


def parse_trainer(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the trainer's command line. Raises SystemExit if it is invalid."""
    parser = Parser(
        prog="python -m fsdp_pretrain.train",
        description="Train, or continue training, the run of a configuration. Start it with torchrun.",
        epilog="example:\n"
        "  torchrun --nproc-per-node 4 -m fsdp_pretrain.train configs/runs/quickstart.toml train.micro_batch=2",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", help="TOML file, see docs/config.md")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="replace values of the file, e.g. train.duration='50 steps'",
    )
    parser.add_argument(
        "--allow-fresh",
        action="store_true",
        help="start from step 0 although the run directory holds only invalid checkpoints, or has lost "
        "those in its record; no effect on restarts by the launcher or torchrun after a start that trained",
    )
    parser.add_argument(
        "--from-mirror",
        action="store_true",
        help="restore an empty run directory from checkpoint.mirror: the record and the newest valid checkpoint; no "
        "effect if it holds the run, refused if the mirror has more than it",
    )
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="SECTION.KEY",
        help="allow this change of what is learned (keys marked `declared` in docs/config.md); a table allows all "
        "its keys; repeatable, and may stay in the command",
    )
    parser.add_argument(
        "--reset-optimizer",
        type=int,
        metavar="STEP",
        help="when resuming from the checkpoint of STEP, keep weights, data position and schedules, and reset the "
        "optimiser's moments; without effect after later checkpoints, so it may stay in the command",
    )
    parser.add_argument("--reason", default="", help="why this start differs from the last; for the chronicle")
    return parser.parse_intermixed_args(arguments)
