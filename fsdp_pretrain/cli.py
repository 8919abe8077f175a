"""`fsdp-pretrain VERB`: everything an operator does around a run. Verbs that only look need no torch."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data.opening import data_at

from . import alarms_cli, branch, checkpoints_cli, where
from .arguments import add_run
from .config import Config, load
from .config_reference import reference
from .console import Command, byte_count, positive
from .control import VERBS, send
from .errors import ConfigError, StorageError
from .fork import fork
from .launch import command as launch
from .launch import doctor_command
from .record import aim, goodput, journal
from .record.files import stamp
from .rollback import rollback
from .status import inspect, render
from .units import Progress, Seconds


def main() -> int:
    """Entry point of the console script."""
    command = Command("fsdp-pretrain", "Plan, watch and steer pre-training runs.")
    _add_plan(command)
    _add_status(command)
    checkpoints_cli.add(command)
    alarms_cli.add(command)
    _add_rollback(command)
    _add_fork(command)
    _add_control(command)
    _add_where(command)
    _add_journal(command)
    _add_goodput(command)
    _add_note(command)
    _add_aim(command)
    launch.add(command)
    doctor_command.add(command)
    command.verb(
        "config-reference",
        _config_reference,
        "Print docs/config.md: every configuration key.",
        "fsdp-pretrain config-reference",
    )
    return command.run()


def _add_plan(command: Command) -> None:
    parser = command.verb(
        "plan",
        _plan,
        "What a configuration means in numbers: parameters, memory, FLOPs, mesh, disk, schedule; and what in it is "
        "probably not meant. Exit 78 on a contradiction.",
        "fsdp-pretrain plan configs/runs/llama-7b-hsdp.toml --world-size 128 --device 'NVIDIA A100-SXM4-80GB'",
    )
    parser.add_argument("config", help="TOML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--world-size", type=positive, help="check and describe this number of ranks")
    parser.add_argument("--gpus-per-node", type=positive, default=8, help="ranks of a node (default: 8)")
    parser.add_argument("--device", help="name of the device as its driver gives it, or `cpu`: its memory and peak")
    parser.add_argument("--device-memory", type=byte_count, help="warn if a rank needs more, such as 80GiB")
    parser.add_argument(
        "--seconds-per-step",
        type=float,
        help="print what a step of the full batch in this time on --world-size devices comes to: TFLOP/s, MFU, HFU",
    )
    parser.add_argument("--at", help="print the schedule at a point, such as '43680 steps'")
    parser.add_argument("--json", action="store_true")


def _add_status(command: Command) -> None:
    parser = command.verb(
        "status",
        _status,
        "How a run is doing. Exit 0 ok, 1 warning, 2 alert.",
        "fsdp-pretrain status runs/quickstart/run",
    )
    add_run(parser)
    parser.add_argument("--json", action="store_true")


def _add_rollback(command: Command) -> None:
    parser = command.verb(
        "rollback",
        _rollback,
        "Go back to a checkpoint: later ones are moved aside, samples skipped and settings changed for good. Killed at "
        "any point, the same command or the next start finishes it. Training then goes on with its usual command.",
        "fsdp-pretrain rollback runs/quickstart/run --to 200 --skip-steps 241:260 --set optimizer.lr=5e-4",
    )
    add_run(parser)
    parser.add_argument("--to", type=positive, required=True, metavar="STEP", help="step of a checkpoint")
    _add_branch(parser)
    parser.add_argument("--dry-run", action="store_true", help="check everything and show it, change nothing")


def _add_fork(command: Command) -> None:
    parser = command.verb(
        "fork",
        _fork,
        "A new run that goes on from a checkpoint of RUN, with its own directory; RUN is not changed.",
        "fsdp-pretrain fork runs/quickstart/run --at 200 runs/quickstart/cooler --set optimizer.lr=1e-3",
    )
    add_run(parser)
    parser.add_argument("--at", type=positive, required=True, metavar="STEP", help="step of a checkpoint")
    parser.add_argument("target", type=Path, metavar="NEW_RUN", help="directory of the new run")
    _add_branch(parser)


def _add_control(command: Command) -> None:
    parser = command.verb(
        "control",
        _control,
        "Ask the running job to save a checkpoint, or to save and stop.",
        "fsdp-pretrain control runs/quickstart/run save",
    )
    add_run(parser)
    parser.add_argument("action", choices=VERBS)


def _add_where(command: Command) -> None:
    parser = command.verb(
        "where",
        _where,
        "Which documents a step was trained on: samples, shards, documents, token ranges, text. Proves by the recorded "
        "digest that it is the batch that was trained. Needs the run directory and the corpora, no GPU.",
        "fsdp-pretrain where runs/quickstart/run --step 120 --text",
    )
    add_run(parser)
    parser.add_argument("--step", type=positive, required=True, help="optimiser step, from 1")
    parser.add_argument("--before", type=positive, default=0, metavar="K", help="also the K steps before it")
    parser.add_argument("--after", type=positive, default=0, metavar="K", help="also the K steps after it")
    parser.add_argument("--segment", type=int, help="the start that trained it, to see a step that a resume replaced")
    parser.add_argument("--rank", type=int, help="only the samples of this rank")
    parser.add_argument("--world", type=positive, help="split over this many ranks (default: as it was trained)")
    parser.add_argument("--sample", type=int, help="only the sample with this index")
    parser.add_argument("--text", action="store_true", help="show the text of every piece")
    parser.add_argument("--ids", action="store_true", help="show the token ids, the last of which is only a label")
    parser.add_argument("--json", action="store_true", help="one JSON object per step, each on its line")


def _add_journal(command: Command) -> None:
    parser = command.verb(
        "journal",
        _journal,
        "The chronicle of a run: every start and what changed, every stop and what was at risk, saves, alarms, notes.",
        "fsdp-pretrain journal runs/quickstart/run --kind changed --kind stop --since '24 h'",
    )
    add_run(parser)
    parser.add_argument(
        "--kind",
        action="append",
        choices=journal.KINDS,
        metavar="KIND",
        help=f"only entries of this kind; repeatable; one of {', '.join(sorted(journal.KINDS))}",
    )
    parser.add_argument(
        "--since", type=_since, metavar="TIME", help="only entries after a UTC time (2026-06-01T12:00) or within '24 h'"
    )
    parser.add_argument("--follow", action="store_true", help="keep showing what is added, until interrupted")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")


def _add_goodput(command: Command) -> None:
    parser = command.verb(
        "goodput",
        _goodput,
        "Where the time of a run went, as its record shows: every second in one state, interruptions and their cost, "
        "and how often to save.",
        "fsdp-pretrain goodput runs/quickstart/run",
    )
    add_run(parser)
    parser.add_argument("--json", action="store_true")


def _add_note(command: Command) -> None:
    parser = command.verb(
        "note", _note, "Add a line to the chronicle.", 'fsdp-pretrain note runs/quickstart/run "new switch"'
    )
    add_run(parser)
    parser.add_argument("text")
    parser.add_argument("--step", type=positive, help="that it is about")
    parser.add_argument("--author", default=journal.who(), help="who says so (default: you)")


def _add_aim(command: Command) -> None:
    parser = command.verb(
        "aim",
        _aim,
        "Build, or bring up to date, the Aim run of a record.",
        "fsdp-pretrain aim runs/quickstart/run",
    )
    add_run(parser)


def _add_branch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--skip-steps", type=_steps, metavar="A:B", help="never train the samples of steps A to B, as recorded"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="key=value", help="change a setting for good; repeatable"
    )
    parser.add_argument("--reason", default="", help="for the chronicle")
    parser.add_argument("--json", action="store_true")


def _steps(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form FIRST:LAST")
    return int(first), int(last)


def _plan(args: argparse.Namespace) -> int:
    if args.seconds_per_step is not None and (args.world_size is None or not 0 < args.seconds_per_step < math.inf):
        raise ConfigError("--seconds-per-step needs a positive time and --world-size")
    if args.world_size is None and (args.device or args.device_memory):
        raise ConfigError("--device and --device-memory are compared with what a rank needs: give --world-size as well")
    config = load(args.config, args.overrides)
    if args.at is not None:
        row = _schedule_at(config, args.at)
        print(json.dumps(row, indent=1) if args.json else "\n".join(f"{key:16} {value}" for key, value in row.items()))
        return 0
    try:
        from . import plan
    except ImportError as error:
        raise ConfigError(
            f"plan counts parameters with torch, which is not installed ({error.name})",
            remedy="in the checkout: pip install -e '.[train]'",
        ) from None
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
    )
    print(json.dumps(result.to_json(), indent=1) if args.json else plan.render(result))
    return 0


def _schedule_at(config: Config, text: str) -> dict[str, Any]:
    """The schedule at a point of the run such as `43680 steps`. Raises ConfigError."""
    schedule = config.schedule
    try:
        samples = schedule.samples(Progress.parse(text))
    except ValueError as error:
        raise ConfigError(f"--at: {error}") from None
    if not 0 < samples <= schedule.total:
        raise ConfigError(
            f"--at {text!r} is {'after the end' if samples else 'before the first step'} of the run, which has "
            f"{schedule.steps:_} steps: {schedule.total:_} samples, "
            f"{schedule.tokens(schedule.total):_} tokens"
        )
    row = schedule.at(schedule.batch.step_at(samples))
    return {**row, **data_at(config, int(row["consumed"])), "sequence_length": config.data.sequence_length}


def _status(args: argparse.Namespace) -> int:
    report = inspect(args.run)
    print(json.dumps(report.as_dict(), indent=1) if args.json else render(report))
    return report.level


def _rollback(args: argparse.Namespace) -> int:
    report = rollback(
        args.run,
        args.to,
        changes=args.set,
        skip_steps=args.skip_steps,
        reason=args.reason,
        dry_run=args.dry_run,
    )
    heads = {"now": "went back", "already": "had gone back already", "dry run": "would go back"}
    lines = [f"{args.run.path} {heads[report['done']]} to step {args.to:_}", *branch.render(report)]
    lines.append(f"  aside       {', '.join(report['abandoned']) or 'no checkpoint'}")
    print(json.dumps(report, indent=1) if args.json else "\n".join(lines))
    return 0


def _fork(args: argparse.Namespace) -> int:
    report = fork(args.run, args.at, args.target, changes=args.set, skip_steps=args.skip_steps, reason=args.reason)
    lines = [f"{args.target} goes on from step {args.at:_} of {args.run.path}", *branch.render(report)]
    lines.append(f"  start       torchrun ... -m fsdp_pretrain.train {report['config']}")
    print(json.dumps(report, indent=1) if args.json else "\n".join(lines))
    return 0


def _control(args: argparse.Namespace) -> int:
    report = inspect(args.run)
    if not report.running:
        raise ConfigError(
            f"no job of {args.run.path} is running (state {report.state})",
            effect="the request would wait for a later start, which discards it",
        )
    try:
        send(args.run, args.action)
    except OSError as error:
        raise StorageError(
            f"cannot write to {args.run.control}: {error.strerror}", effect="nothing was asked"
        ) from None
    print(f"asked to {args.action}; the job answers within a few steps (see its log or `fsdp-pretrain journal`)")
    return 0


def _where(args: argparse.Namespace) -> int:
    for number in range(max(1, args.step - args.before), args.step + args.after + 1):
        step = where.trained_step(args.run, number, args.segment)
        found = where.describe_step(
            step, world=args.world, rank=args.rank, sample=args.sample, text=args.text, ids=args.ids
        )
        print(json.dumps(found) if args.json else where.render(found))
    return 0


def _journal(args: argparse.Namespace) -> int:
    damaged: list[bytes] = []
    known = (entry for entry, _ in journal.entries(args.run.journal, on_damaged=damaged.append))
    for entry in journal.follow(args.run) if args.follow else known:
        if (args.kind is None or entry["kind"] in args.kind) and (args.since is None or entry["time"] >= args.since):
            print(json.dumps(entry) if args.json else journal.render(entry), flush=args.follow)
    if damaged:
        print(f"damaged lines, passed over: {len(damaged):_}", file=sys.stderr)
    return 0


def _since(text: str) -> str:
    """A place in time as the journal writes it. Raises ArgumentTypeError."""
    with contextlib.suppress(ValueError):
        return stamp(time.time() - Seconds.parse(text).value)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a time such as 2026-06-01T12:00 nor '24 h'") from None
    return stamp((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())


def _goodput(args: argparse.Namespace) -> int:
    found = goodput.goodput(args.run, partial(tqdm, desc="reading", unit=" steps", delay=2, leave=False, disable=None))
    if found is None:
        raise ConfigError(f"there is nothing to count: {args.run.path} was never started")
    print(json.dumps(found, indent=1) if args.json else goodput.render(found))
    return 0


def _note(args: argparse.Namespace) -> int:
    journal.tell(args.run, "note", args.text, by=args.author, **({} if args.step is None else {"step": args.step}))
    print(f"noted in {args.run.journal}")
    return 0


def _aim(args: argparse.Namespace) -> int:
    repository, count = aim.rebuild(args.run)
    print(f"{repository}: {count} records tracked; look at them with `aim up --repo {repository}`")
    return 0


def _config_reference(args: argparse.Namespace) -> int:
    del args
    print(reference(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
