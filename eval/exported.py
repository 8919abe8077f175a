"""Opens what a person names, and in particular a Hugging Face folder that `checkpoints RUN export` wrote.

The run's configuration is not in such a folder; `fsdp_pretrain.json` has the facts about training that are needed.
"""

from __future__ import annotations

from pathlib import Path

import torch

from fsdp_pretrain import models
from fsdp_pretrain.checkpoint.store import Checkpoint, Store, step_of
from fsdp_pretrain.config.data_section import CausalObjective
from fsdp_pretrain.data.text.tokenizer import Tokenizer
from fsdp_pretrain.errors import CheckpointError, ConfigError, DataError
from fsdp_pretrain.hf.folder import Folder
from fsdp_pretrain.hf.layout import FACTS, ExportFacts, read_json_object, read_model
from fsdp_pretrain.models import Decoder
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.run import state_files
from fsdp_pretrain.run.arguments import check_begun
from fsdp_pretrain.run.files import RunDir

from .checkpoints import EvaluatedModel, open_checkpoint, read_weights, usable_device

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def is_exported(path: Path) -> bool:
    """Whether a path is a Hugging Face folder: runs and checkpoints have no `config.json`."""
    return (path / "config.json").is_file()


def open_model(path: Path, step: int | None = None) -> EvaluatedModel:
    """The model of a run directory, of a `step-N` directory, or of an exported folder.

    Args:
        step: the checkpoint of a run to use; None: the newest.

    Raises:
        UserError: there is no such model, or it cannot be used.
    """
    if not is_exported(path):
        return open_checkpoint(_find_checkpoint(path, step))
    if step is not None:
        raise ConfigError(f"{path} is one exported checkpoint: --step {step} chooses one of a run")
    return open_exported(path)


def _find_checkpoint(path: Path, step: int | None) -> Checkpoint:
    """The checkpoint in a `step-N` directory; or in a run directory the one of a step, or the newest.

    Raises:
        ConfigError: the path is neither.
        CheckpointError: there is no such checkpoint.
    """
    named = step_of(path.name)
    if named is not None:
        if step is not None:
            raise ConfigError(f"{path} is one checkpoint already: --step {step} chooses one of a run directory")
        return Store(path.parent).find(named)
    run = RunDir(path)
    check_begun(run)
    store = Store(run.checkpoints)
    newest = store.newest() if step is None else store.find(step)
    if newest is None:
        raise CheckpointError(f"{store.directory} holds no complete checkpoint")
    return newest


def open_exported(path: Path) -> EvaluatedModel:
    """An exported folder to evaluate, in the precision of its weights. It is untrusted: everything is checked.

    Raises:
        ConfigError: the model is not one of this trainer's, or the folder is not one of its exports.
        DataError: the folder is incomplete or inconsistent, or the tokenizer does not fit.
    """
    model, facts = read_model(path), state_files.read(path / FACTS, ExportFacts)
    if facts is None:
        raise ConfigError(
            f"{path} has no {FACTS}, which says how the model was trained",
            effect="the longest input and the token that separates documents are unknown",
            remedy="export the checkpoint with this version; for others' models: lm-eval run --model hf",
        )
    content, folder = read_json_object(path / "config.json"), Folder(path, model, model)
    dtype = _DTYPES.get(str(content.get("dtype") or content.get("torch_dtype")), torch.float32)
    tokenizer = Tokenizer.load(path, eod=facts.eod)
    if tokenizer.vocab_size > model.rows:
        raise DataError(
            f"{tokenizer.path} has {tokenizer.vocab_size:_} ids, the model of {path} {model.rows:_} rows",
            remedy="put its own tokenizer into the folder",
        )

    def read(device: str, world: World | None) -> Decoder:
        place = usable_device(device) if world is None else world.device
        return read_weights(folder, models.build(model), dtype, place, world)

    return EvaluatedModel(
        path=path,
        step=facts.step,
        tokens=facts.tokens,
        tokenizer=tokenizer,
        length=facts.sequence_length,
        objective=CausalObjective(),
        read=read,
    )
