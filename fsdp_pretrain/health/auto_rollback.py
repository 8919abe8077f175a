"""Automatic rollbacks: whether one is allowed, to which checkpoint, which samples to skip. On rank 0.

`lineage.rollback` does the work. This module limits how often it happens and skips more samples the second time.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from fsdp_pretrain.checkpoint.store import Checkpoint, Store
from fsdp_pretrain.errors import CheckpointError, Exit, NumericError, StorageError, UserError
from fsdp_pretrain.lineage.rollback import go_back
from fsdp_pretrain.run import exit_intent, journal, status
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.lineage import BranchReport, BranchRequest
from fsdp_pretrain.run.recorder import Recorder
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


def roll_back(run: RunDir, request: RollbackRequest, recorder: Recorder) -> BranchReport:
    """Roll back. The caller holds the run's lock and has stopped training.

    Raises:
        NumericError: a person has to decide.
        StorageError: see `rollback.go_back`.
    """
    before = _rollbacks(journal.read(run))
    repeats = sum(entry["key"] == request.key and abs(entry["start"] - request.start) <= _SAME for entry in before)
    _check_budget(request, before, repeats)
    candidates = _candidates(run, request)
    for checkpoint in candidates:
        skip = _skipped(request, repeats, checkpoint.train_state().cursor)
        text = f"back to step {checkpoint.step:_}, without samples {skip}, because: {request.cause}"
        facts = {
            "key": request.key,
            "start": request.start,
            "end": request.end,
            "to": checkpoint.step,
            "skip": str(skip),
        }
        recorder.event("health-rollback", text, step=request.end, repeats=repeats, **facts)
        try:
            branch = BranchRequest(step=checkpoint.step, changes=[], skip_steps=None, skip_samples=skip)
            return go_back(run, branch, reason=f"automatic: {request.cause}")
        except CheckpointError as error:
            recorder.event("checkpoint-rejected", f"passed over {error.cause}", step=checkpoint.step)
        except StorageError:
            raise
        except UserError as error:
            raise _needs_person(request, f"a rollback to step {checkpoint.step} is refused: {error.cause}") from None
    raise _needs_person(request, f"no clean checkpoint from before step {request.start} can be read")


def _rollbacks(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The `health-rollback` entries that a `rollback` follows: a start may end between the two. Those of a fork's
    parent, or before a start from nothing, do not count."""
    begun, done = None, list[dict[str, Any]]()
    for entry in entries:
        if entry["kind"] in ("fork", "fresh"):
            begun, done = None, []
        if entry["kind"] == "health-rollback":
            begun = entry
        elif entry["kind"] == "rollback" and begun is not None and entry.get("step") == begun["to"]:
            done.append(begun)
            begun = None
    return done


def was_blamed_on_device(run: RunDir, request: RollbackRequest) -> bool:
    """Whether a device was suspected at a nearby step before. Device faults do not recur in one place."""
    entries = journal.of_kind(journal.read(run), "health-again")
    return any(not entry["repeats"] and abs(entry["step"] - request.end) <= _SAME for entry in entries)


def record_rollback(run: RunDir, step: int, request: RollbackRequest, recorder: Recorder, *, asked: bool) -> None:
    """Record the end of a start that was rolled back to `step`, so that the next start follows immediately, unless the
    run was `asked` to stop meanwhile."""
    reason, code = f"rolled back to step {step}: {request.cause}", int(Exit.RESUME)
    for segment in (recorder.segment, run.segments[-1]):
        exit_intent.write(run, segment, code, reason, asked=asked, restart=not asked)
    recorder.event("stop", f"{reason}, exit {code}", step=step, code=code)
    recorder.status(force=True, **status.read(run).entries())  # as the rollback left it


def _check_budget(request: RollbackRequest, before: list[dict[str, Any]], repeats: int) -> None:
    """Raise NumericError if there were too many rollbacks already, of which `before` are the journal entries."""
    since = datetime.now(UTC) - timedelta(hours=24)
    today = sum(datetime.fromisoformat(entry["time"]) >= since for entry in before)
    nearby = sum(abs(entry["start"] - request.start) <= _NEARBY for entry in before)
    limit = 1 if request.key == "loss/nonfinite" else 2
    if repeats >= limit:
        raise _needs_person(
            request, f"the same incident was answered by {repeats} rollback{'s' * (repeats > 1)} already"
        )
    if nearby >= limits.ROLLBACKS_NEARBY:
        raise _needs_person(request, f"{nearby} rollbacks within {_NEARBY} steps")
    if today >= limits.ROLLBACKS_A_DAY:
        raise _needs_person(request, f"{today} rollbacks within 24 hours")


def _candidates(run: RunDir, request: RollbackRequest) -> list[Checkpoint]:
    """Checkpoints to go back to, best first: those far enough before the incident, then the others before it."""
    candidates, until = list[Checkpoint](), float(request.target)
    for bound in (until, request.start - 1.0):
        while (checkpoint := Store(run.checkpoints).newest_clean(bound)) is not None and checkpoint not in candidates:
            candidates.append(checkpoint)
            bound = checkpoint.step - 1
    return candidates


def _skipped(request: RollbackRequest, repeats: int, cursor: int) -> SampleRange:
    """The samples to skip: twice as many if skipping did not help before."""
    more = (request.stop - request.first) // 2 if repeats else 0
    return SampleRange(max(cursor, request.first - more), request.stop + more)


def _needs_person(request: RollbackRequest, why: str) -> NumericError:
    return NumericError(
        f"{request.cause}; no automatic rollback: {why}",
        effect=f"nothing after step {request.start - 1} should be trusted; nothing was changed",
        remedy=_SUGGESTIONS,
    )
