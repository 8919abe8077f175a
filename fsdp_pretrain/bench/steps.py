"""Training speed of a configuration: `python -m fsdp_pretrain.bench CONFIG [key=value ...]`, or under torchrun.

Runs the trainer's own step on random tokens; needs no corpus, writes nothing. Reports the median step after warmup.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from data.packing.loader import MicroBatch, StepBatch, check_batches
from data.packing.position import Position
from fsdp_pretrain.checkpoint.state import TrainState
from fsdp_pretrain.config.config import Config, load
from fsdp_pretrain.config.schedule import BatchSchedule
from fsdp_pretrain.config.sections import GLMObjective
from fsdp_pretrain.config.skips import Skips
from fsdp_pretrain.console import Parser
from fsdp_pretrain.health.monitor import Health
from fsdp_pretrain.models.loss import IGNORE
from fsdp_pretrain.parallel import fsdp, mesh
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.plan import flops as throughput
from fsdp_pretrain.plan import plan
from fsdp_pretrain.record.recorder import NotesOnlyRecorder
from fsdp_pretrain.record.requests import Inbox
from fsdp_pretrain.record.step_record import StepRecord, StepSeconds
from fsdp_pretrain.train.build import build_loss_scaler, build_model_and_optimizer
from fsdp_pretrain.train.checkpointing import Checkpointing
from fsdp_pretrain.train.run_context import RunContext
from fsdp_pretrain.train.trainer import LAG, Trainer
from fsdp_pretrain.units import human_bytes, human_count
from fsdp_pretrain.watchdog.heartbeat.rank_client import Heartbeat

from . import checkpoints, watchdog


class RandomSteps:
    """Batches of random tokens with the configuration's shapes; for blank infilling, half of each slot is prefix."""

    def __init__(self, config: Config, world: World) -> None:
        self._objective = config.data.objective
        self._batches, self._position = BatchSchedule(config.schedule.batch.full), Position()
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
        line = (torch.arange(self._length) % slot).expand(self._micro, -1).contiguous()
        micro.positions = line if objective.positions == "glm1d" else torch.stack((line, line), 1)

    def blank(self, before: Position) -> StepBatch:
        """Needed only after a failed read, and nothing is read here."""
        raise AssertionError("a benchmark reads nothing that could fail")


