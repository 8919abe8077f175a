"""Automatic rollbacks: whether one is allowed, to which checkpoint, which samples to skip. On rank 0; no torch.

`lineage.rollback` does the work. This module limits how often it happens and skips more samples the second time.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from fsdp_pretrain.checkpoint.store import Checkpoint, Store
from fsdp_pretrain.errors import CheckpointError, Exit, NumericError, StorageError, UserError
from fsdp_pretrain.lineage.rollback import go_back
from fsdp_pretrain.run import exit_intent, journal, state_files
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.lineage import BranchReport, BranchRequest
from fsdp_pretrain.run.recorder import Recorder
from fsdp_pretrain.run.status import Status
from fsdp_pretrain.train.observer import RollbackRequest
from fsdp_pretrain.units import SampleRange

from . import limits

_SAME, _NEARBY = 500, 1000
"""Steps within which an incident counts as the same one, and within which rollbacks count as nearby."""

_SUGGESTIONS = (
    "decide yourself; what has helped other runs: go back further (`fsdp-pretrain rollback RUN --to STEP`), skip more "
    "(--skip-steps A:B), a lower learning rate (--set optimizer.lr=...), a lower train.grad_clip, embedding-gradient "
    "shrink (--set optimizer.embedding_shrink=...); and inspect the samples with `fsdp-pretrain where`"
)


def roll_back(run: RunDir, asked: RollbackRequest, recorder: Recorder) -> BranchReport:
    """Roll back. The caller holds the run's lock and has stopped training.

    Raises NumericError if a person has to decide, StorageError as `rollback.go_back` does.
    """
    before = journal.of_kind(journal.read(run), "health-rollback")
    repeats = sum(entry["key"] == asked.key and abs(entry["start"] - asked.start) <= _SAME for entry in before)
    _check_budget(asked, before, repeats)
    candidates = _candidates(run, asked)
    for checkpoint in candidates:
        skip = _skipped(asked, repeats, checkpoint.train_state().cursor)
        text = f"back to step {checkpoint.step:_}, without samples {skip}, because: {asked.cause}"
        facts = {"key": asked.key, "start": asked.start, "end": asked.end, "to": checkpoint.step, "skip": str(skip)}
        recorder.event("health-rollback", text, step=asked.end, repeats=repeats, **facts)
        try:
            request = BranchRequest(step=checkpoint.step, changes=[], skip_steps=None, skip_samples=skip)
            return go_back(run, request, reason=f"automatic: {asked.cause}")
        except CheckpointError as error:
            recorder.event("checkpoint-rejected", f"passed over {error.cause}", step=checkpoint.step)
        except StorageError:
            raise
        except UserError as error:
            raise _needs_person(asked, f"a rollback to step {checkpoint.step} is refused: {error.cause}") from None
    raise _needs_person(asked, f"no clean checkpoint from before step {asked.start} can be read")


def was_blamed_on_device(run: RunDir, asked: RollbackRequest) -> bool:
    """Whether a nearby non-finite step was blamed on a device before: device faults do not recur in one place."""
    entries = journal.of_kind(journal.read(run), "health-again")
    return any(not entry["repeats"] and abs(entry["step"] - asked.end) <= _SAME for entry in entries)


def record_rollback(run: RunDir, step: int, asked: RollbackRequest, recorder: Recorder) -> None:
    """Record the end of a start that was rolled back to `step`; the next start follows immediately."""
    reason, code = f"rolled back to step {step}: {asked.cause}", int(Exit.RESUME)
    for segment in (recorder.segment, run.segments[-1]):
        exit_intent.write(run, segment, code, reason, restart=True)
    recorder.event("stop", f"{reason}, exit {code}", step=step, code=code)
    left = state_files.view(run.status, Status) or Status()
    recorder.status(force=True, **left.entries())  # as the rollback left it


def _check_budget(asked: RollbackRequest, before: list[dict[str, Any]], repeats: int) -> None:
    """Raise NumericError if there were too many rollbacks already."""
    since = datetime.now(UTC) - timedelta(hours=24)
    today = sum(datetime.fromisoformat(entry["time"]) >= since for entry in before)
    nearby = sum(abs(entry["start"] - asked.start) <= _NEARBY for entry in before)
    limit = 1 if asked.key == "loss/nonfinite" else 2
    if repeats >= limit:
        raise _needs_person(asked, f"the same incident was answered by {repeats} rollback{'s' * (repeats > 1)} already")
    if nearby >= limits.ROLLBACKS_NEARBY:
        raise _needs_person(asked, f"{nearby} rollbacks within {_NEARBY} steps")
    if today >= limits.ROLLBACKS_A_DAY:
        raise _needs_person(asked, f"{today} rollbacks within 24 hours")


def _candidates(run: RunDir, asked: RollbackRequest) -> list[Checkpoint]:
    """Candidate checkpoints, best first: those far enough before the incident, then the latest before it."""
    found, until = list[Checkpoint](), float(asked.target)
    for bound in (until, asked.start - 1.0):
        while (checkpoint := Store(run.checkpoints).newest_clean(bound)) is not None and checkpoint not in found:
            found.append(checkpoint)
            bound = checkpoint.step - 1
    return found


def _skipped(asked: RollbackRequest, repeats: int, cursor: int) -> SampleRange:
    """The samples to skip: twice as many if skipping did not help before."""
    more = (asked.stop - asked.first) // 2 if repeats else 0
    return SampleRange(max(cursor, asked.first - more), asked.stop + more)


def _needs_person(asked: RollbackRequest, why: str) -> NumericError:
    return NumericError(
        f"{asked.cause}; no automatic rollback: {why}",
        effect=f"nothing after step {asked.start - 1} should be trusted; nothing was changed",
        remedy=_SUGGESTIONS,
    )
