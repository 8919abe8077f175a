"""The main job: `torchrun ... -m fsdp_pretrain.train CONFIG.toml [key=value ...]`.

Parses, builds, runs, says how it ended. The only place that knows all parts; nothing imports it. Starting it again
continues from the newest valid checkpoint in the run directory.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from data.loader import Loader, StepBatch, check_batches
from data.mapping import now_reading
from data.opening import check_supply, open_infilling, open_packer, open_skips
from data.packer import Packer
from data.position import Position
from data.unigrams import Unigrams
from eval import jobs

from . import changes, environment, mesh, models, optim, overrides, parallel, plan, starting, throughput
from .arguments import parse_trainer
from .checkpoint.dcp import Saved
from .checkpoint.hook import CommitHook, refuse_path_in_text
from .checkpoint.manager import Manager
from .checkpoint.manifest import Manifest
from .checkpoint.resume import Resume, Resumed, Terms
from .checkpoint.subject import Subject
from .config import Config
from .control import Inbox, interrupt_on_signal
from .ending import record_end, say_stop, say_suspicion
from .errors import Exit, Interrupted, UserError
from .health import Health
from .health_journal import provenance
from .health_memory import recall
from .launch import torchrun
from .mesh import World
from .overrides import Overrides, load_run
from .record import aim, lineage, run_id
from .record import environment as environments
from .record.files import RunDir, make_directory, replace_file, seconds_of
from .record.lock import RunLock
from .record.milestones import milestones
from .record.recorder import Recorder, Silent
from .record.run_id import Memory
from .retreat import came_back, retreat, say_end
from .rollback import finish
from .run_context import RunContext
from .saves import Saves
from .state import TrainState, identity
from .trainer import Trainer
from .units import human_count, human_time
from .watchdog.channels import make_channels
from .watchdog.heart import Heart, Watched
from .watchdog.page import Phase


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
        allowed = changes.read_allowed(args.allow)
        config, lasting = load_run(args.config, args.overrides)
        refuse_path_in_text(config)
        terms = Terms(args.allow_fresh, allowed, args.reset_optimizer, args.reason)
        memory = Memory(torchrun.seen_note(), active=os.environ.get("LOCAL_RANK", "0") == "0")
        starting.recognise(RunDir(config.run.dir), memory)
    except UserError as error:  # every rank of a node reads the same file: one message is enough
        return _refuse(error, speaks=os.environ.get("LOCAL_RANK", "0") == "0")
    try:
        heart = _heart(config)
        with mesh.connect(config.parallel) as world:
            return int(run(config, world, lasting, terms, heart, memory))
    except UserError as error:
        return _refuse(error, speaks=not error.shared or os.environ.get("RANK", "0") == "0")


def _refuse(error: UserError, *, speaks: bool) -> int:
    if speaks:
        print(f"error: {error}", file=sys.stderr, flush=True)
    torchrun.leave_note(int(error.exit), error.cause)
    return int(error.exit)


def _heart(config: Config) -> Heart:
    """This rank's part of the watchdog, which looks from before the ranks meet. Raises ConfigError."""
    ranks = mesh.Ranks.from_environment()
    if not config.watchdog.enabled:
        return Heart()
    nodes = ranks.world // ranks.local_world
    node = int(os.environ.get("GROUP_RANK", ranks.rank // ranks.local_world))
    try:
        return Watched(
            config,
            rank=ranks.rank,
            local_rank=ranks.local_rank,
            local_ranks=ranks.local_world,
            node=node,
            nodes=nodes,
            reading=now_reading,
        )
    except OSError as error:
        print(f"warning: training without a watchdog on this rank: {error}", file=sys.stderr, flush=True)
        return Heart()


def run(config: Config, world: World, lasting: Overrides, terms: Terms, heart: Heart, memory: Memory) -> Exit:
    """Lock the run, open a segment, train, and record how it ended, whatever the way. Raises UserError.

    Args:
        config: what to train.
        world: all ranks.
        lasting: what of `config` comes from the run directory.
        terms: what the person who started it allows.
        heart: tells the watchdog what this rank does.
        memory: what earlier starts under the same launcher have seen.
    """
    run_dir = RunDir(config.run.dir)
    world.decide(lambda: starting.refuse_unwanted_restart(run_dir))
    starting.open_directory(run_dir, world, memory)
    terms = starting.agreed(terms, memory, world)
    lock = RunLock(run_dir, "training")
    while not world.decide(lock.attempt):  # short looks, so that no rank waits long for rank 0
        pass
    try:
        finished = world.decide(lambda: finish(run_dir))
        world.decide(lambda: len(lineage.nodes(run_dir)))  # or refuse before anything is written
        standing = world.decide(lambda: overrides.read(run_dir))
        world.together(lambda: starting.check_overrides(run_dir, lasting, standing))
        missing = world.decide(lambda: starting.look_for_checkpoints(run_dir, terms, memory))
        starting.open_checkpoints(run_dir, world)
        hosts = world.gather(socket.gethostname())
        segment = world.decide(lambda: starting.open_segment(run_dir, config, world, hosts))
        heart.belongs_to(int(segment.name))
        recorder = Silent(run_dir, segment) if not world.is_main else _recorder(run_dir, segment, config)
        if finished:
            recorder.say("finished the rollback that had been interrupted")
        if missing is not None and missing.newest is not None:
            recorder.event("checkpoint-missing", missing.text, step=missing.step, newest=missing.newest)
        _tell_overrides(lasting, recorder)
        guard = partial(_check_writer, lock if world.is_main else None)
        return record_end(
            world.rank,
            run_dir,
            segment,
            recorder,
            lambda: _train(config, world, run_dir, recorder, guard, terms, heart, memory),
        )
    finally:
        heart.close()
        lock.release()


def _check_writer(lock: RunLock | None) -> None:
    """Before a save: raise RunGoneError if the run directory is gone, BusyError if rank 0 (`lock`) does not hold it."""
    run_id.check()
    if lock is not None:
        lock.check()


def _tell_overrides(lasting: Overrides, recorder: Recorder) -> None:
    """Say at every start what the run directory adds to the configuration file."""
    recorder.status(overrides=str(lasting))
    if str(lasting):
        recorder.event("overrides", f"of overrides.toml: {lasting}")


def _train(
    config: Config,
    world: World,
    run_dir: RunDir,
    recorder: Recorder,
    guard: Callable[[], None],
    terms: Terms,
    heart: Heart,
    memory: Memory,
) -> Exit:
    """Build everything and run the loop."""
    heart.beat(Phase.LOAD)
    model = models.build(config.model)
    parameters = model.count_parameters()
    world.together(lambda: _preflight(config, world, parameters))
    packer = world.together(lambda: open_packer(config))
    if world.is_main:
        _copy_tokenizer(packer, run_dir)
    parallel.parallelize(model, config, world)
    optimizer = optim.build(model, config.optimizer)
    subject = Subject(world, run_dir, model, optimizer, config, identity(config, packer))
    _tell_start(recorder, subject, parameters)
    resumed = Resume(subject, recorder, terms)()
    state = resumed.state
    if world.is_main:
        _tell_changes(run_dir, recorder, subject.identity.corpora, terms.reason)
    world.decide(lambda: starting.join_line(run_dir, recorder, resumed, fresh=terms.fresh))
    memory.remember(segment=recorder.number, checkpoint=resumed.checkpoint)
    health = _health(subject, recorder.number, resumed)
    after_save = _AfterSave(run_dir, config, recorder)
    manager = _manager(subject, recorder.number, guard, after_save, health)
    world.together(lambda: check_supply(config, packer, cursor=state.cursor, consumed=state.consumed))
    _list_skips(config, state, recorder)
    if world.is_main:
        replace_file(run_dir.config, config.to_toml())
    inbox = Inbox(run_dir if world.is_main else None)
    if inbox.discard():
        recorder.event("control", "requests left from before this start were discarded")
    inbox.listen()
    follower = aim.start_follower(run_dir) if world.is_main and config.record.aim else None

    def saved(made: Saved) -> None:
        memory.remember(checkpoint=made.checkpoint.step)
        if world.is_main:
            after_save(made)

    trainer = Trainer(
        RunContext(config, world, recorder, inbox, heart, after_save.at_work),
        model=model,
        optimizer=optimizer,
        scaler=_loss_scaler(config, world, state, recorder),
        data=_loader(config, packer, world, run_dir, state, compares=world.is_main and config.watchdog.enabled),
        saves=Saves(config, world, manager, saved, recorder, state.step),
        state=state,
        health=health,
        provenance=provenance(config, world.size),
        reread=partial(_read_again, config, world, run_dir),
    )
    if world.is_main:
        _tell_ready(recorder, config, state)
    outcome = _end(trainer.run(), trainer, run_dir, recorder, inbox)
    if follower is not None:
        aim.finish_follower(run_dir, follower)
    return outcome


def _tell_start(recorder: Recorder, subject: Subject, parameters: int) -> None:
    world, config, device = subject.world, subject.config, throughput.device_name(subject.world.device)
    recorder.event(
        "start",
        f"{config.run.name}: {config.model.family} with {human_count(parameters)} parameters "
        f"on {world.size} x {device} ({world.replicas} replicas x {world.shards} shards), "
        f"{config.schedule.steps:_} steps of {config.train.global_batch}",
        parameters=parameters,
        world=world.size,
        replicas=world.replicas,
        shards=world.shards,
        device=device,
    )


def _health(subject: Subject, segment: int, resumed: Resumed) -> Health:
    """What judges the steps of this start, the same on every rank."""
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


def _manager(
    subject: Subject, segment: int, guard: Callable[[], None], after_save: _AfterSave, health: Health
) -> Manager:
    return Manager(
        subject,
        segment=segment,
        guard=guard,
        protected=lambda: {*jobs.protected_steps(subject.run, subject.config), *after_save.busy()},
        suspicion=lambda: health.suspicion,
        clean_until=lambda: health.clean_until,
    )


def _end(outcome: Exit, trainer: Trainer, run_dir: RunDir, recorder: Recorder, inbox: Inbox) -> Exit:
    """Say how the loop ended; go back first if it ended for that."""
    world, asked = trainer.world, trainer.retreat
    if asked is None:
        return say_stop(outcome, trainer.state.step, world, run_dir, recorder, inbox)
    if asked.repeats is False and not world.decide(lambda: came_back(run_dir, asked)):
        return say_suspicion(asked, world, run_dir, recorder)
    if asked.repeats is not None:
        found = "not finite again" if asked.repeats else "finite, as it was found before, and came back all the same"
        text = f"the same step from the same batch was {found}: {asked.cause}"
        recorder.event("health-again", text, step=asked.end, repeats=asked.repeats)
    report = world.decide(lambda: retreat(run_dir, trainer.config, asked, recorder))
    if world.is_main:
        say_end(run_dir, report["step"], asked, recorder)
    return outcome


def _tell_changes(run_dir: RunDir, recorder: Recorder, corpora: dict[str, str], reason: str) -> None:
    """Say what is not as it was at the last start, and why."""
    found = environment.compare(run_dir, recorder.number, corpora)
    if found is not None:
        last, changed = found
        text = "; ".join([*(changed or ["nothing"]), *([f"because: {reason}"] if changed and reason else [])])
        recorder.event("changed", f"since start {last}: {text}", last=last, changes=changed, reason=reason)


def _tell_ready(recorder: Recorder, config: Config, state: TrainState) -> None:
    """Say how long it took to get here: the first step begins now."""
    begun = environments.view(recorder.run, recorder.number)
    launched, connected = seconds_of(begun.launched), seconds_of(begun.time)
    if launched is not None and connected is not None:
        loaded = time.time() - connected
        recorder.event(
            "ready",
            f"{human_time(connected - launched)} until all ranks had met, {human_time(loaded)} to build and load",
            step=state.step,
            connect_seconds=connected - launched,
            load_seconds=loaded,
        )
    recorder.watch_for(milestones(config), state.consumed)


def _preflight(config: Config, world: World, parameters: int) -> None:
    """What can be refused before anything is built. Raises ConfigError."""
    plan.check_declared(config.model, parameters)
    check_batches(config.schedule.batches(), world.size, config.train.micro_batch)
    if config.record.aim:
        aim.check_installed()
    if config.watchdog.enabled:
        make_channels(config.watchdog.notify, os.environ)


def _recorder(run_dir: RunDir, segment: Path, config: Config) -> Recorder:
    recorder = Recorder(
        run_dir,
        segment,
        name=config.run.name,
        console_every=config.record.console_every,
        total_steps=config.schedule.steps,
    )
    recorder.status(force=True, state="starting")
    return recorder


def _copy_tokenizer(packer: Packer, run_dir: RunDir) -> None:
    """Keep the tokenizer with the run, so that it can be judged and exported when the corpora are gone."""
    source = next(iter(packer.corpora.values())).tokenizer().path
    make_directory(run_dir.tokenizer)
    shutil.copyfile(source, run_dir.tokenizer / source.name)


def _loader(
    config: Config, packer: Packer, world: World, run_dir: RunDir, start: Position, *, compares: bool
) -> Loader:
    path = run_dir.path / "watchdog/unigrams.json"
    if compares:
        make_directory(path.parent)
    return Loader(
        packer,
        config.schedule.batch,
        rank=world.rank,
        world=world.size,
        micro_batch=config.train.micro_batch,
        start=start,
        skips=open_skips(config),
        prefetch=config.data.prefetch,
        with_lengths=config.data.uses_lengths,
        across_documents=config.data.loss_across_documents,
        infilling=open_infilling(config, packer),
        pin=world.device.type == "cuda",
        unigrams=Unigrams(path, config.watchdog.sentinels.learn) if compares else None,
    )


def _read_again(config: Config, world: World, run_dir: RunDir, before: Position) -> StepBatch:
    """This rank's share of the batch after a position, by a packer that nobody else uses. Raises DataError."""
    return _loader(config, open_packer(config), world, run_dir, before, compares=False).build(before)


def _loss_scaler(config: Config, world: World, state: TrainState, recorder: Recorder) -> optim.LossScaler | None:
    """For fp16: continues as the checkpoint says, or begins anew and says so."""
    if parallel.compute_dtype(config, world.device) is not torch.float16:
        return None
    if state.step and state.loss_scale is None:
        first = config.train.loss_scale.first
        recorder.event("loss-scale", f"the checkpoint holds no loss scale; starting from {first:g}", step=state.step)
    return optim.LossScaler(config.train.loss_scale, world.device, state.loss_scale)


def _list_skips(config: Config, state: TrainState, recorder: Recorder) -> None:
    """Say at every start what is skipped, and what of it comes too late."""
    for first, stop in open_skips(config).ranges:
        late = " (before this start's position: no effect)" if stop <= state.cursor else ""
        recorder.event("skip", f"samples {first:_} to {stop:_} are not trained{late}", first=first, stop=stop)


class _AfterSave:
    """What follows a checkpoint: evaluation, the command of the user. Training neither waits nor fails with them."""

    def __init__(self, run_dir: RunDir, config: Config, recorder: Recorder) -> None:
        self._run_dir, self._config, self._recorder = run_dir, config, recorder
        command = config.checkpoint.on_commit
        self._hook = None if command is None else CommitHook(command, run_dir.path / "on_commit.log", recorder)
        self._worker: subprocess.Popen[bytes] | None = None

    def __call__(self, saved: Saved) -> None:
        """Start what is due."""
        manifest = saved.checkpoint.manifest()
        if self._hook is not None:
            self._hook.start(saved.checkpoint.path, saved.checkpoint.step)
        if self._config.eval.launch and jobs.is_due(self._config, manifest):
            self._evaluate(manifest)

    def at_work(self) -> list[str]:
        """What this process started and what runs beside training now."""
        evaluating = self._worker is not None and self._worker.poll() is None
        return [*(["evaluation"] if evaluating else []), *(["on_commit"] if self.busy() else [])]

    def busy(self) -> list[int]:
        """Steps whose checkpoints must not go yet."""
        return self._hook.busy() if self._hook is not None else []

    def _evaluate(self, manifest: Manifest) -> None:
        """Start a worker if none is at work: one at work will find the checkpoint, or the next will."""
        if self._worker is not None and self._worker.poll() is None and not manifest.final:
            return
        try:
            self._worker = jobs.start_worker(self._run_dir, self._config)
        except OSError as error:
            self._recorder.event("eval-failed", f"could not start the evaluation process: {error}", step=manifest.step)


if __name__ == "__main__":
    sys.exit(main())
