"""The phases of a start once it has a segment: open, restore, join, build. Each takes the results of those before.

All are collective; an error is raised on every rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from fsdp_pretrain.checkpoint.manager import CheckpointManager, TrainingObjects
from fsdp_pretrain.checkpoint.resume import Resume, Resumed, ResumeOptions
from fsdp_pretrain.checkpoint.state import identity
from fsdp_pretrain.checkpoint.witness import code_identity
from fsdp_pretrain.config import world_sizes
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.data.packing.heldout import HeldOutSamples, open_heldout
from fsdp_pretrain.data.packing.loader import StepBatch
from fsdp_pretrain.data.packing.opening import check_supply, open_packer
from fsdp_pretrain.data.packing.packer import Packer
from fsdp_pretrain.data.packing.position import Position
from fsdp_pretrain.eval import jobs
from fsdp_pretrain.health.history import recall
from fsdp_pretrain.health.journal import HealthObserver, provenance
from fsdp_pretrain.health.monitor import Health
from fsdp_pretrain.helper_process import HelperProcess
from fsdp_pretrain.models import Decoder
from fsdp_pretrain.parallel import fsdp
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.plan import plan
from fsdp_pretrain.run import mirror_status
from fsdp_pretrain.run.files import make_directory
from fsdp_pretrain.run.run_id import LauncherMemory
from fsdp_pretrain.train.build import build_data, build_loss_scaler, build_model_and_optimizer
from fsdp_pretrain.train.checkpointing import Checkpointing
from fsdp_pretrain.train.group_statistics import GroupStatistics
from fsdp_pretrain.train.heldout_loss import HeldOutLoss, build_heldout_loss
from fsdp_pretrain.train.loop import Loop
from fsdp_pretrain.train.observer import Observer
from fsdp_pretrain.train.own_observers import ObserverContext, OwnObservers
from fsdp_pretrain.train.repeat_check import RepeatCheck
from fsdp_pretrain.train.trainer import Trainer
from fsdp_pretrain.views.trackers.follow import Followers, finish_followers, start_followers
from fsdp_pretrain.views.trackers.sink import SINKS, check_installed
from fsdp_pretrain.watchdog.notify.channels import make_channels

from . import joining
from .evaluation_worker import EvaluationWorker
from .live_control import LiveControl
from .mirroring import flush_mirror, start_uploader
from .profiling import StepProfiler
from .run_context import RunContext


def preflight(config: Config, world: World) -> None:
    """Check what can be checked before anything is built. Raises ConfigError."""
    world_sizes.check(config, world.size)
    plan.check_declared(config.model, plan.count_parameters(config.model))
    check_installed(name for name in SINKS if getattr(config.record, name))
    if config.watchdog.enabled:
        make_channels(config.watchdog.notify, os.environ)


@dataclass(frozen=True)
class OpenCorpora:
    """The corpora of a run, opened and checked."""

    packer: Packer  # packs the training data
    heldout: HeldOutSamples | None  # held-out samples whose loss is measured; None: there are none


def open_corpora(run: RunContext) -> OpenCorpora:
    """Open and check all corpora. Raises UserError."""
    config, world, fetching = run.config, run.world, run.fetching
    packer = world.together(lambda: open_packer(config, None if fetching is None else fetching.status))
    if fetching is not None:
        world.together(partial(fetching.check, packer))
    heldout = world.together(lambda: open_heldout(config, packer))
    if world.is_main:
        joining.copy_tokenizer(run.recorder.run, packer)
    return OpenCorpora(packer, heldout)


@dataclass(frozen=True)
class RestoredRun:
    """Model, optimiser and history, as they are before the first step of this start."""

    model: Decoder  # sharded, with its values
    training: TrainingObjects  # model and optimiser, with what their checkpoints record of the run
    resumed: Resumed  # where the run is, and the checkpoint it came from
    health: Health  # has judged the steps before
    heldout: HeldOutLoss | None  # measures the held-out loss; None: it is not measured
    own: OwnObservers  # the observers of extensions


def restore(run: RunContext, corpora: OpenCorpora, options: ResumeOptions, memory: LauncherMemory) -> RestoredRun:
    """Load the newest valid checkpoint, or the initial values, and make this start the head of the lineage. Raises
    UserError if there is no valid checkpoint, or something changed that a resume may not change."""
    config, world, recorder, packer = run.config, run.world, run.recorder, corpora.packer
    model, optimizer = build_model_and_optimizer(config, world)
    own = OwnObservers(ObserverContext(config, world, model, optimizer, recorder.run))
    facts = identity(config, packer, code_identity(config))
    training = TrainingObjects(world, recorder.run, model, optimizer, config, facts, own.tensors_of_each())
    joining.record_start(recorder, training, model.count_parameters())
    resumed = Resume(training, recorder, options).run()
    own.mark_restored(resumed.observers)
    if resumed.checkpoint is None:
        fsdp.initialise_all(model, config.run.seed)
    if world.is_main:
        joining.record_changes(recorder, training.identity, corpora.heldout, options.reason)
    world.decide(lambda: joining.record_lineage(recorder.run, recorder, resumed, fresh=options.fresh))
    memory.remember(segment=recorder.number, checkpoint=resumed.checkpoint)
    health, at = _recall_health(training, recorder.number, resumed), resumed.state
    world.together(lambda: check_supply(config, packer, cursor=at.cursor, consumed=at.consumed))
    heldout = None
    if (samples := corpora.heldout) is not None:
        heldout = world.together(lambda: build_heldout_loss(config, samples, world, model, run.heartbeat))
    return RestoredRun(model, training, resumed, health, heldout, own)


def _recall_health(training: TrainingObjects, segment: int, resumed: Resumed) -> Health:
    """The `Health` of this start, identical on every rank."""
    world = training.world
    exact = world.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
    return world.decide(
        lambda: recall(
            training.run,
            training.config,
            segment=segment,
            parent=resumed.parent,
            step=resumed.state.step,
            whole=resumed.whole,
            exact=exact,
        )
    )


@dataclass(frozen=True)
class Companions:
    """Processes that rank 0 runs beside training; none on other ranks."""

    followers: Followers = field(default_factory=dict)  # those that feed the trackers, by tracker name
    uploader: HelperProcess | None = None  # that of the mirror, if there is one

    def finish(self, run: RunContext, *, complete: bool) -> None:
        """Wait for them to finish, for a limited time. Collective."""
        flush_mirror(run, self.uploader, complete=complete)
        finish_followers(run.recorder.run, self.followers)


def join(run: RunContext, corpora: OpenCorpora, restored: RestoredRun) -> Companions:
    """Make this start the one that the run's files, its requests and its companion processes belong to."""
    recorder = run.recorder
    joining.record_heldout(run, corpora.heldout)
    joining.record_skips(run, restored.resumed.state)
    if run.world.is_main:
        joining.join_run(run, restored.resumed)
    joining.discard_requests(run)
    run.inbox.listen()
    if not run.world.is_main:
        return Companions()
    mirrored = run.config.checkpoint.mirror is not None
    uploader = start_uploader(recorder.run, recorder.number) if mirrored else None
    return Companions(start_followers(recorder.run), uploader)


