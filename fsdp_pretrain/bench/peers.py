"""The trainer beside other implementations of its model: `python -m fsdp_pretrain.bench CONFIG --peers`.

In every round each side trains in a fresh process, the next round in the opposite order. So no side inherits memory,
caches or a warm device from another, two models never have to fit on a GPU together, and a neighbour's load falls on
all sides alike. Compare the ratios: they are computed within rounds.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.model import LlamaModel
from fsdp_pretrain.errors import ConfigError

from . import children
from .times import MeasuredSteps, Spread

OURS = "ours"
SIDES = (OURS, "plain", "transformers")


@dataclass
class Comparison:
    """All rounds.

    Attributes:
        rounds: results by side.
        failed: reasons, by side; such a side is not started again.
    """

    rounds: list[dict[str, MeasuredSteps]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def ratio(self, side: str) -> Spread | None:
        """A side's step time divided by ours in the same round; None without a common round."""
        both = [
            each[side].speed.seconds_per_step / each[OURS].speed.seconds_per_step
            for each in self.rounds
            if {side, OURS} <= each.keys()
        ]
        return Spread.of(both) if both else None


def compare(config: Config, command: Sequence[str], *, rounds: int, limit: float) -> Comparison:
    """Measure all sides in alternating rounds. An interrupt ends it with what is measured by then.

    Args:
        config: what to train.
        command: arguments of the benchmark that give it.
        limit: seconds after which a side's process is ended.

    Raises:
        ConfigError: not every side can train this.
    """
    _check(config)
    result, left = Comparison(), list(SIDES)
    with contextlib.suppress(KeyboardInterrupt):
        for number in range(rounds):
            result.rounds.append(found := {})
            for side in left if number % 2 == 0 else left[::-1]:
                times = children.measure([*command, "--side", side], limit=limit)
                if isinstance(times, str):
                    result.failed[side] = times
                else:
                    found[side] = times
                print(f"round {number + 1} of {rounds}, {side}: {times}", file=sys.stderr, flush=True)
            left = [side for side in left if side in found]
    return result


def _check(config: Config) -> None:
    """Raise ConfigError if other implementations would not compute the same."""
    model, train = config.model, config.train
    odd = [] if model.family == "llama" else [f"model.family = {model.family}"]
    if isinstance(model, LlamaModel):
        odd += ["model.head_size"] * (model.query_width != model.hidden) + ["model.tied_head"] * model.tied_head
        odd += ["model.rope_scaling"] * (model.rope_scaling is not None)
    odd += ["data.attention = document"] * (config.data.attention == "document")
    odd += ["train.z_loss"] * (train.z_loss > 0) + ["train.precision = fp16"] * (train.precision == "fp16")
    odd += ["parallel.recompute"] * (config.parallel.recompute != 0)
    if odd:
        raise ConfigError(
            f"--peers cannot compare this configuration: {', '.join(odd)}",
            effect="other implementations would compute something else, or more",
            remedy="take it out, or override it on the command line",
        )


def render(result: Comparison) -> Iterator[str]:
    """The results for people, in lines."""
    shared = next((times for each in result.rounds for times in each.values()), None)
    if shared is None:
        yield "no side could be measured"
    else:
        yield (
            f"{shared.run}: {shared.dtype}, {'compiled' if shared.compiled else 'eager'}, {shared.speed.device}, torch "
            f"{shared.torch}; {len(result.rounds)} rounds of {shared.steps} steps, median [least to most]"
        )
    for side in SIDES:
        if found := [each[side] for each in result.rounds if side in each]:
            ratio = "" if side == OURS or result.ratio(side) is None else f", {result.ratio(side)} of ours"
            seconds = Spread.of([each.speed.seconds_per_step for each in found])
            yield f"  {side:<13} step {seconds}s{ratio}; loss {found[-1].loss:.3f}"
            yield f"  {'':<13} the last: {found[-1]}"
    yield from (f"  {side:<13} failed: {reason}" for side, reason in result.failed.items())
