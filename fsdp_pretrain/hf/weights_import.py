"""Import of a Hugging Face folder as a new run's checkpoint of step 0, tensor by tensor: the model is never in memory
as a whole."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from fsdp_pretrain.checkpoint import dcp
from fsdp_pretrain.checkpoint.manager import make_facts
from fsdp_pretrain.checkpoint.state import TrainState, identity
from fsdp_pretrain.checkpoint.store import Store
from fsdp_pretrain.checkpoint.tokenizer import compare_with_folder
from fsdp_pretrain.checkpoint.witness import code_identity
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.model import AnyModel, LlamaModel
from fsdp_pretrain.config.resume_rules import differences
from fsdp_pretrain.data.packing.opening import open_packer
from fsdp_pretrain.data.packing.packer import Packer
from fsdp_pretrain.errors import ConfigError, DataError, shortened
from fsdp_pretrain.parallel.mesh import SingleProcess
from fsdp_pretrain.run import journal, run_id
from fsdp_pretrain.run.files import RunDir

from .folder import Folder
from .layout import architecture, read_model

_TABLES = ("embedding.weight", "head.weight")


@dataclass(frozen=True)
class Imported:
    """The result of an import.

    Attributes:
        padded: number of rows of the embedding table that the source lacked.
        tokenizer: result of comparing the tokenizers, for people.
    """

    saved: dcp.SaveResult
    padded: int
    tokenizer: str


def _refuse_begun(run: RunDir, config: Config) -> None:
    """Raise ConfigError if the configuration is for another run, or the run has begun."""
    if config.run.dir.resolve() != run.path.resolve():
        raise ConfigError(f"the configuration is for run.dir = {config.run.dir}, not for {run.path}")
    if Store(run.checkpoints).scan() or run.segments:
        raise ConfigError(
            f"{run.path} holds a run that has begun",
            effect="its checkpoints would no longer be those of one training",
            remedy="import into a new run.dir",
        )


def _refuse_another_model(source: Path, theirs: AnyModel, ours: AnyModel) -> None:
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


def import_folder(run: RunDir, folder: Path, config: Config, accept: Collection[str] = ()) -> Imported:
    """Write a new run's step-0 checkpoint from a Hugging Face folder: fp32 weights, no optimiser state.

    Args:
        run: a new or empty directory.
        folder: has `config.json` and safetensors.
        accept: problems that the user accepts; only `tokenizer` exists, see `import --help`.

    Raises:
        ConfigError: the configuration is for another model or another run, or the run was already started.
        DataError: the folder is incomplete, inconsistent or has non-finite values, or its tokenizer is not that of the
            corpora.
        StorageError: the checkpoint cannot be written.
    """
    _refuse_begun(run, config)
    theirs = read_model(folder)
    _refuse_another_model(folder, theirs, config.model)
    source = Folder(folder, theirs, config.model)
    packer = open_packer(config)
    tokenizer = next(iter(packer.corpora.values())).tokenizer()
    comparison = compare_with_folder(tokenizer, folder, accept="tokenizer" in accept)
    window = config.model.sliding_window if isinstance(config.model, LlamaModel) else None
    length = config.data.sequence_length
    if window and window >= length:
        comparison += f"; its sliding_window of {window} tokens is not in force, since samples have {length}"
    return _begin(run, config, packer, source, folder, comparison)


def _begin(run: RunDir, config: Config, packer: Packer, source: Folder, where: Path, comparison: str) -> Imported:
    """Write the checkpoint and the journal's first entry. `comparison`: the result for the tokenizers, as text."""
    _refuse_not_finite(source, where)
    identifier = run_id.assign(run.path)
    run_id.assign(run.checkpoints, identifier)
    state, world = TrainState(), SingleProcess()
    facts = make_facts(config, world, state, imported=str(where.resolve()))
    known = identity(config, packer, code_identity(config))
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
            train_state=state.to_json(identity=known, tokens=0, world=world.shape),
            config=config.to_toml(),
        )
    text = f"weights of {where.resolve()}; {comparison}"
    if source.padded:
        text += f"; {source.padded} rows of the embedding table are the mean of the others"
    journal.add(run, "import", text, step=0, folder=str(where.resolve()), padded=source.padded)
    return Imported(saved, source.padded, comparison)


def _refuse_not_finite(source: Folder, where: Path) -> None:
    """Raise DataError naming all tensors with NaN or infinite values; reads all weights."""
    bar = tqdm(source.parameters, desc="checking values", unit="tensors", delay=2, disable=None)
    wrong = sorted({source.source_name(name) for name in bar if not source.read(name).isfinite().all()})
    if wrong:
        raise DataError(
            f"{where} has tensors with values that are NaN, or infinite in fp32:\n    " + shortened(wrong),
            effect="every loss of a training from them would be NaN",
            remedy="take the weights from before they were damaged",
        )
