"""Lion (arXiv 2302.06675), and histograms of the sizes of gradients."""

import json
from collections.abc import Mapping, Sequence

from torch import Tensor

from fsdp_pretrain.checkpoint.state import TrainState
from fsdp_pretrain.config.sections import OptimizerSection
from fsdp_pretrain.parallel.mesh import World, local_part
from fsdp_pretrain.parallel.update_rules import ParameterPart, UpdateRule, unless
from fsdp_pretrain.run.step_record import StepRecord
from fsdp_pretrain.train.observer import Observer, Sum, Verdict
from fsdp_pretrain.train.own_observers import ObserverContext

from . import HistogramSection


class Lion(UpdateRule):
    """The sign of an average of momentum and gradient."""

    tensors = ("momentum",)

    def __init__(self, section: OptimizerSection, world: World | None) -> None:
        pass

    def update(
        self, parts: Sequence[ParameterPart], *, betas: tuple[float, float], divisor: Tensor | None, skip: Tensor | None
    ) -> None:
        for part in parts:
            momentum, gradient = part.state["momentum"], part.gradient if divisor is None else part.gradient / divisor
            sign = momentum.lerp(gradient, 1 - betas[0]).sign()
            new = part.values * (1 - part.lr * part.weight_decay) - part.lr * sign
            part.values.copy_(unless(skip, part.values, new))
            momentum.copy_(unless(skip, momentum, momentum.lerp(gradient, 1 - betas[1])))


class Histogram(Observer):
    """Counts the elements of all gradients by the power of ten of their size."""

    def __init__(self, settings: HistogramSection, context: ObserverContext) -> None:
        self._every, self._model = settings.every, context.model
        self._file = context.run.path / "histograms.jsonl" if context.world.is_main else None
        self._counts: dict[str, Sum] = {}

    def before_update(self, state: TrainState, scale: Tensor | None) -> None:
        gradients = [local_part(p.grad).abs() for p in self._model.parameters() if p.grad is not None]
        powers = range(-12, 3) if state.step % self._every == 0 else range(0)
        self._counts = {
            str(power): Sum(sum(((g >= 10.0**power) & (g < 10.0 ** (power + 1))).sum() for g in gradients))
            for power in powers
        }

    def measures(self) -> Mapping[str, Sum]:
        return self._counts

    def recorded(self, record: StepRecord, verdict: Verdict) -> None:
        if self._file is not None and (found := {k: v for k, v in record.observed.items() if "histogram" in k}):
            with self._file.open("a") as file:
                file.write(json.dumps({"step": record.step, **found}) + "\n")
