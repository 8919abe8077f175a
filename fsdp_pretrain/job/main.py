"""The trainer: `torchrun ... -m fsdp_pretrain.train CONFIG.toml [key=value ...]`.

Parses arguments, builds all parts, trains and reports how training ended. When it is started again, it continues from
the newest valid checkpoint in the run directory.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import warnings
from collections.abc import Callable
from functools import partial

from fsdp_pretrain.checkpoint.resume import ResumeOptions
from fsdp_pretrain.config import resume_rules
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.errors import Exit, Interrupted, PeerLostError, UserError
from fsdp_pretrain.heartbeat import Heartbeat, Phase
from fsdp_pretrain.launch import torchrun
from fsdp_pretrain.lineage.rollback import finish
from fsdp_pretrain.parallel import mesh
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.ranks import RankInfo
from fsdp_pretrain.run import lineage, overrides, run_id
from fsdp_pretrain.run.arguments import parse_trainer
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.lock import TRAINING, RunLock
from fsdp_pretrain.run.overrides import Overrides, load_run
from fsdp_pretrain.run.requests import Inbox, interrupt_on_signal
from fsdp_pretrain.run.run_id import LauncherMemory

from . import joining, phases
from .exit_status import conclude, record_end
from .mirroring import restored_from_mirror
from .run_context import RunContext
from .services import build_fetching, build_heartbeat, build_recorder


def main(arguments: list[str] | None = None) -> int:
    """Run the job; returns the exit code."""
    args = parse_trainer(sys.argv[1:] if arguments is None else arguments)
    torchrun.die_with_launcher()
    warnings.filterwarnings("ignore", message=".*socket.*", category=UserWarning)
    try:
        interrupt_on_signal()
        return _start(args)
    except Interrupted as interruption:
        print(f"stopped: {interruption}", file=sys.stderr, flush=True)
        return int(interruption.exit)


def _start(args: argparse.Namespace) -> int:
    try:
        config, lasting = load_run(args.config, args.overrides)
        allowed = resume_rules.read_allowed(args.allow)  # imported packages have keys, too
        options = ResumeOptions(args.allow_fresh, allowed, args.reset_optimizer, args.reason, args.from_mirror)
        memory = LauncherMemory(torchrun.seen_note(), active=os.environ.get("LOCAL_RANK", "0") == "0")
        ranks = RankInfo.from_environment()
        config.parallel.shard_size(ranks.world, ranks.local_world)
        joining.bind_run_directory(RunDir(config.run.dir), memory)
    except UserError as error:  # every rank of a node reads the same file: one message is enough
        return _refuse(error, speaks=os.environ.get("LOCAL_RANK", "0") == "0", is_common=True)
    try:
        heartbeat = build_heartbeat(config)
        with mesh.connect(config.parallel) as world:
            options = joining.agree_on_options(options, memory, world)
            if restored_from_mirror(config, world, options, heartbeat):
                lasting = joining.take_restored(RunDir(config.run.dir), world, memory)
                config = world.together(partial(overrides.apply, args.config, args.overrides, lasting))
                heartbeat.reconfigure(config)
            return torchrun.end_as_agreed(run(config, world, lasting, options, heartbeat, memory))
    except UserError as error:
        is_first, told = os.environ.get("RANK", "0") == "0", isinstance(error, PeerLostError)  # told: in the journal
        return _refuse(error, speaks=not told if is_first else not error.shared, is_common=error.shared)


def _refuse(error: UserError, *, speaks: bool, is_common: bool) -> int:
    """Exit code for an error; of one that is common to several ranks only one of them speaks."""
    if speaks:
        print(f"error: {error}", file=sys.stderr, flush=True)
    torchrun.leave_note(int(error.exit), error.cause)
    if is_common and not speaks:
        torchrun.wait_to_be_ended()
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
        lasting: the part of `config` that comes from the run directory.
        options: resume options of the person who started the job.
        heartbeat: reports this rank's phases to the watchdog.
        memory: what earlier starts under the same launcher saw of the run.
    """
    run_dir = RunDir(config.run.dir)
    world.decide(lambda: joining.refuse_unwanted_restart(run_dir))
    joining.open_directory(run_dir, world, memory)
    lock, fetching = RunLock(run_dir, TRAINING), None
    while not world.decide(lock.attempt):  # short attempts, so that no rank waits long for rank 0
        pass
    try:
        finished = world.decide(lambda: finish(run_dir))  # a rollback that was interrupted
        world.decide(lambda: len(lineage.nodes(run_dir)))  # refuses a damaged lineage before anything is written
        read_by_main = world.decide(lambda: overrides.read(run_dir))
        world.together(lambda: joining.check_overrides(run_dir, lasting, read_by_main))
        missing = world.decide(lambda: joining.look_for_checkpoints(run_dir, options, memory))
        joining.open_checkpoints(run_dir, world)
        hosts = world.gather(socket.gethostname())
        segment = world.decide(lambda: joining.open_segment(run_dir, config, world, hosts))
        heartbeat.set_segment(int(segment.name))
        fetching = build_fetching(config)
        recorder = build_recorder(config, world, run_dir, segment)
        if finished:
            recorder.say("finished the rollback that had been interrupted")
        if missing is not None and missing.newest is not None:
            recorder.event("checkpoint-missing", missing.text, step=missing.step, newest=missing.newest)
        joining.record_overrides(recorder, lasting)
        inbox = Inbox(run_dir if world.is_main else None)
        context = RunContext(config, world, recorder, inbox, heartbeat, fetching)
        guard = partial(_check_writer, lock if world.is_main else None)
        train = partial(_train, context, guard, options, memory)
        return record_end(world.rank, run_dir, segment, recorder, train)
    finally:
        heartbeat.close()
        if fetching is not None:
            fetching.close()
        lock.release()


def _check_writer(lock: RunLock | None) -> None:
    """Before a save: raise RunGoneError if the run directory vanished, BusyError if rank 0 lost the `lock`."""
    run_id.check()
    if lock is not None:
        lock.check()


def _train(run: RunContext, guard: Callable[[], None], options: ResumeOptions, memory: LauncherMemory) -> Exit:
    """Go through the phases of a start, train, and wait for the processes beside training to finish."""
    run.heartbeat.beat(Phase.LOAD)
    run.world.together(lambda: phases.preflight(run.config, run.world))
    corpora = phases.open_corpora(run)
    restored = phases.restore(run, corpora, options, memory)
    companions = phases.join(run, corpora, restored)
    loop = phases.build_loop(run, corpora, restored, guard=guard, memory=memory)
    if run.world.is_main:
        joining.record_ready(run, restored.resumed.state)
    outcome = conclude(loop.run(), loop, run)
    companions.finish(run, complete=outcome is Exit.COMPLETE)
    return outcome
