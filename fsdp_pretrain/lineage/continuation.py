"""Prepares to continue from a checkpoint with other settings: resolves and checks them before anything is changed.

Rollback and fork both start here. What a resume would refuse is refused now, while the run is unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tqdm import tqdm

from fsdp_pretrain.checkpoint.state import TrainState, forbidden, identity
from fsdp_pretrain.checkpoint.store import CONFIG, Checkpoint, Store, verify_files
from fsdp_pretrain.config.config import Config, load
from fsdp_pretrain.config.resume_rules import changes, load_recorded, refuse, refuse_replaced
from fsdp_pretrain.config.timeline import TimelineEntry
from fsdp_pretrain.config.toml_file import inline
from fsdp_pretrain.data.packing.opening import check_supply, open_packer
from fsdp_pretrain.errors import CheckpointError, ConfigError
from fsdp_pretrain.run import lineage, overrides
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.lineage import BranchReport, BranchRequest
from fsdp_pretrain.run.metrics import find_step, last_records
from fsdp_pretrain.run.overrides import Overrides
from fsdp_pretrain.run.step_record import IN_FLIGHT
from fsdp_pretrain.units import SampleRange


@dataclass(frozen=True)
class Branch:
    """A checkpoint of a run and the configuration to continue with."""

    checkpoint: Checkpoint  # its bytes have just been verified
    segment: int | None  # number of the segment that wrote the checkpoint; None if it was imported
    state: TrainState
    before: Config  # configuration of the run as it is
    after: Config  # configuration to continue with
    overrides: Overrides  # the part of `after` that must outlive restarts
    skip: SampleRange | None  # further samples to skip

    def report(self) -> BranchReport:
        """The branch as a report: its checkpoint and what changes."""
        return BranchReport(
            step=self.state.step,
            segment=self.segment,
            consumed=self.state.consumed,
            cursor=self.state.cursor,
            skip=str(self.skip) if self.skip else None,
            changes=[change.text for change in changes(self.before, self.after)],
        )


def prepare(
    run: RunDir, request: BranchRequest, place: Sequence[str] = (), timeline: Sequence[TimelineEntry] = ()
) -> Branch:
    """Check everything about continuing from a checkpoint.

    `place`: further `section.key=value` that hold for one run directory only, and so do not persist. `timeline`:
    further entries, which do.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
        ConfigError: the changes contradict each other, the run, or what a resume may change.
        DataError: the corpora cannot be read, or run out before the run ends.
    """
    if not run.config.exists():
        remedy = "name a run that was started; of a mean of checkpoints, RUN/merged/NAME, that is RUN"
        raise ConfigError(f"{run.path} was never started: there is no {run.config.name}", remedy=remedy)
    for text in request.changes:
        if f"{_key(text)}.".startswith("data.skip."):
            raise ConfigError(f"{text!r}: skipped samples are added with --skip-steps, or in the configuration file")
    checkpoint = Store(run.checkpoints).find(request.step)
    wrong = verify_files(checkpoint.path, tqdm(checkpoint.files(), desc="reading back", delay=2, disable=None))
    if wrong:
        raise CheckpointError(
            f"{checkpoint.path} is damaged: {wrong[0]}", remedy="choose another step, see `fsdp-pretrain checkpoints`"
        )
    content = checkpoint.train_state()
    state = TrainState.of(content)
    skip = _samples(run, state, *request.skip_steps) if request.skip_steps else request.skip_samples
    current = overrides.read(run)
    before = overrides.apply(run.config, (), current)
    for text in request.changes:
        _refuse_entry_of_control(text, before, current)
    asked = load(run.config, request.changes)  # together: one alone may contradict the rest
    resolved = [_absolute(text, asked) for text in request.changes]
    dropped = _left_behind(run, current, state)
    persistent = current.add(resolved, [skip] if skip else []).without(dropped)
    persistent = persistent.model_copy(update={"timeline": (*persistent.timeline, *timeline)})
    after = overrides.apply(run.config, place, persistent, dropped)
    refuse_replaced({_key(text) for text in resolved}, after, state.consumed, "--set ")
    if after.schedule.end <= state.consumed < before.schedule.end:
        raise ConfigError(
            f"train.duration would be {after.train.duration}, which ends the run at step {after.schedule.steps}",
            effect=f"nothing would be trained after step {state.step}, from which it is to continue",
        )
    _refuse_other_optimizer(checkpoint, after)
    packer = open_packer(after)
    changed = forbidden(content.identity, identity(after, packer), state.cursor)
    refuse(str(checkpoint.path), changed, [], state.cursor)
    check_supply(after, packer, cursor=state.cursor, consumed=state.consumed)
    return Branch(checkpoint, checkpoint.manifest().segment, state, before, after, persistent, skip)


def _refuse_entry_of_control(text: str, before: Config, current: Overrides) -> None:
    """Raise ConfigError if a change is of a timeline entry that is not in the configuration file of later starts."""
    section, number, *_ = [*_key(text).split("."), "", ""]
    entries = dict(enumerate(before.timeline))
    if section == "timeline" and number.isdigit() and entries.get(int(number)) in current.timeline:
        raise ConfigError(
            f"{text!r}: this entry was added by `control set`, and is not in the configuration file",
            remedy="an entry in steps that are abandoned goes with them; add another with `control set`",
        )


def _refuse_other_optimizer(checkpoint: Checkpoint, after: Config) -> None:
    """Raise ConfigError if parameters would get another kind of update, for which the checkpoint has no state."""
    trained = load_recorded(checkpoint.path / CONFIG, own=False)
    kinds = [
        (section.kind, [(group.match, group.kind) for group in section.groups if group.kind is not None])
        for section in (trained.optimizer, after.optimizer)
    ]
    if kinds[0] != kinds[1] and checkpoint.manifest().optimizer:
        raise ConfigError(
            f"{checkpoint.path} has no state for other kinds of optimisers",
            effect="nothing was done: no start could continue from it",
            remedy="leave optimizer.kind and the kinds of optimizer.groups out of --set, and give them to the next "
            f"start, with --allow optimizer --reset-optimizer {checkpoint.step}",
        )


def _left_behind(run: RunDir, current: Overrides, state: TrainState) -> list[TimelineEntry]:
    """Entries of `control set` in steps after the checkpoint, to be dropped; those ahead of the run are kept, and that
    with which a fork has begun there."""
    nodes = lineage.nodes(run)
    segments = reversed([run.segment(node.segment) for node in nodes])
    newest = next((records[-1] for path in segments if (records := last_records(path, 1 << 16))), None)
    reached = state.consumed if newest is None else newest.consumed + IN_FLIGHT * newest.batch
    forks = [run.segment(node.segment) for node in nodes if node.kind == "fork" and node.consumed == state.consumed]
    begun = load_recorded(forks[-1] / "config.toml").timeline if forks else []
    kept = [entry for entry in begun if entry.at.value == state.consumed]
    return [entry for entry in current.timeline if state.consumed <= entry.at.value < reached and entry not in kept]


def refuse_run_dir(changes: Sequence[str], cause: str, remedy: str) -> None:
    """Raise ConfigError if `section.key=value` changes include the run directory."""
    if any(_key(text) == "run.dir" for text in changes):
        raise ConfigError(cause, remedy=remedy)


def _key(text: str) -> str:
    return text.partition("=")[0].strip()


def _absolute(text: str, config: Config) -> str:
    """An override with its resolved value, and with the name of a source in place of its number, so that it means the
    same in any directory and for sources in any order."""
    key = _key(text)
    value = overrides.value(config.model_dump(mode="json", exclude_unset=True), key)
    parts = key.split(".")
    if parts[:2] == ["data", "sources"] and len(parts) > 2 and parts[2].isdigit():
        name = config.data.sources[int(parts[2])].name
        parts[2] = parts[2] if "." in name or name.isdigit() else name
    return text if value is None else f"{'.'.join(parts)}={inline(value)}"


def _samples(run: RunDir, state: TrainState, first: int, last: int) -> SampleRange:
    """The samples of steps `first` to `last` inclusive, from the run's record. Raises ConfigError."""
    if not state.step < first <= last:
        raise ConfigError(
            f"--skip-steps {first}:{last}, continuing from step {state.step}: the steps to skip must come after that, "
            "in order",
            remedy=f"go back to a checkpoint before step {first}" if first <= last else "write FIRST:LAST",
        )
    begin = state.cursor if first == state.step + 1 else _cursor(run, first - 1)
    return SampleRange(begin, _cursor(run, last))


