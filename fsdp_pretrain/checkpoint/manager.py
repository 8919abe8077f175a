"""Saves a run's checkpoints during training and applies the retention policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from fsdp_pretrain import __version__
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.errors import UserError
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.parallel.optimizer import Optimizer
from fsdp_pretrain.run.files import RunDir

from . import dcp
from .async_save import Stager, in_background
from .loading import ObserverTensors, state_dict
from .manifest import Facts, RunIdentity, is_permanent
from .state import TrainState
from .store import Checkpoint, Store


@dataclass(frozen=True)
class TrainingObjects:
    """Everything of a run that its checkpoints are made from; `model` and `optimizer` are sharded.

    `observers`: live tensors of extensions' observers.
    """

    world: World
    run: RunDir
    model: nn.Module
    optimizer: Optimizer
    config: Config
    identity: RunIdentity
    observers: ObserverTensors = field(default_factory=dict)


class CheckpointManager:
    """Saves the checkpoints of one start and deletes old ones. All ranks call its methods together.

    Args:
        segment: number of this start's segment.
        guard: raises BusyError when this job lost the run's lock, RunGoneError when the run directory vanished; called
            on every rank before a save, and on rank 0 before the commit.
        protected: steps that retention must not delete now (pending evaluations).
        suspicion: why a checkpoint saved now should not be rolled back to, or None; see `Health.suspicion`.
        clean_until: steps; for each, retention keeps the newest checkpoint up to it that is not suspect; see
            `Health.clean_until`.
        delete_last: steps that retention deletes only when room is needed (copied to the mirror, or merged).
    """

    def __init__(
        self,
        training: TrainingObjects,
        *,
        segment: int,
        guard: Callable[[], None] = lambda: None,
        protected: Callable[[], Collection[int]] = list,
        suspicion: Callable[[], str | None] = lambda: None,
        clean_until: Callable[[], Iterable[float]] = lambda: (math.inf,),
        delete_last: Callable[[], Collection[int]] = list,
    ) -> None:
        self._training, self._segment = training, segment
        self._world, self._config = training.world, training.config
        self._store = Store(training.run.checkpoints)
        self._guard, self._protected, self._delete_last = guard, protected, delete_last
        self._suspicion, self._clean_until = suspicion, clean_until
        if self._config.checkpoint.background:
            self.replace_writers()

    def reconfigure(self, config: Config) -> None:
        """Continue with a configuration in which only the timeline differs."""
        self._config = config

    def save(self, state: TrainState, *, final: bool) -> dcp.SaveResult:
        """Write, commit and verify a checkpoint, then apply the retention policy.

        Raises:
            StorageError: on every rank.
            BusyError: another job took over the run.
            RunGoneError: the run directory vanished.
        """
        self._world.together(self._guard)
        return self._save(self._world, state, self._tensors(), self._facts(state, final), self._config)

    def begin(self, state: TrainState) -> Future[dcp.SaveResult]:
        """Copy the state, then save the copy in the background; training may continue on return. Raises ConfigError on
        every rank if any cannot allocate host memory for the copy."""
        self._world.together(self._guard)
        tensors = self._world.together(lambda: self._stager.copy(self._tensors()))
        world, facts, config = self._world.with_host_group(self._writers), self._facts(state, False), self._config
        return in_background(lambda: self._save(world, state, tensors, facts, config))

    def replace_writers(self) -> None:
        """Create a new process group and new copy buffers for background saves.

        A group is unusable once a rank left it during a collective, and a stuck writer may still read the old copy.
        """
        self._stager, self._writers = Stager(self._world.device), self._world.new_group()

    def _facts(self, state: TrainState, final: bool) -> Facts:
        marks = {"segment": self._segment, "suspect": self._suspicion()}
        return make_facts(self._config, self._world, state, final=final, **marks)

    def _tensors(self) -> dict[str, Any]:
        return state_dict(self._training.model, self._training.optimizer, self._training.observers)

    def _save(
        self, world: World, state: TrainState, tensors: dict[str, Any], facts: Facts, config: Config
    ) -> dcp.SaveResult:
        """Write, commit and verify a checkpoint. `config`: that of the step; a later one may have another timeline."""
        world.decide(self._store.sweep)  # ranks of an earlier attempt may have ended at different times
        saved = dcp.save(
            world,
            self._store,
            facts,
            state=tensors,
            train_state=state.to_json(identity=self._training.identity, tokens=facts.tokens, world=facts.world),
            config=config.to_toml(),
            prune=lambda: self._retain(2),
            guard=self._guard,
        )
        return self._tidy(saved) if world.is_main else saved

    def _tidy(self, saved: dcp.SaveResult) -> dcp.SaveResult:
        """On rank 0: apply the retention policy. The new checkpoint exists, so a failure is only noted."""
        try:
            return replace(saved, deleted=self._retain(self._config.checkpoint.keep_last, self._delete_last()))
        except (OSError, UserError) as error:
            text = f"old checkpoints could not be deleted: {error}"
            return replace(saved, notes=(*saved.notes, ("checkpoint-room", text)))

    def _retain(self, keep_last: int, delete_last: Collection[int] = ()) -> tuple[int, ...]:
        """Apply the retention policy; returns the steps that were deleted."""

        def keep(checkpoint: Checkpoint) -> bool:
            return is_permanent(self._config, checkpoint.manifest(), self._config.checkpoint.kept_intervals)

        # A checkpoint to roll back to stays, however many follow.
        clean = [self._store.newest_clean(bound) for bound in self._clean_until()]
        protected = {*self._protected(), *delete_last, *(item.step for item in clean if item is not None)}
        return tuple(item.step for item in self._store.retain(keep_last, keep, protected))


def make_facts(config: Config, world: World, state: TrainState, *, final: bool = False, **marks: Any) -> Facts:
    """The manifest's facts for a checkpoint of `state`.

    `marks`: `segment`, `imported`, `suspect` and `merged` of `Facts`; None values are left out.
    """
    return Facts(
        **vars(state),
        tokens=config.schedule.tokens(state.consumed),
        world=world.shape,
        run=config.run.name,
        final=final,
        torch=torch.__version__,
        fsdp_pretrain=__version__,
        **{name: value for name, value in marks.items() if value is not None},
    )
