"""A new run from a checkpoint of another: `fsdp-pretrain fork`. The parent is only read.

The new run is built in `NEW_RUN.forking/` and renamed when complete. It is self-contained: the checkpoint (hard links
where possible, since checkpoint files never change), the records of the kept line up to it, the journal, the tokenizer,
the evaluations. The parent may be deleted.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

from fsdp_pretrain.checkpoint.store import Store, directory_name, step_of, verify_files
from fsdp_pretrain.config.toml_file import inline
from fsdp_pretrain.errors import CheckpointError, ConfigError, StorageError
from fsdp_pretrain.files import sync
from fsdp_pretrain.run import journal, lineage, run_id, status
from fsdp_pretrain.run.files import AppendFile, RunDir, now, read_lines, replace_file
from fsdp_pretrain.run.lineage import BranchReport, BranchRequest
from fsdp_pretrain.run.lock import hold
from fsdp_pretrain.run.metrics import METRICS
from fsdp_pretrain.run.step_record import parse

from . import annealing
from .annealing import Annealing
from .continuation import Branch, prepare, refuse_run_dir, sentence
from .rollback import refuse_during_rollback, status_at


def fork(
    parent: RunDir,
    step: int,
    target: Path,
    *,
    changes: Sequence[str] = (),
    skip_steps: tuple[int, int] | None = None,
    reason: str = "",
    anneal: Annealing | None = None,
    dry_run: bool = False,
) -> BranchReport:
    """Create a run directory that continues from a checkpoint of `parent`, which may keep training.

    Args:
        target: directory of the new run; must be empty or not exist.
        changes: `section.key=value` for the new run; `run.name` defaults to the name of `target`, with `-` for what a
            name cannot have.
        skip_steps: first and last step of the parent whose samples the new run skips.
        reason: text for the journal.
        anneal: let the learning rate decay from there, see `annealing`.
        dry_run: only check everything.

    Raises:
        BusyError: a rollback of the parent is in progress, or another fork to `target`.
        UserError: see `continuation.prepare`; `target` is in use.
        StorageError: the new run cannot be written.
    """
    target = Path(os.path.abspath(target))  # noqa: PTH100 (links stay as written)
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise ConfigError(f"{target} exists already", remedy="choose another directory for the new run")
    refuse_during_rollback(parent)
    refuse_run_dir(changes, "run.dir is where the fork is made", "leave it out of --set")
    annealed, entries = ([], []) if anneal is None else annealing.changes(parent, step, anneal, changes)
    named_changes = [f"run.name={inline(_run_name(target))}", *annealed, *changes]
    request = BranchRequest(step=step, changes=named_changes, skip_steps=skip_steps)
    branch = prepare(parent, request, place=[f"run.dir={inline(str(target))}"], timeline=entries)
    report = branch.report()
    if anneal is not None:
        report = report.model_copy(update={"rates": annealing.rates(branch, anneal)})
    if dry_run:
        return report.model_copy(update={"done": "dry run"})
    building = RunDir(target.with_name(f"{target.name}.forking"))
    try:
        with hold(building, "fork"):
            _clear(building)
            run_id.assign(building.checkpoints, run_id.assign(building.path))
            linked = _copy_run(parent, branch, building)
            _begin_run(parent, branch, building, sentence(report, reason))
        sync(building.path)
        building.path.rename(target)
        sync(target.parent)
    except OSError as error:
        raise StorageError(
            f"cannot make {target}: {error}",
            effect=f"the parent is untouched; {building.path} may hold an unfinished copy",
            remedy="repair the storage, then repeat the command",
        ) from None
    return report.model_copy(update={"config": str(target / "config.toml"), "linked": linked})


def _run_name(target: Path) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", target.name)
    return name if name[:1].isalnum() else f"fork{name}"


def _clear(building: RunDir) -> None:
    """Remove the files that a killed fork left. Raises OSError."""
    for path in building.path.iterdir():
        if path != building.lock:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _copy_run(parent: RunDir, branch: Branch, new: RunDir) -> bool:
    """Copy checkpoint and record. Returns whether the checkpoint was linked. Raises OSError, CheckpointError."""
    source = branch.checkpoint.path
    target = new.checkpoints / source.name
    linked = _link_tree(source, target)
    copied = Store(new.checkpoints).find(branch.state.step)
    wrong = [] if linked else verify_files(target, copied.files())
    if wrong or not source.is_dir():
        raise CheckpointError(wrong[0] if wrong else f"{source} was deleted by the running job while it was copied")
    copied.mark_verified()
    parts = lineage.line(lineage.nodes(parent), branch.segment) if branch.segment is not None else []
    for part in parts:
        until = min(part.until, branch.state.step)
        _copy_segment(parent.segment(part.segment), new.segment(part.segment), part.after, until)
    for name in ("journal.jsonl", "CHRONICLE.md"):
        if (parent.path / name).exists():
            shutil.copyfile(parent.path / name, new.path / name)
    if parent.tokenizer.is_dir():
        shutil.copytree(parent.tokenizer, new.tokenizer)
    for results in parent.evals.glob("step-*/*/results.json"):
        step = step_of(results.parts[-3])
        if step is not None and step <= branch.state.step:
            destination = new.evals / results.relative_to(parent.evals)
            destination.parent.mkdir(parents=True)
            for file in (results, *results.parent.glob("samples_*.jsonl")):
                shutil.copyfile(file, destination.parent / file.name)
    return linked


def _link_tree(source: Path, target: Path) -> bool:
    """Link all files of a directory, or copy them if that fails. Returns whether all were linked. Raises OSError."""
    shutil.copytree(source, target, copy_function=_link)
    sync(target)
    return all(path.samefile(target / path.relative_to(source)) for path in source.rglob("*") if path.is_file())


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
        sync(Path(target))


def _copy_segment(source: Path, target: Path, after: int, until: float) -> None:
    """Copy a segment's record, with only the metrics after step `after` up to `until`. Raises OSError."""
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_file() and path.name != METRICS:
            shutil.copyfile(path, target / path.name)
    metrics = AppendFile(target / METRICS)
    for (step, line), _ in read_lines(source / METRICS, _step_and_line):
        if after < step <= until and not metrics.write(line):
            raise OSError(f"cannot write {target / METRICS}: {metrics.problem}")
    metrics.close()


def _step_and_line(line: bytes) -> tuple[int, str] | None:
    record = parse(line)
    return None if record is None else (record.step, line.decode().rstrip("\n"))


def _begin_run(parent: RunDir, branch: Branch, new: RunDir, summary: str) -> None:
    """Write the configuration, first segment, status and journal entry of the new run. Raises OSError."""
    number = int(parent.segments[-1].name) + 1  # keeps segment numbers in the journal unique
    step, origin = branch.state.step, str(parent.path.resolve())
    replace_file(new.config, branch.after.to_toml())
    replace_file(new.overrides, branch.overrides.to_toml())
    replace_file(new.segment(number) / "config.toml", branch.after.to_toml())
    counters = {"consumed": branch.state.consumed, "cursor": branch.state.cursor}
    lineage.record(new.segment(number), parent=branch.segment, step=step, kind="fork", run=origin, **counters)
    text = f"from step {step:_} of {origin}" + (f"; {summary}" if summary else "")
    start = {"run": branch.after.run.name, "segment": number, "host": socket.gethostname(), "heartbeat": now()}
    status.update(new, **start, **status_at(branch, f"forked {text}"))
    journal.add(new, "fork", text, segment=number, step=step, parent=origin, checkpoint=directory_name(step))
