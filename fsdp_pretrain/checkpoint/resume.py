"""Resuming a run: choose the checkpoint, check that the configuration may continue from it, load and report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.resume_rules import (
    DECLARED,
    ConfigChange,
    changes,
    differences,
    load_recorded,
    refuse,
    refuse_replaced,
    undeclared,
)
from fsdp_pretrain.config.step_settings import SCHEDULED, same_values
from fsdp_pretrain.data.packing.opening import open_skips
from fsdp_pretrain.data.packing.position import Position
from fsdp_pretrain.errors import CheckpointError, ConfigError, Exit, StorageError, raising
from fsdp_pretrain.parallel.fsdp import compute_dtype
from fsdp_pretrain.run import environment, lineage
from fsdp_pretrain.run.environment import WorldShape
from fsdp_pretrain.run.metrics import left_behind
from fsdp_pretrain.run.recorder import Recorder
from fsdp_pretrain.units import counted, human_count

from .code_identity import new_sources, other_code
from .loading import DamagedError, kept_observers, load, verify
from .manager import TrainingObjects
from .manifest import SavedState
from .state import TrainState, forbidden
from .store import CONFIG, TRAIN_STATE, Checkpoint, Store, verify_files
from .tensors import TENSORS


@dataclass(frozen=True)
class ResumeOptions:
    """Options of the start command."""

    fresh: bool = False  # whether to start at step 0 although all checkpoints are invalid, or recorded ones are missing
    # keys and tables of the configuration that may differ although that changes what is learned
    changes: frozenset[str] = frozenset()
    reset_optimizer: int | None = None  # step of the checkpoint at which the optimiser is reset
    reason: str = ""  # why this start differs from the last, for the journal
    from_mirror: bool = False  # whether to restore from `checkpoint.mirror` what the run directory lacks


@dataclass(frozen=True)
class Resumed:
    """Where training continues."""

    state: TrainState  # the counters
    # number of the segment that wrote the checkpoint; None for an import or without a checkpoint
    parent: int | None = None
    checkpoint: int | None = None  # step of the loaded checkpoint; None: none was loaded
    whole: bool = True  # whether the optimiser was restored too, so that the following steps repeat exactly
    observers: frozenset[str] = frozenset()  # extensions' observers whose tensors were restored


@dataclass(frozen=True)
class _Changes:
    """Changes since the start that wrote a checkpoint, in words."""

    settings: list[str]  # of the configuration and the mesh
    code: dict[str, str]  # parts whose source changed and which compute the same: `old -> new`
    declared: list[str]  # settings that were declared for this start


class Resume:
    """Restores the state of a start, and records restored parts, rejected checkpoints and changes. Collective."""

    def __init__(self, training: TrainingObjects, recorder: Recorder, options: ResumeOptions) -> None:
        self._world, self._run = training.world, training.run
        self._model, self._optimizer = training.model, training.optimizer
        self._config, self._identity, self._observers = training.config, training.identity, training.observers
        self._recorder, self._options = recorder, options

    def run(self) -> Resumed:
        """Load the newest valid checkpoint; without any checkpoint, begin at step 0.

        Raises:
            CheckpointError: there are checkpoints, but none is valid (and `options.fresh` is not set).
            ConfigError: the checkpoint belongs to another model or other data, or an undeclared change would alter
                what is learned from here on.
        """
        world = self._world
        store = Store(self._run.checkpoints)
        world.decide(store.sweep)
        rejected: list[str] = []
        for checkpoint in reversed(world.decide(store.scan)):
            problem = checkpoint.problem or world.decide(partial(self._set_aside, checkpoint))
            problem = problem or world.decide(partial(_wrong_texts, checkpoint))
            if problem is None:
                try:
                    return self._load(checkpoint, rejected)
                except DamagedError as damaged:
                    problem = damaged.cause
                    self._optimizer.state.clear()  # an earlier checkpoint may have only weights
            text = f"{checkpoint.path.name}: {problem}"
            rejected.append(text)
            self._recorder.event("checkpoint-rejected", f"passed over {text}", step=checkpoint.step)
        if rejected and not self._options.fresh:
            error = CheckpointError(
                f"{store.directory} holds {counted(len(rejected), 'checkpoint')}, none of them valid:\n    "
                + "\n    ".join(rejected),
                effect="starting again from step 0 would silently discard the run",
                remedy="restore a checkpoint, or pass --allow-fresh to begin again in this directory",
            )
            error.exit = Exit.NEEDS_PERSON
            raise error.on_all_ranks()
        self._judge_reset(0)
        return Resumed(TrainState())

    def _set_aside(self, checkpoint: Checkpoint) -> str | None:
        """Move a checkpoint aside if a rollback abandoned it while its storage was unavailable. Returns the reason."""
        segment = checkpoint.manifest().segment
        if segment is None:
            return None
        rollback = lineage.abandoned_by(lineage.nodes(self._run), segment, checkpoint.step)
        if rollback is None:
            return None
        with raising(StorageError, f"cannot move {checkpoint.path} aside"):
            Store(self._run.checkpoints).abandon(checkpoint.path)
        return f"segment {rollback.segment} went back to step {rollback.step}, so it was moved to abandoned/ beside it"

    def _load(self, checkpoint: Checkpoint, rejected: list[str]) -> Resumed:
        world, content = self._world, self._world.decide(checkpoint.train_state)
        try:
            changed = world.decide(partial(self._judge, checkpoint, content))
        except ConfigError:
            if wrong := verify(world, checkpoint):  # its configuration may be damaged, too
                raise DamagedError(wrong[0]).on_all_ranks() from None
            raise
        reset = self._judge_reset(content.step)
        kept = world.decide(lambda: kept_observers(checkpoint))
        observers = {name: tensors for name, tensors in self._observers.items() if name in kept}
        loaded = load(world, checkpoint, self._model, None if reset else self._optimizer, observers)
        if not checkpoint.verified:
            world.decide(checkpoint.mark_verified)
        state, whole = TrainState.of(content), loaded.optimizer and not reset
        parts = [
            f"from {checkpoint.path.name}",
            *self._restored(state, whole, reset),
            self._mesh(content.world),
            *([] if reset or kept - observers.keys() else [f"state digest {loaded.state_digest} as saved"]),
            *(
                f"the observer {name} starts fresh"
                for name, tensors in self._observers.items()
                if tensors and name not in kept
            ),
            *(f"tensors of the observer {name} are left out" for name in sorted(kept - observers.keys())),
        ]
        tokens = self._config.schedule.tokens(state.consumed)
        lost = world.decide(lambda: left_behind(self._run, state.step, tokens))
        if lost.steps:
            parts.append(f"{counted(lost.steps, 'step')} ({human_count(lost.tokens)} tokens) after it lost")
        parts += [f"changed: {'; '.join(changed.settings)}"] if changed.settings else []
        parts += [f"new code of {', '.join(changed.code)} computes the same"] if changed.code else []
        parts += [f"declared: {'; '.join(changed.declared)}"] if changed.declared else []
        self._recorder.event(
            "resume",
            "; ".join(parts),
            step=state.step,
            consumed=state.consumed,
            cursor=state.cursor,
            optimizer=whole,
            loss_scale=state.loss_scale,
            state_digest=loaded.state_digest,
            world={"from": content.world.model_dump(), "to": world.shape.model_dump()},
            changed=[
                *changed.settings,
                *(f"code of {key}: {it}, computes the same" for key, it in changed.code.items()),
            ],
            declared=changed.declared,
            passed_over=rejected,
            lost={"steps": lost[0], "tokens": lost[1]},
        )
        at = {"step": state.step, "consumed": state.consumed, "tokens": tokens}
        self._recorder.status(checkpoint={**at, "verified": True})
        return Resumed(state, loaded.segment, state.step, whole, frozenset(observers))

    # ------------------------------------------------------------------ checks

    def _judge(self, checkpoint: Checkpoint, content: SavedState) -> _Changes:
        """The changes since the start that wrote a checkpoint.

        Raises ConfigError. Declarations are checked against the newest segment's configuration: declaring once is
        enough even if a start ends before its first checkpoint, and a rollback's or fork's changes are already in it.
        """
        of_checkpoint = newest = load_recorded(checkpoint.path / CONFIG, own=False)
        head = max(lineage.nodes(self._run), key=lambda node: node.segment, default=None)
        if head is not None and (path := self._run.segment(head.segment) / "config.toml").exists():
            newest = load_recorded(path)
        here = changes(newest, self._config)
        refuse_replaced({change.key for change in here}, self._config, content.consumed)
        if undeclared(here, (), content.consumed) and self._same_ahead(newest, content):
            here = [change for change in here if change.kind != DECLARED or change.key == "train.duration"]
        since = changes(of_checkpoint, self._config)
        settings = {change.key for change in since if change.key.startswith("optimizer.")} - SCHEDULED
        text = other_code(content.identity.code, self._identity.code, "optimizer")
        if text and not settings:  # other settings compute other numbers, and are declared themselves
            here = [*here, ConfigChange("optimizer.kind", text, DECLARED)]
        recorded = None if head is None else environment.excluded(self._run, head.segment)
        listed = any(change.key == "data.exclude" for change in (since if recorded is None else here))
        excluded = content.identity.excluded if recorded is None else recorded
        if excluded != self._identity.excluded and not listed:
            text = f"data.exclude: {self._config.data.exclude} names other documents"
            here = [*here, ConfigChange("data.exclude", text, DECLARED)]
        missing = []
        if content.consumed:  # else nothing was learned yet
            missing = undeclared(here, self._options.changes, content.consumed)
        wrong = forbidden(content.identity, self._identity, content.cursor)
        refuse(str(checkpoint.path), wrong, missing, content.cursor)
        return _Changes(
            [change.text for change in since]
            + differences(content.world.model_dump(), self._world.shape.model_dump(), "world"),
            new_sources(content.identity.code, self._identity.code),
            [change.text for change in undeclared(here, (), content.consumed)],
        )

    def _same_ahead(self, newest: Config, content: SavedState) -> bool:
        """Whether there are steps ahead, and all have the values that they have in the newest configuration."""
        ahead = content.consumed < self._config.schedule.end
        return ahead and same_values(newest, self._config, _steps_from(self._config, TrainState.of(content)))

    def _judge_reset(self, step: int) -> bool:
        """Whether the optimiser is reset at this checkpoint. Raises ConfigError if its step was not reached."""
        at = self._options.reset_optimizer
        if at is not None and step < at:
            raise ConfigError(
                f"--reset-optimizer {at}, but the newest valid checkpoint is of step {step}",
                effect=f"training would pass step {at} with the optimiser as it is",
                remedy=f"--reset-optimizer {step}, or leave it out",
            ).on_all_ranks()
        return at == step and step > 0

    # ------------------------------------------------------------------ report

    def _restored(self, state: TrainState, whole: bool, reset: bool) -> list[str]:
        """Texts on what was restored, and what was not; `whole`: including the optimiser."""
        names, missing = ["model"], []
        if whole:
            names.append("optimiser")
        elif reset:
            missing.append("the optimiser starts fresh (--reset-optimizer)")
        else:
            missing.append("it has only weights: the optimiser starts fresh")
        scaled = compute_dtype(self._config, self._world.device) is torch.float16
        if state.loss_scale is not None and scaled:
            names.append(f"loss scale {state.loss_scale[0]:g}")
        elif state.loss_scale is not None:
            missing.append("its loss scale is not used: this start is not fp16")
        elif scaled and state.step:
            missing.append("it has no loss scale: that starts fresh")
        names.append(f"data position (sample {state.cursor:_})")
        return [f"restored: {', '.join(names)}", *missing]

    def _mesh(self, old: WorldShape) -> str:
        was, is_ = (f"{mesh.replicas} x {mesh.shards} ranks" for mesh in (old, self._world))
        return f"written and read by {is_}" if was == is_ else f"written by {was}, read by {is_}"


def _steps_from(config: Config, position: Position) -> Iterator[Position]:
    """The positions after each step ahead of a position."""
    skips = open_skips(config)
    while position.consumed < config.schedule.end:
        position = position.advance(config.schedule.batch, skips)
        yield position


def _wrong_texts(checkpoint: Checkpoint) -> str | None:
    """A defect of the files that are read before the tensors; None: there is none."""
    entries = [entry for entry in checkpoint.files() if entry.name in (TRAIN_STATE, CONFIG, TENSORS)]
    return next(iter(verify_files(checkpoint.path, entries)), None)
