"""The weighted mean of the weights of several checkpoints of a run, written as a checkpoint of its own.

It is in `RUN/merged/NAME`, which looks like a run directory with one checkpoint and its tokenizer: what takes the
checkpoints of a run takes it too (`checkpoints list`, `verify` and `export`, `fsdp-eval run`).
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from tqdm import tqdm

from fsdp_pretrain import models
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.resume_rules import differences, load_recorded
from fsdp_pretrain.errors import CheckpointError, ConfigError
from fsdp_pretrain.parallel.mesh import SingleProcess
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.lock import hold
from fsdp_pretrain.units import Progress, counted

from . import dcp
from .loading import Weights
from .manager import make_facts
from .manifest import MergedParent, SavedState
from .state import TrainState
from .store import CONFIG, Checkpoint, Store, verify_files
from .witness import check_model_code

Kind = Literal["uniform", "decay"]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Merged:
    """A merge, and its parents, oldest first."""

    saved: dcp.SaveResult
    parents: list[MergedParent]


def coefficients(kind: Kind, count: int) -> list[float]:
    """The weights of `count` checkpoints, oldest first; their sum is 1.

    Between two checkpoints lie updates of the parameters, and an update is in all checkpoints after it: the mean scales
    it by their weights' sum. `uniform` so imitates a learning rate that falls linearly to zero, and `decay` one that
    falls as 1 - sqrt(x) (arXiv 2507.17634).
    """
    if kind == "uniform":
        return [1 / count] * count
    return [math.sqrt((index + 1) / count) - math.sqrt(index / count) for index in range(count)]


class Mean:
    """The weighted mean of the weights of some checkpoints; a `RowReader`.

    Args:
        chosen: see `choose`.

    Attributes:
        config: of the newest.
        parents: the checkpoints with their weights, oldest first.

    Raises:
        CheckpointError: a checkpoint is damaged, or its model or tokenizer is not that of the newest. Reads all files.
    """

    def __init__(self, chosen: Sequence[Checkpoint], kind: Kind) -> None:
        self.config = load_recorded(chosen[-1].path / CONFIG, own=False)
        _refuse_others(chosen, self.config)
        _refuse_damaged(chosen)
        self.parents = [
            MergedParent(step=checkpoint.step, weight=weight, state_digest=checkpoint.manifest().state_digest)
            for checkpoint, weight in zip(chosen, coefficients(kind, len(chosen)), strict=True)
        ]
        model = models.build(self.config.model)
        self._sources = [Weights(checkpoint, model) for checkpoint in chosen]

    def read_rows(self, name: str, rows: range, out: torch.Tensor) -> None:
        """The mean of rows of a parameter, formed in fp64. Raises CheckpointError."""
        mean, part = torch.zeros(out.shape, dtype=torch.float64), torch.empty(out.shape, dtype=torch.float32)
        for parent, source in zip(self.parents, self._sources, strict=True):
            source.read_rows(name, rows, part)
            mean.add_(part, alpha=parent.weight)
        out.copy_(mean)


def merge(run: RunDir, name: str, *, last: Progress | None, every: Progress | None, kind: Kind) -> Merged:
    """Write the mean of a run's checkpoints, tensor by tensor. The run may be training.

    Args:
        name: of the folder in `RUN/merged`.
        last, every: see `choose`.

    Raises:
        BusyError: another process writes this merge.
        ConfigError: the name is not one, or in use; fewer than two checkpoints are left.
        CheckpointError: see `Mean`.
        StorageError: the merge cannot be written.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot be the name of a folder", remedy="use letters, digits, dots and dashes")
    target = RunDir(run.path / "merged" / name)
    store = Store(target.checkpoints)
    _refuse_existing(store)
    chosen = choose(run.path, Store(run.checkpoints).scan(), last, every)
    mean = Mean(chosen, kind)  # what is refused up to here leaves nothing
    with hold(target, "merge"):
        _refuse_existing(store)  # another process may have written it meanwhile
        store.sweep()
        if run.tokenizer.is_dir():
            shutil.copytree(run.tokenizer, target.tokenizer, dirs_exist_ok=True)
        return Merged(_write(store, mean, chosen[-1].train_state()), mean.parents)


def _refuse_existing(store: Store) -> None:
    if store.scan():
        raise ConfigError(f"{store.directory.parent} exists", remedy="choose another --out; nothing is overwritten")


