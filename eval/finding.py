"""Which checkpoint an argument names."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_pretrain.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from fsdp_pretrain.checkpoint.store import Checkpoint


def names(text: str) -> list[str]:
    """Argument type of comma-separated names. Raises ArgumentTypeError."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing")
    return found


def find_checkpoint(path: Path, step: int | None, damaged: dict[Path, str] | None = None) -> Checkpoint:
    """The checkpoint at a `step-N` directory; or of a run directory: that of a step, or the newest.

    Damaged ones that are newer are passed over, each with a line on standard error.

    Args:
        damaged: what is known to be wrong, by path of the checkpoint; what is found is added.

    Raises:
        ConfigError: the path is neither.
        CheckpointError: there is no such checkpoint.
    """
    from fsdp_pretrain.checkpoint.locations import stores
    from fsdp_pretrain.checkpoint.store import Store, step_of
    from fsdp_pretrain.record.arguments import check_begun
    from fsdp_pretrain.record.files import RunDir

    named = step_of(path.name)
    if named is not None:
        if step is not None:
            raise ConfigError(f"{path} is one checkpoint already: --step {step} chooses one of a run directory")
        return Store(path.parent).find(named)
    run = RunDir(path)
    check_begun(run)
    found = stores(run)
    if step is not None:
        return found.find(step)
    damaged = {} if damaged is None else damaged
    for checkpoint in reversed(found.scan()):
        if checkpoint.problem is not None:
            pass_over(checkpoint.path, checkpoint.problem, damaged)
        elif checkpoint.path not in damaged:
            return checkpoint
    raise CheckpointError(f"{found.directory} holds no complete checkpoint")


def pass_over(path: Path, problem: str, damaged: dict[Path, str]) -> None:
    """Add to what is known to be damaged, and say so once."""
    if path not in damaged and os.environ.get("RANK", "0") == "0":
        print(f"passed over {path}: {problem}", file=sys.stderr, flush=True)
    damaged[path] = problem
