"""Evaluation of a Hugging Face folder: one that `checkpoints RUN export` wrote, or one of transformers' own.

The folder stands alone: the run's configuration is not there. What was exported by this project says in
`fsdp_pretrain.json` how the model was trained; without that file it is taken as trained to predict every next token, as
long as its positions, or its window if that is shorter, separated by its end-of-sequence token.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from data.text.tokenizer import Tokenizer
from fsdp_pretrain import models
from fsdp_pretrain.checkpoint.hf_folder import Folder
from fsdp_pretrain.checkpoint.hf_layout import FACTS, ExportFacts, read_json_object, read_model
from fsdp_pretrain.config.data_section import CausalObjective
from fsdp_pretrain.config.model import GLMModel, LlamaModel
from fsdp_pretrain.errors import ConfigError, DataError
from fsdp_pretrain.models import Decoder
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.record import state_files

from .checkpoints import EvaluatedModel, read_weights, usable_device

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def is_exported(path: Path) -> bool:
    """Whether a path is a Hugging Face folder: runs and checkpoints have no `config.json`."""
    return (path / "config.json").is_file()


class ExportedFolder:
    """An opened folder, read tensor by tensor. It is untrusted: everything is checked.

    Attributes:
        path: of the folder.
        model: its `[model]` section.
        facts: what it was trained with.
        dtype: of its weights, in which it is computed.

    Raises:
        ConfigError: the model is not one of this trainer's.
        DataError: the folder is incomplete or inconsistent.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model = read_model(path)
        self._content = read_json_object(path / "config.json")
        self._folder = Folder(path, self.model, self.model)
        name = self._content.get("dtype") or self._content.get("torch_dtype")
        self.dtype = _DTYPES.get(str(name), torch.float32)
        self.facts = state_files.read(path / FACTS, ExportFacts) or self._guess()

    def read_rows(self, name: str, rows: range, out: Tensor) -> None:
        """Some rows of a parameter under our name, into a tensor of any dtype. Raises DataError."""
        out.copy_(self._folder.read(name)[rows.start : rows.stop])

    def tokenizer(self, named: Path | None = None) -> Tokenizer:
        """The tokenizer of the folder, or at another path. Raises DataError."""
        return Tokenizer.load(named or self.path, eod=self.facts.eod)

    def _guess(self) -> ExportFacts:
        if isinstance(self.model, GLMModel):
            raise ConfigError(
                f"{self.path} has no {FACTS}, which says how a GLM was trained",
                effect="its special tokens are unknown, so nothing can be scored",
                remedy="export the checkpoint with this version",
            )
        length = self._number("max_position_embeddings" if isinstance(self.model, LlamaModel) else "n_positions")
        if isinstance(self.model, LlamaModel) and self.model.sliding_window:
            length = min(length, self.model.sliding_window)  # in longer ones it would be another model
        eod = self._number("eos_token_id")
        return ExportFacts(step=0, tokens=0, sequence_length=length, eod=eod, objective=CausalObjective())

    def _number(self, key: str) -> int:
        value = self._content.get(key)
        value = value[0] if isinstance(value, list) and value else value  # of several ends of a text, the first
        if type(value) is not int or value < 0:
            raise DataError(
                f"{self.path / 'config.json'}: {key} = {value!r} is not a number",
                effect="the longest sequence, or the token that separates documents, is unknown",
                remedy="add it to config.json",
            )
        return value


def open_exported(path: Path, tokenizer: Path | None = None) -> EvaluatedModel:
    """A Hugging Face folder to evaluate, in the precision of its weights.

    Args:
        tokenizer: path of the tokenizer, if it is not in the folder.

    Raises:
        ConfigError: the model is not one of this trainer's.
        DataError: the folder or the tokenizer cannot be used, or they do not fit.
    """
    folder = ExportedFolder(path)
    known, facts = folder.tokenizer(tokenizer), folder.facts
    if known.vocab_size > folder.model.rows:
        raise DataError(
            f"{known.path} has {known.vocab_size:_} ids, the model of {path} {folder.model.rows:_} rows",
            remedy="name its own tokenizer with --tokenizer",
        )

    def read(device: str, world: World | None) -> Decoder:
        place = usable_device(device) if world is None else world.device
        return read_weights(folder, models.build(folder.model), folder.dtype, place, world)

    return EvaluatedModel(
        path=path,
        step=facts.step,
        tokens=facts.tokens,
        tokenizer=known,
        length=facts.sequence_length,
        objective=facts.objective,
        read=read,
    )
