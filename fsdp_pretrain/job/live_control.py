"""Acts on what operators ask of a live run with `control`: all ranks together, between two steps.

Rank 0 has the requests. That there are some reaches the others in the sums of a step; what they mean is then decided on
rank 0 and broadcast, when all ranks have issued the same steps. A change is in `overrides.toml` before any rank acts on
it, so a killed run has it wholly or not at all. Every request is answered by a journal entry.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from fsdp_pretrain.config import live_set
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.timeline import TimelineEntry
from fsdp_pretrain.data.packing.position import Position
from fsdp_pretrain.errors import ConfigError, Exit, StorageError, UserError
from fsdp_pretrain.files import sync
from fsdp_pretrain.heartbeat import Phase
from fsdp_pretrain.run import overrides
from fsdp_pretrain.run.files import now, replace_file
from fsdp_pretrain.run.overrides import Overrides
from fsdp_pretrain.run.requests import Request, Requests
from fsdp_pretrain.train.loop import Loop
from fsdp_pretrain.train.observer import AgreedActions, Observer
from fsdp_pretrain.units import human_time

from .profiling import StepProfiler
from .run_context import RunContext

_ROUND = 0.5
"""Seconds between two looks for requests while the ranks are held."""


@dataclass
class Decided:
    """What all ranks do before the next step: add timeline entries, then be held (or, if they are, go on)."""

    entries: list[TimelineEntry] = field(default_factory=list)
    pause: Request | None = None
    resume: Request | None = None


class LiveControl(Observer):
    """The requests of one start.

    Args:
        run: shared context of the start.
        guard: raises UserError if this job may not write into the run directory any more.
        profiler: gets the requests for traces.

    Attributes:
        loop: that it steers, set before training.
    """

    loop: Loop

    def __init__(self, run: RunContext, guard: Callable[[], None], profiler: StepProfiler) -> None:
        self._run, self._world, self._recorder, self._guard = run, run.world, run.recorder, guard
        self._profiler, self._config = profiler, run.config

    def requests(self) -> Mapping[str, int]:
        asked = self._run.inbox.take()
        profile = self._profiler.ask(asked.profile)
        return {"stop": asked.stop, "save": asked.save, "profile": profile, "steer": asked.steer}

    def between_steps(self, agreed: AgreedActions) -> Exit | None:
        if agreed.save or agreed.stop:
            self._acknowledge(agreed.step)
        return Exit.RESUME if agreed.stop or (agreed.steer and self._steer()) else None

    def end(self, step: int) -> None:
        self._acknowledge(step)

    def _steer(self) -> bool:
        """Do what operators asked for, before the next step; whether to stop."""
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

    def _decide(self, *, held: bool = False) -> Decided:
        """Decide on the pending requests, after the same step was issued on all ranks, and go on with what was set."""
        decided = self._world.decide(lambda: self._judge(self.loop.trainer.state, held))
        for entry in decided.entries:
            self._config = live_set.steer(self._config, entry)
        if decided.entries:
            self.loop.trainer.reconfigure(self._config)
        return decided

    def _judge(self, here: Position, held: bool) -> Decided:
        """On rank 0: the requests in the order in which they were sent."""
        decided, config, step = Decided(), self._config, here.step
        for request in self._run.inbox.take_steering():
            holds = decided.pause is not None or (held and decided.resume is None)
            if request.verb == "set":
                try:
                    entry, config = self._set(request, here, config)
                    decided.entries.append(entry)
                except StorageError:
                    raise
                except UserError as error:
                    self._refuse(request, step, error.cause)
            elif request.verb == "pause" and not holds:
                decided.pause = request
            elif request.verb == "resume" and holds and decided.pause is None:
                decided.resume = request
            else:
                self._refuse(request, step, "the ranks are paused already" if holds else "the ranks are not paused")
        return decided

    def _acknowledge(self, step: int) -> None:
        """On rank 0: answer the requests to save or to stop, which all ranks now do."""
        for request in self._run.inbox.take_orders():
            what = "save" if request.verb == "save" else "save and stop"
            self._answer(request, step, f"all ranks {what} after step {step:_}", did=request.verb)

    def _refuse(self, request: Request, step: int, why: str) -> None:
        """Answer a request that changes nothing."""
        self._answer(request, step, f"{request.verb} refused: {why}", refused=why)

    def _answer(self, request: Request, step: int, text: str, **facts: object) -> None:
        because = f", because: {request.reason}" if request.reason else ""
        names = {"request": request.id, "asked": request.verb, "by": request.by, "reason": request.reason}
        self._recorder.event("control", text + because, step=step, **names, **facts)

    # ------------------------------------------------------------------ set

    def _set(self, request: Request, here: Position, before: Config) -> tuple[TimelineEntry, Config]:
        """On rank 0: make a change last. Returns it, and the configuration with it. Raises UserError: it is refused."""
        at, batch = here.step if request.at is None else request.at, before.schedule.batch
        if at < here.step:
            raise ConfigError(f"step {at + 1:_} has begun: the run is at step {here.step:_}")
        place = batch.ahead(here.consumed, at - here.step)
        entry = live_set.read_entry(request.changes, before.schedule, at=place, reason=request.reason)
        after = live_set.steer(before, entry)
        _refuse_unseen(request, entry, before, place)
        was, is_ = (live_set.values_of(entry, config, batch.ahead(place, 1)) for config in (before, after))
        self._guard()
        standing = self._make_lasting(entry, after)
        values = ", ".join(f"{key} {was[key]} -> {is_[key]}" for key in was)
        text = f"set {', '.join(request.changes)} after step {at:_}; in step {at + 1:_}: {values}"
        facts = {"at": at, "consumed": place, "before": was, "after": is_, "entry": entry.model_dump(mode="json")}
        self._answer(request, here.step, text, did="set", **facts)
        self._recorder.status(force=True, overrides=str(standing))
        return entry, after

    def _make_lasting(self, entry: TimelineEntry, after: Config) -> Overrides:
        """From here on every start has it. Returns what lasts. Raises ConfigError: nothing was changed; StorageError:
        this start cannot go on."""
        run = self._recorder.run
        try:
            standing = overrides.add_entry(run, entry)
        except OSError as error:
            raise ConfigError(f"cannot write {run.overrides}: {error.strerror}") from None
        try:  # what this start trains with must be known later; else it ends, and the next one has the change
            replace_file(run.segment(self._recorder.number) / "config.toml", after.to_toml())
        except OSError as error:
            gone = StorageError(f"cannot write to {run.path}: {error.strerror}")
            gone.exit = Exit.RESUME
            raise gone from None
        with suppress(OSError):  # the first makes it outlive a power failure; the next start writes the second again
            sync(run.path)
            replace_file(run.config, after.to_toml())
        return standing

    # ------------------------------------------------------------------ pause

    def _hold(self, asked: Request) -> bool:
        """Hold all ranks idle, as `asked`. Returns whether to stop, else they were asked to go on."""
        since, start, step = now(), time.monotonic(), self.loop.step
        self._answer(asked, step, f"paused after step {step:_}", did="pause")
        held = {"since": since, "by": asked.by, "reason": asked.reason}
        self._recorder.status(force=True, state="paused", paused=held)
        released: Request | None = None
        try:
            while released is None:
                self._run.heartbeat.beat(Phase.PAUSED)
                time.sleep(_ROUND)
                found = self._world.gather(self._look_while_held())
                if any(each.stop for each in found):
                    self._acknowledge(step)
                    return True
                if any(each.save for each in found):
                    self._save_while_held()
                if any(each.steer for each in found):
                    released = self._decide(held=True).resume
                self._recorder.status(state="paused")
        finally:
            text = f"after a pause of {human_time(time.monotonic() - start)}"
            if released is not None:
                self._answer(released, step, f"resumed after step {step:_}, {text}", did="resume")
            else:
                self._recorder.event("control", f"ends {text}", step=step, did="resume")
            self._recorder.status(force=True, state="running", paused=None)
        return False

    def _look_while_held(self) -> Requests:
        """This rank's pending requests; a failed save that is to be repeated is one to save."""
        asked, (_, retry, _) = self._run.inbox.take(), self.loop.saves.signals()
        self._profiler.ask(asked.profile)
        return replace(asked, save=asked.save or retry)

    def _save_while_held(self) -> None:
        loop = self.loop
        self._acknowledge(loop.step)
        if loop.saves.saved_step != loop.step:
            loop.checkpoint()
            loop.saves.finish()


def _refuse_unseen(request: Request, entry: TimelineEntry, before: Config, place: int) -> None:
    """Raise ConfigError if somebody else has changed what the sender of a set had in the preview."""
    shown = live_set.values_of(entry, before, place).keys()
    for other in before.timeline[request.seen :] if request.seen is not None else ():
        if changed := shown & live_set.values_of(other, before, place).keys():
            raise ConfigError(
                f"{', '.join(sorted(changed))} is no longer as in the preview: {other} was set meanwhile; look at the "
                "new preview"
            )
