"""One run's checkpoints over its life: resume from the newest valid one, save, and keep what the policy names."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
import xxhash
from torch import nn

from .. import __version__
from ..config import Config, load
from ..errors import CheckpointError, Exit, StorageError, UserError
from ..mesh import World
from ..record.recorder import Recorder
from ..state import TrainState, check_identity, differences
from . import dcp
from .background import Pending, Stager
from .space import Ballast, GiveUp
from .store import CONFIG, Checkpoint, Store


class Manager:
    """Saves and restores one run. All ranks call its methods together.

    Args:
        world: all ranks.
        store: the run's checkpoints.
        model, optimizer: what is saved and restored.
        config: the run.
        identity: see `state.identity`.
        recorder: where passed-over checkpoints, changes and deletions are told.
        guard: raises BusyError when this job does not hold the run any more; asked before a save begins and before
            it is committed.
        protected: steps that retention must spare for now (pending evaluations).

    Attributes:
        parent: the segment that wrote the checkpoint that was resumed from; None at a fresh start.
    """

    def __init__(
        self,
        *,
        world: World,
        store: Store,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: Config,
        identity: dict[str, Any],
        recorder: Recorder,
        guard: Callable[[], None],
        protected: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self._world, self._store, self._model, self._optimizer = world, store, model, optimizer
        self._config, self._identity, self._recorder = config, identity, recorder
        self._guard, self._protected = guard, protected
        self.parent: int | None = None
        fallback = config.checkpoint.fallback_dir
        self._fallback = None if fallback is None else Store(fallback / fallback_name(config))
        if config.checkpoint.background:
            self.renew()

    def resume(self, *, allow_fresh: bool) -> TrainState:
        """Load the newest valid checkpoint and return its counters; a fresh start if there never was one.

        Raises:
            CheckpointError: there are checkpoints, but none is valid (and `allow_fresh` is not set).
            ConfigError: the checkpoint belongs to another model or other data.
        """
        world, recorder = self._world, self._recorder
        world.decide(self._store.sweep)
        candidates = world.decide(self._scan)
        passed_over: list[str] = []
        for checkpoint in reversed(candidates):
            problem = checkpoint.problem or next(iter(dcp.verify(world, checkpoint)), None)
            if problem is None:
                return self._load(checkpoint, passed_over)
            passed_over.append(f"{checkpoint.path.name}: {problem}")
            recorder.event(
                "checkpoint-rejected", f"passed over {checkpoint.path.name}: {problem}", step=checkpoint.step
            )
        if passed_over and not allow_fresh:
            error = CheckpointError(
                f"{self._store.directory} holds {len(passed_over)} checkpoints, none of them valid:\n    "
                + "\n    ".join(passed_over),
                effect="starting again from step 0 would throw the run away without a word",
                remedy="restore a checkpoint, or pass --allow-fresh to begin again in this directory",
            )
            error.exit = Exit.NEEDS_PERSON
            raise error.on_all_ranks()
        return TrainState()

    def _scan(self) -> list[Checkpoint]:
        """The checkpoints of the run directory and of the fallback, oldest step first, the former first of equals."""
        found = self._store.scan() + (self._fallback.scan() if self._fallback is not None else [])
        return sorted(found, key=lambda checkpoint: (checkpoint.step, checkpoint.path.parent == self._store.directory))

    def _load(self, checkpoint: Checkpoint, passed_over: list[str]) -> TrainState:
        content = self._world.decide(checkpoint.train_state)
        self._world.decide(
            lambda: check_identity(content["identity"], self._identity, str(checkpoint.path), content["cursor"])
        )
        whole = dcp.load(self._world, checkpoint, self._model, self._optimizer)
        if not checkpoint.verified:
            self._world.decide(lambda: self._store.mark_verified(checkpoint))
        state = TrainState.from_json(content)
        self.parent = self._world.decide(checkpoint.manifest).get("segment")
        changed = self._world.decide(lambda: _changes(checkpoint, self._config, content, self._world))
        self._recorder.event(
            "resume",
            f"from {checkpoint.path.name}, {state.consumed:_} samples consumed"
            + ("" if whole else "; it holds weights alone: the optimiser starts fresh")
            + (f"; changed: {'; '.join(changed)}" if changed else ""),
            step=state.step,
            consumed=state.consumed,
            cursor=state.cursor,
            changed=changed,
            passed_over=passed_over,
            optimizer=whole,
        )
        return state

    def save(self, state: TrainState, *, final: bool) -> dcp.Saved:
        """Write, commit and verify a checkpoint, then apply the retention policy.

        Raises:
            StorageError: on every rank; BusyError if another job took the run over.
        """
        self._world.decide(self._guard)
        return self._save(self._world, state, final, dcp.state_dict(self._model, self._optimizer))

    def begin(self, state: TrainState) -> Pending[dcp.Saved]:
        """Copy the state, and do the same as `save` in the background; training may go on when this returns."""
        self._world.decide(self._guard)
        tensors = self._stager.copy(dcp.state_dict(self._model, self._optimizer))
        world = self._world.on(self._writers)
        return Pending(lambda: self._save(world, state, False, tensors))

    def renew(self) -> None:
        """Give the background a new process group and new memory for its copies.

        A group is useless once a rank left it in the middle of something, and a writer that did not end may still
        read the old copy.
        """
        self._stager, self._writers = Stager(self._world.device), self._world.new_group()

    def _save(self, world: World, state: TrainState, final: bool, tensors: dict[str, Any]) -> dcp.Saved:
        config = self._config
        shape = {"size": world.size, "replicas": world.replicas, "shards": world.shards}
        facts = {
            "run": config.run.name,
            "segment": self._recorder.number,
            **vars(state),
            "tokens": state.consumed * config.data.sequence_length,
            "final": final,
            "world": shape,
            "torch": torch.__version__,
            "fsdp_pretrain": __version__,
        }
        content = state.to_json(identity=self._identity, tokens=facts["tokens"], world=shape)

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
            note = ("checkpoint-fallback", f"{saved.checkpoint.path} instead of the run directory: {error.cause}")
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
            note = ("checkpoint-room", f"old checkpoints could not be deleted: {error}")
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

        deleted = list(self._store.retain(keep_last, keep, self._protected()))
        if self._fallback is not None:  # only ever a stopgap
            deleted += self._fallback.retain(2, lambda _: False)
        return tuple(item.step for item in deleted)


def kept_for_ever(config: Config, facts: dict[str, Any]) -> bool:
    """Whether a checkpoint stays however many newer ones there are: a final one, or one named by `keep_every`.

    Args:
        config: the run.
        facts: its manifest.
    """
    before, after = facts["consumed"] - facts["batch"], facts["consumed"]
    due = (
        config.schedule.due(every, step=facts["step"], before=before, after=after)
        for every in config.checkpoint.kept_intervals
    )
    return bool(facts.get("final")) or any(due)


def fallback_name(config: Config) -> str:
    """Name of the run's directory in `checkpoint.fallback_dir`, which other runs may share."""
    return f"{config.run.name}-{xxhash.xxh3_64_hexdigest(str(config.run.dir).encode())[:8]}"


def _changes(checkpoint: Checkpoint, config: Config, content: dict[str, Any], world: World) -> list[str]:
    """What differs from the start that wrote the checkpoint, among the things that may."""
    old = load(checkpoint.path / CONFIG).model_dump(mode="json")
    changed = differences(old, config.model_dump(mode="json"))
    shape = {"size": world.size, "replicas": world.replicas, "shards": world.shards}
    return changed + differences(content["world"], shape, "world")
