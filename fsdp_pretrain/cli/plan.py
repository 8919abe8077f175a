"""`fsdp-pretrain plan`: what a configuration means, how fast it would train, and the fastest way to train it."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING

from fsdp_pretrain.console import JSON, CommandLine, argument, byte_count, positive, verb
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.record.arguments import import_extra

if TYPE_CHECKING:
    from fsdp_pretrain.config.config import Config
    from fsdp_pretrain.plan.tune import Tuning


def add(command: CommandLine) -> None:
    """Add the verb."""
    command.add(_plan)


def _share(text: str) -> float:
    number = text.strip().removesuffix("%")
    if not text.strip().endswith("%") or not number.replace(".", "", 1).isdecimal() or not 0 < float(number) <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share such as 45%")
    return float(number) / 100


@verb(
    "plan",
    "configs/runs/llama-7b-hsdp.toml --world-size 128 --device 'NVIDIA A100-SXM4-80GB'",
    argument("config", help="TOML file"),
    argument("overrides", nargs="*", metavar="key=value"),
    argument("--world-size", type=positive, help="check and describe this number of ranks"),
    argument("--gpus-per-node", type=positive, default=8, help="ranks of a node (default: 8)"),
    argument("--device", help="name of the device as its driver gives it, or `cpu`: its memory and peak"),
    argument("--device-memory", type=byte_count, help="warn if a rank needs more, such as 80GiB"),
    argument(
        "--seconds-per-step",
        type=float,
        help="print TFLOP/s, MFU and HFU of --world-size devices that take this time for a step of the full batch",
    ),
    argument(
        "--mfu",
        type=_share,
        help="for the days of the run, such as 45%% (default: predicted from --world-size and --device)",
    ),
    argument("--at", help="print the schedule at a point, such as '43680 steps', or at several: '22_800,22_801 steps'"),
    argument(
        "--predict",
        action="store_true",
        help="print what step time, goodput and days to expect on 8 to 1,024 --device, and how far such predictions "
        "were from published runs",
    ),
    argument(
        "--tune",
        action="store_true",
        help="print which micro-batch, accumulation, recomputation and resharding are fastest on --world-size ranks of "
        "a --device, and why",
    ),
    argument(
        "--trials", type=positive, default=0, help="for --tune: measure this many of the best on the GPUs of this node"
    ),
    argument(
        "--link",
        type=byte_count,
        help="for --predict and --tune: bytes/s from a GPU to others of its node, such as 450GB",
    ),
    argument(
        "--network",
        type=byte_count,
        help="for --predict and --tune: bytes/s from a node to others; 50GB is 400 Gb/s",
    ),
    argument("--storage", type=byte_count, help="for --predict: bytes/s of all ranks together (default: 10GB)"),
    argument("--node-failures", type=float, help="for --predict: per node and 1,000 days (default: 3.8, as Llama 3)"),
    JSON,
)
def _plan(args: argparse.Namespace) -> int:
    """What a configuration means in numbers: parameters, memory, FLOPs, mesh, disk, schedule; and what in it is
    probably not meant. Exit 78 on a contradiction."""
    from fsdp_pretrain.config.config import load

    if args.seconds_per_step is not None and (args.world_size is None or not 0 < args.seconds_per_step < math.inf):
        raise ConfigError("--seconds-per-step needs a positive time and --world-size")
    if sum((args.predict, args.tune, args.at is not None, args.seconds_per_step is not None)) > 1:
        raise ConfigError("--predict, --tune, --at and --seconds-per-step exclude each other")
    if args.trials and not args.tune:
        raise ConfigError("--trials belongs to --tune")
    if not args.predict and (args.storage, args.node_failures) != (None, None):
        raise ConfigError("--storage and --node-failures belong to --predict")
    if not (args.predict or args.tune) and (args.link, args.network) != (None, None):
        raise ConfigError("--link and --network belong to --predict and --tune")
    if args.predict:
        return _predict(args)
    if args.tune and args.world_size is None:
        raise ConfigError("--tune needs --world-size")
    if args.mfu is not None and (args.world_size is None or args.predict or args.tune):
        raise ConfigError("--mfu needs --world-size and --device, and is not for --predict or --tune")
    if args.world_size is None and (args.device or args.device_memory):
        raise ConfigError("--device and --device-memory are compared with what a rank needs: give --world-size as well")
    config = load(args.config, args.overrides)
    if args.at is not None:
        return _at(args, config)
    if args.tune:
        return _tune(args, config)
    plan = import_extra("fsdp_pretrain.plan.plan", "plan counts parameters")
    if args.seconds_per_step is not None:
        rates = plan.measured(config, seconds=args.seconds_per_step, devices=args.world_size, device=args.device)
        print(json.dumps(vars(rates), indent=1) if args.json else plan.render_measured(rates))
        return 0
    result = plan.plan(
        config,
        args.world_size,
        gpus_per_node=args.gpus_per_node,
        device=args.device,
        available=args.device_memory,
        mfu=args.mfu,
    )
    print(json.dumps(result.to_json(), indent=1) if args.json else plan.render(result))
    return 0


def _at(args: argparse.Namespace, config: Config) -> int:
    """Print the schedule at a place, or a table of several."""
    from fsdp_pretrain.plan.preview import render_rows, rows_at

    rows = rows_at(config, args.at)
    if args.json:
        print(json.dumps(rows if "," in args.at else rows[0], indent=1))
    else:
        print("\n".join(render_rows(rows) if len(rows) > 1 else (f"{key:16} {rows[0][key]}" for key in rows[0])))
    return 0


def _tune(args: argparse.Namespace, config: Config) -> int:
    """Print the best ways, and what trials of them measure. Exit 1 if nothing fits."""
    from fsdp_pretrain.launch.preflight import gpu_count
    from fsdp_pretrain.plan import trials

    tune = import_extra("fsdp_pretrain.plan.tune", "plan --tune traces the memory of a step")
    ranks, shards = min(args.world_size, args.gpus_per_node), config.parallel.shard
    if args.trials and shards != "node" and shards > ranks:
        raise ConfigError(f"--trials use one node, and parallel.shard = {shards} needs more than {ranks} ranks")
    if args.trials and gpu_count() < ranks:
        raise ConfigError(f"--trials need {ranks} GPUs on this node, which shows {gpu_count()}")
    tuning: Tuning = tune.tune(
        config,
        args.device,
        args.world_size,
        gpus_per_node=args.gpus_per_node,
        available=args.device_memory,
        link=args.link,
        network=args.network,
    )
    if not args.json:
        print(tune.render(tuning), flush=True)
    measured = trials.run_trials(config, tuning.fitting[: args.trials], ranks)
    if args.json:
        print(json.dumps({**tuning.to_json(), "trials": [asdict(trial) for trial in measured]}, indent=1))
    elif measured:
        print("\n".join(trials.render_trials(measured)))
    return 0 if tuning.fitting else 1


def _predict(args: argparse.Namespace) -> int:
    from fsdp_pretrain.config.config import load
    from fsdp_pretrain.plan import predict

    if args.node_failures is not None and not 0 <= args.node_failures < math.inf:
        raise ConfigError("--node-failures needs a number from 0 on")
    failures = None if args.node_failures is None else args.node_failures / 1000
    config = load(args.config, args.overrides)
    table = predict.predict(
        config,
        args.device,
        world=args.world_size,
        gpus_per_node=args.gpus_per_node,
        link=args.link,
        network=args.network,
        operations=predict.operations_of(config, args.storage, failures),
    )
    print(json.dumps(table.to_json(), indent=1) if args.json else predict.render(table))
    return 0
