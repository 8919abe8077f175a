"""Carries out the requests of operators to a live run (`control`): all ranks together, between two steps.

Rank 0 receives the requests. The other ranks learn from the sums of a step that there are some; when all ranks have
issued the same steps, rank 0 decides what to do and broadcasts it. A change is in `overrides.toml` before any rank acts
on it, so a killed run has it wholly or not at all. Every request is answered by a journal entry.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from fsdp_pretrain.config import live_set
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.timeline import TimelineEntry
from fsdp_pretrain.data.packing.position import Position
from fsdp_pretrain.errors import ConfigError, Exit, StorageError, UserError, raising
from fsdp_pretrain.files import sync
from fsdp_pretrain.heartbeat import Phase
from fsdp_pretrain.run import overrides
from fsdp_pretrain.run.files import now, replace_file
from fsdp_pretrain.run.overrides import Overrides
from fsdp_pretrain.run.recorder import Recorder
from fsdp_pretrain.run.requests import Request, Requests
from fsdp_pretrain.train.loop import Loop
from fsdp_pretrain.train.observer import AgreedActions, Observer
from fsdp_pretrain.units import human_time

from .profiling import StepProfiler
from .run_context import RunContext

_ROUND = 0.5
"""Seconds between two checks for requests while training is paused."""


@dataclass
class ControlActions:
    """Actions of all ranks before the next step: add timeline entries, then pause, or resume if they are paused."""

    entries: list[TimelineEntry] = field(default_factory=list)
    pause: Request | None = None
    resume: Request | None = None


def answer(recorder: Recorder, request: Request, step: int, text: str, **facts: object) -> None:
    """Answer a request in the journal; `facts` has `did` or `refused`."""
    because = f", because: {request.reason}" if request.reason else ""
    names = {"request": request.id, "asked": request.verb, "by": request.by, "reason": request.reason}
    recorder.event("control", text + because, step=step, **names, **facts)


class LiveControl(Observer):
    """Acknowledges, carries out or refuses the requests to one start.

    Args:
        guard: raises UserError if this job may not write into the run directory any more.
        profiler: receives the requests for traces.
    """

    loop: Loop  # the training loop, set before training

    def __init__(self, run: RunContext, guard: Callable[[], None], profiler: StepProfiler) -> None:
        self._run, self._guard, self._profiler = run, guard, profiler
        self._world, self._recorder = run.world, run.recorder
        self._config = run.config  # with all changes so far

    def requests(self) -> Mapping[str, int]:
        pending = self._run.inbox.take()
        profile = self._profiler.ask(pending.profile)
        return {"stop": pending.stop, "save": pending.save, "profile": profile, "steer": pending.steer}

    def between_steps(self, agreed: AgreedActions) -> Exit | None:
        if agreed.save or agreed.stop:
            self._acknowledge(agreed.step)
        return Exit.RESUME if agreed.stop or (agreed.steer and self._steer()) else None

    def end(self, step: int) -> None:
        self._acknowledge(step)

    def _steer(self) -> bool:
        """Carry out the pending requests before the next step. Returns whether to stop."""
        loop, pause = self.loop, self._decide().pause
        if pause is None:
            return False
        start = time.perf_counter()
        loop.collect(keep=0)
        if loop.rolls_back:
            self._refuse(pause, loop.step, "the run goes back to an earlier step")
            return False
        loop.finish_save()
        stop = self._hold(pause)
        seconds = time.perf_counter() - start
        loop.saves.exclude_pause(seconds)
        loop.trainer.clock.resume_after(seconds)
        return stop

    def _decide(self, *, paused: bool = False) -> ControlActions:
        """Decide on the pending requests, when all ranks have issued the same step, and apply the changes among them.

        `paused`: whether training is paused now.
        """
        actions = self._world.decide(lambda: self._decide_here(self.loop.trainer.state, paused))
        for entry in actions.entries:
            self._config = live_set.steer(self._config, entry)
        if actions.entries:
            self.loop.trainer.reconfigure(self._config)
        return actions

    def _decide_here(self, here: Position, paused: bool) -> ControlActions:
        """On rank 0: the actions for the pending requests, in the order in which they were sent; refuses some."""
        actions, config, step = ControlActions(), self._config, here.step
        for request in self._run.inbox.take_steering():
            pauses = actions.pause is not None or (paused and actions.resume is None)
            if request.verb == "set":
                try:
                    entry, config = self._set(request, here, config)
                    actions.entries.append(entry)
                except StorageError:
                    raise
                except UserError as error:
                    self._refuse(request, step, error.cause)
            elif request.verb == "pause" and actions.resume is not None:
                self._refuse(actions.resume, step, "a request to pause came before the ranks went on")
                actions.resume = None
                self._answer(request, step, f"still paused after step {step:_}", did="pause")
            elif request.verb == "resume" and actions.pause is not None:
                self._refuse(actions.pause, step, "a request to resume came before the ranks paused")
                actions.pause = None
                self._answer(request, step, f"goes on after step {step:_}, without a pause", did="resume")
            elif request.verb == "pause" and not pauses:
                actions.pause = request
            elif request.verb == "resume" and pauses:
                actions.resume = request
            else:
                self._refuse(request, step, "the ranks are paused already" if pauses else "the ranks are not paused")
        return actions

    def _acknowledge(self, step: int) -> None:
        """On rank 0: answer the requests to save or to stop, which all ranks now do."""
        for request in self._run.inbox.take_orders():
            what = "save" if request.verb == "save" else "save and stop"
            self._answer(request, step, f"all ranks {what} after step {step:_}", did=request.verb)

    def _refuse(self, request: Request, step: int, why: str) -> None:
        """Answer a request that changes nothing."""
        self._answer(request, step, f"{request.verb} refused: {why}", refused=why)

    def _answer(self, request: Request, step: int, text: str, **facts: object) -> None:
        answer(self._recorder, request, step, text, **facts)

    # ------------------------------------------------------------------ set

    def _set(self, request: Request, here: Position, before: Config) -> tuple[TimelineEntry, Config]:
        """On rank 0: check and persist a change. Returns it, and the configuration with it.

        Raises:
            UserError: the request is refused.
            StorageError: see `_persist`.
        """
        at, batch = here.step if request.at is None else request.at, before.schedule.batch
        if at < here.step:
            raise ConfigError(f"step {at + 1:_} has begun: the run is at step {here.step:_}")
        place = batch.ahead(here.consumed, at - here.step)
        entry = live_set.read_entry(request.changes, before.schedule, at=place, reason=request.reason)
        after = live_set.steer(before, entry)
        _refuse_unseen(request, entry, before, place)
        was, is_ = (live_set.values_of(entry, config, batch.ahead(place, 1)) for config in (before, after))
        self._guard()
        lasting = self._persist(entry, after)
        values = ", ".join(f"{key} {_short(was[key])} -> {_short(is_[key])}" for key in was)
        text = f"set {', '.join(request.changes)} after step {at:_}; in step {at + 1:_}: {values}"
        facts = {"at": at, "consumed": place, "before": was, "after": is_, "entry": entry.model_dump(mode="json")}
        self._answer(request, here.step, text, did="set", **facts)
        self._recorder.status(force=True, overrides=str(lasting))
        return entry, after

    def _persist(self, entry: TimelineEntry, after: Config) -> Overrides:
        """Write a change where this start and all later ones find it. Returns all overrides of the run.

        Raises:
            ConfigError: nothing was changed.
            StorageError: this start cannot continue; the next one has the change.
        """
        run = self._recorder.run
        with raising(ConfigError, f"cannot write {run.overrides}"):
            lasting = overrides.add_entry(run, entry)
        try:  # a segment must record what it trains with
            replace_file(run.segment(self._recorder.number) / "config.toml", after.to_toml())
        except OSError as error:
            failure = StorageError(f"cannot write to {run.path}: {error.strerror}")
            failure.exit = Exit.RESUME
            raise failure from None
        with suppress(OSError):  # against a power failure; and a file that the next start writes again
            sync(run.path)
            replace_file(run.config, after.to_toml())
        return lasting

    # ------------------------------------------------------------------ pause

    def _hold(self, request: Request) -> bool:
        """Pause training on all ranks. Returns whether a request to stop ended the pause, instead of one to resume."""
        since, start, step = now(), time.monotonic(), self.loop.step
        facts = {"since": since, "by": request.by, "reason": request.reason}
        self._recorder.status(force=True, state="paused", paused=facts)  # before the answer: who has it may look
        self._answer(request, step, f"paused after step {step:_}", did="pause")
        released: Request | None = None
        try:
            if self.loop.take_save_request():
                self._save_while_held()
            while released is None:
                self._run.heartbeat.beat(Phase.PAUSED)
                time.sleep(_ROUND)
                pending = self._world.gather(self._look_while_held())
                if any(requests.stop for requests in pending):
                    self._acknowledge(step)
                    return True
                if any(requests.save for requests in pending):
                    self._save_while_held()
                if any(requests.steer for requests in pending):
                    released = self._decide(paused=True).resume
                self._recorder.status(state="paused")
        finally:
            text = f"after a pause of {human_time(time.monotonic() - start)}"
            self._recorder.status(force=True, state="running", paused=None)
            if released is not None:
                self._answer(released, step, f"resumed after step {step:_}, {text}", did="resume")
            else:
                self._recorder.event("control", f"ends {text}", step=step, did="resume")
        return False

    def _look_while_held(self) -> Requests:
        """This rank's pending requests; a failed save that is due for a retry counts as a request to save."""
        pending, (_, retry, _) = self._run.inbox.take(), self.loop.saves.signals()
        self._profiler.ask(pending.profile)
        return replace(pending, save=pending.save or retry)

    def _save_while_held(self) -> None:
        loop = self.loop
        self._acknowledge(loop.step)
        if loop.saves.saved_step != loop.step:
            loop.checkpoint()
            loop.saves.finish()


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _refuse_unseen(request: Request, entry: TimelineEntry, before: Config, place: int) -> None:
    """Raise ConfigError if a value that a `set` changes is no longer as its sender saw it in the preview."""
    shown = live_set.values_of(entry, before, place).keys()
    for other in before.timeline[request.seen :] if request.seen is not None else ():
        if changed := shown & live_set.values_of(other, before, place).keys():
            raise ConfigError(
                f"{', '.join(sorted(changed))} is no longer as in the preview: {other} was set meanwhile; look at the "
                "new preview"
            )
