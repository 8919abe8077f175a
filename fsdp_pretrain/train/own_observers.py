"""Observers of extensions (`[[observers]]`), as one observer: what they measure is gathered together, and errors name
them. Of the callbacks of `Observer`, they have all but `beside`, `after_update`, `after_step` and `fields`.
"""

from __future__ import annotations

import traceback
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp_pretrain import extensions
from fsdp_pretrain.checkpoint.dcp import SaveResult
from fsdp_pretrain.checkpoint.state import TrainState
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.data.packing.loader import StepBatch
from fsdp_pretrain.errors import ConfigError, Exit, UserError
from fsdp_pretrain.models import Decoder
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.parallel.optimizer import Optimizer
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.step_record import StepRecord, number

from .observer import AgreedActions, Max, Observer, Sum, Verdict


@dataclass(frozen=True)
class ObserverContext:
    """What an observer of an extension may look at. It must change nothing that is learned."""

    config: Config
    world: World
    model: Decoder
    optimizer: Optimizer
    run: RunDir


class OwnObservers(Observer):
    """Calls the observers in the order of the configuration."""

    def __init__(self, context: ObserverContext) -> None:
        self._world = context.world
        self._observers: list[tuple[str, Observer]] = []
        for settings in context.config.observers:
            with _blamed_on(settings.use):
                made = extensions.part("observers", settings.use).load()(settings, context)
            self._observers.append((settings.use, made))
        names = [name for name, _ in self._observers]
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise ConfigError(f"[[observers]] has {twice[0]} twice", remedy="once is enough: its settings may be lists")
        self._names = deque[list[str]]()

    def tensors_of_each(self) -> dict[str, Mapping[str, Tensor]]:
        """The tensors that checkpoints keep, by the name of the observer."""
        kept = dict[str, Mapping[str, Tensor]]()
        for name, observer in self._observers:
            with _blamed_on(name):
                kept[name] = observer.tensors()
        return kept

    def mark_restored(self, names: Collection[str]) -> None:
        """Tell the observers whose tensors were loaded."""
        for name, observer in self._observers:
            observer.restored = name in names

    def after_update(self) -> Tensor | None:
        """Values of all measures of this step, fp64 [measures]. One gather over the shards, none without measures."""
        measures: dict[str, Sum | Max] = {}
        for name, observer in self._observers:
            with _blamed_on(name):
                measures |= {f"{name}/{key}": value for key, value in observer.measures().items()}
        if not measures:
            return None
        self._names.append(list(measures))
        # Each may be on any device, and a plain copy would make the host wait.
        device, values = self._world.device, (measure.value.detach() for measure in measures.values())
        local = [value.to(device, torch.float64, non_blocking=True) for value in values]
        shards = self._world.gather_shards(torch.stack(local))
        combined = shards.sum(0)
        for place, measure in enumerate(measures.values()):
            if isinstance(measure, Max):
                combined[place] = shards[:, place].amax()
        return combined

    def fields(self, measured: Tensor) -> Mapping[str, Any]:
        """The field `observed` of a step's record."""
        return {"observed": dict(zip(self._names.popleft(), map(number, measured.tolist()), strict=True))}

    def requests(self) -> Mapping[str, int]:
        """The sum of the requests of all."""
        asked = Counter[str]()
        self._each(lambda observer: asked.update(observer.requests()))
        return asked

    def start(self) -> None:
        self._each(lambda observer: observer.start())

    def batch_read(self, batch: StepBatch) -> None:
        self._each(lambda observer: observer.batch_read(batch))

    def before_step(self, step: int) -> None:
        self._each(lambda observer: observer.before_step(step))

    def before_update(self, state: TrainState, scale: Tensor | None) -> None:
        self._each(lambda observer: observer.before_update(state, scale))

    def judge(self, record: StepRecord) -> Verdict | None:
        """The findings of all, and the first other wish."""
        verdict = Verdict()
        for name, observer in self._observers:
            with _blamed_on(name):
                judged = observer.judge(record) or Verdict()
            verdict.findings += judged.findings
            verdict.rollback, verdict.error = verdict.rollback or judged.rollback, verdict.error or judged.error
        return verdict

    def recorded(self, record: StepRecord, verdict: Verdict) -> None:
        self._each(lambda observer: observer.recorded(record, verdict))

    def between_steps(self, agreed: AgreedActions) -> Exit | None:
        """The first reason to end."""
        reasons = list[Exit | None]()
        self._each(lambda observer: reasons.append(observer.between_steps(agreed)))
        return next((reason for reason in reasons if reason is not None), None)

    def saved(self, result: SaveResult) -> None:
        self._each(lambda observer: observer.saved(result))

    def reconfigured(self, config: Config) -> None:
        self._each(lambda observer: observer.reconfigured(config))

    def end(self, step: int) -> None:
        self._each(lambda observer: observer.end(step))

    def close(self) -> None:
        self._each(lambda observer: observer.close())

    def _each(self, call: Callable[[Observer], Any]) -> None:
        for name, observer in self._observers:
            with _blamed_on(name):
                call(observer)


@contextmanager
def _blamed_on(name: str) -> Iterator[None]:
    """Make any error of an observer a ConfigError that names it."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{frame.filename}:{frame.lineno}, {frame.name}"
        raise ConfigError(
            f"the observer {name} raised {type(error).__name__}: {error} ({place})",
            effect="the run ends: what it would have measured or decided is missing",
            remedy="mend it, or leave it out of [[observers]]",
        ) from error
