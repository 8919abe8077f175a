"""Going back to a checkpoint, atomically: `fsdp-pretrain rollback`.

A rollback is decided completely and written to one file, `RUN/rollback.json`. Then it is carried out in repeatable
steps, and the file is removed. If the command is killed before the file exists, nothing has changed; if it is killed
later, the same command or the next start finishes the rollback. Nothing is deleted: abandoned checkpoints are moved to
`abandoned/`.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp_pretrain.checkpoint.store import directory_name, step_of
from fsdp_pretrain.errors import BusyError, Exit, StorageError, raising
from fsdp_pretrain.files import sync
from fsdp_pretrain.run import journal, lineage, state_files, status
from fsdp_pretrain.run.files import RunDir, now, replace_file
from fsdp_pretrain.run.journal import who
from fsdp_pretrain.run.lineage import BranchReport, BranchRequest, DecidedRollback, LineageNode
from fsdp_pretrain.run.lock import hold
from fsdp_pretrain.run.metrics import left_behind
from fsdp_pretrain.units import counted, human_count

from .continuation import Branch, prepare, refuse_run_dir, sentence


def rollback(
    run: RunDir,
    step: int,
    *,
    changes: Sequence[str] = (),
    skip_steps: tuple[int, int] | None = None,
    reason: str = "",
    dry_run: bool = False,
) -> BranchReport:
    """Make the checkpoint of `step` the end of the kept line, and report what that changes.

    Args:
        changes: `section.key=value` that persist from now on.
        skip_steps: first and last recorded step, after `step`, whose samples are skipped.
        reason: text for the journal.
        dry_run: check and report only.

    Raises:
        BusyError: a job holds the run.
        UserError: see `continuation.prepare`.
        StorageError: a file cannot be written or moved; repeat the command once it can.
    """
    remedy = "`fsdp-pretrain fork` makes another run"
    refuse_run_dir(changes, "run.dir cannot be changed by a rollback", remedy)
    request = BranchRequest(step=step, changes=list(changes), skip_steps=skip_steps)
    if dry_run:
        refuse_during_rollback(run)
        return _report(run, prepare(run, request)).model_copy(update={"done": "dry run"})
    with hold(run, "rollback"):
        return go_back(run, request, reason)


def refuse_during_rollback(run: RunDir) -> None:
    """Raise BusyError if a rollback was decided and is not carried out yet."""
    if run.rollback.exists():
        raise BusyError(
            f"a rollback of {run.path} is under way",
            remedy=f"wait for its end; if it was killed, repeat it: {run.rollback} has the request",
        )


def go_back(run: RunDir, request: BranchRequest, reason: str) -> BranchReport:
    """`rollback` for a caller that holds the lock of the run."""
    finish(run)
    head = max(lineage.nodes(run), key=lambda node: node.segment, default=None)
    if head is not None and head.report is not None and head.request == request:
        return head.report.model_copy(update={"done": "already"})
    branch = prepare(run, request)
    report = _report(run, branch)
    with raising(StorageError, f"cannot write {run.rollback}", effect="nothing was changed"):
        state_files.write(run.rollback, _decide(run, branch, report, request, reason))
    finish(run)
    return report.model_copy(update={"done": "now"})


def _report(run: RunDir, branch: Branch) -> BranchReport:
    return branch.report().model_copy(update={"abandoned": _later(run.checkpoints, branch.state.step)})


def abandon_all(run: RunDir) -> list[str]:
    """Move all checkpoints and evaluations aside, for a run that restarts at step 0 in its directory.

    Returns the names of the checkpoints. Raises StorageError.
    """
    checkpoints, evals = _later(run.checkpoints, -1), _later(run.evals, -1)
    try:
        _move_aside([run.checkpoints / name for name in checkpoints], mark := uuid.uuid4().hex[:8])
        _move_aside([run.evals / name for name in evals], mark)
    except OSError as error:
        raise StorageError(f"cannot move the old checkpoints aside: {error}") from None
    return checkpoints


def _later(folder: Path, step: int) -> list[str]:
    """Names of the entries of a folder whose step is after `step`."""
    if not folder.is_dir():
        return []
    steps = {path.name: step_of(path.name) for path in folder.iterdir()}
    return sorted(name for name, number in steps.items() if number is not None and number > step)


def _decide(run: RunDir, branch: Branch, report: BranchReport, request: BranchRequest, reason: str) -> DecidedRollback:
    """Decide everything that `finish` carries out."""
    step, segments = branch.state.step, run.segments
    summary = sentence(report, reason)
    lost = left_behind(run, step, branch.after.schedule.tokens(branch.state.consumed))
    text = f"back to step {step:_}" + (f"; {summary}" if summary else "")
    text += f"; {counted(lost.steps, 'step')} ({human_count(lost.tokens)} tokens) left behind" if lost.steps else ""
    moved = ", ".join(name.removeprefix("step-").lstrip("0") for name in report.abandoned)
    return DecidedRollback(
        id=uuid.uuid4().hex[:8],
        time=now(),
        segment=int(segments[-1].name) + 1 if segments else 1,
        lineage=LineageNode(
            parent=branch.segment,
            step=step,
            kind="rollback",
            consumed=branch.state.consumed,
            cursor=branch.state.cursor,
            reason=reason,
            request=request,
            report=report,
        ),
        aside=[
            *(f"checkpoints/{name}" for name in report.abandoned),
            *(f"evals/{name}" for name in _later(run.evals, step)),
        ],
        overrides=branch.overrides.to_toml(),
        config=branch.after.to_toml(),
        lost=lost._asdict(),
        by=who(),
        text=text + (f"; checkpoints {moved} were moved to abandoned/ beside them" if moved else ""),
        status=status_at(branch, text),
    )


def status_at(branch: Branch, text: str) -> dict[str, Any]:
    """The entries of `status.json` that a run has at a checkpoint."""
    state, schedule = branch.state, branch.after.schedule
    tokens = schedule.tokens(state.consumed)
    return {
        **vars(state),
        "tokens": tokens,
        "total_steps": schedule.last_step(state.step, state.consumed),
        "loss": None,
        "heldout": None,
        "checkpoint": {"step": state.step, "consumed": state.consumed, "tokens": tokens, "verified": True},
        **status.ended(Exit.RESUME, text),
        "before": None,
        "overrides": str(branch.overrides),
    }


def finish(run: RunDir) -> bool:
    """Carry out the decided rollback, if any; repeating a part that is done is harmless. The caller holds the lock.

    Returns whether there was one. Raises DamagedFileError if the decision cannot be read, StorageError if a file cannot
    be written or moved; the decision then stays in place.
    """
    decided = lineage.decided_rollback(run)
    if decided is None:
        return False
    try:
        _move_aside([run.path / path for path in decided.aside], decided.id)
        replace_file(run.overrides, decided.overrides)
        replace_file(run.config, decided.config)
        segment = run.segment(decided.segment)
        replace_file(segment / "config.toml", decided.config)
        values = decided.lineage.model_dump(mode="json", exclude={"segment"}, exclude_unset=True)
        lineage.record(segment, **values)
        status.update(run, **{**decided.status, "segment": decided.segment})
        _add_entry(run, decided)
        sync(run.path)
        run.rollback.unlink()
    except OSError as error:
        raise StorageError(
            f"the rollback to {directory_name(decided.lineage.step)} is not finished: {error}",
            effect="the run is as safe as before; training will not start until it is finished",
            remedy="repair the storage, then repeat the command",
        ) from None
    return True


def _move_aside(paths: list[Path], mark: str) -> None:
    """Move the paths that still exist into `abandoned/` beside them, durably. Raises OSError."""
    for path in paths:
        if path.exists():
            aside = path.with_name("abandoned")
            aside.mkdir(exist_ok=True)
            path.rename(aside / f"{path.name}-{mark}")
    for folder in {path.parent for path in paths}:
        if (folder / "abandoned").exists():
            sync(folder / "abandoned")
            sync(folder)


def _add_entry(run: RunDir, decided: DecidedRollback) -> None:
    """Write the journal entry, once. Raises StorageError."""
    if any(entry.get("rollback") == decided.id for entry in journal.read(run)):
        return
    report = decided.lineage.report
    journal.add(
        run,
        "rollback",
        decided.text,
        segment=decided.segment,
        step=decided.lineage.step,
        rollback=decided.id,
        lost=decided.lost,
        abandoned=report.abandoned if report is not None else [],
        changes=report.changes if report is not None else [],
        reason=decided.lineage.reason,
        by=decided.by,
    )
