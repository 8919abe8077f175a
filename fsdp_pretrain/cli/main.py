"""`fsdp-pretrain VERB`: the operator's commands for a run. Read-only verbs need no torch, except `plan`, unless it only
predicts.

A handler imports what it runs, see `fsdp_pretrain.console`.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

from fsdp_pretrain.console import JSON, CommandLine, argument, positive, row, verb
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.run import journal
from fsdp_pretrain.run.arguments import RUN, SEGMENT
from fsdp_pretrain.units import human_bytes

from .alarms import ack, alarms, notify
from .checkpoints import checkpoints
from .control import control
from .init import init
from .launch import doctor, launch
from .plan import plan
from .steps import profile, replay
from .trackers import aim, tensorboard, wandb
from .watch import watch


def main() -> int:
    """Entry point of the console script."""
    command = CommandLine("fsdp-pretrain", "Plan, watch and steer pre-training runs.")
    command.add(init, plan, _status, watch, checkpoints, alarms, ack, notify, _rollback, _fork, control, _where)
    command.add(_journal, _goodput, _report, _note, profile, replay, aim, tensorboard, wandb, launch, doctor)
    command.add(_config_reference)
    return command.run()


@verb("status", "runs/quickstart/run", RUN, JSON)
def _status(args: argparse.Namespace) -> int:
    """How a run is doing. Exit 0 ok, 1 warning, 2 alert."""
    from fsdp_pretrain.views.status import inspect, render

    report = inspect(args.run)
    print(json.dumps(report.as_dict(), indent=1) if args.json else render(report))
    return report.level


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


@verb(
    "rollback",
    "runs/quickstart/run --to 200 --skip-steps 241:260 --set optimizer.lr=5e-4",
    RUN,
    argument("--to", type=positive, required=True, metavar="STEP", help="step of a checkpoint"),
    *_BRANCH,
    argument("--dry-run", action="store_true", help="check everything and show it, change nothing"),
)
def _rollback(args: argparse.Namespace) -> int:
    """Go back to a checkpoint: later ones are moved aside, samples skipped and settings changed for good. Killed at
    any point, the same command or the next start finishes it. Training then goes on with its usual command."""
    from fsdp_pretrain.lineage import continuation
    from fsdp_pretrain.lineage.rollback import rollback

    report = rollback(
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
    argument("--at", type=positive, required=True, metavar="STEP", help="step of a checkpoint"),
    argument("target", type=Path, metavar="NEW_RUN", help="directory of the new run"),
    *_BRANCH,
)
def _fork(args: argparse.Namespace) -> int:
    """A new run that goes on from a checkpoint of RUN, with its own directory; RUN is not changed."""
    from fsdp_pretrain.lineage import continuation
    from fsdp_pretrain.lineage.fork import fork

    report = fork(args.run, args.at, args.target, changes=args.set, skip_steps=args.skip_steps, reason=args.reason)
    lines = [f"{args.target} goes on from step {args.at:_} of {args.run.path}", *continuation.render(report)]
    lines.append(row("start", f"torchrun ... -m fsdp_pretrain.train {report.config}"))
    print(report.model_dump_json(indent=1, exclude_unset=True) if args.json else "\n".join(lines))
    return 0


@verb(
    "where",
    "runs/quickstart/run --step 120 --text",
    RUN,
    argument("--step", type=positive, required=True, help="optimiser step, from 1"),
    SEGMENT,
    argument("--rank", type=int, help="only the samples of this rank"),
    argument("--text", action="store_true", help="show the text of every piece"),
    argument("--ids", action="store_true", help="show the token ids, the last of which is only a label"),
    argument("--json", action="store_true", help="print JSON"),
)
def _where(args: argparse.Namespace) -> int:
    """Which documents a step was trained on: samples, shards, documents, token ranges, text. Proves by the recorded
    digest that it is the batch that was trained. Needs the run directory and the corpora, no GPU."""
    from fsdp_pretrain.lineage import provenance

    step = provenance.trained_step(args.run, args.step, args.segment)
    found = provenance.describe_step(step, rank=args.rank, text=args.text, ids=args.ids)
    print(json.dumps(found.model_dump(exclude_unset=True)) if args.json else provenance.render(found))
    return 0


@verb(
    "journal",
    "runs/quickstart/run --kind changed --kind stop",
    RUN,
    argument(
        "--kind",
        action="append",
        choices=journal.KINDS,
        metavar="KIND",
        help=f"only entries of this kind; repeatable; one of {', '.join(sorted(journal.KINDS))}",
    ),
    argument("--json", action="store_true", help="one JSON object per line"),
)
def _journal(args: argparse.Namespace) -> int:
    """The chronicle of a run: every start and what changed, every stop and what was at risk, saves, alarms, notes."""
    for entry in journal.read(args.run):
        if args.kind is None or entry["kind"] in args.kind:
            print(json.dumps(entry) if args.json else journal.render(entry))
    return 0


@verb("goodput", "runs/quickstart/run", RUN, JSON)
def _goodput(args: argparse.Namespace) -> int:
    """Where the time of a run went, as its record shows: every second in one state, interruptions and their cost, and
    how often to save."""
    from tqdm import tqdm

    from fsdp_pretrain.run import goodput

    found = goodput.goodput(args.run, partial(tqdm, desc="reading", unit=" steps", delay=2, leave=False, disable=None))
    if found is None:
        raise ConfigError(f"there is nothing to count: {args.run.path} was never started")
    print(json.dumps(found.model_dump(), indent=1) if args.json else goodput.render(found))
    return 0


@verb(
    "report",
    "runs/quickstart/run",
    RUN,
    argument("--out", type=Path, metavar="FILE", help="file to write (default: report.html in RUN)"),
)
def _report(args: argparse.Namespace) -> int:
    """A page to look at: curves, checkpoints, evaluations, events and goodput of a run in one HTML file that needs no
    network."""
    from tqdm import tqdm

    from fsdp_pretrain.views.report.page import write_report

    out = args.out or args.run.path / "report.html"
    shown = partial(tqdm, desc="reading", unit=" steps", delay=2, leave=False, disable=None)
    size = write_report(args.run, out, shown)
    print(f"{out}: {human_bytes(size)}")
    return 0


@verb(
    "note",
    'runs/quickstart/run "new switch"',
    RUN,
    argument("text"),
    argument("--step", type=positive, help="step that the note is about"),
)
def _note(args: argparse.Namespace) -> int:
    """Add a line to the chronicle."""
    journal.add(args.run, "note", args.text, by=journal.who(), **({} if args.step is None else {"step": args.step}))
    print(f"noted in {args.run.journal}")
    return 0


@verb("config-reference", "")
def _config_reference(args: argparse.Namespace) -> int:
    """Print docs/config.md: every configuration key."""
    from fsdp_pretrain.config.reference import reference

    print(reference(), end="")
    return 0
