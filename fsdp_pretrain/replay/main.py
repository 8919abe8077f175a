"""The ranks of a replay: load the checkpoint, train the same samples with the trainer's own step, compare.

Nothing touches the run: its checkpoint is only read, no lock is taken, no heartbeat written, and this process is bound
to the run directory in a way that refuses to write there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

from data.packing.loader import Loader, StepBatch, check_batches
from data.packing.opening import open_packer
from data.packing.position import Position
from fsdp_pretrain.checkpoint import loading
from fsdp_pretrain.checkpoint.async_save import Pending
from fsdp_pretrain.checkpoint.dcp import SaveResult
from fsdp_pretrain.checkpoint.state import TrainState, forbidden, identity
from fsdp_pretrain.config.resume_rules import differences, refuse
from fsdp_pretrain.errors import ConfigError, Exit, StorageError, UserError
from fsdp_pretrain.health import limits
from fsdp_pretrain.health.monitor import Health, HealthOutcome
from fsdp_pretrain.launch import torchrun
from fsdp_pretrain.lineage import provenance
from fsdp_pretrain.models import Decoder, forward
from fsdp_pretrain.models.loss import IGNORE
from fsdp_pretrain.parallel import fsdp, mesh
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.parallel.surgery import Surgery
from fsdp_pretrain.record import run_id
from fsdp_pretrain.record.environment import Environment
from fsdp_pretrain.record.files import AppendFile, now, replace_file
from fsdp_pretrain.record.metrics import METRICS
from fsdp_pretrain.record.recorder import NotesOnlyRecorder
from fsdp_pretrain.record.requests import Inbox
from fsdp_pretrain.record.step_record import StepRecord, number
from fsdp_pretrain.train import environment
from fsdp_pretrain.train.build import build_data, build_loss_scaler, build_model_and_optimizer
from fsdp_pretrain.train.checkpointing import Checkpointing
from fsdp_pretrain.train.run_context import RunContext
from fsdp_pretrain.train.trainer import LAG, Trainer

from .comparison import StepComparison, UsualSteps, compare
from .verdict import ReplayReport, SuspectSample, judge, render
from .window import ReplayRequest, ReplayWindow, open_window

DIFFERS = 1
"""Exit code where a step is not equal to the bit; 0: all are."""
_SUSPECTS = 3
_COMPARED = {"world", "device", "torch", "cuda", "nccl", "driver", "fsdp_pretrain", "git"}


def rank_main(arguments: str) -> int:
    """One rank under torchrun; `arguments` is a request as JSON. The exit code, which the launcher also gets."""
    torchrun.die_with_launcher()
    try:
        code = replay(ReplayRequest.model_validate_json(arguments))
    except UserError as error:
        torchrun.leave_note(int(error.exit), error.cause)
        raise
    # If a rank exited with 1, torchrun would print a long failure report below the verdict.
    return 0 if code and torchrun.leave_note(code, "differs") else code


def replay(request: ReplayRequest) -> int:
    """Replay on the ranks of this job; rank 0 prints the verdict and writes it to `request.out`.

    Returns:
        0 if every step is equal to the bit, else `DIFFERS`.

    Raises:
        UserError: see `open_window`; the corpora or the checkpoint cannot be read; the directory cannot be written.
    """
    window = _on_fewer_ranks(open_window(request))
    run_id.bind(window.run.path, None)
    run_id.bind(window.run.path.resolve(), None)
    start = time.monotonic()
    with mesh.connect(window.config.parallel) as world:
        window = world.decide(lambda: window)  # of a live run, the others may see a shorter record
        world.decide(lambda: _open_folder(request, window))
        records, samples = _train(window, world)
        report = _report(request, window, records, samples, world)
        report = judge(report.model_copy(update={"seconds": time.monotonic() - start}))
        world.decide(lambda: _finish(request, window, report, records))
    return int(Exit.COMPLETE) if report.equal else DIFFERS


def _on_fewer_ranks(window: ReplayWindow) -> ReplayWindow:
    """The recorded mesh, or the usual one where it does not fit the ranks of this job."""
    parallel = window.config.parallel
    if isinstance(parallel.shard, int) and mesh.RankInfo.from_environment().world % parallel.shard:
        usual = {"parallel": parallel.model_copy(update={"shard": "node"})}
        return replace(window, config=window.config.model_copy(update=usual))
    return window


# ---------------------------------------------------------------------- training


class _Records(NotesOnlyRecorder):
    """Keeps the step records, and drops everything else."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def step(self, record: StepRecord, *, target: int) -> None:
        del target
        self.records.append(record)

    def note(self, *args: Any, **kwargs: Any) -> None:
        pass


