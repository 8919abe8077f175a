"""Runs commands one after the other within a fixed time, and shows their results in one table. No torch.

A part is a process with a time limit of its own. Whatever becomes of it, nothing of it is left when the next one
starts, and the table on disk is complete up to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import psutil

from .figures import COLUMNS, Figures, figures

ROOT = Path(__file__).resolve().parent.parent.parent
TABLE, SUMMARY, SCRATCH = "summary.md", "summary.json", "scratch"
_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of prctl(2)."""
_LEAST = 5.0
"""Seconds that must be left to start a part."""
_LAST_SECONDS = 5.0
"""Time for an interrupted part to print what it has."""
_KILL_SECONDS = 10.0
"""Time for killed processes to end; one that waits in a driver may not."""
_LAST_LINES = 20


@dataclass(frozen=True)
class Part:
    """One command.

    Attributes:
        name: of its files, and of its row.
        command: arguments of Python.
        limit: seconds after which it is ended.
    """

    name: str
    command: tuple[str, ...]
    limit: float

    def output(self, out: Path) -> Path:
        """Its standard output."""
        return out / f"{self.name}.{'json' if '--json' in self.command else 'txt'}"

    def log(self, out: Path) -> Path:
        """Its error output."""
        return out / f"{self.name}.log"


@dataclass(frozen=True)
class PartOutcome:
    """How a part ended.

    Attributes:
        seconds: that it ran.
        code: its exit code, None if it was ended or not started.
        figures: what it measured, also if it failed later.
        last: the last lines of its log, if it did not pass.
    """

    name: str
    result: Literal["passed", "failed", "timed out", "not started"]
    seconds: float = 0.0
    code: int | None = None
    figures: list[Figures] = field(default_factory=list)
    last: list[str] = field(default_factory=list)
    command: str = ""

    @property
    def text(self) -> str:
        """The result in a word or two."""
        return f"failed (exit {self.code})" if self.result == "failed" else self.result


@dataclass(frozen=True)
class Report:
    """What the table says above its rows."""

    title: str
    device: str
    torch: str
    python: str = platform.python_version()
    started: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S %z"))


def run_parts(parts: Sequence[Part], out: Path, *, report: Report, seconds: float) -> list[PartOutcome]:
    """Run all parts for which there is time, and write `TABLE` and `SUMMARY` after each.

    Args:
        parts: the most valuable first.
        out: existing directory; files of these names are replaced.
        report: the head of the table.
        seconds: for all of them.
    """
    _adopt_orphans()
    began, outcomes = time.monotonic(), list[PartOutcome]()
    for part in parts:
        left = seconds - (time.monotonic() - began)
        if left < _LEAST:
            outcomes.append(PartOutcome(part.name, "not started", command=shlex.join(part.command)))
        else:
            outcomes.append(_run(part, out, min(part.limit, left)))
        print(f"{part.name}: {outcomes[-1].text}, {outcomes[-1].seconds:.0f}s", file=sys.stderr, flush=True)
        _write(report, outcomes, out, time.monotonic() - began)
    return outcomes


def _adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that they can be found."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def _run(part: Part, out: Path, limit: float) -> PartOutcome:
    output, log, start = part.output(out), part.log(out), time.monotonic()
    code: int | None = None
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    with output.open("wb") as standard, log.open("wb") as errors:
        try:
            process = subprocess.Popen(
                [sys.executable, *part.command],
                stdin=subprocess.DEVNULL, stdout=standard, stderr=errors, cwd=ROOT, env=environment,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # in the background it is ignored
            )  # fmt: skip
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:  # pytest shows its failures, `--peers` what it has
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LAST_SECONDS)
        finally:
            _end_descendants()
            shutil.rmtree(out / SCRATCH, ignore_errors=True)
    result = PartOutcome(
        name=part.name,
        result="timed out" if code is None else "failed" if code else "passed",
        seconds=time.monotonic() - start,
        code=code,
        figures=figures(_read(output)),
        command=shlex.join(part.command),
    )
    if code == 0:
        return result
    texts = [_read(log)] if output.suffix == ".json" else [_read(output), _read(log)]
    lines = [line for text in texts for line in text.splitlines() if line.strip()]
    return replace(result, last=lines[-_LAST_LINES:])


def _end_descendants() -> None:
    """Kill every process below this one, wherever it has moved."""
    until = time.monotonic() + _KILL_SECONDS
    while (below := psutil.Process().children(recursive=True)) and time.monotonic() < until:
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.05)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _write(report: Report, outcomes: list[PartOutcome], out: Path, seconds: float) -> None:
    content: dict[str, Any] = {**asdict(report), "seconds": seconds, "parts": [asdict(each) for each in outcomes]}
    (out / SUMMARY).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (out / TABLE).write_text(render(report, outcomes, seconds), encoding="utf-8")


def render(report: Report, outcomes: Sequence[PartOutcome], seconds: float) -> str:
    """The table in Markdown, and below it the last lines of what did not pass."""
    lines = [
        f"# {report.title}",
        "",
        f"{report.device}, torch {report.torch}, Python {report.python}; {report.started}, {seconds:.0f} s in all.",
        "",
        f"| part | result | s | {' | '.join(COLUMNS)} |",
        f"|---|---|---{'|---' * len(COLUMNS)}|",
    ]
    for outcome in outcomes:
        for number, row in enumerate(outcome.figures or [Figures()]):
            name = f"{outcome.name}: {row.of}" if row.of else outcome.name
            ended = [outcome.text, f"{outcome.seconds:.0f}"] if number == 0 else ["", ""]
            lines.append("| " + " | ".join([name, *ended, *row.cells()]) + " |")
    for outcome in outcomes:
        if outcome.last:
            lines += ["", f"## {outcome.name}: {outcome.text}", "", f"`python {outcome.command}`", ""]
            lines += [f"    {line}" for line in outcome.last]
    return "\n".join(lines) + "\n"
