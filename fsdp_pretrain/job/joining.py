"""How a start joins its run: run directory, checkpoints, segment, lineage, and the first journal entries."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from fsdp_pretrain import hardware
from fsdp_pretrain.checkpoint.manager import TrainingObjects
from fsdp_pretrain.checkpoint.manifest import RunIdentity
from fsdp_pretrain.checkpoint.missing import MissingCheckpoint, missing
from fsdp_pretrain.checkpoint.resume import Resumed, ResumeOptions
from fsdp_pretrain.checkpoint.state import TrainState
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.data.packing.heldout import HeldOutSamples
from fsdp_pretrain.data.packing.opening import open_skips
from fsdp_pretrain.data.packing.packer import Packer
from fsdp_pretrain.errors import CheckpointError, ConfigError, Exit, StorageError, UserError, raising
from fsdp_pretrain.launch.outcome import newest_segment
from fsdp_pretrain.lineage.rollback import abandon_all
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.parallel.optimizer import checkpoint_bytes
from fsdp_pretrain.plan.warnings import in_vain
from fsdp_pretrain.processes import launched_at
from fsdp_pretrain.run import environment as environments
from fsdp_pretrain.run import exit_intent, lineage, overrides, run_id, state_files, status
from fsdp_pretrain.run.environment import ENVIRONMENT
from fsdp_pretrain.run.exit_intent import EXIT_INTENT
from fsdp_pretrain.run.files import RunDir, make_directory, replace_file, seconds_of
from fsdp_pretrain.run.metrics import left_behind
from fsdp_pretrain.run.overrides import Overrides
from fsdp_pretrain.run.recorder import Recorder
from fsdp_pretrain.run.run_id import LauncherMemory
from fsdp_pretrain.train import environment
from fsdp_pretrain.units import counted, human_count, human_time

from .run_context import RunContext

_VISIBLE_WITHIN = 5.0
"""Seconds in which a host must see what another has created in the run directory."""


# ---------------------------------------------------------------------- the directory


def bind_run_directory(run: RunDir, memory: LauncherMemory) -> None:
    """Bind this process to the run directory before anything is created.

    Raises:
        RunGoneError: earlier starts under the same launcher used another directory.
        StorageError: the directory cannot be read.
    """
    memory.check(run.path, partial(newest_segment, run))
    run_id.bind(run.path, run_id.read(run.path))


def take_restored(run: RunDir, world: World, memory: LauncherMemory) -> Overrides:
    """After a restoration: read the restored overrides, and note the restored segments for the launcher, so that it
    does not take the end of an earlier start for that of this one. Collective. Raises UserError."""
    identifier, newest, lasting = world.decide(
        lambda: (run_id.read(run.path), newest_segment(run), overrides.read(run))
    )
    memory.remember(run_id=identifier, restored=newest)
    return lasting


def open_directory(run: RunDir, world: World, memory: LauncherMemory) -> None:
    """Bind every rank to the run directory, which is created if no host has one. Collective.

    Raises:
        RunGoneError: some hosts see the run and others do not.
        StorageError: the directory cannot be created or read.
    """
    seen = world.gather(world.together(lambda: run_id.read(run.path)))
    identifier = next((other for other in seen if other is not None), None)
    if identifier is None:
        identifier = world.decide(lambda: run_id.assign(run.path))
    _bind_all(run.path, identifier, world)
    memory.remember(run_id=identifier)


def open_checkpoints(run: RunDir, world: World) -> None:
    """Bind every rank to `checkpoints/`, which may be a separate mount; after `look_for_checkpoints`. Collective."""
    identifier = run_id.bound_to(run.path)
    _bind_all(run.checkpoints, world.decide(lambda: run_id.assign(run.checkpoints, identifier or "")), world)


def _bind_all(directory: Path, identifier: str, world: World) -> None:
    world.together(lambda: _wait_until_visible(directory, identifier))
    run_id.bind(directory, identifier)


def _wait_until_visible(directory: Path, identifier: str) -> None:
    """Raise RunGoneError if this host does not soon see a directory with this id."""
    until = time.monotonic() + _VISIBLE_WITHIN
    while run_id.read(directory) != identifier:
        if time.monotonic() > until:
            raise run_id.run_gone_error(directory)
        for folder in (directory.parent, directory):  # opening a directory makes a network file system refresh it
            with contextlib.suppress(OSError):
                os.close(os.open(folder, os.O_RDONLY))
        time.sleep(0.1)


def refuse_unwanted_restart(run: RunDir) -> None:
    """Refuse a restart by torchrun if the last start ended on purpose: torchrun restarts after any exit code but 0.
    Raises UserError with the exit code of the last start; torchrun uses up its restarts on it and ends."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" or not run.segments:
        return
    path = run.segments[-1] / EXIT_INTENT
    intent = exit_intent.read(path.parent)
    if intent is None or intent.restart or intent.code not in (Exit.RESUME, Exit.REFUSED, Exit.NEEDS_PERSON):
        return
    if path.stat().st_mtime > launched_at(os.getppid()):  # decided under this torchrun
        error = UserError(f"not restarted by torchrun: the run ended on purpose ({intent.reason})")
        error.exit = Exit(intent.code)
        raise error


