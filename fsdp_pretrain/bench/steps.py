"""Times the trainer's own step on random tokens. Needs no corpus, writes nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from fsdp_pretrain import hardware
from fsdp_pretrain.checkpoint.state import TrainState
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.data_section import GLMObjective
from fsdp_pretrain.config.schedule import BatchSchedule
from fsdp_pretrain.config.skips import Skips
from fsdp_pretrain.data.packing.batch import MicroBatch
from fsdp_pretrain.data.packing.loader import StepBatch, check_batches
from fsdp_pretrain.data.packing.position import Position
from fsdp_pretrain.heartbeat import Heartbeat
from fsdp_pretrain.models import Decoder, flops
from fsdp_pretrain.models.layers import Constant
from fsdp_pretrain.models.loss import IGNORE
from fsdp_pretrain.parallel import fsdp, mesh
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.plan.plan import count_parameters, render_measured
from fsdp_pretrain.run.recorder import SilentRecorder
from fsdp_pretrain.run.step_record import LAG, StepRecord, StepSeconds
from fsdp_pretrain.train.build import build_loss_scaler, build_model_and_optimizer
from fsdp_pretrain.train.group_statistics import GroupStatistics
from fsdp_pretrain.train.heldout_loss import HeldOutLoss
from fsdp_pretrain.train.observer import Observer
from fsdp_pretrain.train.trainer import Trainer
from fsdp_pretrain.units import human_bytes, human_count

from .fake_ranks import FakeWorld
from .measured import MeasuredSteps

_LONGEST = 10
"""Kernels in the table of a trace."""
_TRACED = 2
"""Steps in a trace."""


class RandomSteps:
    """Batches of random tokens with the configuration's shapes; for blank infilling, half of each slot is prefix.

    `batch`: samples of a step; default: the full batch of the configuration.
    """

    def __init__(self, config: Config, world: World, batch: int | None = None) -> None:
        self._objective, self._two = config.data.objective, config.model.two_dimensions
        self._batches, self._position = BatchSchedule(batch or config.schedule.batch.full), Position()
        self._local, self._micro = self._batches.full // world.size, config.train.micro_batch
        self._length, self._vocab = config.data.sequence_length, config.model.vocab
        self._lengths = config.data.uses_lengths
        self._pin = world.device.type == "cuda"
        self._generator = torch.Generator().manual_seed(world.rank)

    def __next__(self) -> StepBatch:
        self._position = self._position.advance(self._batches, Skips())
        step = StepBatch([], self._position)
        for _ in range(self._local // self._micro):
            tokens = torch.randint(self._vocab, (self._micro, self._length + 1), generator=self._generator)
            tokens = tokens.pin_memory() if self._pin else tokens
            micro = MicroBatch(tokens, None, None, torch.zeros(self._micro, dtype=torch.int64))
            if isinstance(self._objective, GLMObjective):
                self._make_slots(micro, self._objective)
            elif self._lengths:
                micro.lengths = torch.full((self._micro, 1), self._length, dtype=torch.int32)
            step.micro.append(micro)
            step.targets += tokens[:, 1:].numel() if micro.labels is None else int((micro.labels != IGNORE).sum())
        return step

    def _make_slots(self, micro: MicroBatch, objective: GLMObjective) -> None:
        slot = self._length // objective.slots
        learned = torch.arange(self._length) % slot >= slot // 2
        micro.labels = micro.tokens[:, 1:].where(learned, IGNORE)
        micro.lengths = torch.full((self._micro, objective.slots), slot, dtype=torch.int32)
        micro.prefix = micro.lengths // 2
        offsets = (torch.arange(self._length) % slot).expand(self._micro, -1).contiguous()
        micro.positions = torch.stack((offsets, offsets), 1) if self._two else offsets

    def blank(self, before: Position) -> StepBatch:
        """Never called: the trainer needs it only after a failed read, and nothing is read here."""
        raise AssertionError("a benchmark reads nothing that could fail")


def build(
    config: Config,
    world: World,
    heartbeat: Heartbeat | None = None,
    *,
    heldout: Sequence[MicroBatch] = (),
    batch: int | None = None,
) -> Trainer:
    """A trainer on random tokens.

    Args:
        heartbeat: heartbeat of the ranks; None if there is no watchdog.
        heldout: this rank's share of the samples whose loss is measured.
        batch: samples of a step; default: the full batch of the configuration.

    Raises:
        ConfigError: the batch does not fit the world.
    """
    check_batches([batch or config.schedule.batch.full], world.size, config.train.micro_batch)
    model, optimizer = build_model_and_optimizer(config, world)
    initialise(model, config, world)
    heartbeat = heartbeat or Heartbeat()
    observers: list[Observer] = [GroupStatistics(model, optimizer, config, world)]
    observers += [HeldOutLoss(config, world, model, heartbeat, heldout)] if heldout else []
    trainer = Trainer(
        config,
        world,
        model=model,
        optimizer=optimizer,
        scaler=build_loss_scaler(config, world),
        data=RandomSteps(config, world, batch),
        state=TrainState(),
        recorder=SilentRecorder(),
        heartbeat=heartbeat,
        observers=observers,
    )
    trainer.start()
    return trainer


def initialise(model: Decoder, config: Config, world: World) -> None:
    """Set the initial values. A GPU draws them itself, since a host takes many seconds to draw the trainer's own.

    Unlike those they depend on the mesh; all shards are alike, and so are replicas.
    """
    if world.device.type != "cuda":
        fsdp.initialise_all(model, config.run.seed)
        return
    torch.manual_seed(config.run.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            initial, local = model.initial(name), mesh.local_part(parameter)
            if isinstance(initial, Constant):
                local.fill_(initial.value)
            else:
                local.normal_(std=initial.std)


def measure(
    config: Config,
    world: World,
    *,
    steps: int,
    warmup: int,
    accumulation: int | None = None,
    trace: Path | None = None,
) -> MeasuredSteps:
    """Time `steps` steps after `warmup`, with `accumulation` micro-batches or those of the full batch. Collective.

    `trace`: then trace two more steps of rank 0 into this file, and print their longest kernels.
    """
    batch = accumulation * config.train.micro_batch * world.size if accumulation else config.schedule.batch.full
    trainer = build(config, world, batch=batch)
    run_steps(trainer, warmup)
    seconds, timed = run_steps(trainer, steps)
    seconds /= steps
    parts = {
        part: statistics.median(getattr(record.seconds, part) for record in timed) for part in StepSeconds.model_fields
    }
    loss = float(timed[-1].loss.mean)
    if trace is not None and world.is_main:
        print(trace_steps(trainer, trace, on_gpu=world.device.type == "cuda"), flush=True)
    elif trace is not None:
        run_steps(trainer, _TRACED)
    return step_times(config, world, batch=batch, steps=steps, seconds=seconds, loss=loss, parts=parts)


def run_steps(trainer: Trainer, steps: int) -> tuple[float, list[StepRecord]]:
    """Run some steps. Returns their seconds, until the device has finished them, and their records."""
    start, records = time.perf_counter(), list[StepRecord]()
    for _ in range(steps):
        trainer.step()
        records += [record for _, record in trainer.read(keep=LAG)]
    records += [record for _, record in trainer.read(keep=0)]
    return time.perf_counter() - start, records


def trace_steps(trainer: Trainer, path: Path, *, on_gpu: bool) -> str:
    """Trace some steps into a file for https://ui.perfetto.dev. Returns a table of the longest kernels."""
    kinds = [ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
    with profile(activities=kinds) as trace:
        run_steps(trainer, _TRACED)
    trace.export_chrome_trace(str(path))
    by = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
    table: str = trace.key_averages().table(sort_by=by, row_limit=_LONGEST, max_name_column_width=70)
    return table


def step_times(
    config: Config,
    world: World,
    *,
    batch: int,
    steps: int,
    seconds: float,
    loss: float,
    side: str = "ours",
    parts: dict[str, float] | None = None,
) -> MeasuredSteps:
    """The result for steps that took this rank `seconds` each. Collective."""
    parameters, device = count_parameters(config.model), world.device
    seconds, name = max(world.gather(seconds)), hardware.device_name(device)
    return MeasuredSteps(
        run=config.run.name,
        side=side,
        torch=torch.__version__,
        dtype=str(fsdp.compute_dtype(config, device)).removeprefix("torch."),
        compiled=fsdp.compiles(config, device),
        parameters=parameters,
        replicas=world.replicas,
        shards=world.shards,
        steps=steps,
        speed=flops.speed(config, parameters, batch=batch, seconds=seconds, devices=world.size, device=name),
        memory=max(world.gather(hardware.memory_in_use(device))),
        loss=loss,
        parts=parts,
        fake=isinstance(world, FakeWorld),
    )


def render(times: MeasuredSteps) -> str:
    """The result as text."""
    parts = ", ".join(f"{part} {1000 * value:.1f}" for part, value in (times.parts or {}).items())
    return "\n".join(
        [
            f"{times.run}, {times.side}: {human_count(times.parameters)} parameters, {times.dtype}, "
            f"{'compiled' if times.compiled else 'eager'}, {times.replicas} x {times.shards}"
            f"{' (one real rank, no wire)' if times.fake else ''}, torch {times.torch}, "
            f"{times.steps} steps",
            render_measured(times.speed),
            f"  memory      {human_bytes(times.memory)} on the fullest rank",
            f"  parts (ms)  {parts or 'unknown'}",
        ]
    )
