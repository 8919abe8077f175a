"""Evaluation of a Hugging Face folder that `checkpoints RUN export` wrote.

The run's configuration is not in the folder; `fsdp_pretrain.json` has the facts about training that are needed.
"""

from __future__ import annotations

from pathlib import Path

import torch

from fsdp_pretrain import models
from fsdp_pretrain.config.data_section import CausalObjective
from fsdp_pretrain.data.text.tokenizer import Tokenizer
from fsdp_pretrain.errors import ConfigError, DataError
from fsdp_pretrain.hf.folder import Folder
from fsdp_pretrain.hf.layout import FACTS, ExportFacts, read_json_object, read_model
from fsdp_pretrain.models import Decoder
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.run import state_files

from .checkpoints import EvaluatedModel, read_weights, usable_device

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def is_exported(path: Path) -> bool:
    """Whether a path is a Hugging Face folder: runs and checkpoints have no `config.json`."""
    return (path / "config.json").is_file()


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
