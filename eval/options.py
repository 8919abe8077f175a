"""Arguments of `fsdp-eval run` and what they mean. No torch here."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_pretrain.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from fsdp_pretrain.checkpoint.store import Checkpoint


def names(text: str) -> list[str]:
    """Argument type of comma-separated names. Raises ArgumentTypeError."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing")
    return found


def tasks_and_folders(words: Sequence[str]) -> tuple[list[str], list[Path]]:
    """Names of tasks, and the folders to include for them, from what lm-eval's `--tasks` takes beside names.

    That is a task file (`.yaml`), a pattern of such files, or a directory of them. Raises ConfigError.
    """
    tasks: list[str] = []
    folders: list[Path] = []
    for word in words:
        path = Path(word)
        files = sorted(path.parent.glob(path.name)) if word.endswith(".yaml") else sorted(path.glob("*.yaml"))
        if word.endswith(".yaml") and not files:
            raise ConfigError(f"there is no task file {word}")
        for file in files:
            text = file.read_text(encoding="utf-8", errors="replace")
            named = re.search(r"^group:\s*(\S+)", text, re.MULTILINE) or re.search(
                r"^task:\s*(\w\S*)", text, re.MULTILINE
            )
            if named is None:
                raise ConfigError(f"the task file {file} has no line `task: NAME` or `group: NAME`")
            tasks.append(named[1].strip("'\""))
            folders.append(file.parent.absolute())
        tasks += [] if files else [word]
    return list(dict.fromkeys(tasks)), list(dict.fromkeys(folders))


def count_or_share(text: str) -> float:
    """Argument type of a limit: a whole number from 1 on, or a share below 1. Raises ArgumentTypeError."""
    if re.fullmatch(r"[0-9]{1,18}", text) and int(text):
        return int(text)
    if re.fullmatch(r"0?\.[0-9]{1,18}", text) and float(text):
        return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number from 1 on nor a share such as 0.1")


def shots(text: str) -> int:
    """Argument type of a number of few-shot examples. Raises ArgumentTypeError."""
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def generation_options(text: str) -> dict[str, Any]:
    """`--gen-kwargs` as lm-eval's command line reads it: `key=value,...` or a JSON object. Raises ConfigError."""
    try:
        from lm_eval._cli.utils import key_val_to_dict, try_parse_json
    except ImportError:
        raise ConfigError("lm-eval is not installed", remedy="in the checkout: pip install -e '.[eval]'") from None
    try:
        found = try_parse_json(text)
        options = found if isinstance(found, dict) else key_val_to_dict(text)
    except ValueError:
        options = {}
    if not options:
        raise ConfigError(
            f"--gen-kwargs {text!r} is not of the form key=value,key=value and no JSON object",
            remedy="""such as --gen-kwargs 'max_gen_toks=64,until=["\\n"]'""",
        )
    return options


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
