"""One run's checkpoints over its life: resume from the newest valid one, save, and keep what the policy names."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from .. import __version__
from ..config import Config, load
from ..errors import CheckpointError, Exit
from ..mesh import World
from ..record.recorder import Recorder
from ..state import TrainState, check_identity, differences
from . import dcp
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
        protected: steps that retention must spare for now (pending evaluations).
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
        protected: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self._world, self._store, self._model, self._optimizer = world, store, model, optimizer
        self._config, self._identity, self._recorder, self._protected = config, identity, recorder, protected

    def resume(self, *, allow_fresh: bool) -> TrainState:
        """Load the newest valid checkpoint and return its counters; a fresh start if there never was one.

        Raises:
            CheckpointError: there are checkpoints, but none is valid (and `allow_fresh` is not set).
            ConfigError: the checkpoint belongs to another model or other data.
        """
        world, recorder = self._world, self._recorder
        world.decide(self._store.sweep)
        candidates = world.decide(self._store.scan)
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

    def _load(self, checkpoint: Checkpoint, passed_over: list[str]) -> TrainState:
        content = self._world.decide(checkpoint.train_state)
        self._world.decide(
            lambda: check_identity(content["identity"], self._identity, str(checkpoint.path), content["cursor"])
        )
        whole = dcp.load(self._world, checkpoint, self._model, self._optimizer)
        if not checkpoint.verified:
            self._world.decide(lambda: self._store.mark_verified(checkpoint))
        state = TrainState.from_json(content)
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
        """Write, commit and verify a checkpoint, then apply the retention policy. Raises StorageError on every rank."""
        world, config = self._world, self._config
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
        saved = dcp.save(
            world,
            self._store,
            state.step,
            state=dcp.state_dict(self._model, self._optimizer),
            train_state=state.to_json(identity=self._identity, tokens=facts["tokens"], world=shape),
            config=config.to_toml(),
            facts=facts,
            verify=config.checkpoint.verify,
        )
        if world.is_main:
            self._retain()
        return saved

    def _retain(self) -> None:
        policy = self._config.checkpoint

        def keep(checkpoint: Checkpoint) -> bool:
            facts = checkpoint.manifest()
            if facts.get("final"):
                return True
            before = facts["consumed"] - facts["batch"]
            return self._config.schedule.due(
                policy.keep_every, step=facts["step"], before=before, after=facts["consumed"]
            )

        deleted = self._store.retain(policy.keep_last, keep, self._protected())
        if deleted:
            names = ", ".join(str(checkpoint.step) for checkpoint in deleted)
            self._recorder.event("checkpoint-deleted", f"by the retention policy: step {names}")


def _changes(checkpoint: Checkpoint, config: Config, content: dict[str, Any], world: World) -> list[str]:
    """What differs from the start that wrote the checkpoint, among the things that may."""
    old = load(checkpoint.path / CONFIG).model_dump(mode="json")
    changed = differences(old, config.model_dump(mode="json"))
    shape = {"size": world.size, "replicas": world.replicas, "shards": world.shards}
    return changed + differences(content["world"], shape, "world")
