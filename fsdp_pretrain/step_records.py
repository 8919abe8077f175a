"""What a step measured, and the metrics record that is made of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import replicas
from .config import Config
from .mesh import World
from .record.metrics import json_number
from .state import TrainState
from .step_clock import StepTimes
from .step_sums import StepCounts, StepSums
from .throughput import device_name, flops_per_token, memory_in_use, peak_flops


@dataclass
class Issued:
    """A step that was issued to the device and whose numbers are on their way.

    Attributes:
        state: after it.
        lr, ramps: what its schedules gave.
        times: of it.
        counts, sums: packed `StepCounts` and `StepSums` of all ranks.
        ready: after which `counts` and `sums` are in host memory; None: now.
        data: facts about its batch, for the record.
    """

    state: TrainState
    lr: float
    ramps: dict[str, float]
    times: StepTimes
    counts: Tensor
    sums: Tensor
    ready: torch.cuda.Event | None
    data: dict[str, Any]


class StepRecords:
    """Makes the metrics records of a start.

    Args:
        config: the run.
        world: all ranks.
        parameters: of the model.
        scaled: the loss is scaled, for fp16.
    """

    def __init__(self, config: Config, world: World, parameters: int, *, scaled: bool) -> None:
        self._config, self._world, self._scaled = config, world, scaled
        self._sources = [source.name for source in config.data.sources]
        self._flops = flops_per_token(parameters, config.model, config.data.sequence_length)
        self._peak = peak_flops(device_name(world.device))

    def of(self, issued: Issued) -> dict[str, Any]:
        """The record of a step whose numbers are there (design, section 5)."""
        config, world, state, length = self._config, self._world, issued.state, self._config.data.sequence_length
        counts, sums = StepCounts.read(issued.counts), StepSums.of(issued.sums)
        targets, samples, documents, separators = counts.targets, counts.samples, counts.documents, counts.separators
        adjacent, digest, quarantined = counts.adjacent_specials, counts.digest, counts.quarantined
        checksums, losses, learned = counts.checksums, sums.losses.tolist(), sums.targets.tolist()
        norm, scale, skipped = sums.norm.item(), sums.loss_scale.item(), sums.skipped.item()
        means, penalties = sums.sample_losses.item(), sums.penalties.item()
        ranks, numbers, norms = sums.bad_losses.item(), sums.bad_ranks.item(), sums.bad_norms.item()
        penalty = {"sum": json_number(config.train.z_loss * penalties), "count": targets}
        seconds = issued.times.seconds()
        rate = state.batch * length / seconds["iteration"]
        clip = config.train.grad_clip
        return {
            "step": state.step,
            "consumed": state.consumed,
            "cursor": state.cursor,
            "tokens": state.consumed * length,
            "loss": {"sum": json_number(sum(losses)), "count": targets},
            "loss_sequence": {"sum": json_number(means), "count": samples},
            "z_loss": penalty if config.train.z_loss else None,
            "sources": {
                name: {"sum": json_number(loss), "count": int(count)}
                for name, loss, count in zip(self._sources, losses, learned, strict=True)
            },
            "grad_norm": None if norms else json_number(norm),
            "clip": min(1.0, clip / (norm + 1e-6)) if clip and not norms else 1.0,
            "loss_scale": None if not self._scaled else scale,
            "overflow": skipped > 0 and self._scaled,
            "skipped": skipped > 0,
            "not_finite": "loss" if ranks else "gradients" if norms else None,
            "nonfinite_rank": int(numbers) if ranks == 1 else None,
            "replicas": replicas.compare(checksums, world.shards) if checksums else None,
            "lr": issued.lr,
            "ramps": {"lr": issued.lr, "batch": state.batch, "shares": issued.data["shares"], **issued.ramps},
            "batch": state.batch,
            "sequence_length": length,
            "mixture": {
                n: count / targets if targets else 0.0 for n, count in zip(self._sources, learned, strict=True)
            },
            "epochs": issued.data["epochs"],
            "data_digest": f"{digest % 2**64:016x}",
            "data_distance": issued.data["data_distance"],
            "documents": documents,
            "separators": separators,
            "adjacent_specials": adjacent,
            "quarantined": quarantined,
            "data_read": issued.data["data_read"],
            "beside": issued.data["beside"],
            "world": world.size,
            "seconds": seconds,
            "tokens_per_second": rate,
            "mfu": rate * self._flops / (self._peak * world.size) if self._peak else None,
            "memory_bytes": memory_in_use(world.device),
        }