class Records(NotesOnlyRecorder):
    """A recorder that keeps the step records in memory."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def step(self, record: StepRecord, *, target: int) -> None:
        del target
        self.records.append(record)


def build(config: Config, world: World, heartbeat: Heartbeat | None = None) -> tuple[Trainer, Records]:
    """A trainer on random tokens that cannot save, and the recorder of its step records. Raises ConfigError."""
    check_batches([config.schedule.batch.full], world.size, config.train.micro_batch)
    model, optimizer = build_model_and_optimizer(config, world)
    fsdp.initialise_all(model, config.run.seed)
    records = Records()
    trainer = Trainer(
        RunContext(config, world, records, Inbox(None), heartbeat or Heartbeat()),
        model=model,
        optimizer=optimizer,
        scaler=build_loss_scaler(config, world),
        data=RandomSteps(config, world),
        saves=Checkpointing(config, world, _NoSaver(), _no_save, records, 0),
        state=TrainState(),
        health=Health(config),
    )
    model.train()
    return trainer, records


def bench(config: Config, world: World, *, steps: int, warmup: int) -> dict[str, Any]:
    """Time `steps` steps after `warmup`. Collective."""
    trainer, records = build(config, world)
    parameters = plan.count_parameters(config.model)
    flops = throughput.flops_per_token(parameters, config.model, config.data.sequence_length)
    device = throughput.device_name(world.device)
    for _ in range(warmup + steps):
        trainer.step()
        trainer.collect(keep=LAG)
    trainer.collect(keep=0)
    timed = records.records[warmup:]
    rate = statistics.median(record.tokens_per_second for record in timed)
    peak = throughput.peak_flops(device)
    return {
        "run": config.run.name,
        "device": device,
        "torch": torch.__version__,
        "world": world.size,
        "replicas": world.replicas,
        "shards": world.shards,
        "parameters": parameters,
        "dtype": str(fsdp.compute_dtype(config, world.device)).removeprefix("torch."),
        "compile": config.parallel.compile,
        "recompute": config.parallel.recompute,
        "batch": config.schedule.batch.full,
        "micro_batch": config.train.micro_batch,
        "sequence_length": config.data.sequence_length,
        "steps": steps,
        "tokens_per_second": rate,
        "tokens_per_second_per_device": rate / world.size,
        "model_flops_per_second_per_device": rate * flops / world.size,
        "mfu": rate * flops / (peak * world.size) if peak else None,
        "memory_bytes": max(world.gather(throughput.memory_in_use(world.device))),
        "seconds": {
            part: statistics.median(getattr(record.seconds, part) for record in timed)
            for part in StepSeconds.model_fields
        },
        "iteration_seconds_min_max": [
            min(record.seconds.iteration for record in timed),
            max(record.seconds.iteration for record in timed),
        ],
    }


def _no_save(*_: Any, **__: Any) -> Any:
    raise AssertionError("a benchmark saves nothing")


class _NoSaver:
    save = begin = renew = _no_save


def render(result: dict[str, Any]) -> str:
    """The results as text for people."""
    mfu = (
        "unknown (no peak on file for this device)"
        if result["mfu"] is None
        else f"{result['mfu']:.1%} of the dense peak"
    )
    parts = ", ".join(f"{part} {value * 1000:.1f}" for part, value in result["seconds"].items() if part != "iteration")
    low, high = result["iteration_seconds_min_max"]
    return "\n".join(
        [
            f"{result['run']}: {human_count(result['parameters'])} parameters, {result['dtype']}, "
            f"{result['world']} x {result['device']}, torch {result['torch']}",
            f"  tokens/s     {human_count(result['tokens_per_second'])}"
            f" ({human_count(result['tokens_per_second_per_device'])} per device)",
            f"  MFU          {mfu}",
            f"  memory       {human_bytes(result['memory_bytes'])} on the fullest rank",
            f"  step         {result['seconds']['iteration']:.4g}s, median of {result['steps']} "
            f"({low:.4g} to {high:.4g})",
            f"  parts (ms)   {parts}",
        ]
    )


def main() -> int:
    """Command line."""
    parser = Parser(
        prog="python -m fsdp_pretrain.bench",
        description=__doc__,
        epilog="example:\n  python -m fsdp_pretrain.bench configs/bench/llama-tiny.toml\n"
        "  python -m fsdp_pretrain.bench configs/bench/llama-tiny.toml --saves runs --rounds 2",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--steps", type=int, default=20, help="steps to time (default: 20)")
    parser.add_argument("--warmup", type=int, default=5, help="steps before (default: 5)")
    parser.add_argument("--saves", type=Path, metavar="DIR", help="time checkpoints in this directory instead")
    parser.add_argument("--watchdog", type=Path, metavar="DIR", help="time what the watchdog costs instead")
    parser.add_argument("--rounds", type=int, default=5, help="of --saves (default: 5)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    config = load(args.config, args.overrides)
    with mesh.connect(config.parallel) as world:
        if args.saves:
            trainer, _ = build(config, world)
            for _ in range(args.warmup):
                trainer.step()
            trainer.collect(keep=0)
            result = checkpoints.measure(trainer, world, args.saves, rounds=args.rounds, steps=args.steps)
        elif args.watchdog:
            result = watchdog.measure(
                build, config, world, args.watchdog, steps=args.steps, warmup=args.warmup, seconds=60
            )
        else:
            result = bench(config, world, steps=args.steps, warmup=args.warmup)
        if world.is_main:
            show = checkpoints.render if args.saves else watchdog.render if args.watchdog else render
            text = show(result)
            print(json.dumps(result, indent=1) if args.json else text)
    return 0
