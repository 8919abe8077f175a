"""Verbs that show the record of a run: `status`, `watch`, `journal`, `goodput`, `report`, the trackers; and `note`,
which adds to its journal."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fsdp_pretrain.console import JSON, Argument, argument, as_json, positive, row, verb
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.remote import RemoteError, Url, is_url
from fsdp_pretrain.run import journal as record
from fsdp_pretrain.run.arguments import RUN, run_directory
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.units import human_bytes

_EXAMPLE = "runs/quickstart/run"
_LINES = 40
"""Height for which the page is laid out where it is printed once; it may be longer."""


def _bar(what: str, unit: str, lines: Any = None) -> Any:
    """A progress bar, which appears after two seconds."""
    from tqdm import tqdm

    return tqdm(lines, desc=what, unit=f" {unit}", delay=2, leave=False, disable=None)


def _run_or_url(text: str) -> RunDir:
    """A run directory, or a copy of the record at a URL, whose age is told. Raises ArgumentTypeError, UserError."""
    if not is_url(text):
        return run_directory(text)
    from fsdp_pretrain.mirror.record_copy import FetchedRun

    try:
        url = Url(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    try:
        run = FetchedRun(url)
    except RemoteError as error:
        error.effect = "nothing is shown"
        raise
    print(run.fetched, file=sys.stderr)
    return run


RUN_OR_URL = argument("run", type=_run_or_url, metavar="RUN", help="run directory, or the URL of its mirror")


@verb("status", _EXAMPLE, RUN_OR_URL, JSON)
def status(args: argparse.Namespace) -> int:
    """How a run is doing. Exit 0 ok, 1 warning, 2 alert."""
    from fsdp_pretrain.views.status import inspect, render

    report = inspect(args.run)
    print(as_json(report.as_dict()) if args.json else render(report))
    return report.level


@verb(
    "watch",
    "runs/quickstart/run --once",
    argument(
        "run",
        type=lambda text: _run_or_url(text) if is_url(text) else RunDir(Path(text)),
        metavar="RUN|DIR",
        help="run directory, a directory with runs in it or below, or the URL of a run's mirror",
    ),
    argument("--once", action="store_true", help="print it once, as when the output is not a terminal"),
)
def watch(args: argparse.Namespace) -> int:
    """Follow a run in the terminal: progress, curves, checkpoints, evaluations, alarms, the journal. For a
    directory: all runs in it, worst first. Printed once, exit 0 ok, 1 warning, 2 alert."""
    from fsdp_pretrain.views.watch import app, fleet, following, page

    run = args.run
    single = run.begun
    runs = [run] if single else list(fleet.find_runs(run.path))
    if not runs:
        problem = "neither it nor a directory in it holds a run" if run.path.is_dir() else "there is no such directory"
        raise ConfigError(f"{run.path} is not a run directory: {problem}")
    if not args.once and app.is_live():
        app.show(run, fleet_of_runs=not single)
        return 0
    rows = fleet.read_rows(runs)
    out = app.console()
    view = page.render(following.read_view(run), out.width, _LINES) if single else None
    out.print(view or fleet.render(run.path, rows, out.width))
    return max(report.level for _, report in rows)


@verb(
    "journal",
    "runs/quickstart/run --kind changed --kind stop",
    RUN_OR_URL,
    argument(
        "--kind",
        action="append",
        choices=record.KINDS,
        metavar="KIND",
        help=f"only entries of this kind; repeatable; one of {', '.join(sorted(record.KINDS))}",
    ),
    argument("--json", action="store_true", help="one JSON object per line"),
)
def journal(args: argparse.Namespace) -> int:
    """The chronicle of a run: every start and what changed, every stop and what was at risk, saves, alarms, notes."""
    for entry in record.read(args.run):
        if args.kind is None or entry["kind"] in args.kind:
            print(as_json(entry, indent=None) if args.json else record.render(entry))
    return 0


@verb(
    "note",
    'runs/quickstart/run "new switch"',
    RUN,
    argument("text"),
    argument("--step", type=positive, help="step that the note is about"),
)
def note(args: argparse.Namespace) -> int:
    """Add a line to the chronicle."""
    record.add(args.run, "note", args.text, by=record.who(), **({} if args.step is None else {"step": args.step}))
    print(f"noted in {args.run.journal}")
    return 0


@verb("goodput", _EXAMPLE, RUN_OR_URL, JSON)
def goodput(args: argparse.Namespace) -> int:
    """Where the time of a run went, as its record shows: every second in one state, interruptions and their cost, and,
    after failures, how often to save."""
    from fsdp_pretrain.run.goodput import goodput as account
    from fsdp_pretrain.run.goodput import render

    result = account(args.run, partial(_bar, "reading", "steps"))
    if result is None:
        raise ConfigError(f"there is nothing to count: {args.run.path} was never started")
    print(as_json(result.model_dump()) if args.json else render(result))
    return 0


@verb(
    "report",
    _EXAMPLE,
    RUN_OR_URL,
    argument(
        "--out", type=Path, metavar="FILE", help="page to write (default: RUN/report.html; of a URL, report.html)"
    ),
)
def report(args: argparse.Namespace) -> int:
    """Write a run as one HTML page: curves, checkpoints, evaluations, events and goodput, without a network."""
    from fsdp_pretrain.views.report.page import write_report

    out = args.out or (Path() if args.run.fetched else args.run.path) / "report.html"
    size, summary = write_report(args.run, out, partial(_bar, "reading", "steps"))
    page = f"{out}: {human_bytes(size)}"
    rows = [
        ("trained", summary.trained),
        *zip(("result", *[""] * len(summary.went)), summary.went, strict=False),
        ("problems", summary.look_at),
        ("sample", summary.writes),
        ("report", page),
    ]
    print("\n".join(row(name, text) for name, text in rows if text))
    return 0


_LOOK = {"aim": "aim up --repo {}", "tensorboard": "tensorboard --logdir {}", "wandb": "wandb sync {}"}
"""How to look at what was written, by the name of the tracker."""


@verb(
    "track",
    f"{_EXAMPLE} --to tensorboard",
    RUN,
    argument("--to", choices=_LOOK, required=True, help="in whose format; nothing is sent"),
)
def track(args: argparse.Namespace) -> int:
    """Write a record into Aim, TensorBoard or W&B, or bring up to date what was written."""
    from fsdp_pretrain.views.trackers.follow import rebuild

    with _bar("writing", "records") as bar:
        made, count = rebuild(args.run, args.to, lambda done: bar.update(done - bar.n))
    print(f"{made}: {count} records; look at them with `{_LOOK[args.to].format(made)}`")
    return 0


def _to(name: str) -> Argument:
    return lambda parser: parser.set_defaults(to=name)


TRACKERS = [replace(track, name=name, example=_EXAMPLE, arguments=(RUN, _to(name))) for name in _LOOK]
"""Short forms, `aim RUN` for `track RUN --to aim`."""