def build_loop(
    run: RunContext,
    corpora: OpenCorpora,
    restored: RestoredRun,
    *,
    guard: Callable[[], None],
    memory: LauncherMemory,
) -> Loop:
    """Build the training loop, which continues from the restored state.

    Args:
        guard: raises UserError if this job may not write into the run directory any more.
        memory: remembers every checkpoint for the next start under the same launcher.
    """
    config, world, recorder = run.config, run.world, run.recorder
    training, state = restored.training, restored.resumed.state
    manager = _build_manager(training, recorder.number, guard, restored.health)
    unigrams = recorder.run.path / "watchdog/unigrams.json" if world.is_main and config.watchdog.enabled else None
    if unigrams is not None:
        make_directory(unigrams.parent)
    built = run.fetching.begin(state) if run.fetching is not None else lambda _: None
    scaler = build_loss_scaler(config, world, state.loss_scale)
    profiler = StepProfiler(run)
    control = LiveControl(run, guard, profiler)
    services: list[Observer] = [
        GroupStatistics(restored.model, training.optimizer, config, world),
        *([restored.heldout] if restored.heldout is not None else []),
        HealthObserver(restored.health, recorder, provenance(config, world.size)),
        RepeatCheck(config, world, restored.model, training.optimizer, scaler, recorder, run.heartbeat),
        EvaluationWorker(config, recorder, memory, main=world.is_main),
        profiler,
        control,
        restored.own,
    ]
    saves = Checkpointing(config, world, manager, recorder, run.heartbeat, state.step, services)
    trainer = Trainer(
        config,
        world,
        model=restored.model,
        optimizer=training.optimizer,
        scaler=scaler,
        data=build_data(config, corpora.packer, world, state, unigrams=unigrams, built=built),
        state=state,
        recorder=recorder,
        heartbeat=run.heartbeat,
        observers=[saves, *services],
    )
    control.loop = loop = Loop(trainer, saves, partial(_rebuild_batch, config, world))
    return loop


def _build_manager(
    training: TrainingObjects,
    segment: int,
    guard: Callable[[], None],
    health: Health,
) -> CheckpointManager:
    return CheckpointManager(
        training,
        segment=segment,
        guard=guard,
        protected=lambda: jobs.protected_steps(training.run, training.config),
        suspicion=lambda: health.suspicion,
        clean_until=lambda: health.clean_until,
        delete_last=lambda: {
            *mirror_status.copied_steps(training.run, segment),
            *jobs.merged_steps(training.run, training.config),
        },
    )


def _rebuild_batch(config: Config, world: World, before: Position) -> StepBatch:
    """This rank's share of the batch after a position, built with a packer of its own. Raises DataError."""
    return build_data(config, open_packer(config), world, before).build(before)
