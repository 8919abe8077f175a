#!/usr/bin/env python3
"""Make the pictures of the README from a run, finished or not: its report in Chromium, and `fsdp-pretrain watch`.

    scripts/pictures.py runs/quickstart/run docs/pictures

Needs the extra `report`, and Chromium (Debian's package chromium).
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.views.report.page import write_report
from fsdp_pretrain.views.watch import following, page

WIDTH, HEIGHT = 1280, 1000
"""Pixels of the report's picture."""
COLUMNS, LINES = 118, 34


def report(run: RunDir, out: Path) -> None:
    """A picture of the first screen of a run's report. Raises CalledProcessError."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        sys.exit("error: there is no Chromium here")
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "report.html"
        write_report(run, made)
        subprocess.run(
            [
                *(browser, "--headless", "--no-sandbox", "--hide-scrollbars", f"--user-data-dir={folder}/profile"),
                *(f"--window-size={WIDTH},{HEIGHT}", "--virtual-time-budget=20000", f"--screenshot={out}"),
                made.as_uri(),
            ],
            check=True,
            capture_output=True,
        )


def watch(run: RunDir, out: Path) -> None:
    """A picture of the terminal view of a run."""
    with Path("/dev/null").open("w") as nowhere:
        console = Console(record=True, width=COLUMNS, height=LINES, file=nowhere, force_terminal=True, highlight=False)
        console.print(page.render(following.read_view(run), COLUMNS, LINES))
    drawn = console.export_svg(title=f"fsdp-pretrain watch {run.path}")
    out.write_text(re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL))  # rich's fonts come from the network


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    report(RunDir(args.run), args.out / "report.png")
    watch(RunDir(args.run), args.out / "watch.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
