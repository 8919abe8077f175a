"""One run's checkpoints while it trains: save, and keep what the policy names."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

import torch

from .. import __version__
from ..config import Config
from ..errors import StorageError, UserError
from ..mesh import World
from ..state import TrainState
from . import dcp
from .background import Pending, Stager
from .space import Ballast, GiveUp
from .store import Checkpoint, Manifest, Store
from .stores import fallback, newest_clean, stores
from .subject import Subject


class Manager:
    """Saves one run. All ranks call its methods together.

    Args:
        subject: what is saved.
        segment: number of this start.
        guard: raises BusyError when this job does not hold the run any more, RunGoneError when the run directory is
            gone; asked on every rank before a save begins, and on rank 0 before it is committed.
        protected: steps that retention must spare for now (pending evaluations).
        suspicion: why what is saved now should not be gone back to, or None; see `Health.suspicion`.
        clean_until: steps before which retention keeps a checkpoint that is not suspect; see `Health.clean_until`.
    """

    def __init__(
        self,
        subject: Subject,
        *,
        segment: int,
        guard: Callable[[], None],
        protected: Callable[[], Collection[int]] = tuple,
        suspicion: Callable[[], str | None] = lambda: None,
        clean_until: Callable[[], Iterable[float]] = lambda: (math.inf,),
    ) -> None:
        self._world, self._model, self._optimizer = subject.world, subject.model, subject.optimizer
        self._stores, self._fallback = self._world.decide(lambda: stores(subject.run)), fallback(subject.config)
        self._store = self._stores.main
        self._config, self._identity, self._segment = subject.config, subject.identity, segment
        self._guard, self._protected = guard, protected
        self._suspicion, self._clean_until = suspicion, clean_until
        if self._config.checkpoint.background:
            self.renew()

    def save(self, state: TrainState, *, final: bool) -> dcp.Saved:
        """Write, commit and verify a checkpoint, then apply the retention policy.

        Raises:
            StorageError: on every rank; BusyError if another job took the run over; RunGoneError.
        """
        self._world.together(self._guard)
        tensors = dcp.state_dict(self._model, self._optimizer)
        return self._save(self._world, state, final, tensors, self._suspicion())

    def begin(self, state: TrainState) -> Pending[dcp.Saved]:
        """Copy the state, and do the same as `save` in the background; training may go on when this returns.

        Raises:
            ConfigError: on every rank, if host memory for the copy cannot be had on any.
        """
        self._world.together(self._guard)
        tensors = self._world.together(lambda: self._stager.copy(dcp.state_dict(self._model, self._optimizer)))
        world, suspicion = self._world.on(self._writers), self._suspicion()
        return Pending(lambda: self._save(world, state, False, tensors, suspicion))

    def renew(self) -> None:
        """Give the background a new process group and new memory for its copies.

        A group is useless once a rank left it in the middle of something, and a writer that did not end may still
        read the old copy.
        """
        self._stager, self._writers = Stager(self._world.device), self._world.new_group()

    def _save(
        self, world: World, state: TrainState, final: bool, tensors: dict[str, Any], suspicion: str | None
    ) -> dcp.Saved:
        config = self._config
        facts = manifest_facts(config, world, state, segment=self._segment, final=final)
        facts |= {} if suspicion is None else {"suspect": suspicion}
        content = state.to_json(identity=self._identity, tokens=facts["tokens"], world=facts["world"])

        def save(store: Store, give_up: GiveUp) -> dcp.Saved:
            world.decide(store.sweep)  # of an attempt whose writers did not end together
            return dcp.save(
                world,
                store,
                state.step,
                state=tensors,
                train_state=content,
                config=config.to_toml(),
                facts=facts,
                verify=config.checkpoint.verify,
                give_up=give_up,
                guard=self._guard,
            )

        try:
            saved = save(self._store, self._sacrifices())
        except StorageError as error:
            if self._fallback is None:
                raise
            saved = save(self._fallback, [])
            note: dcp.Note = (
                "checkpoint-fallback",
                f"{saved.checkpoint.path} instead of the run directory: {error.cause}",
            )
            saved = replace(saved, notes=(note, *saved.notes))
        return self._tidy(saved) if world.is_main else saved

    def _tidy(self, saved: dcp.Saved) -> dcp.Saved:
        """What follows a checkpoint on rank 0. The checkpoint is there, so a failure here is only a note."""
        policy = self._config.checkpoint
        try:
            if policy.ballast:
                Ballast(self._store.directory).take(saved.bytes)
            return replace(saved, deleted=self._retain(policy.keep_last))
        except (OSError, UserError) as error:
            note: dcp.Note = ("checkpoint-room", f"old checkpoints could not be deleted: {error}")
            return replace(saved, notes=(*saved.notes, note))

    def _sacrifices(self) -> GiveUp:
        """What may go when a checkpoint does not fit."""
        policy, ballast = self._config.checkpoint, Ballast(self._store.directory)
        found: list[tuple[str, Callable[[], object]]] = []
        if policy.prune:
            found.append(("all but the two newest verified checkpoints", lambda: self._retain(2)))
        return [*found, ("the ballast", ballast.release)]

    def _retain(self, keep_last: int) -> tuple[int, ...]:
        """Apply the retention policy; the steps deleted."""

        def keep(checkpoint: Checkpoint) -> bool:
            return kept_for_ever(self._config, checkpoint.manifest())

        # Those that a rollback would go to stay, however many were made since.
        clean = [newest_clean(self._stores, bound) for bound in self._clean_until()]
        protected = {*self._protected(), *(item.step for item in clean if item is not None)}
        deleted = list(self._store.retain(keep_last, keep, protected))
        for stopgap in self._stores.fallbacks:
            deleted += stopgap.retain(2, lambda _: False, protected)
        return tuple(item.step for item in deleted)


def kept_for_ever(config: Config, manifest: Manifest) -> bool:
    """Whether a checkpoint stays however many newer ones there are: a final one, or one named by `keep_every`.

    Args:
        config: the run.
        manifest: of the checkpoint.
    """
    before, after = manifest.consumed - manifest.batch, manifest.consumed
    due = (
        config.schedule.due(every, step=manifest.step, before=before, after=after)
        for every in config.checkpoint.kept_intervals
    )
    return manifest.final or any(due)


def manifest_facts(
    config: Config, world: World, state: TrainState, *, segment: int | None, final: bool = False
) -> dict[str, Any]:
    """What the manifest says of a checkpoint besides its files, see `store.Manifest`."""
    return {
        "run": config.run.name,
        "segment": segment,
        **vars(state),
        "tokens": config.schedule.tokens(state.consumed),
        "final": final,
        "world": {"size": world.size, "replicas": world.replicas, "shards": world.shards},
        "torch": torch.__version__,
        "fsdp_pretrain": __version__,
    }
