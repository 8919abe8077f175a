"""The trainer: `torchrun ... -m fsdp_pretrain.train CONFIG.toml [key=value ...]`.

Parses arguments, builds all parts, runs, reports how it ended. Running it again continues from the newest valid
checkpoint in the run directory.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import warnings
from collections.abc import Callable
from functools import partial

import torch

from data.packing.heldout import open_heldout
from data.packing.loader import StepBatch, check_batches
from data.packing.opening import check_supply, open_packer
from data.packing.position import Position
from eval import jobs
from fsdp_pretrain.checkpoint.dcp import SaveResult
from fsdp_pretrain.checkpoint.manager import CheckpointManager, TrainingObjects
from fsdp_pretrain.checkpoint.resume import Resume, Resumed, ResumeOptions
from fsdp_pretrain.checkpoint.state import identity
from fsdp_pretrain.config import resume_rules
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.errors import Exit, Interrupted, UserError
from fsdp_pretrain.health.history import recall
from fsdp_pretrain.health.journal import provenance
from fsdp_pretrain.health.monitor import Health
from fsdp_pretrain.heartbeat import Heartbeat, Phase
from fsdp_pretrain.launch import torchrun
from fsdp_pretrain.lineage.rollback import finish
from fsdp_pretrain.parallel import fsdp, mesh
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.plan import plan
from fsdp_pretrain.record import lineage, overrides, run_id
from fsdp_pretrain.record.arguments import parse_trainer
from fsdp_pretrain.record.files import RunDir, make_directory
from fsdp_pretrain.record.lock import RunLock
from fsdp_pretrain.record.overrides import Overrides, load_run
from fsdp_pretrain.record.requests import Inbox, interrupt_on_signal
from fsdp_pretrain.record.run_id import LauncherMemory
from fsdp_pretrain.trackers.follow import finish_followers, start_followers
from fsdp_pretrain.trackers.sink import NAMES, check_installed
from fsdp_pretrain.watchdog.notify.channels import make_channels

from . import start
from .after_save import AfterSave
from .build import (
    build_data,
    build_fetching,
    build_heartbeat,
    build_loss_scaler,
    build_model_and_optimizer,
    build_recorder,
)
from .checkpointing import Checkpointing
from .exit_status import conclude, record_end
from .heldout_loss import build_heldout_loss
from .loop import Loop
from .mirroring import UploaderProcess, flush_mirror, restored_from_mirror
from .run_context import RunContext
from .trainer import Trainer


def main(arguments: list[str] | None = None) -> int:
    """Run the job; the exit code."""
    args = parse_trainer(sys.argv[1:] if arguments is None else arguments)
    torchrun.die_with_launcher()
    warnings.filterwarnings("ignore", message=".*socket.*", category=UserWarning)
    try:
        interrupt_on_signal()
        return _start(args)
    except Interrupted as asked:
        print(f"stopped: {asked}", file=sys.stderr, flush=True)
        return int(asked.exit)


def _start(args: argparse.Namespace) -> int:
    try:
        allowed = resume_rules.read_allowed(args.allow)
        config, lasting = load_run(args.config, args.overrides)
        options = ResumeOptions(args.allow_fresh, allowed, args.reset_optimizer, args.reason, args.from_mirror)
        memory = LauncherMemory(torchrun.seen_note(), active=os.environ.get("LOCAL_RANK", "0") == "0")
        start.bind_run_directory(RunDir(config.run.dir), memory)
    except UserError as error:  # every rank of a node reads the same file: one message is enough
        return _refuse(error, speaks=os.environ.get("LOCAL_RANK", "0") == "0")
    try:
        heartbeat = build_heartbeat(config)
        with mesh.connect(config.parallel) as world:
            options = start.agree_on_options(options, memory, world)
            if restored_from_mirror(config, world, options, heartbeat):
                lasting = start.take_restored(RunDir(config.run.dir), world, memory)
                config = world.together(partial(overrides.apply, args.config, args.overrides, lasting))
                heartbeat.reconfigure(config)
            return torchrun.end_as_agreed(run(config, world, lasting, options, heartbeat, memory))
    except UserError as error:
        return _refuse(error, speaks=not error.shared or os.environ.get("RANK", "0") == "0")


def _refuse(error: UserError, *, speaks: bool) -> int:
    if speaks:
        print(f"error: {error}", file=sys.stderr, flush=True)
    torchrun.leave_note(int(error.exit), error.cause)
    return int(error.exit)


def run(
    config: Config,
    world: World,
    lasting: Overrides,
    options: ResumeOptions,
    heartbeat: Heartbeat,
    memory: LauncherMemory,
) -> Exit:
    """Lock the run, open a segment, train, and record how it ended in any case. Raises UserError.

    Args:
        config: what to train.
        world: all ranks.
        lasting: the part of `config` that comes from the run directory.
        options: resume options of the person who started it.
        heartbeat: reports to the watchdog what this rank does.
        memory: what earlier starts under the same launcher have seen.
    """
    run_dir = RunDir(config.run.dir)
    world.decide(lambda: start.refuse_unwanted_restart(run_dir))
    start.open_directory(run_dir, world, memory)
    lock, fetching = RunLock(run_dir, "training"), None
    while not world.decide(lock.attempt):  # short attempts, so that no rank waits long for rank 0
        pass
    try:
        finished = world.decide(lambda: finish(run_dir))
        world.decide(lambda: len(lineage.nodes(run_dir)))  # refuses a damaged lineage before anything is written
        standing = world.decide(lambda: overrides.read(run_dir))
        world.together(lambda: start.check_overrides(run_dir, lasting, standing))
        missing = world.decide(lambda: start.look_for_checkpoints(run_dir, options, memory))
        start.open_checkpoints(run_dir, world)
        hosts = world.gather(socket.gethostname())
        segment = world.decide(lambda: start.open_segment(run_dir, config, world, hosts))
        heartbeat.set_segment(int(segment.name))
        fetching = build_fetching(config)
        recorder = build_recorder(config, world, run_dir, segment)
        if finished:
            recorder.say("finished the rollback that had been interrupted")
        if missing is not None and missing.newest is not None:
            recorder.event("checkpoint-missing", missing.text, step=missing.step, newest=missing.newest)
        start.record_overrides(recorder, lasting)
        after_save = AfterSave(config, recorder)
        inbox = Inbox(run_dir if world.is_main else None)
        context = RunContext(config, world, recorder, inbox, heartbeat, after_save.running, fetching)
        guard = partial(_check_writer, lock if world.is_main else None)
        train = partial(_train, context, guard, options, memory, after_save)
        return record_end(world.rank, run_dir, segment, recorder, train)
    finally:
        heartbeat.close()
        if fetching is not None:
            fetching.close()
        lock.release()


def _check_writer(lock: RunLock | None) -> None:
    """Before a save: raise RunGoneError if the run directory is gone, BusyError if rank 0 (`lock`) lost the lock."""
    run_id.check()
    if lock is not None:
        lock.check()


def _train(
    context: RunContext,
    guard: Callable[[], None],
    options: ResumeOptions,
    memory: LauncherMemory,
    after_save: AfterSave,
) -> Exit:
    """Build everything and run the loop."""
    config, world, recorder, run_dir = context.config, context.world, context.recorder, context.recorder.run
    context.heartbeat.beat(Phase.LOAD)
    world.together(lambda: _preflight(config, world))
    fetching = context.fetching
    packer = world.together(lambda: open_packer(config, None if fetching is None else fetching.status))
    if fetching is not None:
        world.together(partial(fetching.check, packer))
    samples = world.together(lambda: open_heldout(config, packer))
    if world.is_main:
        start.copy_tokenizer(run_dir, packer)
    model, optimizer = build_model_and_optimizer(config, world)
    subject = TrainingObjects(world, run_dir, model, optimizer, config, identity(config, packer))
    start.record_start(recorder, subject, model.count_parameters())
    resumed = Resume(subject, recorder, options).run()
    if resumed.checkpoint is None:
        fsdp.initialise_all(model, config.run.seed)
    state = resumed.state
    if world.is_main:
        start.record_changes(recorder, subject.identity.corpora, samples, options.reason)
    world.decide(lambda: start.record_lineage(run_dir, recorder, resumed, fresh=options.fresh))
    memory.remember(segment=recorder.number, checkpoint=resumed.checkpoint)
    health = _health(subject, recorder.number, resumed)
    world.together(lambda: check_supply(config, packer, cursor=state.cursor, consumed=state.consumed))
    heldout = None if samples is None else world.together(partial(build_heldout_loss, config, samples, world))
    scaler = build_loss_scaler(config, world, state.loss_scale)
    start.record_heldout(context, samples)
    start.record_skips(context, state)
    if world.is_main:
        start.join_run(context, resumed)
    start.discard_requests(context)
    context.inbox.listen()
    followers = start_followers(run_dir) if world.is_main else {}
    copied = world.is_main and config.checkpoint.mirror is not None
    uploader = UploaderProcess(run_dir, recorder.number) if copied else None

    def saved(made: SaveResult) -> None:
        memory.remember(checkpoint=made.checkpoint.step)
        if world.is_main:
            after_save.start(made)
            if uploader is not None:
                uploader.ensure_running()

    unigrams = run_dir.path / "watchdog/unigrams.json" if world.is_main and config.watchdog.enabled else None
    if unigrams is not None:
        make_directory(unigrams.parent)
    built = fetching.begin(state) if fetching is not None else lambda _: None
    manager = _manager(subject, recorder.number, guard, health, uploader)

    trainer = Trainer(
        config,
        world,
        model=model,
        optimizer=optimizer,
        scaler=scaler,
        data=build_data(config, packer, world, state, unigrams=unigrams, built=built),
        state=state,
        recorder=recorder,
        heartbeat=context.heartbeat,
        heldout=heldout,
    )
    loop = Loop(
        context,
        trainer,
        saves=Checkpointing(config, world, manager, saved, recorder, state.step),
        health=health,
        provenance=provenance(config, world.size),
        reread=partial(_read_again, config, world),
        guard=guard,
        on_set=manager.steer,
    )
    if world.is_main:
        start.record_ready(context, state)
    outcome = conclude(loop.run(), loop)
    flush_mirror(context, uploader, complete=outcome is Exit.COMPLETE)
    finish_followers(run_dir, followers)
    return outcome


def _manager(
    subject: TrainingObjects,
    segment: int,
    guard: Callable[[], None],
    health: Health,
    uploader: UploaderProcess | None,
) -> CheckpointManager:
    return CheckpointManager(
        subject,
        segment=segment,
        guard=guard,
        protected=lambda: jobs.protected_steps(subject.run, subject.config),
        suspicion=lambda: health.suspicion,
        clean_until=lambda: health.clean_until,
        spared=uploader.steps_in_use if uploader is not None else list,
    )


def _preflight(config: Config, world: World) -> None:
    """Refuse what can be refused before anything is built. Raises ConfigError."""
    plan.check_declared(config.model, plan.count_parameters(config.model))
    check_batches(config.schedule.batches(), world.size, config.train.micro_batch)
    check_installed(name for name in NAMES if getattr(config.record, name))
    if config.watchdog.enabled:
        make_channels(config.watchdog.notify, os.environ)


def _health(subject: TrainingObjects, segment: int, resumed: Resumed) -> Health:
    """The `Health` of this start, identical on every rank."""
    world = subject.world
    exact = world.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
    return world.decide(
        lambda: recall(
            subject.run,
            subject.config,
            segment=segment,
            parent=resumed.parent,
            step=resumed.state.step,
            whole=resumed.whole,
            exact=exact,
        )
    )


def _read_again(config: Config, world: World, before: Position) -> StepBatch:
    """This rank's share of the batch after a position, with a packer of its own. Raises DataError."""
    return build_data(config, open_packer(config), world, before).build(before)