def _cursor(run: RunDir, step: int) -> int:
    """The cursor after a step of the kept line: how many samples were read. Raises ConfigError."""
    for trained in find_step(run, step):
        if trained.left_by is None:
            return trained.record.cursor
    raise ConfigError(
        f"the record has no step {step} on the kept line, so which samples to skip is not known",
        remedy=f"`fsdp-pretrain where {run.path} --step {step}` shows what there is; sample ranges can be written into "
        "data.skip of the configuration",
    )


def render(report: BranchReport) -> list[str]:
    """The report as lines of text."""
    lines = [f"  from        step {report.step:_}, {report.consumed:_} samples trained, {report.cursor:_} read"]
    lines += [f"  skip        samples {report.skip.removesuffix(' samples')}"] if report.skip else []
    if report.rates:
        lines.append("  rate        {:.3e} at first, {:.3e} half-way, {:.3e} at the end".format(*report.rates))
    return lines + [f"  {'change' if not at else '':11} {text}" for at, text in enumerate(report.changes or ["none"])]


def sentence(report: BranchReport, reason: str) -> str:
    """The change in one line, for the journal."""
    parts = [f"samples {report.skip} are skipped".replace(" samples", "")] if report.skip else []
    parts += [text for text in report.changes if not text.startswith(("data.skip", "run.dir", "run.name"))]
    parts += [f"because: {reason}"] if reason else []
    return "; ".join(parts)
