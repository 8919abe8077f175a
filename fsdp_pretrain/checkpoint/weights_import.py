"""Import of existing weights as a new run's checkpoint of step 0: from another run's checkpoint, and the part shared
with imports of Hugging Face folders (`hf`). Tensor by tensor: the model is never in memory as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from data.packing.opening import open_packer
from data.packing.packer import Packer
from fsdp_pretrain import models
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.model import AnyModel
from fsdp_pretrain.config.resume_rules import differences, load_recorded
from fsdp_pretrain.errors import CheckpointError, ConfigError, DataError, shortened
from fsdp_pretrain.parallel.mesh import SingleProcess
from fsdp_pretrain.record import journal, run_id
from fsdp_pretrain.record.files import RunDir

from . import dcp
from .hf_layout import architecture
from .loading import Weights
from .manager import make_facts
from .state import TrainState, identity
from .store import CONFIG, Checkpoint, Store, verify_files

_TABLES = ("embedding.weight", "head.weight")


class WeightsSource(Protocol):
    """Weights under our names; `parameters` are fp32 tensors on the meta device.

    The source lacks `padded` rows of the embedding table.
    """

    parameters: dict[str, Tensor]
    padded: int

    def read(self, name: str) -> Tensor:
        """A parameter in fp32, with the source's rows. Raises DataError, CheckpointError."""

    def source_name(self, name: str) -> str:
        """A parameter's name in the source."""


@dataclass(frozen=True)
class Imported:
    """The result of an import; the source lacked `padded` rows of the embedding table."""

    saved: dcp.SaveResult
    padded: int
    tokenizer: str


def refuse_begun(run: RunDir, config: Config) -> None:
    """Raise ConfigError if the configuration is for another run, or the run was already started."""
    if config.run.dir.resolve() != run.path.resolve():
        raise ConfigError(f"the configuration is for run.dir = {config.run.dir}, not for {run.path}")
    if Store(run.checkpoints).scan() or run.segments:
        raise ConfigError(
            f"{run.path} holds a run that has begun",
            effect="its checkpoints would no longer be those of one training",
            remedy="import into a new run.dir",
        )


def refuse_another_model(source: Path, theirs: AnyModel, ours: AnyModel) -> None:
    """Raise ConfigError, listing all differences, if weights of `theirs` would compute something else in `ours`."""
    wrong = differences(architecture(theirs), architecture(ours), "model")
    if theirs.rows > ours.rows:
        wrong.append(f"rows of the embedding table: {theirs.rows} -> {ours.rows} (model.vocab, model.vocab_multiple)")
    if wrong:
        raise ConfigError(
            f"the model of {source} is not that of the configuration (source -> configuration):\n    "
            + "\n    ".join(wrong),
            effect="the weights would compute something else than they were trained to",
            remedy="`fsdp-pretrain checkpoints RUN import SOURCE --show-model` prints the [model] section that fits",
        )


def begin(run: RunDir, config: Config, packer: Packer, source: WeightsSource, where: Path, said: str) -> Imported:
    """Write the checkpoint and the journal's first entry.

    Args:
        run: checked by `refuse_begun`.
        where: path of `source`, for the record.
        said: result of the tokenizer comparison, for people.

    Raises:
        DataError: weights are not finite.
        StorageError: the checkpoint cannot be written.
    """
    _refuse_not_finite(source, where)
    known = run_id.assign(run.path)
    run_id.assign(run.checkpoints, known)
    state, world = TrainState(), SingleProcess()
    facts = make_facts(config, world, state, imported=str(where.resolve()))
    total = sum(tensor.numel() * tensor.element_size() for tensor in source.parameters.values())
    with tqdm(total=total, desc="importing", unit="B", unit_scale=True, delay=2, disable=None) as bar:

        def fetch(key: str) -> Tensor:
            name = key.removeprefix("model.")
            tensor = source.read(name)
            if source.padded and name in _TABLES:
                # These ids never occur, but the softmax includes them: with the mean row each gets at most 1/V.
                tensor = torch.cat((tensor, tensor.mean(0).expand(source.padded, -1)))
            bar.update(tensor.numel() * tensor.element_size())
            return tensor

        saved = dcp.save(
            world,
            Store(run.checkpoints),
            facts,
            state={"model": source.parameters},
            fetch=fetch,
            train_state=state.to_json(identity=identity(config, packer), tokens=0, world=world.shape),
            config=config.to_toml(),
        )
    text = f"weights of {where.resolve()}; {said}"
    if source.padded:
        text += f"; {source.padded} rows of the embedding table are the mean of the others"
    journal.add(run, "import", text, step=0, folder=str(where.resolve()), padded=source.padded)
    return Imported(saved, source.padded, said)


