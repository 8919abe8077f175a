"""`fsdp-pretrain watch`: a run, or all runs under a directory, in the terminal."""

from __future__ import annotations

import argparse
from pathlib import Path

from fsdp_pretrain.console import argument, verb
from fsdp_pretrain.errors import ConfigError

_LINES = 40
"""Of a page that is printed; more where there is more to say."""


@verb(
    "watch",
    "runs/quickstart/run --once",
    argument("path", type=Path, metavar="RUN|DIR", help="run directory, or a directory with runs in it or below"),
    argument("--once", action="store_true", help="print it once, as when the output is not a terminal"),
)
def watch(args: argparse.Namespace) -> int:
    """Follow a run in the terminal: progress, curves, checkpoints, evaluations, alarms, the journal. For a
    directory: all runs in it, worst first. Printed once, exit 0 ok, 1 warning, 2 alert."""
    from fsdp_pretrain.run.files import RunDir
    from fsdp_pretrain.views.watch import app, fleet, following, page

    run = RunDir(args.path)
    single = run.begun
    runs = [run] if single else list(fleet.find_runs(args.path))
    if not runs:
        found = "neither it nor a directory in it holds a run" if args.path.is_dir() else "there is no such directory"
        raise ConfigError(f"{args.path} is not a run directory: {found}")
    if not args.once and app.is_live():
        app.show(args.path, fleet_of_runs=not single)
        return 0
    rows = fleet.read_rows(runs)
    out = app.console()
    view = page.render(following.read_view(run), out.width, _LINES) if single else None
    out.print(view or fleet.render(args.path, rows, out.width))
    return max(report.level for _, report in rows)
