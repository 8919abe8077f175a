"""The model families; `build` creates a model from its configuration."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fsdp_pretrain import extensions
from fsdp_pretrain.config.model import AnyModel, GLMModel, GPTModel, LlamaModel

from .decoder import Decoder
from .glm import GLM
from .gpt import GPT
from .llama import Llama

__all__ = ["Decoder", "build"]

_KINDS: dict[type[AnyModel], Callable[..., Decoder]] = {LlamaModel: Llama, GPTModel: GPT, GLMModel: GLM}


def build(config: AnyModel) -> Decoder:
    """The model on the meta device: shapes and names, no memory. `parallel.fsdp.materialise` initialises it.

    Raises:
        ConfigError: the code of an extension's family cannot be imported.
    """
    family = _KINDS.get(type(config)) or extensions.part("families", config.family).load()
    with torch.device("meta"):
        return family(config)  # type: ignore[no-any-return]
