"""Steps in flight: issued to the device, but their sums are not on the host yet; then each becomes a `StepRecord`."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fsdp_pretrain.checkpoint.state import TrainState
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.schedule import StepValues
from fsdp_pretrain.hardware import device_name, memory_in_use, peak_flops
from fsdp_pretrain.models.flops import flops_per_token
from fsdp_pretrain.parallel import replica_check as replicas
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.run.step_record import LossSum, Ramps, ReadSeconds, StepRecord, number

from .observer import Observer
from .step_clock import StepTimes
from .step_metrics import StepCounts, StepSums


@dataclass
class IssuedStep:
    """A step that was issued to the device and whose metrics are in flight."""

    state: TrainState  # counters after the step
    values: StepValues  # what the schedules gave for it
    times: StepTimes
    data: dict[str, Any]  # facts about its batch, for the record
    counts: Tensor  # this and the next: packed `StepCounts` and `StepSums` of all ranks
    sums: Tensor
    measured: list[tuple[Observer, Tensor]]  # what observers measured
    ready: torch.cuda.Event | None = None  # event after which the tensors are in host memory; None: they are already


class Ledger:
    """The steps in flight, oldest first.

    Args:
        parameters: number of model parameters.
        scaled: the loss is scaled, for fp16.
    """

    def __init__(self, config: Config, world: World, parameters: int, *, scaled: bool) -> None:
        self._config, self._world, self._scaled = config, world, scaled
        self._sources = [source.name for source in config.data.sources]
        self._flops = partial(flops_per_token, parameters, config.model)
        self._peak = peak_flops(device_name(world.device))
        self._issued = deque[IssuedStep]()

    def __len__(self) -> int:
        return len(self._issued)

    def enter(self, issued: IssuedStep) -> None:
        """Add a step that was issued."""
        self._issued.append(issued)

    def settle(self) -> IssuedStep:
        """Take the oldest step out, and wait until its sums are in host memory."""
        issued = self._issued.popleft()
        if issued.ready is not None:
            issued.ready.synchronize()
        return issued

    def record(self, issued: IssuedStep) -> StepRecord:
        """The record of a settled step."""
        config, world, state = self._config, self._world, issued.state
        measured = dict[str, Any]()
        for observer, tensor in issued.measured:
            measured.update(observer.fields(tensor))
        if unknown := measured.keys() - StepRecord.model_fields.keys():
            raise TypeError(f"a step's record has no field {', '.join(sorted(unknown))}: its model would drop it")
        lengths = config.schedule.lengths.between(state.consumed - state.batch, state.consumed)
        tokens = {length: length * samples for length, samples in lengths.items()}
        counts, sums, seconds = StepCounts.read(issued.counts), StepSums.of(issued.sums), issued.times.seconds()
        losses, targets = sums.losses.tolist(), sums.targets.tolist()
        norm, bad_losses, bad_norms = sums.norm.item(), sums.bad_losses.item(), sums.bad_norms.item()
        clip, z_loss, rate = issued.values.grad_clip, issued.values.z_loss, sum(tokens.values()) / seconds.training
        flops = sum(count * self._flops(length) for length, count in tokens.items()) / seconds.training
        return StepRecord(
            step=state.step,
            consumed=state.consumed,
            cursor=state.cursor,
            tokens=config.schedule.tokens(state.consumed),
            loss=LossSum(sum=number(sum(losses)), count=counts.targets),
            loss_sequence=LossSum(sum=number(sums.sample_losses.item()), count=counts.samples),
            z_loss=LossSum(sum=number(z_loss * sums.penalties.item()), count=counts.targets) if z_loss else None,
            sources=loss_by_source(self._sources, losses, targets),
            grad_norm=None if bad_norms else number(norm),
            clip=min(1.0, clip / (norm + 1e-6)) if clip and not bad_norms else 1.0,
            loss_scale=sums.loss_scale.item() if self._scaled else None,
            skipped=bool(sums.skipped),
            not_finite="loss" if bad_losses else "gradients" if bad_norms else None,
            nonfinite_rank=int(sums.bad_ranks) if bad_losses == 1 else None,
            replicas=replicas.compare(counts.checksums, world.shards) if counts.checksums else None,
            lr=issued.values.lr,
            ramps=Ramps(**issued.data["ramps"]),
            batch=state.batch,
            sequence_length=max(tokens),
            step_tokens=sum(tokens.values()) if len(tokens) > 1 else None,
            mixture={
                name: count / counts.targets if counts.targets else 0.0
                for name, count in zip(self._sources, targets, strict=True)
            },
            epochs=issued.data["epochs"],
            data_digest=f"{counts.digest % 2**64:016x}",
            data_distance=issued.data["data_distance"],
            documents=counts.documents,
            separators=counts.separators,
            adjacent_specials=counts.adjacent_specials,
            quarantined=counts.quarantined,
            data_read=ReadSeconds(**issued.data["data_read"]),
            beside=issued.data["beside"],
            world=world.size,
            seconds=seconds,
            tokens_per_second=rate,
            mfu=flops / (self._peak * world.size) if self._peak else None,
            memory_bytes=memory_in_use(world.device),
            energy_joules=counts.millijoules / 1000 if counts.metered == world.size else None,
            **measured,
        )


def loss_by_source(names: list[str], losses: list[float], targets: list[float]) -> dict[str, LossSum]:
    """Sums of losses and targets, by the names of their sources."""
    return {
        name: LossSum(sum=number(loss), count=int(count))
        for name, loss, count in zip(names, losses, targets, strict=True)
    }