def check_overrides(run: RunDir, read_here: Overrides, read_by_main: Overrides) -> None:
    """Raise ConfigError if a rollback changed the overrides since this rank read them, or it read a stale file."""
    if read_here != read_by_main:
        raise ConfigError(
            f"{run.overrides} was read as {str(read_here)!r}, and is {str(read_by_main)!r}",
            effect="this start would train without the changes of a rollback",
            remedy="start again; if it persists, the nodes do not see the same run directory",
        )


# ---------------------------------------------------------------------- its checkpoints


def agree_on_options(options: ResumeOptions, memory: LauncherMemory, world: World) -> ResumeOptions:
    """The options of this start: --allow-fresh and --from-mirror apply only to the first start under a launcher or
    torchrun. Collective."""
    first = world.decide(lambda: not (memory.seen and memory.seen.segment))
    return replace(options, fresh=options.fresh and first, from_mirror=options.from_mirror and first)


def look_for_checkpoints(run: RunDir, options: ResumeOptions, memory: LauncherMemory) -> MissingCheckpoint | None:
    """The newest recorded checkpoint of the kept line, if neither it nor a later one exists; else None. Raises
    CheckpointError if there is no checkpoint at all, or the missing one was seen under this launcher: continuing would
    silently repeat training. With `options.fresh` it is returned instead."""
    lost = missing(run, memory.seen)
    if lost is None or options.fresh or not (lost.newest is None or lost.seen):
        return lost
    directory = run.checkpoints
    error = CheckpointError(
        f"{directory} has lost checkpoints: {lost.text}",
        effect="nothing was done: training would begin again "
        + ("at step 0" if lost.newest is None else f"after step {lost.newest}"),
        remedy="check that its file system is mounted, or restore them; "
        + (
            "start manually with --allow-fresh to begin again at step 0 in this directory"
            if lost.newest is None
            else f"`fsdp-pretrain rollback {run.path} --to {lost.newest}` continues without them"
        ),
    )
    error.exit = Exit.NEEDS_PERSON
    raise error


# ---------------------------------------------------------------------- its segment


def open_segment(run: RunDir, config: Config, world: World, hosts: list[str]) -> Path:
    """Create this start's segment directory with configuration and environment. Raises StorageError."""
    with raising(StorageError, f"cannot write to the run directory {run.path}"):
        segment = run.new_segment()
        replace_file(segment / "config.toml", config.to_toml())
        state_files.write(segment / ENVIRONMENT, environment.describe(world, hosts))
    return segment


def record_lineage(run: RunDir, recorder: Recorder, resumed: Resumed, *, fresh: bool) -> None:
    """Make this start the head of the lineage, before it records a step.

    A start at step 0 of a run with a record reports which steps are lost. If that was allowed (`fresh`), old
    checkpoints and evaluations are moved aside, since they belong to another line. Raises StorageError if the run
    directory cannot be written.
    """
    fresh = fresh and resumed.checkpoint is None
    steps, tokens = left_behind(run, 0, 0) if resumed.checkpoint is None else (0, 0)
    aside = abandon_all(run) if fresh else []
    kind = "fresh" if fresh else "start"
    with raising(StorageError, f"cannot write to the run directory {run.path}"):
        lineage.record(run.segment(recorder.number), parent=resumed.parent, kind=kind, **vars(resumed.state))
    if steps or aside:
        why = "as --allow-fresh says" if fresh else "no checkpoint had been saved"
        text = (
            f"begins at step 0, {why}: {counted(steps, 'step')} ({human_count(tokens)} tokens) of the record are lost"
        )
        text += f"; checkpoints {', '.join(aside)} were moved to abandoned/ beside them" if aside else ""
        recorder.event("fresh", text, step=0, lost={"steps": steps, "tokens": tokens}, abandoned=aside)


def copy_tokenizer(run: RunDir, packer: Packer) -> None:
    """Copy the tokenizer into the run directory, for evaluation and export without the corpora."""
    source = next(iter(packer.corpora.values())).tokenizer().path
    make_directory(run.tokenizer)
    shutil.copyfile(source, run.tokenizer / source.name)


# ---------------------------------------------------------------------- its first journal entries