class _NoVerdicts(Health):
    """Judges nothing: a replay goes on through bad steps."""

    def step(self, record: StepRecord) -> HealthOutcome:
        del record
        return HealthOutcome()


class _NoSaver:
    """For a trainer that is never asked to save."""

    def save(self, state: TrainState, *, final: bool) -> SaveResult:
        raise AssertionError("a replay saves nothing")

    def begin(self, state: TrainState) -> Pending[SaveResult]:
        raise AssertionError("a replay saves nothing")

    def renew(self) -> None:
        raise AssertionError("a replay saves nothing")


class ReplayData:
    """The batches of a loader, as if they followed the state; each is read one call ahead, to be looked at."""

    def __init__(self, loader: Loader, state: Position) -> None:
        self._loader, self._state = loader, state
        self.ahead: StepBatch | None = None

    def read(self) -> StepBatch:
        """The batch that `next` returns then. Raises DataError."""
        if self.ahead is None:
            batch, before = next(self._loader), self._state
            size = batch.position.batch
            self._state = batch.position = Position(
                before.step + 1, before.consumed + size, batch.position.cursor, size
            )
            self.ahead = batch
        return self.ahead

    def __next__(self) -> StepBatch:
        batch, self.ahead = self.read(), None
        return batch

    def blank(self, before: Position) -> StepBatch:
        return self._loader.blank(before)


def _train(window: ReplayWindow, world: World) -> tuple[list[StepRecord], list[list[float | None]]]:
    """Train the steps of the window. Returns their records, and the mean losses of the samples of bad ones."""
    config = window.config
    packer = world.together(lambda: open_packer(config))
    check_batches([record.batch for record in window.records], world.size, config.train.micro_batch)
    model, optimizer = build_model_and_optimizer(config, world)
    if window.checkpoint is None:
        fsdp.initialise_all(model, config.run.seed)
    else:
        checkpoint, saved = window.checkpoint, window.checkpoint.train_state().identity
        wrong = forbidden(saved, identity(config, packer), window.state.cursor)
        refuse(str(checkpoint.path), wrong, [], window.state.cursor)
        loading.load(world, checkpoint, model, optimizer)
        if window.reset:
            optimizer.state.clear()
    records = _Records()
    data = ReplayData(build_data(config, packer, world, window.first), window.state)
    trainer = Trainer(
        RunContext(config, world, records, Inbox(None)),
        model=model,
        optimizer=optimizer,
        scaler=build_loss_scaler(config, world, window.state.loss_scale),
        data=data,
        saves=Checkpointing(config, world, _NoSaver(), lambda saved: None, records, window.state.step),
        state=window.state,
        health=_NoVerdicts(config),
        surgery=Surgery(model, config),
    )
    model.train()
    usual, samples = UsualSteps(window.usual, config.health), []
    shown = tqdm(
        window.records, desc="replaying", unit="steps", delay=2, leave=False, disable=None if world.is_main else True
    )
    with _kernels(window):
        for record in shown:
            batch = world.together(data.read)
            samples.append(_sample_losses(model, batch, window, world) if usual.stands_out(record) else [])
            trainer.step()
            trainer.collect(keep=LAG)
        trainer.collect(keep=0)
    return records.records, samples


@contextmanager
def _kernels(window: ReplayWindow) -> Iterator[None]:
    """Attention by PyTorch's formula instead of a fused kernel, if asked for."""
    math_only = any(text.startswith("attention") and text.endswith("math") for text in window.changed)
    with sdpa_kernel(SDPBackend.MATH) if math_only else nullcontext():
        yield


@torch.no_grad()
def _sample_losses(model: Decoder, batch: StepBatch, window: ReplayWindow, world: World) -> list[float | None]:
    """The mean loss of every sample of the global batch before its step, in order. Collective; changes no number."""
    means: list[float | None] = []
    for micro in batch.micro:
        measured = forward.losses(model, micro, window.config.data, world.device)
        targets = (measured.labels != IGNORE).sum(1).clamp(min=1)
        means += [number(value) for value in (measured.losses.double().sum(1) / targets).tolist()]
    fsdp.reshard(model)
    return [value for share in world.gather(means) for value in share]


