"""`fsdp-pretrain rollback` and `fork`: continue from an earlier checkpoint, in this run or in a new one."""

from __future__ import annotations

import argparse
from pathlib import Path

from fsdp_pretrain.console import JSON, argument, not_negative, progress, row, step_number, verb
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.run.arguments import RUN


def _steps(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form FIRST:LAST")
    return int(first), int(last)


_BRANCH = (
    argument("--skip-steps", type=_steps, metavar="A:B", help="never train the samples of steps A to B, as recorded"),
    argument("--set", action="append", default=[], metavar="key=value", help="change a setting for good; repeatable"),
    argument("--reason", default="", help="for the chronicle"),
    JSON,
)


DRY_RUN = argument("--dry-run", action="store_true", help="check everything and show it, change nothing")


@verb(
    "rollback",
    "runs/quickstart/run --to 200 --skip-steps 241:260 --set optimizer.lr=5e-4",
    RUN,
    argument("--to", type=step_number, required=True, metavar="STEP", help="step of a checkpoint"),
    *_BRANCH,
    DRY_RUN,
)
def rollback(args: argparse.Namespace) -> int:
    """Go back to a checkpoint: later ones are moved aside, samples skipped and settings changed for good. Killed at
    any point, the same command or the next start finishes it. Training then continues with its usual command."""
    from fsdp_pretrain.lineage import continuation
    from fsdp_pretrain.lineage.rollback import rollback as go_back

    report = go_back(
        args.run,
        args.to,
        changes=args.set,
        skip_steps=args.skip_steps,
        reason=args.reason,
        dry_run=args.dry_run,
    )
    heads = {"now": "went back", "already": "had gone back already", "dry run": "would go back"}
    lines = [f"{args.run.path} {heads[report.done]} to step {args.to:_}", *continuation.render(report)]
    lines.append(row("aside", ", ".join(report.abandoned) or "no checkpoint"))
    print(report.model_dump_json(indent=1, exclude_unset=True) if args.json else "\n".join(lines))
    return 0


@verb(
    "fork",
    "runs/quickstart/run --at 200 runs/quickstart/cooler --set optimizer.lr=1e-3",
    RUN,
    argument("--at", type=step_number, required=True, metavar="STEP", help="step of a checkpoint"),
    argument("target", type=Path, metavar="NEW_RUN", help="directory of the new run"),
    argument(
        "--anneal",
        type=progress,
        metavar="LENGTH",
        help='let the learning rate decay from where it is over this length, such as "50B tokens", which ends the run',
    ),
    argument(
        "--to",
        type=not_negative,
        metavar="SHARE",
        help="of --anneal: share of the rate at the end (default: 0.1)",
    ),
    argument(
        "--mix",
        type=Path,
        metavar="FILE",
        help="of --anneal: TOML file with [[sources]] (name, path, weight) to continue with",
    ),
    *_BRANCH,
    DRY_RUN,
)
def fork(args: argparse.Namespace) -> int:
    """A new run that continues from a checkpoint of RUN, with its own directory; RUN is not changed."""
    from fsdp_pretrain.lineage import continuation
    from fsdp_pretrain.lineage.annealing import Annealing
    from fsdp_pretrain.lineage.fork import fork as fork_run

    alone = [option for option, value in (("--to", args.to), ("--mix", args.mix)) if value is not None]
    if args.anneal is None and alone:
        raise ConfigError(f"{' and '.join(alone)}: only with --anneal", remedy="say for how long: --anneal LENGTH")
    share = 0.1 if args.to is None else args.to
    report = fork_run(
        args.run,
        args.at,
        args.target,
        changes=args.set,
        skip_steps=args.skip_steps,
        reason=args.reason,
        anneal=None if args.anneal is None else Annealing(args.anneal, share, args.mix),
        dry_run=args.dry_run,
    )
    lines = [
        f"{args.target} {'would continue' if args.dry_run else 'continues'} from step {args.at:_} of {args.run.path}",
        *continuation.render(report),
    ]
    if not args.dry_run:
        lines.append(row("start", f"torchrun ... -m fsdp_pretrain.train {report.config}"))
    print(report.model_dump_json(indent=1, exclude_unset=True) if args.json else "\n".join(lines))
    return 0
