"""Start again, or end, and with which code: a pure function of how the starts so far ended. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import Exit
from ..units import human_time
from ..watchdog_sections import LaunchSection
from .outcome import Outcome

_SAME_STEP = 2
"""Deaths so many recorded steps apart are at the same place: numbers of a device come two steps late."""


@dataclass(frozen=True)
class Ended:
    """One start: when it ended (seconds of a clock that only goes forward), how, what was verified before it, and how
    many seconds it took."""

    at: float
    outcome: Outcome
    verified_before: int
    seconds: float = 0.0

    @property
    def progressed(self) -> bool:
        """Whether it left a newer verified checkpoint."""
        return self.outcome.verified > self.verified_before


@dataclass(frozen=True)
class Decision:
    """What now.

    Attributes:
        code: end with it; None: start again.
        reason: why, for people.
        pause: seconds to wait before the start.
        overruled: it is the launcher that decided to end, not the run.
    """

    code: int | None
    reason: str
    pause: float = 0.0
    overruled: bool = False


def decide(history: Sequence[Ended], config: LaunchSection, *, asked: bool, host: str, elastic: bool) -> Decision:
    """What follows the last start.

    Args:
        history: all starts of this launcher, oldest first, at least one.
        config: limits.
        asked: this launcher was told to stop.
        host: name of this host.
        elastic: the job may go on with fewer nodes.
    """
    last = history[-1].outcome
    if last.code in (Exit.COMPLETE, Exit.REFUSED, Exit.NEEDS_PERSON):
        return Decision(last.code, last.reason)
    if last.code == Exit.RESUME_AVOIDING_HOSTS and (asked or not elastic or host in last.avoid):
        return Decision(last.code, last.reason)
    if asked or last.asked:
        return Decision(int(Exit.RESUME), last.reason if last.asked else f"asked to stop; {last.reason}")
    if not last.met:
        return _meet_again(history, config)
    history = [ended for ended in history if ended.outcome.met]
    fruitless = 0
    for ended in reversed(history):
        if ended.progressed:
            break
        fruitless += 1
    place = same_place(history)
    if fruitless >= config.attempts:
        cause = f"{fruitless} starts in a row ended without a newer verified checkpoint, the last: {last.reason}"
        return Decision(int(Exit.NEEDS_PERSON), cause + place, overruled=True)
    since = history[-1].at - config.restart_window.value
    recent = sum(ended.at >= since for ended in history)
    if recent > config.restarts:
        cause = f"{config.restarts} restarts within {human_time(config.restart_window.value)}, the last: {last.reason}"
        return Decision(int(Exit.NEEDS_PERSON), cause + place, overruled=True)
    pauses = config.pauses
    pause = pauses[min(max(0, fruitless - 1), len(pauses) - 1)].value
    return Decision(None, last.reason + place, pause)


def _meet_again(history: Sequence[Ended], config: LaunchSection) -> Decision:
    """The nodes did not find each other: no fault of the run. All try for as long as the one that waits longest."""
    alone = []
    for ended in reversed(history):
        if ended.outcome.met:
            break
        alone.append(ended)
    waited = alone[0].at - alone[-1].at + alone[-1].seconds
    if waited >= config.join_timeout.value:
        text = f"the nodes did not find each other within {human_time(waited)}: {history[-1].outcome.reason}"
        return Decision(int(Exit.RESUME), text)
    return Decision(None, f"the nodes did not find each other: {history[-1].outcome.reason}", config.pauses[0].value)


def same_place(history: Sequence[Ended]) -> str:
    """What to say if the last two starts died at the same step; else empty."""
    if len(history) < 2:
        return ""
    steps = [ended.outcome.step for ended in history[-2:]]
    if steps[0] is None or steps[1] is None or abs(steps[1] - steps[0]) > _SAME_STEP:
        return ""
    last = history[-1].outcome
    batches = ", ".join(f"step {each['step']} samples {each['first']}:{each['cursor']}" for each in last.ahead)
    look = f"look at these batches: fsdp-pretrain where RUN --step {last.ahead[0]['step']}" if last.ahead else ""
    return f"; like the start before it died after step {steps[1]} ({batches}): {look}"
