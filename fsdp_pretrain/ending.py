"""How a start ends, and that it says so: in the journal, in `status.json`, and to launchers by `exit_intent.json`."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .control import Inbox
from .errors import Exit, Interrupted, UserError
from .health import Retreat
from .mesh import World
from .record import exit_intent, status
from .record.files import RunDir
from .record.recorder import Recorder


def record_end(rank: int, run_dir: RunDir, segment: Path, recorder: Recorder, train: Callable[[], Exit]) -> Exit:
    """Train, and write down how it ended if it failed; what `train` returns or raises.

    Args:
        rank: this rank; of several that fail alike, the first to write is believed.
        run_dir: the run directory.
        segment: of this start.
        recorder: closed at the end.
        train: the run.
    """
    try:
        return train()
    except Interrupted as asked:  # no intent: torchrun sends SIGTERM too, when another rank has died of something
        recorder.ended(str(asked), code=int(asked.exit))
        recorder.status(force=True, state="stopped")
        raise
    except BaseException as error:
        known = isinstance(error, UserError)
        code = int(error.exit) if isinstance(error, UserError) else int(Exit.UNEXPECTED)
        reason = error.cause if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        exit_intent.write(run_dir, segment, code, reason, rank=rank)
        recorder.ended(f"exit {code}: {reason}" if known else f"unexpected {reason}", code=code)
        recorder.status(force=True, **status.ended(code, reason))
        raise
    finally:
        recorder.close()


def say_stop(outcome: Exit, step: int, world: World, run_dir: RunDir, recorder: Recorder, inbox: Inbox) -> Exit:
    """Write down that the run is complete, or was asked to stop; what to exit with.

    Args:
        outcome: COMPLETE or RESUME.
        step: the last one.
        world: all ranks.
        run_dir: the run directory.
        recorder: of this start.
        inbox: knows who asked.
    """
    asked = inbox.take()
    reason = "complete" if outcome is Exit.COMPLETE else f"stopped on request ({asked.reason or 'another rank'})"
    facts: dict[str, object] = {"asked": outcome is Exit.RESUME}
    if outcome is Exit.RESUME and asked.avoid_hosts:
        outcome, facts = Exit.RESUME_AVOIDING_HOSTS, {"avoid_hosts": list(asked.avoid_hosts)}
    _say(outcome, f"{reason} after step {step:_}", reason, step, world, run_dir, recorder, **facts)
    return outcome


def say_suspicion(asked: Retreat, world: World, run_dir: RunDir, recorder: Recorder) -> Exit:
    """Write down that steps were not finite for a reason that is not in their data; what to exit with. Collective.

    No sample is to be left then, and the weights are those before: the next start goes on from the last checkpoint,
    without the host if that is known and there are others.

    Args:
        asked: what would have been gone back for.
        world: all ranks.
        run_dir: the run directory.
        recorder: of this start.
    """
    hosts = world.gather(socket.gethostname())
    host = None if asked.rank is None else hosts[asked.rank]
    who = "of one of the ranks" if host is None else f"of rank {asked.rank} on {host}"
    reason = f"{asked.cause}; the same step from the same batch was finite: suspect a device {who}, not the data"
    outcome, facts = Exit.RESUME, dict[str, object](restart=True)
    if host is not None and len(set(hosts)) > 1:
        outcome, facts = Exit.RESUME_AVOIDING_HOSTS, {"avoid_hosts": [host]}
    recorder.event("health-again", reason, step=asked.end, rank=asked.rank, suspect=host, repeats=False)
    _say(outcome, reason, reason, asked.end, world, run_dir, recorder, **facts)
    return outcome


def _say(
    outcome: Exit, text: str, reason: str, step: int, world: World, run_dir: RunDir, recorder: Recorder, **facts: Any
) -> None:
    """An end that was decided: `text` into the journal, `reason` into `status.json` and, with `facts`, the intent."""
    code = int(outcome)
    recorder.ended(f"{text}, exit {code}", step=step, code=code)
    recorder.status(force=True, **status.ended(code, reason))
    if world.is_main:
        exit_intent.write(run_dir, recorder.segment, code, reason, **facts)
