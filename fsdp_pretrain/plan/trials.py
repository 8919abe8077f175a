"""Short trials of the choices of `plan --tune`: a job under torchrun for each, on this node. No torch."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from fsdp_pretrain.child_process import run_module
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.units import Progress, human_bytes

if TYPE_CHECKING:
    from .tune import Choice

_STEPS, _WARMUP = 8, 3
_ACCUMULATION = 4
"""Most micro-batches in a step of a trial: more add time, and make only the update weigh less."""
_LIMIT = 900.0
"""Seconds after which a trial is ended: a compilation and slow steps fit in."""


@dataclass(frozen=True)
class Trial:
    """A choice as measured.

    Attributes:
        tokens: per second and device; None if the trial failed.
        memory: peak bytes allocated on the fullest device.
        problem: why it failed.
    """

    overrides: tuple[str, ...]
    tokens: float | None = None
    memory: int | None = None
    problem: str = ""


def run_trials(config: Config, choices: Sequence[Choice], ranks: int) -> list[Trial]:
    """Measure choices one after the other, on `ranks` devices of this node; the fastest first."""
    found = [_run(config, choice, ranks) for choice in tqdm(choices, desc="trials", leave=False, disable=None)]
    return sorted(found, key=lambda trial: -(trial.tokens or 0.0))


def _run(config: Config, choice: Choice, ranks: int) -> Trial:
    batch = ranks * choice.micro_batch * min(choice.accumulation, _ACCUMULATION)
    overrides = (*choice.overrides, f"train.global_batch={batch} samples")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trial.toml"
        train = config.train.model_copy(update={"batch_ramp": None})
        # Curves that depend on the number of steps may contradict the smaller batch.
        optimizer = config.optimizer.model_copy(update={"warmup": Progress(0, "step"), "embedding_shrink": 1.0})
        path.write_text(config.model_copy(update={"train": train, "optimizer": optimizer, "timeline": []}).to_toml())
        launch = ("--standalone", "--nproc-per-node", str(ranks), "-m", "fsdp_pretrain.bench", str(path))
        often = ("--steps", str(_STEPS), "--warmup", str(_WARMUP), "--json")
        try:
            done = run_module("torch.distributed.run", *launch, *overrides, *often, limit=_LIMIT)
        except subprocess.TimeoutExpired:
            return Trial(choice.overrides, problem=f"not finished after {_LIMIT:.0f} seconds")
    result = read_result(done.stdout.decode(errors="replace"))
    if done.returncode or result is None:
        return Trial(choice.overrides, problem=reason(done.stderr.decode(errors="replace")))
    return Trial(choice.overrides, result["tokens_per_second_per_device"], result["memory_bytes"])


def read_result(output: str) -> dict[str, Any] | None:
    """The JSON object in a job's output, in which libraries such as NCCL may have written lines as well."""
    found = re.search(r"^\{$.+?^\}$|^\{.+\}$", output, re.MULTILINE | re.DOTALL)
    try:
        result: dict[str, Any] | None = json.loads(found[0]) if found else None
    except ValueError:
        return None
    return result


def reason(errors: str) -> str:
    """The line of a job's error output that says why it failed; torchrun's report of it comes last."""
    lines = [line.strip() for line in errors.splitlines()]
    raised = r"(\[rank\d+\]: ?)?(?!torch\.distributed\.elastic)[\w.]+(Error|Exception|Unsupported)\b"
    told = [line for line in lines if line.startswith("error:") or re.match(raised, line)]
    killed = [line for line in lines if "Signal " in line]
    return (told or killed or ["it ended without a message"])[-1][:200]


def render_trials(trials: Sequence[Trial]) -> Iterator[str]:
    """The table for people."""
    yield "  measured here:"
    for trial in trials:
        shown = trial.problem
        if trial.tokens is not None and trial.memory is not None:
            shown = f"{trial.tokens:,.0f} tokens/s per device, {human_bytes(trial.memory)}"
        yield f"    {' '.join(trial.overrides):90} {shown}"
