"""Acts on what operators ask of a live run with `control`: all ranks together, between two steps.

Rank 0 has the requests. That there are some reaches the others in the sums of a step; what they mean is then decided on
rank 0 and broadcast, when all ranks have issued the same steps. Every request is answered by a journal entry.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from fsdp_pretrain.record.files import now
from fsdp_pretrain.record.inbox import Request
from fsdp_pretrain.record.requests import Requests
from fsdp_pretrain.units import human_time
from fsdp_pretrain.watchdog.heartbeat.page import Phase

from .run_context import RunContext

_ROUND = 0.5
"""Seconds between two looks for requests while the ranks are held."""


@dataclass(frozen=True)
class Decided:
    """What all ranks do before the next step; None: nothing of this kind."""

    pause: Request | None = None
    resume: Request | None = None


class Steering:
    """The requests of one start. All ranks call its methods together."""

    def __init__(self, run: RunContext) -> None:
        self._run, self._world, self._recorder = run, run.world, run.recorder

    def decide(self, step: int, *, held: bool = False) -> Decided:
        """Decide on the pending requests, after `step` was issued on all ranks and none was issued after it."""
        return self._world.decide(lambda: self._judge(step, held))

    def _judge(self, step: int, held: bool) -> Decided:
        """On rank 0: the requests in the order in which they were sent."""
        decided = Decided()
        for request in self._run.inbox.take_steering():
            held_then = decided.pause is not None or (held and decided.resume is None)
            if request.verb == "pause" and not held_then:
                decided = replace(decided, pause=request)
            elif request.verb == "resume" and held_then:
                decided = replace(decided, pause=None) if decided.pause else replace(decided, resume=request)
            else:
                self.refuse(request, step, "the ranks are paused already" if held_then else "the ranks are not paused")
        return decided

    def refuse(self, request: Request, step: int, why: str) -> None:
        """Answer a request that changes nothing."""
        self._answer(request, step, f"{request.verb} refused: {why}", refused=why)

    def _answer(self, request: Request, step: int, text: str, **facts: object) -> None:
        because = f", because: {request.reason}" if request.reason else ""
        names = {"request": request.id, "asked": request.verb, "by": request.by, "reason": request.reason}
        self._recorder.event("control", text + because, step=step, **names, **facts)

    def hold(
        self, asked: Request, step: int, look: Callable[[], Requests], act: Callable[[Requests], Request | None]
    ) -> bool:
        """Hold all ranks idle after `step`. Returns whether to stop, else they were asked to go on.

        Args:
            asked: who asked for it, and why.
            look: returns this rank's pending requests.
            act: does what all ranks together were asked for meanwhile; returns a request to go on.
        """
        since, start = now(), time.monotonic()
        self._answer(asked, step, f"paused after step {step:_}", did="pause")
        held = {"since": since, "by": asked.by, "reason": asked.reason}
        self._recorder.status(force=True, state="paused", paused=held)
        released: Request | None = None
        try:
            while released is None:
                self._run.heartbeat.beat(Phase.PAUSED)
                time.sleep(_ROUND)
                found = self._world.gather(look())
                if any(each.stop for each in found):
                    return True
                together = Requests(save=any(each.save for each in found), steer=any(each.steer for each in found))
                released = act(together)
                self._recorder.status(state="paused")
        finally:
            text = f"after a pause of {human_time(time.monotonic() - start)}"
            if released is not None:
                self._answer(released, step, f"resumed after step {step:_}, {text}", did="resume")
            else:
                self._recorder.event("control", f"ends {text}", step=step, did="resume")
            self._recorder.status(force=True, state="running", paused=None)
        return False
