"""What statistics of parameter groups cost: `python -m fsdp_pretrain.bench CONFIG --statistics`.

Three trainers in one process take turns, in rotating order: one without statistics, one that measures the groups in
every step, and one that measures logits and attention scores as well. The difference is what one measurement costs;
divided by the default interval, it is the share of the time of training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.sections import RecordSection
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.train.trainer import Trainer

from .ranges import median_range, show_percent, show_range
from .turns import turn

_KINDS: dict[str, dict[str, Any]] = {
    "off": {"statistics_every": "0 steps"},
    "groups": {"statistics_every": "1 step"},
    "maxima": {"statistics_every": "1 step", "activation_maxima": True},
}


def measure(
    build: Callable[..., tuple[Trainer, Any]], config: Config, world: World, *, rounds: int, steps: int, warmup: int
) -> dict[str, Any]:
    """Time turns of all kinds. Collective.

    Args:
        build: returns a trainer and its recorder, see `steps.build`.
        config: of the run.
        world: all ranks.
        rounds: to measure, after one that is not counted.
        steps: of each turn.
        warmup: steps of all trainers before.
    """
    trainers = {kind: build(_with(config, changes), world)[0] for kind, changes in _KINDS.items()}
    for trainer in trainers.values():
        turn(trainer, warmup)
    found = []
    kinds = list(_KINDS)
    for number in range(rounds + 1):
        order = [kinds[(number + place) % len(kinds)] for place in range(len(kinds))]
        turns = {kind: turn(trainers[kind], steps) for kind in order}
        found.append(turns)
    found = found[1:]
    interval = RecordSection.model_fields["statistics_every"].get_default().value
    costs = {
        kind: [[each[kind][part] / each["off"][part] - 1 for each in found] for part in (0, 1)]
        for kind in ("groups", "maxima")
    }
    return {
        "rounds": rounds,
        "steps": steps,
        "interval": interval,
        "step_seconds": median_range([each["off"][0] / steps for each in found]),
        **{f"{kind}_steps": median_range(wall) for kind, (wall, _) in costs.items()},
        **{f"{kind}_processor_steps": median_range(used) for kind, (_, used) in costs.items()},
        **{f"{kind}_share": median_range([each / interval for each in wall]) for kind, (wall, _) in costs.items()},
        **{
            f"{kind}_processor_share": median_range([each / interval for each in used])
            for kind, (_, used) in costs.items()
        },
    }


def _with(config: Config, changes: dict[str, Any]) -> Config:
    return config.model_copy(
        update={"record": RecordSection(**{**config.record.model_dump(exclude=set(changes)), **changes})}
    )


def render(result: dict[str, Any]) -> str:
    """The results as text for people."""
    lines = [
        f"{result['rounds']} rounds of {result['steps']} steps, median [least to most]:",
        f"  step                  {show_range(result['step_seconds'])}s",
    ]
    for kind, name in (("groups", "groups"), ("maxima", "groups and maxima")):
        cost, share = result[f"{kind}_steps"], result[f"{kind}_share"]
        processor = result[f"{kind}_processor_share"]
        lines += [
            f"  {name:<21} {show_range(cost)} steps; once in {result['interval']} steps "
            f"{show_percent(share)} of the time of training, processor {show_percent(processor)}"
        ]
    return "\n".join(lines)