# ---------------------------------------------------------------------- the report


def _report(
    request: ReplayRequest,
    window: ReplayWindow,
    records: list[StepRecord],
    samples: list[list[float | None]],
    world: World,
) -> ReplayReport:
    """The comparison. Collective."""
    health, then = window.config.health, UsualSteps(window.usual, window.config.health)
    here, unsteered = UsualSteps(window.due_usual, health), window.config.schedule.values_at(0)
    steps = [
        compare(replayed, recorded, here, then, losses, unsteered)
        for replayed, recorded, losses in zip(records, window.records, samples, strict=True)
    ]
    others = request.batch_of is not None and window.due is not None
    return ReplayReport(
        run=request.run,
        segment=window.records[0].segment,
        start=request.start,
        asked=request.steps,
        changed=window.changed,
        batch_of=request.batch_of,
        unlike=_unlike(window, world),
        tolerance=limits.REPLAY_TOLERANCE,
        steps=steps,
        due_bad=here.stands_out(window.due) if others and window.due is not None else "",
    )


def _unlike(window: ReplayWindow, world: World) -> list[str]:
    """Why equal bits cannot be expected although nothing was changed on purpose. Collective."""
    described = environment.describe(world, []) if world.is_main else {}
    here = Environment.model_validate(described)
    was, is_ = (side.model_dump(include=_COMPARED) for side in (window.begun, here))
    found = world.decide(lambda: differences(was, is_))
    if world.device.type != "cpu" and not torch.are_deterministic_algorithms_enabled():
        found.append("some kernels of a GPU add in another order each time")
    return found


def _open_folder(request: ReplayRequest, window: ReplayWindow) -> None:
    """Create the directory to write to, with the configuration in it. Raises ConfigError, StorageError."""
    out = Path(request.out)
    if out.resolve().is_relative_to(window.run.path.resolve()):
        raise ConfigError(f"--out {out} is inside the run directory", remedy="a replay writes nothing there")
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"--out {out} exists already", remedy="name a new directory")
        out.mkdir(parents=True, exist_ok=True)
        replace_file(out / "config.toml", window.config.to_toml())
    except OSError as error:
        raise StorageError(f"cannot write to {out}: {error.strerror}", remedy="name another with --out") from None


def _finish(request: ReplayRequest, window: ReplayWindow, report: ReplayReport, records: list[StepRecord]) -> None:
    """On rank 0: name the samples of a bad step, write the report and print it. Raises StorageError."""
    bad, out = report.bad_step, Path(request.out)
    if bad is not None and bad.samples and report.finding in ("reproducible", "data", "data or state"):
        report = report.model_copy(update={"suspects": _suspects(window, bad)})
    try:
        replace_file(out / "replay.json", report.model_dump_json(indent=1) + "\n")
        metrics = AppendFile(out / METRICS)
        for record in records:
            metrics.write(record.model_copy(update={"segment": report.segment, "time": now()}).to_line())
        if not metrics.close():
            raise StorageError(f"cannot write {out / METRICS}: {metrics.problem}")
    except OSError as error:
        raise StorageError(f"cannot write to {out}: {error.strerror}") from None
    print(
        report.model_dump_json(indent=1) if request.json_output else f"{render(report)}\nwritten to {out}", flush=True
    )


def _suspects(window: ReplayWindow, bad: StepComparison) -> list[SuspectSample]:
    """The samples of a step with the highest losses, or none if too many are not finite to name one."""
    order = sorted(range(len(bad.samples)), key=lambda at: -_height(bad.samples[at]))
    if sum(loss is None for loss in bad.samples) > _SUSPECTS:
        return []
    step = provenance.trained_step(window.run, bad.batch_of, window.records[0].segment)
    return [
        SuspectSample(
            **provenance.describe_sample(step, at, world=step.world).model_dump(exclude_unset=True),
            loss=bad.samples[at],
        )
        for at in order[:_SUSPECTS]
    ]


def _height(loss: float | None) -> float:
    return math.inf if loss is None else loss
