"""The trainer beside other implementations of its model: `python -m fsdp_pretrain.bench CONFIG --peers`.

In every round each side trains in a fresh process, the next round in the opposite order. So no side inherits memory,
caches or a warm device from another, each round also samples what differs between processes, two models never have to
fit on a GPU together, and a neighbour's load falls on all sides alike. The price is a start per side and round. Compare
the ratios: they are computed within rounds.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

from fsdp_pretrain.child_process import run_module
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.model import LlamaModel
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.plan import flops
from fsdp_pretrain.units import human_bytes, human_count

from .ranges import median_range, show_range

OURS, TITAN = "ours", "torchtitan"
SIDES = (OURS, "minimal", "transformers", TITAN)
SKIPPED = "skipped: "
"""Begins the line that a side prints instead of a result if its library is missing."""
_TITAN = "0.2."
"""Releases of torchtitan whose interface `sides` knows."""
_LAST_LINES = 15


@dataclass(frozen=True)
class Measured:
    """One side in one round; seconds are per step.

    Attributes:
        seconds: wall-clock, until the device has finished.
        processor: of all threads of the process; includes waiting for a GPU.
        memory: peak bytes allocated on the GPU, or resident bytes of a CPU process.
        loss: of the last step, in nats per target.
        targets: tokens to predict in a step.
        tokens_sum: sum of the token ids of the first batch.
    """

    seconds: float
    processor: float
    memory: int
    loss: float
    parameters: int
    targets: int
    tokens_sum: int
    device: str
    torch: str
    compiled: bool


@dataclass
class Comparison:
    """All rounds.

    Attributes:
        config: what was trained.
        steps: timed in each round.
        rounds: by side.
        skipped: reasons, by side.
        failed: the last lines of its output, by side; such a side is not started again.
    """

    config: Config
    steps: int
    rounds: list[dict[str, Measured]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def first(self) -> Measured | None:
        """Any result: what all sides share is the same in each."""
        return next((found for each in self.rounds for found in each.values()), None)

    def of(self, side: str) -> list[Measured]:
        """The results of a side."""
        return [each[side] for each in self.rounds if side in each]

    def ratios(self, side: str, name: str) -> list[float] | None:
        """A side's figure divided by ours in the same round: median, least, most; None without a common round."""
        both = [(each[side], each[OURS]) for each in self.rounds if side in each and OURS in each]
        return median_range([getattr(theirs, name) / getattr(ours, name) for theirs, ours in both]) if both else None

    def mfu(self, found: Measured) -> float | None:
        """Share of the device's peak; None if that is unknown."""
        per_token = flops.flops_per_token(found.parameters, self.config.model, self.config.data.sequence_length)
        peak = flops.peak_flops(found.device)
        return found.targets / found.seconds * per_token / peak if peak else None

    def to_json(self) -> dict[str, Any]:
        """For `--json`: medians, ranges and ratios by side, and the rounds themselves."""
        config, shared = self.config, self.first
        return {
            "run": config.run.name,
            "device": shared and shared.device,
            "torch": shared and shared.torch,
            "parameters": shared and shared.parameters,
            "tokens_per_step": shared and shared.targets,
            "sequence_length": config.data.sequence_length,
            "micro_batch": config.train.micro_batch,
            "precision": config.train.precision,
            "compiled": shared and shared.compiled,
            "steps": self.steps,
            "rounds": [{name: asdict(found) for name, found in each.items()} for each in self.rounds],
            "sides": {name: self.summary(name) for name in SIDES if self.of(name)},
            "skipped": self.skipped,
            "failed": self.failed,
        }

    def summary(self, side: str) -> dict[str, Any]:
        """Median and range of a side's figures over its rounds."""
        found = self.of(side)
        mfu = [value for value in map(self.mfu, found) if value is not None]
        return {
            "seconds": median_range([each.seconds for each in found]),
            "processor_seconds": median_range([each.processor for each in found]),
            "tokens_per_second": median_range([each.targets / each.seconds for each in found]),
            "mfu": median_range(mfu) if mfu else None,
            "memory_bytes": max(each.memory for each in found),
            "loss": found[-1].loss,
            "seconds_ratio": self.ratios(side, "seconds"),
            "processor_ratio": self.ratios(side, "processor"),
        }