def record_overrides(recorder: Recorder, lasting: Overrides) -> None:
    """Record the overrides, which the run directory adds to the configuration file."""
    recorder.status(overrides=str(lasting))
    if str(lasting):
        recorder.event("overrides", f"of overrides.toml: {lasting}")


def record_start(recorder: Recorder, training: TrainingObjects, parameters: int) -> None:
    """Record the model, its number of parameters, and the devices it is trained on."""
    world, config, device = training.world, training.config, hardware.device_name(training.world.device)
    own = (tensor.numel() * tensor.element_size() for kept in training.observers.values() for tensor in kept.values())
    for warning in in_vain(config):
        recorder.say(f"warning: {warning}")
    recorder.event(
        "start",
        f"{config.run.name}: {config.model.family} with {human_count(parameters)} parameters "
        f"on {world.size} x {device} ({counted(world.replicas, 'replica')} x {counted(world.shards, 'shard')}), "
        f"{config.schedule.steps:_} steps of {config.train.global_batch}",
        parameters=parameters,
        checkpoint_bytes=checkpoint_bytes(training.model, config.optimizer) + sum(own),
        world=world.size,
        replicas=world.replicas,
        shards=world.shards,
        device=device,
    )


def record_changes(recorder: Recorder, identity: RunIdentity, heldout: HeldOutSamples | None, reason: str) -> None:
    """Record what changed since the last start, and why."""
    heldout_too = {f"held-out {name}": value for name, value in (heldout.fingerprints if heldout else {}).items()}
    data = environments.Corpora(corpora=identity.corpora | heldout_too, excluded=identity.excluded)
    comparison = environment.compare(recorder.run, recorder.number, data)
    if comparison is not None:
        last, changed = comparison
        text = "; ".join([*(changed or ["nothing"]), *([f"because: {reason}"] if changed and reason else [])])
        recorder.event("changed", f"since start {last}: {text}", last=last, changes=changed, reason=reason)


def join_run(run: RunContext, resumed: Resumed) -> None:
    """On rank 0: write `config.toml` and `status.json` of this start. Those of a complete run with nothing left to
    train stay as they are."""
    config, state, before = run.config, resumed.state, status.read(run.recorder.run)
    if before.was_complete and state.consumed >= config.schedule.end:
        return
    replace_file(run.recorder.run.config, config.to_toml())
    facts: dict[str, object] = {} if state.step == before.step else {"loss": None, "heldout": None}
    if resumed.checkpoint is None:
        facts["checkpoint"] = None
    at = {"step": state.step, "consumed": state.consumed, "cursor": state.cursor}
    schedule = config.schedule
    total, tokens = schedule.last_step(state.step, state.consumed), schedule.tokens(state.consumed)
    run.recorder.status(force=True, total_steps=total, tokens=tokens, **at, **facts)


def record_skips(run: RunContext, state: TrainState) -> None:
    """Record the ranges of samples to skip, and which of them have no effect because they were read already."""
    for first, stop in open_skips(run.config).ranges:
        late = " (before this start's position: no effect)" if stop <= state.cursor else ""
        run.recorder.event("skip", f"samples {first:_} to {stop:_} are not trained{late}", first=first, stop=stop)


def discard_requests(run: RunContext) -> None:
    """Discard requests that were sent to an earlier start, and record them."""
    for request in run.inbox.discard(run.recorder.number):
        what = " ".join([request.verb or "a damaged request", *request.changes])
        facts = {"request": request.id, "asked": request.verb, "by": request.by}
        why = "it was sent to an earlier start"
        run.recorder.event("control", f"discarded, since {why}: {what}", refused=why, **facts)


def record_heldout(run: RunContext, heldout: HeldOutSamples | None) -> None:
    """Record which held-out samples are measured, how often, and the notices of reading them."""
    if heldout is None:
        return
    names = ", ".join(f"{count:_} samples of {name}" for name, count in heldout.counts.items())
    text = f"the loss on {names} is measured every {run.config.heldout_every}"
    run.recorder.event("heldout", text, samples=heldout.counts, corpora=heldout.fingerprints)
    for corpus in heldout.packer.corpora.values():
        for notice in corpus.reads.take_notices():
            run.recorder.note("data-read", f"rank {run.world.rank}: {notice}")


def record_ready(run: RunContext, state: TrainState) -> None:
    """Record how long startup took: the first step starts now."""
    recorded = environments.view(run.recorder.run, run.recorder.number)
    launched, connected = seconds_of(recorded.launched), seconds_of(recorded.time)
    if launched is not None and connected is not None:
        loaded = time.time() - connected
        run.recorder.event(
            "ready",
            f"{human_time(connected - launched)} until all ranks connected, {human_time(loaded)} to build and load",
            step=state.step,
            connect_seconds=connected - launched,
            load_seconds=loaded,
        )
