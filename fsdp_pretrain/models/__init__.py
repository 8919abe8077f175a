"""The model families; `build` creates a model from its configuration."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fsdp_pretrain import extensions
from fsdp_pretrain.config.model import AnyModel, GLMModel, GPTModel, LlamaModel
from fsdp_pretrain.errors import ConfigError

from .decoder import Decoder
from .glm import GLM
from .gpt import GPT
from .llama import Llama

__all__ = ["Decoder", "build"]

_KINDS: dict[type[AnyModel], Callable[..., Decoder]] = {LlamaModel: Llama, GPTModel: GPT, GLMModel: GLM}


def build(config: AnyModel) -> Decoder:
    """The model on the meta device: shapes and names, no memory. `parallel.fsdp.materialise` initialises it.

    Raises:
        ConfigError: the code of an extension's family cannot be imported, or does not say how a parameter begins.
    """
    if (kind := _KINDS.get(type(config))) is not None:
        with torch.device("meta"):
            return kind(config)
    family = extensions.part("families", config.family).load()
    with torch.device("meta"):
        model: Decoder = family(config)
    for name, _ in model.named_parameters():
        try:
            model.initial(name)
        except KeyError:
            raise ConfigError(
                f"{family.__name__}.initial has no rule for the parameter {name}",
                remedy="override `initial` to return `NormalInit(std)` or `Constant(value)` for it",
            ) from None
    return model
