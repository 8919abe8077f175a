"""`fsdp-pretrain control`: requests to the running job, which any teammate can send."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_pretrain.console import JSON, argument, as_json, seconds, step_number, verb
from fsdp_pretrain.errors import ConfigError, Exit, StorageError, UserError
from fsdp_pretrain.run import journal
from fsdp_pretrain.run.arguments import RUN
from fsdp_pretrain.units import human_time

if TYPE_CHECKING:
    from fsdp_pretrain.config.live_set import ShownValue
    from fsdp_pretrain.run.files import RunDir
    from fsdp_pretrain.views.status import StatusReport

_PATIENCE, _STEPS = 60.0, 20
"""How long to wait for an answer: seconds, or this many steps if they take longer."""
_POLL_SECONDS, _LOOK_SECONDS = 0.1, 2.0


@verb(
    "control",
    'runs/quickstart/run set optimizer.lr_scale=0.5 --over "200 steps" --reason "the loss is noisy"',
    RUN,
    argument("action", choices=("stop", "save", "pause", "resume", "set"), help="what to ask for"),
    argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="set: optimizer.lr, min_lr, lr_scale, weight_decay, betas; train.grad_clip, z_loss; checkpoint.every",
    ),
    argument("--over", default="", metavar="LENGTH", help="set: ramp to the new values, such as '200 steps'"),
    argument("--at", type=step_number, metavar="STEP", help="set: for the steps after this one (default: at once)"),
    argument("--yes", action="store_true", help="set: do not ask for confirmation"),
    argument("--reason", default="", help="for the chronicle"),
    argument("--wait", type=seconds, metavar="TIME", help="how long to wait for an answer, such as '5 minutes'"),
    JSON,
)
def control(args: argparse.Namespace) -> int:
    """Ask the running job to save, stop, pause, resume or change settings. `stop` saves first; `pause` holds the ranks
    idle between two steps; `set` is for good, and previewed."""
    if args.action != "set" and (args.overrides or args.over or args.at is not None):
        raise ConfigError(f"KEY=VALUE, --over and --at belong to `set`, not to `{args.action}`")
    report = running_job(args.run)
    if args.action == "set":
        return _set(args, report)
    _show(args, answer=_ask(args, report, reason=args.reason))
    return 0


def running_job(run: RunDir) -> StatusReport:
    """The status of the job of a run. Raises ConfigError if none is running."""
    from fsdp_pretrain.views.status import inspect

    report = inspect(run, brief=True)
    if not report.running:
        remedy = "" if report.state == "complete" else "start the run, then repeat the command"
        kinds = [
            entry["kind"] for entry in journal.read(run) if entry["kind"] in ("start", "restart", "stop", "launch")
        ]
        if kinds[-1:] == ["restart"]:
            remedy = "its launcher starts it again: repeat the command then; to end the launcher, send it SIGTERM"
        raise ConfigError(
            f"no job of {run.path} is running (state {report.state})",
            effect="nobody would answer the request",
            remedy=remedy,
        )
    return report


def send_request(run: RunDir, action: str, report: StatusReport, **content: Any) -> Path:
    """Send a request to the running job (`run.requests.send`). Returns its file. Raises StorageError."""
    from fsdp_pretrain.run.requests import send

    try:
        return send(run, action, segment=report.status.segment, **content)
    except OSError as error:
        effect = "the request was not sent"
        raise StorageError(f"cannot write to {run.control}: {error.strerror}", effect=effect) from None


def _set(args: argparse.Namespace, report: StatusReport) -> int:
    from fsdp_pretrain.config.live_set import preview, ramped, read_entry, steer
    from fsdp_pretrain.config.resume_rules import load_recorded

    step, consumed = report.status.step or 0, report.status.consumed or 0
    at = step if args.at is None else args.at
    if at < step:
        raise ConfigError(f"--at {at}: the run is at step {step:_} already", effect="nothing was changed")
    config = load_recorded(args.run.config)
    changes = [ramped(text, args.over) for text in args.overrides]
    place = config.schedule.batch.ahead(consumed, at - step)
    entry = read_entry(changes, config.schedule, at=place, reason=args.reason)
    after = steer(config, entry)
    rows = preview(config, after, entry, step=step, consumed=consumed)
    if not args.json:
        exact = "" if args.at is not None else "; the job acts at the next step that all ranks have before them"
        head = f"{', '.join(changes)} after step {at:_}{exact}"
        print("\n".join([head, *_table(rows)]), flush=True)
    if not args.yes:
        _confirm()
    answer = _ask(args, report, reason=args.reason, changes=changes, at=args.at, seen=len(config.timeline))
    _show(args, answer=answer, preview=[asdict(row) for row in rows])
    return 0


def _table(rows: list[ShownValue]) -> list[str]:
    lines = [("step", "key", "as it is", "then")]
    lines += [(f"{row.step:_}", row.key, row.before, row.after) for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    return [
        f"  {line[0]:>{widths[0]}}  {line[1]:{widths[1]}}  {line[2]:{widths[2]}}  {line[3]}".rstrip() for line in lines
    ]


def _confirm() -> None:
    """Raise ConfigError unless the user agrees."""
    if not sys.stdin.isatty():
        raise ConfigError(
            "not confirmed: this is no terminal", effect="nothing was changed", remedy="add --yes after the preview"
        )
    try:
        agreed = input("change the run? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        agreed = False
    if not agreed:
        raise ConfigError("not confirmed", effect="nothing was changed")


def _show(args: argparse.Namespace, **result: Any) -> None:
    print(as_json(result) if args.json else result["answer"]["text"])


def _ask(args: argparse.Namespace, report: StatusReport, **content: Any) -> dict[str, Any]:
    """Send the request and wait for its answer. Raises UserError if it is refused, or not answered in time."""
    from fsdp_pretrain.views.status import inspect

    def is_running() -> bool:
        now = inspect(args.run, brief=True)
        return now.running and now.status.segment == report.status.segment

    patience = args.wait or max(_PATIENCE, _STEPS * (report.status.iteration_seconds or 0.0))
    offset = args.run.journal.stat().st_size if args.run.journal.exists() else 0
    request = send_request(args.run, args.action, report, **content)
    try:
        answer = _wait(args.run, request, offset, is_running, patience)
    except KeyboardInterrupt:
        print(_withdraw(args.run, request))
        raise
    if answer is None:
        why = f"did not answer within {human_time(patience)}" if is_running() else "has ended"
        unanswered = UserError(f"the job {why}", effect=_withdraw(args.run, request))
        unanswered.exit = Exit.RESUME
        raise unanswered
    if "refused" in answer:
        raise ConfigError(f"{args.action} was refused: {answer['refused']}", effect="nothing was changed")
    return answer


def _wait(
    run: RunDir, request: Path, offset: int, is_running: Callable[[], bool], seconds: float
) -> dict[str, Any] | None:
    """The journal entry after `offset` that answers a request; None if none came in time or before the job ended."""
    from fsdp_pretrain.run import journal

    begun = looked = time.monotonic()
    alive = True
    while True:
        for entry, next_offset in journal.entries(run.journal, offset):
            offset = next_offset
            if entry.get("request") == request.stem:
                return entry
        now = time.monotonic()
        if not alive or now - begun > seconds:  # the journal was read once more after the job ended
            return None
        if now - looked > _LOOK_SECONDS:
            looked, alive = now, is_running()
        time.sleep(_POLL_SECONDS)


def _withdraw(run: RunDir, request: Path) -> str:
    """Withdraw a request that has no answer, unless the job has taken it. Returns what happened, as text."""
    try:
        request.unlink()
    except FileNotFoundError:
        return (
            f"the job has taken the request: {run.overrides} has what lasts, and "
            f"`fsdp-pretrain journal {run.path} --kind control` the answer"
        )
    return "the request was taken back: nothing was changed"
