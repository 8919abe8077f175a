"""Places of a run worth a line in the chronicle, computed from its configuration before it gets there.

Spikes and slow-downs are often put down to what happened to end at the same time: a warm-up, a batch ramp, a change of
the mixture. So the chronicle names these places when they are passed, beside tenths of the run and round token counts.
"""

from __future__ import annotations

from ..config import Config
from ..units import human_count

_FEWEST_TOKENS = 10**9


def milestones(config: Config) -> list[tuple[int, str]]:
    """(consumed samples at which it is reached, what it is), in order."""
    schedule = config.schedule
    found = [(-(-schedule.total * tenth // 10), f"{tenth * 10}% of the run") for tenth in range(1, 10)]
    if schedule.warmup:
        found.append((schedule.warmup, f"the warm-up ends: the learning rate is {schedule.lr_at(schedule.warmup):.3g}"))
    if schedule.decays and schedule.decay < schedule.total:
        found.append((schedule.decay, f"the learning rate has come down to {schedule.lr_at(schedule.decay):.3g}"))
    if schedule.batch.ramp is not None:
        full = schedule.batch.stages[-1].consumed
        found.append((full, f"the batch ramp ends: {schedule.batch.full:_} samples a step from here on"))
    for place in schedule.shrink.places if schedule.shrink is not None else []:
        found.append((place, f"embedding shrink is {schedule.ramps_at(place)['embedding_shrink']:g}"))
    tokens, unit = _FEWEST_TOKENS, _FEWEST_TOKENS
    while tokens <= schedule.tokens(schedule.total):
        found.append((-(-tokens // schedule.sequence_length), f"{human_count(tokens)} tokens"))
        factor = {1: 2, 2: 5, 5: 10}[tokens // unit]
        tokens, unit = unit * factor, unit * 10 if factor == 10 else unit
    return sorted(dict.fromkeys((place, text) for place, text in found if 0 < place < schedule.total))