def compare(
    config: Config,
    arguments: Sequence[str],
    *,
    sides: Sequence[str],
    rounds: int,
    steps: int,
    warmup: int,
    limit: float = 900.0,
) -> Comparison:
    """Measure all sides in alternating rounds. An interrupt ends it with what is measured by then.

    Args:
        config: what to train.
        arguments: of the command line that gave it: the file and its overrides.
        sides: of `SIDES`.
        limit: seconds after which a side's process is ended: a compilation and slow steps must fit in.

    Raises:
        ConfigError: not every side can train this.
    """
    _check(config)
    command = [*arguments, "--steps", str(steps), "--warmup", str(warmup)]
    result, left = Comparison(config, steps), list(sides)
    if TITAN in left and (problem := titan_problem()):
        result.skipped[TITAN] = problem
        left.remove(TITAN)
    with contextlib.suppress(KeyboardInterrupt):
        for number in range(rounds):
            result.rounds.append(found := {})
            for side in left if number % 2 == 0 else left[::-1]:
                text, fine = _run([*command, "--side", side], limit)
                if fine and text.startswith(SKIPPED):
                    result.skipped[side] = text.removeprefix(SKIPPED)
                elif fine and (measured := _parse(text)) is not None:
                    found[side] = measured
                    text = f"{measured.seconds:.4g}s a step"
                else:
                    result.failed[side] = text
                print(f"round {number + 1} of {rounds}, {side}: {text.splitlines()[-1]}", file=sys.stderr, flush=True)
            left = [side for side in left if side in found]
    everything = [found for each in result.rounds for found in each.values()]
    for name in ("parameters", "targets", "tokens_sum", "device", "torch"):
        values = {getattr(found, name) for found in everything}
        if len(values) > 1:
            result.failed["all"] = f"the sides differ in {name}: {values}"
    return result


def titan_problem() -> str | None:
    """Why torchtitan cannot be compared, or None."""
    try:
        version = metadata.version("torchtitan")
    except metadata.PackageNotFoundError:
        return "torchtitan is not installed"
    known = version.startswith(_TITAN)
    return None if known else f"torchtitan is {version}; known is {_TITAN}x: pip install 'torchtitan=={_TITAN}*'"


def _check(config: Config) -> None:
    """Raise ConfigError if other implementations would not compute the same."""
    model = config.model
    odd = [] if model.family == "llama" else [f"model.family = {model.family}"]
    if isinstance(model, LlamaModel):
        odd += ["model.head_size"] * (model.query_width != model.hidden) + ["model.tied_head"] * model.tied_head
        odd += ["model.rope_scaling"] * (model.rope_scaling is not None)
    odd += ["data.attention = document"] * (config.data.attention == "document")
    odd += ["train.z_loss"] * (config.train.z_loss > 0) + ["train.precision = fp16"] * (
        config.train.precision == "fp16"
    )
    odd += ["parallel.recompute"] * (config.parallel.recompute != 0)
    if odd:
        raise ConfigError(
            f"--peers cannot compare this configuration: {', '.join(odd)}",
            effect="other implementations would compute something else, or more",
            remedy="take it out, or override it on the command line",
        )
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError("--peers compares single processes", remedy="start it without torchrun")


def _run(arguments: list[str], limit: float) -> tuple[str, bool]:
    """Run a side. Returns the last line of its output and True, or the end of its error output and False."""
    # Not passed on otherwise: torchrun sets it for ranks.
    threads = {name: value for name, value in os.environ.items() if name == "OMP_NUM_THREADS"}
    try:
        done = run_module("fsdp_pretrain.bench", *arguments, environment=threads, limit=limit)
    except subprocess.TimeoutExpired:
        return f"not finished after {limit:.0f} seconds", False
    lines, last = _lines(done.stdout), _lines(done.stderr)[-_LAST_LINES:]
    if done.returncode == 0 and lines:
        return lines[-1], True
    return "\n".join(last) or f"exit code {done.returncode}", False


def _lines(text: bytes) -> list[str]:
    return [line for line in text.decode(errors="replace").splitlines() if line.strip()]


def _parse(line: str) -> Measured | None:
    """The result on a line; None if it is something else."""
    try:
        return Measured(**json.loads(line))
    except (ValueError, TypeError):
        return None


def render(result: Comparison) -> str:
    """The results as text for people."""
    config, shared = result.config, result.first
    lines = [f"{config.run.name}: no side could be measured"]
    if shared is not None:
        count, per_step = human_count(shared.parameters), human_count(shared.targets)
        how = f"{config.train.precision}, {'compiled' if shared.compiled else 'eager'}"
        lines = [
            f"{config.run.name}: {count} parameters, {how}, {shared.device}, torch {shared.torch}; {per_step} tokens a "
            f"step, {len(result.rounds)} rounds of {result.steps} steps, median [least to most]"
        ]
    for side in SIDES:
        if result.of(side):
            lines += _paragraph(result, side)
    lines += [f"  {side:<13} skipped: {reason}" for side, reason in result.skipped.items()]
    for side, text in result.failed.items():
        lines += [f"  {side:<13} failed:", *(f"    {line}" for line in text.splitlines())]
    return "\n".join(lines)


def _paragraph(result: Comparison, side: str) -> list[str]:
    found = result.summary(side)
    mfu = "" if found["mfu"] is None else f", MFU {found['mfu'][0]:.1%}"
    lines = [
        f"  {side:<13} step {show_range(found['seconds'])}s, processor {show_range(found['processor_seconds'])}s, "
        f"{human_count(found['tokens_per_second'][0])} tokens/s{mfu}, {human_bytes(found['memory_bytes'])}, "
        f"loss {found['loss']:.3f}"
    ]
    if side != OURS and found["seconds_ratio"] is not None:
        ratios = [show_range(found[name]) for name in ("seconds_ratio", "processor_ratio")]
        lines.append(f"  {'':<13} of ours: step {ratios[0]}, processor {ratios[1]}")
    return lines