def _refuse_not_finite(source: WeightsSource, where: Path) -> None:
    """Raise DataError naming all tensors with NaN or infinite values; reads all weights."""
    bar = tqdm(source.parameters, desc="checking values", unit="tensors", delay=2, disable=None)
    wrong = sorted({source.source_name(name) for name in bar if not source.read(name).isfinite().all()})
    if wrong:
        raise DataError(
            f"{where} has tensors with values that are NaN, or infinite in fp32:\n    " + shortened(wrong),
            effect="every loss of a training from them would be NaN",
            remedy="take the weights from before they were damaged",
        )


# ------------------------------------------------------------------------ another run's checkpoint


def import_checkpoint(run: RunDir, path: Path, config: Config) -> Imported:
    """Write a new run's step-0 checkpoint from the weights of another run's checkpoint, of any mesh.

    Optimiser, counters, data and schedules start fresh (a fork keeps them).

    Args:
        run: a new or empty directory.
        config: its model must be the checkpoint's, except for initialization, dropout and additional rows of the
            embedding table.

    Raises:
        CheckpointError: the checkpoint is damaged, or its tensors do not match its configuration.
        ConfigError: the configuration is for another model or another run, or the run was already started.
        DataError: the tokenizer is not that of the corpora, or weights are not finite.
        StorageError: the new checkpoint cannot be written.
    """
    refuse_begun(run, config)
    checkpoint = next((item for item in Store(path.resolve().parent).scan() if item.path.name == path.name), None)
    if checkpoint is None or checkpoint.problem:
        raise CheckpointError(f"{path} is not a valid checkpoint: {checkpoint.problem if checkpoint else 'its name'}")
    theirs = load_recorded(path / CONFIG).model
    refuse_another_model(path, theirs, config.model)
    packer = open_packer(config)
    known = checkpoint.train_state().identity.tokenizer.fingerprint
    if known != packer.tokenizer.fingerprint:
        raise DataError(
            f"{path} was trained with another tokenizer than that of the corpora (fingerprint differs)",
            effect="the model would be shown ids that mean something else to it",
            remedy="prepare the corpora with the tokenizer/ of that run",
        )
    bar = tqdm(checkpoint.files(), desc="verifying", unit="files", delay=2, disable=None)
    if wrong := verify_files(checkpoint.path, bar):
        raise CheckpointError(f"{path} is damaged: {wrong[0]}", effect="nothing was imported")
    source = _Checkpoint(checkpoint, theirs, config.model)
    return begin(run, config, packer, source, path, "the tokenizer is that of the corpora")


class _Checkpoint:
    """`WeightsSource` of a checkpoint, for a model that may have more rows. Raises CheckpointError."""

    def __init__(self, checkpoint: Checkpoint, theirs: AnyModel, ours: AnyModel) -> None:
        self.parameters: dict[str, Tensor] = models.build(ours).state_dict()
        self.padded = ours.rows - theirs.rows
        self._stored = Weights(checkpoint, models.build(theirs))

    def read(self, name: str) -> Tensor:
        return self._stored[name].float()

    def source_name(self, name: str) -> str:
        return name
