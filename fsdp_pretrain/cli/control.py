"""`fsdp-pretrain control`: what any teammate can do to a live run."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from fsdp_pretrain.console import argument, verb
from fsdp_pretrain.errors import ConfigError, Exit, StorageError, UserError
from fsdp_pretrain.record.arguments import RUN
from fsdp_pretrain.units import Seconds, human_time

if TYPE_CHECKING:
    from fsdp_pretrain.watchdog.status import StatusReport

_PATIENCE, _STEPS = 60.0, 20
"""How long to wait for an answer: seconds, or this many steps if they take longer."""


def _seconds(text: str) -> float:
    """Argument type of a duration. Raises ArgumentTypeError."""
    try:
        return Seconds.parse(text).value
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


@verb(
    "control",
    'runs/quickstart/run pause --reason "the power is cut at noon"',
    RUN,
    argument("action", choices=("stop", "save", "pause", "resume")),
    argument("--reason", default="", help="for the chronicle"),
    argument("--wait", type=_seconds, metavar="TIME", help="how long to wait for an answer, such as '5 minutes'"),
)
def control(args: argparse.Namespace) -> int:
    """Ask the running job to save a checkpoint, or to save and stop; to hold its ranks idle between two steps (pause),
    and to go on (resume)."""
    from fsdp_pretrain.record.journal import who
    from fsdp_pretrain.watchdog.status import inspect

    report = inspect(args.run, brief=True)
    if not report.running:
        raise ConfigError(
            f"no job of {args.run.path} is running (state {report.state})",
            effect="the request would wait for a later start, which discards it",
        )
    if args.action in ("stop", "save"):
        because = f"control stop by {who()}: {args.reason}" if args.action == "stop" and args.reason else ""
        _send(args, reason=because)
        print(f"asked to {args.action}; the job reacts within a few steps (see its log or `fsdp-pretrain journal`)")
        return 0
    print(_ask(args, report, reason=args.reason)["text"])
    return 0


def _send(args: argparse.Namespace, **content: Any) -> Any:
    """Send the request. Returns its file. Raises StorageError."""
    from fsdp_pretrain.record.requests import send

    try:
        return send(args.run, args.action, **content)
    except OSError as error:
        raise StorageError(
            f"cannot write to {args.run.control}: {error.strerror}", effect="the request was not sent"
        ) from None


def _ask(args: argparse.Namespace, report: StatusReport, **content: Any) -> dict[str, Any]:
    """Send the request and wait for its answer. Raises UserError: it was refused, or not answered in time."""
    from fsdp_pretrain.record import answers
    from fsdp_pretrain.watchdog.status import inspect

    patience = args.wait or max(_PATIENCE, _STEPS * (report.status.iteration_seconds or 0.0))
    offset = answers.end_of(args.run)
    request = _send(args, **content)
    try:
        runs = lambda: inspect(args.run, brief=True).running  # noqa: E731
        answer = answers.wait(args.run, request, offset, runs, patience)
    except KeyboardInterrupt:
        print(_fate(args, request))
        raise
    if answer is None:
        error = UserError(f"the job did not answer within {human_time(patience)}", effect=_fate(args, request))
        error.exit = Exit.RESUME
        raise error
    if "refused" in answer:
        raise ConfigError(f"{args.action} was refused: {answer['refused']}", effect="nothing was changed")
    return answer


def _fate(args: argparse.Namespace, request: Any) -> str:
    """What becomes of a request without an answer."""
    from fsdp_pretrain.record import answers

    if answers.take_back(request):
        return "the request was taken back: nothing was changed"
    return f"the job has taken the request: `fsdp-pretrain journal {args.run.path} --kind control` will have the answer"
