"""`fsdp-pretrain plan`, which computes what a configuration means in numbers, and `config-reference`."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_pretrain.console import JSON, argument, as_json, byte_count, grouped, positive, verb
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.run.arguments import import_extra

if TYPE_CHECKING:
    from fsdp_pretrain.config.config import Config


def _share(text: str) -> float:
    number = text.strip().removesuffix("%")
    if not text.strip().endswith("%") or not number.replace(".", "", 1).isdecimal() or not 0 < float(number) <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share such as 45%")
    return float(number) / 100


@verb(
    "plan",
    "configs/runs/llama-7b-hsdp.toml --world-size 128 --device 'NVIDIA A100-SXM4-80GB'",
    argument("config", metavar="CONFIG", help="TOML file"),
    argument("overrides", nargs="*", metavar="key=value", help="replace keys of the configuration"),
    argument("--world-size", type=positive, help="check and describe this number of ranks"),
    argument("--gpus-per-node", type=positive, default=8, help="ranks of a node (default: 8)"),
    argument("--device", help="name of the device as its driver gives it, or `cpu`: its memory and peak"),
    argument("--device-memory", type=byte_count, help="warn if a rank needs more, such as 80GiB"),
    argument("--strict", action="store_true", help="refuse, with exit 78, if a corpus is not there"),
    JSON,
    grouped(
        "instead, how long the run takes",
        argument(
            "--seconds-per-step",
            type=float,
            metavar="SECONDS",
            help="TFLOP/s, MFU, HFU and days, if --world-size devices take this time for a step of the full batch",
        ),
        argument(
            "--mfu", type=_share, metavar="SHARE", help="the same from a measured MFU of a --device, such as 45%%"
        ),
    ),
    grouped(
        "instead, the schedule",
        argument(
            "--at", metavar="PLACES", help="at a point, such as '43680 steps', or at several: '22_800,22_801 steps'"
        ),
    ),
    grouped(
        "instead, small runs that find the learning rate (docs/models.md)",
        argument("--ladder", type=positive, metavar="N", help="plan runs of N sizes"),
        argument("--out", type=Path, metavar="DIR", help="write their configurations there"),
        argument("--ladder-fit", type=Path, nargs="+", metavar="RUN", help="propose rate and batch from these runs"),
    ),
)
def plan(args: argparse.Namespace) -> int:
    """What a configuration means in numbers: parameters, memory, FLOPs, mesh, disk, schedule; and what in it is
    probably not meant. Exit 78 on a contradiction."""
    from fsdp_pretrain.config.config import load

    if args.seconds_per_step is not None and (args.world_size is None or not 0 < args.seconds_per_step < math.inf):
        raise ConfigError("--seconds-per-step needs a positive time and --world-size")
    if args.at is not None:
        unused = ("world_size", "device", "device_memory", "strict", "seconds_per_step", "mfu")
        if given := ["--" + name.replace("_", "-") for name in unused if getattr(args, name)]:
            raise ConfigError(f"--at shows the schedule alone, which does not depend on {', '.join(given)}")
    if args.mfu is not None and (args.world_size is None or args.seconds_per_step is not None):
        raise ConfigError("--mfu needs --world-size and --device, and is not for --seconds-per-step")
    if args.world_size is None and (args.device or args.device_memory):
        raise ConfigError("--device and --device-memory are compared with what a rank needs: give --world-size as well")
    config = load(args.config, args.overrides)
    if args.ladder or args.ladder_fit or args.out:
        return _ladder(args, config)
    if args.at is not None:
        return _at(args, config)
    plan = import_extra("fsdp_pretrain.plan.plan", "plan counts parameters")
    if args.seconds_per_step is not None or args.mfu is not None:
        rates = plan.measured(
            config, devices=args.world_size, device=args.device, seconds=args.seconds_per_step, mfu=args.mfu
        )
        print(as_json(vars(rates)) if args.json else plan.render_measured(rates))
        return 0
    result = plan.plan(
        config,
        args.world_size,
        gpus_per_node=args.gpus_per_node,
        device=args.device,
        available=args.device_memory,
    )
    heldout = plan.epochs.absent(source.path for source in config.eval.loss_on)
    if args.strict and (absent := [*result.absent, *heldout]):
        remedy = "prepare it, or mend data.sources or eval.loss_on"
        raise ConfigError(f"there is no corpus at {', '.join(absent)}", remedy=remedy)
    print(as_json(result.to_json()) if args.json else plan.render(result))
    return 0


def _ladder(args: argparse.Namespace, config: Config) -> int:
    """Plan the runs of a ladder, or extrapolate from their records. Raises ConfigError if these do not allow it."""
    from tqdm import tqdm

    from fsdp_pretrain.files import create_file
    from fsdp_pretrain.run.files import RunDir

    if bool(args.ladder) == bool(args.ladder_fit) or (args.out and not args.ladder) or args.at or args.world_size:
        raise ConfigError("give --ladder, with or without --out, or --ladder-fit; neither has --at or --world-size")
    ladder = import_extra("fsdp_pretrain.plan.ladder", "plan counts parameters")
    if args.ladder_fit:
        paths, size = tqdm(args.ladder_fit, "reading records", delay=2, disable=None), ladder.size_of(config.model)
        trials = [ladder.read(RunDir(path), config, size) for path in paths]
        found = ladder.fit(trials, size, config.schedule.batch.full)
        print(as_json(vars(found)) if args.json else ladder.render_fit(found, trials, config))
        if found.problems:
            raise ConfigError(
                "; ".join(found.problems),
                effect="no rate is proposed",
                remedy="train more runs: a configuration of the ladder with another optimizer.lr, run.name and run.dir",
            )
        return 0
    made = ladder.ladder(config, args.ladder, args.out or Path("ladder"))
    rungs = [ladder.rung(run) for run in made]
    index = as_json([vars(rung) for rung in rungs])
    print(index if args.json else ladder.render(rungs, ladder.rung(config)))
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        create_file(args.out / "ladder.json", index + "\n")  # fails if it exists
        for run in made:
            create_file(args.out / f"{run.run.dir.name}.toml", run.to_toml())
    return 0


def _at(args: argparse.Namespace, config: Config) -> int:
    """Print the schedule at a place, or a table of several."""
    from fsdp_pretrain.plan.preview import render_rows, rows_at

    rows = rows_at(config, args.at)
    if args.json:
        print(as_json(rows if "," in args.at else rows[0]))
    else:
        print("\n".join(render_rows(rows) if len(rows) > 1 else (f"{key:16} {rows[0][key]}" for key in rows[0])))
    return 0


@verb("config-reference", "")
def config_reference(args: argparse.Namespace) -> int:
    """Print docs/config.md: every configuration key."""
    from fsdp_pretrain.config.reference import reference

    print(reference(), end="")
    return 0
