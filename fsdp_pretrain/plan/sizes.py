"""Parameters of a model by unit of FSDP, from closed forms: the numbers of `models`, without torch."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_pretrain.config.model import AnyModel, GPTModel, LlamaModel
from fsdp_pretrain.errors import ConfigError

from .flops import feed_forward


@dataclass(frozen=True)
class Sizes:
    """Numbers of parameters.

    Attributes:
        block: of one block; `layers` of them.
        root: of what is outside of blocks: embedding, last norm, and the output matrix unless it is tied.
    """

    block: int
    layers: int
    root: int

    @property
    def blocks(self) -> int:
        return self.block * self.layers

    @property
    def total(self) -> int:
        return self.blocks + self.root


def sizes(model: AnyModel) -> Sizes:
    """Count a model's parameters; the formulas are those in the docstrings of `models.llama`, `gpt` and `glm`."""
    h, (ffn, matrices) = model.hidden, feed_forward(model)
    tables = model.rows * h * (1 if model.tied_head else 2)
    if isinstance(model, LlamaModel):
        q, k = model.query_width, model.kv_width
        extra = {"qwen2": q + 2 * k, "qwen3": 2 * model.head_dim}.get(model.family, 0)
        return Sizes(2 * h * q + 2 * h * k + matrices * h * ffn + 2 * h + extra, model.layers, tables + h)
    biases = 4 * h + (matrices - 1) * ffn + h + 4 * h  # attention, feed-forward, two norms with bias
    root = tables + 2 * h
    if isinstance(model, GPTModel):
        root += 2 * h if model.embedding_norm else 0
        root += 0 if model.positions == "alibi" else int(model.positions) * h
    return Sizes(4 * h * h + matrices * h * ffn + biases, model.layers, root)


def check_declared(model: AnyModel, exact: int) -> None:
    """Raise ConfigError if the model does not have `declared_params` parameters."""
    declared = model.declared_params
    if declared is not None and declared != exact:
        raise ConfigError(
            f"model.declared_params = {declared:_}, but this model has {exact:_} parameters "
            f"({(exact - declared) / declared:+.1%})",
            effect="the run would train another model than intended",
            remedy=f"correct the shape, or set model.declared_params = {exact:_} if this one is meant",
        )
