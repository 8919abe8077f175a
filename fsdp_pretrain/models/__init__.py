"""The model families: `build` makes one from its configuration."""

from __future__ import annotations

import torch

from ..sections import GPTModel, LlamaModel
from .decoder import Decoder
from .gpt import GPT
from .llama import Llama

__all__ = ["Decoder", "build"]


def build(config: LlamaModel | GPTModel) -> Decoder:
    """The model on the meta device: shapes and names, no memory. `parallel.materialise` gives it values."""
    with torch.device("meta"):
        return Llama(config) if isinstance(config, LlamaModel) else GPT(config)