def _write(store: Store, mean: Mean, newest: SavedState) -> dcp.SaveResult:
    state, world = models.build(mean.config.model).state_dict(), SingleProcess()
    reached = TrainState.of(newest)
    size = sum(tensor.nbytes for tensor in state.values())
    with tqdm(total=size, desc="merging", unit="B", unit_scale=True, delay=2, disable=None) as bar:

        def fetch(key: str) -> torch.Tensor:
            name = key.removeprefix("model.")
            tensor = torch.empty_like(state[name], device="cpu")
            mean.read_rows(name, range(len(tensor)), tensor)
            bar.update(tensor.nbytes)
            return tensor

        return dcp.save(
            world,
            store,
            make_facts(mean.config, world, reached, merged=mean.parents),
            state={"model": state},
            fetch=fetch,
            train_state=reached.to_json(identity=newest.identity, tokens=newest.tokens, world=world.shape),
            config=mean.config.to_toml(),
        )


def choose(
    run: Path, there: Sequence[Checkpoint], last: Progress | None, every: Progress | None, until: float = math.inf
) -> list[Checkpoint]:
    """The checkpoints of a run to merge, oldest first; at least two.

    Args:
        there: those that there are, see `Store.scan`.
        last: those less than this before the newest; None: all.
        every: of these only those that complete this interval; None: all.
        until: the step of the newest one.

    Raises:
        ConfigError: fewer than two are left.
        CheckpointError: one of them looks damaged, or there is none.
    """
    found = [checkpoint for checkpoint in there if checkpoint.step <= until]
    if not found:
        raise CheckpointError(f"{run} has no checkpoint")
    chosen = [*in_range(found, last, every)][::-1]
    if len(chosen) < 2:
        steps = ", ".join(f"{checkpoint.step:_}" for checkpoint in found)
        raise ConfigError(
            f"{counted(len(chosen), 'checkpoint')} to merge; {run} has those of the steps {steps}",
            remedy="choose a longer --last or another --every; checkpoint.keep_every keeps more of them",
        )
    return chosen


def in_range(found: Sequence[Checkpoint], last: Progress | None, every: Progress | None) -> Iterator[Checkpoint]:
    """The checkpoints that `last` and `every` choose, see `choose`; newest first.

    Raises:
        CheckpointError: at the first that looks damaged.
        ConfigError: the configuration of the newest cannot be read.
    """
    _refuse_problem(found[-1])
    newest, config = found[-1].manifest(), load_recorded(found[-1].path / CONFIG, own=False)
    for checkpoint in reversed(found):
        _refuse_problem(checkpoint)
        manifest = checkpoint.manifest()
        before, after = manifest.consumed - manifest.batch, manifest.consumed
        amounts = {
            "step": newest.step - manifest.step,
            "sample": newest.consumed - after,
            "token": newest.tokens - manifest.tokens,
        }
        if last is not None and amounts[last.unit] >= last.value:
            return  # those before it, damaged or not, are no concern
        if every is None or config.schedule.due(every, step=manifest.step, before=before, after=after):
            yield checkpoint


def _refuse_problem(checkpoint: Checkpoint) -> None:
    if checkpoint.problem is not None:
        raise _damaged(checkpoint, checkpoint.problem)


def _damaged(checkpoint: Checkpoint, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint.path} is damaged: {problem}",
        effect="nothing was merged",
        remedy="choose others by --last and --every",
    )


def _refuse_damaged(chosen: Sequence[Checkpoint]) -> None:
    """Read all files, and compare them with their checksums."""
    bar = tqdm(chosen, desc="verifying", unit="checkpoints", delay=2, disable=None)
    for checkpoint in bar:
        if wrong := verify_files(checkpoint.path, checkpoint.files()):
            raise _damaged(checkpoint, wrong[0])


def _refuse_others(chosen: Sequence[Checkpoint], config: Config) -> None:
    """Refuse checkpoints of another model, other code or another tokenizer than the newest, or of an incident."""
    kept, newest = {"model", "tokenizer"}, chosen[-1].train_state().identity
    for checkpoint in chosen:
        identity = checkpoint.train_state().identity
        check_model_code(identity, config, checkpoint.path)
        if changed := differences(identity.model_dump(include=kept), newest.model_dump(include=kept)):
            raise CheckpointError(
                f"{checkpoint.path} is not of the model of {chosen[-1].path}: {'; '.join(changed)}",
                effect="a mean of both would be no model",
                remedy="choose others by --last and --every",
            )
        if suspect := checkpoint.manifest().suspect:
            raise CheckpointError(
                f"{checkpoint.path} was saved during an incident: {suspect}",
                effect="its weights would spoil the mean",
                remedy="choose others by --last and --every",
            )
