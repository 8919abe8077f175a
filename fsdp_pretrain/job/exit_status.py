"""Records how a start ends: in the journal, in `status.json`, and for launchers in `exit_intent.json`."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from traceback import extract_tb
from typing import Any

from torch import distributed as dist

from fsdp_pretrain.errors import DeviceError, Exit, Interrupted, PeerLostError, UserError
from fsdp_pretrain.health.auto_rollback import record_rollback, roll_back, was_blamed_on_device
from fsdp_pretrain.heartbeat import Phase
from fsdp_pretrain.run import exit_intent, status
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.recorder import Recorder
from fsdp_pretrain.run.requests import Requests
from fsdp_pretrain.train.loop import Loop
from fsdp_pretrain.train.observer import RollbackRequest

from .live_control import answer
from .run_context import RunContext
from .waiting import decide_in_turns

_LOST = re.compile(
    "Connection (?:reset|closed) by peer|Connection was likely closed|Broken pipe|"
    "remote process exited or there was a network error"
)
"""What gloo, NCCL and the store say of a rank that is gone."""
_ADDRESS = re.compile(r"\[[0-9a-f.:]+\]:\d+")
_COLLECTIVES = "distributed_c10d.py"


def record_end(rank: int, run_dir: RunDir, segment: Path, recorder: Recorder, train: Callable[[], Exit]) -> Exit:
    """Call `train`, and record a failure; returns or raises what `train` does.

    Args:
        rank: this rank; if several ranks fail alike, the first to write the exit intent counts.
        segment: directory of this start's segment.
        recorder: closed at the end.
    """
    try:
        with _naming_lost_peers(rank):
            return train()
    except Interrupted as interruption:  # no intent: torchrun also sends SIGTERM when another rank has died
        recorder.ended(str(interruption), code=int(interruption.exit))
        recorder.status(force=True, **status.ended(int(interruption.exit), str(interruption)))
        raise
    except BaseException as error:
        if isinstance(error, UserError):
            code, reason = int(error.exit), error.cause
            text = reason if isinstance(error, PeerLostError) else f"exit {code}: {reason}"
        else:
            code, reason = int(Exit.UNEXPECTED), f"{type(error).__name__}: {error}"
            text = f"unexpected {shorten(reason, 160)}"
        avoid = error.avoid_hosts if isinstance(error, DeviceError) else ()
        facts: dict[str, Any] = {"rank": rank} | ({"avoid_hosts": list(avoid)} if avoid else {})
        if code == Exit.UNEXPECTED and not isinstance(error, PeerLostError) and not _is_of_a_collective(error):
            facts["own"] = True  # ranks that lose this one may die without Python: they do not replace its error
        exit_intent.write(run_dir, segment, code, reason, **facts)
        recorder.ended(text, code=code, refused=isinstance(error, UserError) and not isinstance(error, PeerLostError))
        recorder.status(force=True, **status.ended(code, reason))
        raise
    finally:
        recorder.close()


def _is_of_a_collective(error: BaseException) -> bool:
    """Whether an error comes from the connection to other ranks."""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


@contextmanager
def _naming_lost_peers(rank: int) -> Iterator[None]:
    """Raise PeerLostError for an error of torch.distributed that says that another rank is gone."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        lost = _LOST.search(text) if _is_of_a_collective(error) else None
        if lost is None:
            raise
        calls = [call.name for call in extract_tb(error.__traceback__) if call.filename.endswith(_COLLECTIVES)]
        whom = f"another rank, at {address[0]}" if (address := _ADDRESS.search(text)) else "another rank"
        where = f", in {calls[-1]}" if calls else ""
        raise PeerLostError(f"rank {rank} lost the connection to {whom}{where}: {lost[0]}") from None


def conclude(outcome: Exit, loop: Loop, run: RunContext) -> Exit:
    """Record how the loop ended, after a rollback if one was requested; returns the exit code. Collective. Raises
    UserError if the rollback is not allowed or fails; see `auto_rollback.roll_back`."""
    request, recorder, run_dir = loop.rollback, run.recorder, run.recorder.run
    if request is None:
        return _record_stop(outcome, loop.step, run)
    if request.repeats is False and not run.world.decide(lambda: was_blamed_on_device(run_dir, request)):
        return _record_suspicion(request, run)
    if request.repeats is not None:
        repeated = "not finite again" if request.repeats else "finite, but a device was suspected here before"
        text = f"the same step from the same batch was {repeated}: {request.cause}"
        recorder.event("health-again", text, step=request.end, repeats=request.repeats)
    report = decide_in_turns(run.world, run.heartbeat, Phase.LOAD, lambda: roll_back(run_dir, request, recorder))
    asked = _take_last_requests(report.step, run).asked
    if run.world.is_main:
        record_rollback(run_dir, report.step, request, recorder, asked=asked)
    return outcome


def _take_last_requests(step: int, run: RunContext) -> Requests:
    """The requests to stop, those included that came late; the journal answers what was not carried out."""
    for request in run.inbox.take_rest():
        if request.verb == "stop":
            answer(run.recorder, request, step, f"the start ends after step {step:_}", did="stop")
        else:
            why = "the start ended before it was carried out"
            answer(run.recorder, request, step, f"{request.verb} refused: {why}", refused=why)
    return run.inbox.take()


def _record_stop(outcome: Exit, step: int, run: RunContext) -> Exit:
    """Record the end of a start without a rollback. `outcome`: COMPLETE or RESUME."""
    requests = _take_last_requests(step, run)
    reason = "complete" if outcome is Exit.COMPLETE else f"stopped on request ({requests.reason or 'another rank'})"
    facts: dict[str, object] = {"asked": outcome is Exit.RESUME}
    if outcome is Exit.RESUME and requests.avoid_hosts:
        outcome = Exit.RESUME_AVOIDING_HOSTS
        facts = {"avoid_hosts": list(requests.avoid_hosts), "asked": requests.asked}
    _record(outcome, f"{reason} after step {step:_}", reason, step, run, **facts)
    return outcome


def _record_suspicion(request: RollbackRequest, run: RunContext) -> Exit:
    """Record that a device is suspected, since the non-finite step was finite when it was repeated.

    No sample is skipped, and the weights are still clean. The next start continues from the last checkpoint, and avoids
    the suspect host if that is known and there are others.
    """
    hosts = run.world.gather(socket.gethostname())
    host = None if request.rank is None else hosts[request.rank]
    who = "of one of the ranks" if host is None else f"of rank {request.rank} on {host}"
    reason = f"{request.cause}; the same step from the same batch was finite: suspect a device {who}, not the data"
    asked = _take_last_requests(request.end, run).asked
    outcome, facts = Exit.RESUME, dict[str, object](asked=asked, restart=not asked)
    if host is not None and len(set(hosts)) > 1:
        outcome, facts = Exit.RESUME_AVOIDING_HOSTS, {"avoid_hosts": [host], "asked": asked}
    run.recorder.event("health-again", reason, step=request.end, rank=request.rank, suspect=host, repeats=False)
    _record(outcome, reason, reason, request.end, run, **facts)
    return outcome


def _record(outcome: Exit, text: str, reason: str, step: int, run: RunContext, **facts: Any) -> None:
    """Record a decided end: `text` in the journal, `reason` in `status.json` and, with `facts`, in the exit intent."""
    code, recorder = int(outcome), run.recorder
    recorder.ended(f"{text}, exit {code}", step=step, code=code)
    recorder.status(force=True, **status.ended(code, reason))
    if run.world.is_main:
        exit_intent.write(recorder.run, recorder.segment, code, reason, **facts)
