"""The command line: `python -m fsdp_pretrain.bench CONFIG [key=value ...]`, or under torchrun."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fsdp_pretrain.config.config import load
from fsdp_pretrain.console import Parser, positive
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.launch import torchrun
from fsdp_pretrain.parallel import mesh

from . import fake_ranks, measured, peers, saves, steps, sweep


def main() -> int:
    """Run the benchmark that the command line selects. Returns the exit code."""
    args = _parser().parse_intermixed_args()
    torchrun.die_with_launcher()
    config = load(args.config, args.overrides)
    command = [args.config, *args.overrides, "--steps", str(args.steps), "--warmup", str(args.warmup)]
    if (args.sweep or args.peers) and os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError("--sweep and --peers start processes of their own", remedy="start it without torchrun")
    if args.fake_ranks and (args.sweep or args.peers or args.saves or "RANK" in os.environ):
        raise ConfigError(
            "--fake-ranks times steps on one device",
            remedy="start it without torchrun, --sweep, --peers and --saves",
        )
    if args.sweep:
        tried = sweep.sweep(config, command, args.overrides, ranks=args.ranks, limit=args.limit)
        _deliver(args, [asdict(way) for way in tried], "\n".join(sweep.render(tried)))
        return 0 if any(way.times for way in tried) else 1
    if args.peers:
        compared = peers.compare(config, command, rounds=args.rounds, limit=args.limit)
        _deliver(args, asdict(compared), "\n".join(peers.render(compared)))
        return 1 if compared.failed else 0
    if args.side != peers.OURS:
        times = peers.measure_side(args.side, config, steps=args.steps, warmup=args.warmup)
        _deliver(args, asdict(times), steps.render(times))
        return 0
    ranks = args.fake_ranks
    with fake_ranks.connect(config.parallel, ranks) if ranks else mesh.connect(config.parallel) as world:
        values: Any
        if args.saves:
            rounds = saves.measure(config, world, args.saves, rounds=args.rounds, steps=args.steps, warmup=args.warmup)
            values, text = [asdict(result) for result in rounds], saves.render(rounds)
        else:
            counts = {"steps": args.steps, "warmup": args.warmup, "accumulation": args.accumulation}
            times = steps.measure(config, world, **counts, trace=args.trace)
            values, text = asdict(times), steps.render(times)
        if world.is_main:
            _deliver(args, values, text)
    return 0


def _deliver(args: argparse.Namespace, values: Any, text: str) -> None:
    """Print the result, and write its JSON values to the file of `--result`, if given."""
    if args.result is not None:
        args.result.write_text(json.dumps(values), encoding="utf-8")
    print(json.dumps(values, indent=1) if args.json else text, flush=True)


def _parser() -> Parser:
    parser = Parser(
        prog="python -m fsdp_pretrain.bench",
        description="Time the trainer's own step on random tokens: the mean of some steps, after others to warm up. "
        "Needs no corpus.",
        epilog="example:\n  python -m fsdp_pretrain.bench configs/bench/llama-tiny.toml\n"
        "  python -m fsdp_pretrain.bench configs/bench/llama-tiny.toml --sweep --steps 3 --warmup 1\n"
        "  python -m fsdp_pretrain.bench configs/bench/llama-tiny.toml --saves runs --rounds 2\n"
        "  python -m fsdp_pretrain.bench configs/bench/llama-tiny.toml --peers --rounds 3 --steps 3 --warmup 1",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--steps", type=positive, default=20, help="steps to time, in each round (default: 20)")
    parser.add_argument("--warmup", type=positive, default=5, help="steps before (default: 5)")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--sweep", action="store_true", help="try micro-batches, recomputation and resharding: what fits, and how fast"
    )
    mode.add_argument("--saves", type=Path, metavar="DIR", help="time checkpoints in this directory instead")
    mode.add_argument("--peers", action="store_true", help="compare with other implementations of the model instead")
    mode.add_argument(
        "--side", choices=(peers.OURS, *peers.NETWORKS), default=peers.OURS, help=argparse.SUPPRESS
    )  # of --peers
    parser.add_argument(
        "--accumulation",
        type=positive,
        help="micro-batches in a step, of the steps alone (default: those of train.global_batch)",
    )
    parser.add_argument(
        "--fake-ranks",
        type=positive,
        metavar="N",
        help="time one rank of N (on nodes of 8), of which only this one exists: all but the wire is real",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="then trace two more steps, of the steps alone, into this file (such as steps.json.gz) and print their "
        "longest kernels",
    )
    parser.add_argument("--ranks", type=positive, help="of --sweep: on this node (default: its GPUs, or 1)")
    parser.add_argument("--rounds", type=positive, default=5, help="of --peers and --saves (default: 5)")
    parser.add_argument(
        "--limit",
        type=float,
        default=measured.LIMIT,
        help="of --sweep and --peers: seconds of a process (default: 900)",
    )
    parser.add_argument(
        "--result", type=Path, metavar="FILE", help="also write JSON there: libraries may print among the output"
    )
    parser.add_argument("--json", action="store_true")
    return parser
