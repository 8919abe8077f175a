"""Short trials of the choices of `plan --tune`: a job under torchrun for each, on this node. No torch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fsdp_pretrain.child_process import start_module
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.units import human_bytes

_STEPS, _WARMUP = 8, 3
_ACCUMULATION = 4
"""Most micro-batches in a step of a trial: more add time, not knowledge."""
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


def run_trials(config: Config, choices: Sequence[Any], ranks: int) -> list[Trial]:
    """Measure `tune.Choice`s one after the other, on `ranks` devices of this node; the fastest first."""
    found = [_run(config, choice, ranks) for choice in tqdm(choices, desc="trials", leave=False, disable=None)]
    return sorted(found, key=lambda trial: -(trial.tokens or 0.0))


def _run(config: Config, choice: Any, ranks: int) -> Trial:
    batch = ranks * choice.micro_batch * min(choice.accumulation, _ACCUMULATION)
    overrides = (*choice.overrides, f"train.global_batch={batch} samples")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trial.toml"
        train = config.train.model_copy(update={"batch_ramp": None})
        path.write_text(config.model_copy(update={"train": train}).to_toml())
        launch = ("--standalone", "--nproc-per-node", str(ranks), "-m", "fsdp_pretrain.bench", str(path))
        often = ("--steps", str(_STEPS), "--warmup", str(_WARMUP), "--json")
        process = start_module(
            "torch.distributed.run", *launch, *overrides, *often, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            output, errors = process.communicate(timeout=_LIMIT)
        except subprocess.TimeoutExpired:
            return Trial(choice.overrides, problem=f"not finished after {_LIMIT:.0f} seconds")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        return Trial(choice.overrides, problem=_reason(errors.decode(errors="replace")))
    result = json.loads(output)
    return Trial(choice.overrides, result["tokens_per_second_per_device"], result["memory_bytes"])


def _reason(errors: str) -> str:
    """The line of a job's error output that says why it failed."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    told = [line for line in lines if "OutOfMemoryError" in line or line.startswith("error:")]
    return (told or lines or ["it ended without a message"])[-1][:200]


def render_trials(trials: Sequence[Trial]) -> Iterator[str]:
    """The table for people."""
    yield "  measured here:"
    for trial in trials:
        shown = trial.problem
        if trial.tokens is not None and trial.memory is not None:
            shown = f"{trial.tokens:,.0f} tokens/s per device, {human_bytes(trial.memory)}"
        yield f"    {' '.join(trial.overrides):90} {shown}"
