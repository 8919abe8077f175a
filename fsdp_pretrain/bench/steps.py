"""Training speed of a configuration: `python -m fsdp_pretrain.bench CONFIG [key=value ...]`, or under torchrun.

Runs the trainer's own step on random tokens; needs no corpus, writes nothing. Reports the median step after warmup.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from data.packing.loader import MicroBatch, StepBatch, check_batches
from data.packing.position import Position
from fsdp_pretrain.checkpoint.state import TrainState
from fsdp_pretrain.config.config import Config, load
from fsdp_pretrain.config.data_section import GLMObjective
from fsdp_pretrain.config.schedule import BatchSchedule
from fsdp_pretrain.config.skips import Skips
from fsdp_pretrain.console import Parser
from fsdp_pretrain.health.monitor import Health
from fsdp_pretrain.launch import torchrun
from fsdp_pretrain.models import Decoder
from fsdp_pretrain.models.layers import Constant
from fsdp_pretrain.models.loss import IGNORE
from fsdp_pretrain.parallel import fsdp, mesh
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.parallel.optimizer import AdamW
from fsdp_pretrain.plan import flops as throughput
from fsdp_pretrain.plan import plan
from fsdp_pretrain.record.recorder import NotesOnlyRecorder, Recorder
from fsdp_pretrain.record.requests import Inbox
from fsdp_pretrain.record.step_record import StepRecord, StepSeconds
from fsdp_pretrain.train.build import build_loss_scaler, build_model_and_optimizer
from fsdp_pretrain.train.checkpointing import Checkpointing, Saver
from fsdp_pretrain.train.heldout_loss import HeldOutLoss
from fsdp_pretrain.train.run_context import RunContext
from fsdp_pretrain.train.trainer import LAG, Trainer
from fsdp_pretrain.units import human_bytes, human_count
from fsdp_pretrain.watchdog.heartbeat.rank_client import Heartbeat

from . import checkpoints, features, group_statistics, heldout, kernels, peers, sides, watchdog


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


def build(
    config: Config,
    world: World,
    heartbeat: Heartbeat | None = None,
    *,
    recorder: Recorder | None = None,
    saver: Callable[[Decoder, AdamW], Saver] | None = None,
    heldout: HeldOutLoss | None = None,
) -> tuple[Trainer, Records]:
    """A trainer on random tokens, and the recorder of its step records.

    Args:
        heartbeat: None: there is no watchdog.
        recorder: gets the record instead, so that the second result stays empty.
        saver: makes checkpoints of a model and its optimiser; None: it cannot save.
        heldout: measures the held-out loss.

    Raises:
        ConfigError: the batch does not fit the world.
    """
    check_batches([config.schedule.batch.full], world.size, config.train.micro_batch)
    model, optimizer = build_model_and_optimizer(config, world)
    _initialise(model, config, world)
    records = Records()
    used = recorder or records
    makes: Saver = _NoSaver() if saver is None else saver(model, optimizer)
    trainer = Trainer(
        RunContext(config, world, used, Inbox(None), heartbeat or Heartbeat()),
        model=model,
        optimizer=optimizer,
        scaler=build_loss_scaler(config, world),
        data=RandomSteps(config, world),
        saves=Checkpointing(config, world, makes, lambda saved: None, used, 0),
        state=TrainState(),
        health=Health(config),
        heldout=heldout,
    )
    model.train()
    return trainer, records


def _initialise(model: Decoder, config: Config, world: World) -> None:
    """Initial values; one GPU draws them itself, since a host takes many seconds for the trainer's own.

    Those do not depend on the mesh, which replicas need, and the trainer's promise.
    """
    if world.device.type != "cuda" or world.size > 1:
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
        "compile": fsdp.compiles(config, world.device),
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
    raise AssertionError("this benchmark saves nothing")


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
    args = _parser().parse_intermixed_args()
    torchrun.die_with_launcher()
    config = load(args.config, args.overrides)
    if args.side and args.side != peers.OURS:
        return _measure_peer(args, config)
    if args.peers:
        named = args.sides or peers.SIDES
        compared = peers.compare(
            config,
            (args.config, *args.overrides),
            sides=named,
            rounds=args.rounds,
            steps=args.steps,
            warmup=args.warmup,
            limit=args.side_limit,
        )
        print(json.dumps(compared.to_json(), indent=1) if args.json else peers.render(compared))
        return 1 if compared.failed else 0
    with mesh.connect(config.parallel) as world:
        result, text = _measure(args, config, world)
        if world.is_main:
            print(text if not args.json else json.dumps(result, indent=1))
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="python -m fsdp_pretrain.bench",
        description=__doc__,
        epilog="example:\n  python -m fsdp_pretrain.bench configs/bench/llama-tiny.toml\n"
        "  python -m fsdp_pretrain.bench configs/bench/llama-tiny.toml --saves runs --rounds 2\n"
        "  python -m fsdp_pretrain.bench configs/bench/llama-tiny.toml --peers --rounds 3 --steps 3 --warmup 1",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--steps", type=int, default=20, help="steps to time, in each round (default: 20)")
    parser.add_argument("--warmup", type=int, default=5, help="steps before (default: 5)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--saves", type=Path, metavar="DIR", help="time checkpoints in this directory instead")
    what.add_argument("--watchdog", type=Path, metavar="DIR", help="time what the watchdog costs instead")
    what.add_argument("--features", type=Path, metavar="DIR", help="time what watchdog, record and saves cost instead")
    what.add_argument("--heldout", action="store_true", help="time what the held-out loss costs instead")
    what.add_argument("--statistics", action="store_true", help="time what statistics of parameters cost instead")
    what.add_argument("--kernels", action="store_true", help="time attention and loss alone, by kernel, instead")
    what.add_argument("--peers", action="store_true", help="compare with other implementations of the model instead")
    what.add_argument("--side", choices=peers.SIDES, help=argparse.SUPPRESS)  # a round of --peers starts itself so
    parser.add_argument(
        "--sides",
        type=_sides,
        metavar="A,B",
        help=f"of --peers, separated by commas (default: {','.join(peers.SIDES)})",
    )
    parser.add_argument("--rounds", type=int, default=5, help="of all but --watchdog and the steps alone (default: 5)")
    parser.add_argument("--side-limit", type=float, default=900, help="of --peers: seconds of a side (default: 900)")
    parser.add_argument("--seconds", type=float, default=60, help="of --watchdog: to watch the agent (default: 60)")
    parser.add_argument("--json", action="store_true")
    return parser


def _sides(text: str) -> tuple[str, ...]:
    """Raises ArgumentTypeError."""
    unknown = set(text.split(",")) - set(peers.SIDES)
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: not one of {', '.join(peers.SIDES)}")
    return tuple(text.split(","))


def _measure(args: argparse.Namespace, config: Config, world: World) -> tuple[dict[str, Any], str]:
    """The results, and the same as text. Collective."""
    often = {"steps": args.steps, "warmup": args.warmup}
    if args.side:
        side, tokens = sides.build_ours(build, config, world)
        line = json.dumps(asdict(sides.measure(side, tokens, config, world.device, **often)))
        return {}, line
    if args.saves:
        trainer, _ = build(config, world)
        for _ in range(args.warmup):
            trainer.step()
        trainer.collect(keep=0)
        result = checkpoints.measure(trainer, world, args.saves, rounds=args.rounds, steps=args.steps)
        return result, checkpoints.render(result)
    if args.watchdog:
        result = watchdog.measure(build, config, world, args.watchdog, seconds=args.seconds, **often)
        return result, watchdog.render(result)
    if args.features:
        result = features.measure(build, config, world, args.features, rounds=args.rounds, **often)
        return result, features.render(result)
    if args.heldout:
        result = heldout.measure(build, config, world, RandomSteps(config, world), rounds=args.rounds, **often)
        return result, heldout.render(result)
    if args.statistics:
        result = group_statistics.measure(build, config, world, rounds=args.rounds, **often)
        return result, group_statistics.render(result)
    if args.kernels:
        result = kernels.measure(config, world.device, rounds=args.rounds, steps=args.steps)
        return result, kernels.render(result)
    result = bench(config, world, **often)
    return result, render(result)


def _measure_peer(args: argparse.Namespace, config: Config) -> int:
    """Measure another implementation, without a process group, and print one line."""
    alone = mesh.SingleProcess()
    alone.device = mesh.device_of(mesh.RankInfo.from_environment())
    try:
        side, tokens = sides.build_peer(args.side, config, RandomSteps(config, alone), alone.device)
    except sides.MissingPeerError as missing:
        print(f"{peers.SKIPPED}{missing}")
        return 0
    found = sides.measure(side, tokens, config, alone.device, steps=args.steps, warmup=args.warmup)
    print(json.dumps(asdict(found)), flush=True)
    os._exit(0)  # threads of other libraries may keep a process alive
