"""Restart or end, and with which exit code: a pure function of how earlier starts ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from fsdp_pretrain.config.operations import LaunchSection
from fsdp_pretrain.errors import Exit
from fsdp_pretrain.run.step_record import LAG
from fsdp_pretrain.units import human_time

from .outcome import StartOutcome

PAUSES = (10.0, 60.0, 300.0)
"""Seconds before the first, second, ... restart after starts without progress; the last one is repeated."""
RESTARTS, _WINDOW_SECONDS = 5, 1800.0
"""Restarts that are allowed within this time, with or without progress."""


@dataclass(frozen=True)
class RestartDecision:
    """What to do now: end with `code`, or if None restart after `pause` seconds. `overruled`: the decision to
    end is the launcher's, not the run's."""

    code: int | None
    reason: str
    pause: float = 0.0
    overruled: bool = False


def decide(
    history: Sequence[StartOutcome], config: LaunchSection, *, asked: bool, host: str, elastic: bool
) -> RestartDecision:
    """What follows the last start.

    Args:
        history: all starts of this launcher, oldest first, at least one.
        asked: this launcher was asked to stop.
        host: name of this host.
        elastic: the job may continue with fewer nodes.
    """
    last = history[-1]
    if last.code in (Exit.COMPLETE, Exit.REFUSED, Exit.NEEDS_PERSON):
        return RestartDecision(last.code, last.reason)
    if last.code == Exit.RESUME_AVOIDING_HOSTS and (asked or last.asked or not elastic or host in last.avoid):
        return RestartDecision(last.code, last.reason)
    if asked or last.asked:
        return RestartDecision(int(Exit.RESUME), last.reason if last.asked else f"asked to stop; {last.reason}")
    if not last.joined:
        return _retry_rendezvous(history, config)
    history = [ended for ended in history if ended.joined]
    fruitless = len(list(takewhile(lambda ended: ended.verified <= ended.verified_before, reversed(history))))
    recent = sum(ended.at >= history[-1].at - _WINDOW_SECONDS for ended in history)
    reason, cause = last.reason + same_place(history), ""
    if fruitless >= config.attempts:
        cause = f"{fruitless} starts in a row ended without a newer verified checkpoint"
    elif recent > RESTARTS:
        cause = f"{RESTARTS} restarts within {human_time(_WINDOW_SECONDS)}"
    if cause:
        return RestartDecision(int(Exit.NEEDS_PERSON), f"{cause}, the last: {reason}", overruled=True)
    return RestartDecision(None, reason, PAUSES[min(max(0, fruitless - 1), len(PAUSES) - 1)])


def _retry_rendezvous(history: Sequence[StartOutcome], config: LaunchSection) -> RestartDecision:
    """Retry a failed rendezvous until `join_timeout` is over; it does not count as a failed start of the run."""
    first, last = list(takewhile(lambda ended: not ended.joined, reversed(history)))[-1], history[-1]
    waited, reason = last.at - first.at + first.seconds, last.reason
    if waited >= config.join_timeout.value:
        reason = f"the nodes did not find each other within {human_time(waited)}: {reason}"
        return RestartDecision(int(Exit.RESUME), reason)
    return RestartDecision(None, f"the nodes did not find each other: {reason}", PAUSES[0])


def same_place(history: Sequence[StartOutcome]) -> str:
    """A message if the last two starts died at the same step, else an empty text."""
    last = history[-1]
    before = history[-2].step if len(history) > 1 else None
    if before is None or last.step is None or abs(last.step - before) > LAG:  # records lag behind by up to LAG steps
        return ""
    batches = ", ".join(f"step {batch['step']} samples {batch['first']}:{batch['cursor']}" for batch in last.ahead)
    look = f"look at these batches: fsdp-pretrain where RUN --step {last.ahead[0]['step']}" if last.ahead else ""
    return f"; like the start before, it died after step {last.step} ({batches}): {look}"
