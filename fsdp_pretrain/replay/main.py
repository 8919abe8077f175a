"""The ranks of a replay: load the checkpoint, train the same samples with the trainer's own step, compare.

Nothing touches the run: its checkpoint is only read, no lock is taken, no heartbeat written, and this process is bound
to the run directory in a way that refuses to write there.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from fsdp_pretrain.checkpoint import loading
from fsdp_pretrain.checkpoint.state import forbidden, identity
from fsdp_pretrain.checkpoint.witness import code_identity
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.resume_rules import differences, refuse
from fsdp_pretrain.data.packing.loader import check_batches
from fsdp_pretrain.data.packing.opening import open_packer
from fsdp_pretrain.data.packing.packer import Packer
from fsdp_pretrain.errors import Exit, UserError
from fsdp_pretrain.heartbeat import Heartbeat
from fsdp_pretrain.launch import torchrun
from fsdp_pretrain.parallel import fsdp, mesh
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.ranks import RankInfo
from fsdp_pretrain.run import environment as environments
from fsdp_pretrain.run import run_id
from fsdp_pretrain.run.environment import Environment
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.recorder import SilentRecorder
from fsdp_pretrain.run.step_record import LAG, StepRecord
from fsdp_pretrain.train import environment
from fsdp_pretrain.train.build import build_data, build_loss_scaler, build_model_and_optimizer
from fsdp_pretrain.train.trainer import Trainer

from .comparison import StepComparison, difference, table
from .window import ReplayRequest, ReplayWindow, open_window

DIFFERS = 1
"""Exit code if a step is not equal to the bit; it is 0 if all are."""
_COMPARED = {"world", "device", "torch", "cuda", "nccl", "driver", "fsdp_pretrain", "git"}


def rank_main(arguments: str) -> int:
    """One rank under torchrun; `arguments`: a request as JSON. Returns the exit code, which the launcher also gets."""
    torchrun.die_with_launcher()
    try:
        code = replay(ReplayRequest.model_validate_json(arguments))
    except UserError as error:
        torchrun.leave_note(int(error.exit), error.cause)
        raise
    # If a rank exited with 1, torchrun would print a long failure report below the table.
    return 0 if code and torchrun.leave_note(code, "differs") else code


def replay(request: ReplayRequest) -> int:
    """Replay on the ranks of this job; rank 0 prints the comparison.

    Returns:
        0 if every step is equal to the bit, else `DIFFERS`.

    Raises:
        UserError: see `open_window`; the corpora or the checkpoint cannot be read.
    """
    window, path = open_window(request), Path(request.run)
    window = replace(window, config=_replay_config(window.config, request, window.begun))
    run_id.bind(path, None)
    run_id.bind(path.resolve(), None)
    with mesh.connect(window.config.parallel) as world:
        window = world.decide(lambda: window)  # other ranks may read a shorter record of a live run
        packer = world.together(lambda: open_packer(window.config))
        records = _train(window, packer, world)
        differs = world.decide(lambda: _report(request, window, records, packer.excluded_digest, world))
    return DIFFERS if differs else int(Exit.COMPLETE)


def _replay_config(config: Config, request: ReplayRequest, begun: Environment) -> Config:
    """The configuration with the requested precision and the recorded mesh, or the usual one if that does not fit."""
    shards = begun.world.shards if begun.world else 1
    fits = begun.world is not None and RankInfo.from_environment().world % shards == 0
    train = {"precision": request.precision or config.train.precision}
    parallel = {"shard": shards if fits else "node"}
    return config.model_copy(
        update={
            "train": config.train.model_copy(update=train),
            "parallel": config.parallel.model_copy(update=parallel),
        }
    )


def _train(window: ReplayWindow, packer: Packer, world: World) -> list[StepRecord]:
    """Train the steps of the window. Returns their records."""
    config = window.config
    check_batches([record.batch for record in window.records], world.size, config.train.micro_batch)
    model, optimizer = build_model_and_optimizer(config, world)
    if window.checkpoint is None:
        fsdp.initialise_all(model, config.run.seed)
    else:
        checkpoint, saved = window.checkpoint, window.checkpoint.train_state().identity
        wrong = forbidden(saved, identity(config, packer, code_identity(config)), window.state.cursor)
        refuse(str(checkpoint.path), wrong, [], window.state.cursor)
        loading.load(world, checkpoint, model, optimizer)
        if window.reset:
            optimizer.state.clear()
    trainer = Trainer(
        config,
        world,
        model=model,
        optimizer=optimizer,
        scaler=build_loss_scaler(config, world, window.state.loss_scale),
        data=build_data(config, packer, world, window.state),
        state=window.state,
        recorder=SilentRecorder(),
        heartbeat=Heartbeat(),
    )
    trainer.start()
    records = list[StepRecord]()
    hidden = None if world.is_main else True
    for _ in tqdm(window.records, desc="replaying", unit="steps", delay=2, leave=False, disable=hidden):
        trainer.step()
        records += [record for _, record in trainer.read(keep=LAG)]
    return records + [record for _, record in trainer.read(keep=0)]


def _report(
    request: ReplayRequest, window: ReplayWindow, records: list[StepRecord], excluded: str, world: World
) -> bool:
    """Print the comparison; `excluded`: digest of the excluded documents. Returns whether a step differs."""
    unsteered = window.config.schedule.values_at(0)
    environment_here = Environment.model_validate(environment.describe(world, []))
    before, now = (side.model_dump(include=_COMPARED) for side in (window.begun, environment_here))
    circumstances = [*window.circumstances, *differences(before, now)]
    if world.device.type != "cpu" and not torch.are_deterministic_algorithms_enabled():
        circumstances.append("some kernels of a GPU add in another order each time")
    run, segments = RunDir(Path(request.run)), {record.segment for record in window.records} - {*window.others}
    relisted = {number for number in segments if environments.excluded(run, number) not in (None, excluded)}
    circumstances += [f"data.exclude: {window.config.data.exclude} names other documents"] if relisted else []
    steps = list[StepComparison]()
    for replayed, recorded in zip(records, window.records, strict=True):
        settings, documents = (recorded.segment not in differing for differing in (window.others, relisted))
        found = difference(replayed, recorded, unsteered, same_settings=settings, same_documents=documents)
        steps.append((replayed, recorded, found))
    print("\n".join(table(steps, circumstances, request.steps)), flush=True)
    return any(differs for _, _, differs in steps)
