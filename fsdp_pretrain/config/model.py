"""The `[model]` section of each family. See `fsdp_pretrain.models` for formulas and sources."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from .base import AboveZero, Positive, Section

Dropout = Annotated[float, Field(strict=False, ge=0, lt=1)]


class _Decoder(Section):
    """Keys of all families."""

    layers: Positive
    """Number of blocks."""
    hidden: Positive
    """Width of the residual stream."""
    heads: Positive
    """Number of query heads; must divide `hidden`."""
    vocab: Positive
    """Number of token ids, with the special tokens of the objective."""
    vocab_multiple: Positive = 1
    """Rows of the embedding table are a multiple of this; 64 or 128 is faster on a GPU."""
    norm_eps: AboveZero = 1e-5
    """Epsilon of the norms."""
    declared_params: Positive | None = None
    """Number of parameters you expect. If the exact count differs, exit 78."""

    @model_validator(mode="after")
    def _heads_divide(self) -> _Decoder:
        if not getattr(self, "head_size", None) and self.hidden % self.heads:
            raise ValueError(f"hidden = {self.hidden} is not a multiple of heads = {self.heads}")
        return self

    def tiny(self) -> Self:
        """The same computation in the smallest size: `checkpoint.code_identity` compares code by it."""
        sizes = {"layers": 2, "hidden": 32, "heads": 4, "vocab": 61, "vocab_multiple": 1, "dropout": 0.0, "ffn": 48}
        optional = {"kv_heads": 2, "head_size": 8, "positions": 32}
        if isinstance(getattr(self, "sliding_window_pattern", None), int):  # one block of each kind
            optional |= {"sliding_window": 8, "sliding_window_pattern": 2}
        sizes |= {key: size for key, size in optional.items() if isinstance(getattr(self, key, None), int)}
        return self.model_copy(update={key: size for key, size in sizes.items() if key in type(self).model_fields})

    @property
    def rows(self) -> int:
        """Rows of the embedding table."""
        return -(-self.vocab // self.vocab_multiple) * self.vocab_multiple

    @property
    def head_dim(self) -> int:
        return getattr(self, "head_size", None) or self.hidden // self.heads

    @property
    def query_width(self) -> int:
        """Width of the queries of all heads together; `hidden`, unless `head_size` is given."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of the keys of all heads together, and of the values."""
        return (getattr(self, "kv_heads", None) or self.heads) * self.head_dim

    def seen(self, layer: int, length: int) -> int:
        """Most tokens that a token of a sample of `length` sees in a block, counted from 0."""
        del layer
        return length

    @property
    def two_dimensions(self) -> bool:
        """Whether a token has two positions: the place of its blank, and its place inside the blank."""
        return getattr(self, "positions", None) == "rope-2d"

    @property
    def uses_dropout(self) -> bool:
        return bool(getattr(self, "dropout", 0.0))


class _Normal(_Decoder):
    """Families whose initial values are N(0, std)."""

    init_std: AboveZero | Literal["sqrt(2/(5h))", "sqrt(1/(3h))"] = 0.02
    """Standard deviation of the initial weights: a number, or a rule with h = `hidden`. That of output projections is
    divided by sqrt(2 * layers)."""

    @property
    def std(self) -> float:
        """`init_std` as a number."""
        rules = {"sqrt(2/(5h))": (2 / (5 * self.hidden)) ** 0.5, "sqrt(1/(3h))": (1 / (3 * self.hidden)) ** 0.5}
        return rules[self.init_std] if isinstance(self.init_std, str) else self.init_std


class RopeScaling(Section):
    """Scaling of rotary positions, for sequences longer than those the model was first trained on."""

    kind: Literal["linear", "llama3", "yarn"]
    """`linear` divides all positions by `factor` (arXiv 2306.15595); `llama3` divides frequencies with less than
    one wave in `original_length` only, leaves those with more than four, and interpolates between; `yarn`
    (arXiv 2309.00071) likewise between 1 and 32 waves, and scales queries and keys by 0.1 ln(`factor`) + 1."""
    factor: Annotated[float, Field(strict=False, ge=1)]
    """Scaling factor."""
    original_length: Positive = 8192
    """`llama3`, `yarn`: the sequence length the model was first trained on."""

    @property
    def gain(self) -> float:
        """Factor of rotated queries and keys."""
        return 0.1 * math.log(self.factor) + 1 if self.kind == "yarn" else 1.0


_KEYS_OF = {
    "sliding_window": ("mistral", "olmo3", "gemma3_text"),
    "sliding_window_pattern": ("olmo3", "gemma3_text"),
    "rope_local_base": ("gemma3_text",),
    "query_pre_attn_scalar": ("gemma3_text",),
}
"""Keys of some families; those of extensions may have all."""


class LlamaModel(_Normal):
    """Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases; and its variants."""

    family: Literal["llama", "mistral", "qwen2", "qwen3", "olmo3", "gemma3_text"]
    """Model family, and the class of an export. `qwen2`: biases on queries, keys and values. `qwen3`: RMSNorm over each
    head of queries and of keys. `olmo3`: RMSNorm over all queries and over all keys; the norms of a block are behind
    attention and feed-forward layer. `gemma3_text`: as `qwen3`, with norms before and behind, whose weights count from
    1, embeddings times sqrt(`hidden`), and tanh-GELU."""
    head_size: Positive | None = None
    """Width of a head. Default: `hidden` / `heads`."""
    kv_heads: Positive | None = None
    """Number of key/value heads (grouped-query attention). Default: `heads`."""
    ffn: Positive
    """Width of the SwiGLU feed-forward layer."""
    rope_base: AboveZero = 10_000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Optional scaling of the rotary positions."""
    tied_head: bool = False
    """Use the embedding table as output matrix."""
    sliding_window: Positive | None = None
    """`mistral`, `olmo3`, `gemma3_text`: tokens that a token sees, with itself; in all blocks, or by the pattern."""
    sliding_window_pattern: Annotated[int, Field(ge=2)] | None = None
    """`olmo3`, `gemma3_text`: every n-th block has no window; `rope_scaling` is of these blocks alone."""
    rope_local_base: AboveZero | None = None
    """`gemma3_text`: base of the rotary frequencies of blocks with a window. Default: `rope_base`."""
    query_pre_attn_scalar: Positive | None = None
    """`gemma3_text`: scores are divided by its square root. Default: the width of a head."""

    @model_validator(mode="after")
    def _llama_shapes(self) -> LlamaModel:
        for key, families in _KEYS_OF.items():
            if getattr(self, key) is not None and self.family not in families and ":" not in self.family:
                raise ValueError(f"{key} is of family = {' or '.join(families)}, not of {self.family}")
        patterned = self.family in _KEYS_OF["sliding_window_pattern"]
        if patterned and not (self.sliding_window and self.sliding_window_pattern):
            raise ValueError(f"family = {self.family} needs sliding_window and sliding_window_pattern")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(f"heads = {self.heads} is not a multiple of kv_heads = {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"rotary positions need an even head size, not {self.head_dim}")
        return self

    def slides(self, layer: int) -> bool:
        """Whether a block, counted from 0, has the window."""
        pattern = self.sliding_window_pattern
        return self.sliding_window is not None and (pattern is None or (layer + 1) % pattern != 0)

    def seen(self, layer: int, length: int) -> int:
        return min(self.sliding_window or length, length) if self.slides(layer) else length


Scores = Literal["fused", "layer_scaled"]
_SCORES = """How attention scores are computed; both give the same function. `layer_scaled`: queries are also divided by
the layer number, and the softmax, in fp32, is scaled back, which keeps fp16 scores small."""


class GPTModel(_Normal):
    """Megatron-GPT-style decoder: LayerNorm, learned positions or ALiBi, biases, tanh-GELU."""

    family: Literal["gpt"]
    """Model family."""
    ffn: Positive | None = None
    """Width of the feed-forward layer. Default: 4 * hidden."""
    positions: Positive | Literal["alibi"]
    """Rows of the learned position table, the longest sequence; or `"alibi"`: scores decrease with distance."""
    embedding_norm: bool = False
    """LayerNorm after the token embedding, before positions are added (BLOOM)."""
    dropout: Dropout = 0.0
    """Dropout on embeddings, attention probabilities and both residual branches."""
    scores: Scores = Field(default="fused", description=_SCORES)
    tied_head: bool = True
    """Use the embedding table as output matrix."""

    @property
    def ffn_width(self) -> int:
        return self.ffn or 4 * self.hidden


class GLMModel(_Decoder):
    """GLM-style decoder: DeepNorm, rotary positions in one or two dimensions, GeGLU, biases, prefix attention."""

    family: Literal["glm"]
    """Model family."""
    ffn: Positive | None = None
    """Width of the GeGLU feed-forward layer. Default: 8 * hidden / 3."""
    positions: Literal["rope", "rope-2d"] = "rope"
    """`rope-2d` rotates one half of a head by the position of the blank, the other by that inside it."""
    rope_base: AboveZero = 10_000.0
    """Base of the rotary frequencies."""
    dropout: Dropout = 0.0
    """Dropout on embeddings, attention probabilities and both residual branches."""
    scores: Scores = Field(default="fused", description=_SCORES)
    tied_head: bool = True
    """Use the embedding table as output matrix."""

    @model_validator(mode="after")
    def _glm_shapes(self) -> GLMModel:
        if self.ffn is None and self.hidden % 3:
            raise ValueError(
                f"the default ffn = 8 * hidden / 3 needs a hidden that is a multiple of 3, not {self.hidden}"
            )
        unit = 4 if self.positions == "rope-2d" else 2
        if self.head_dim % unit:
            raise ValueError(f"positions = {self.positions} needs a head size that is a multiple of {unit}")
        return self

    @property
    def ffn_width(self) -> int:
        return self.ffn or 8 * self.hidden // 3


AnyModel = LlamaModel | GPTModel | GLMModel
Model = Annotated[AnyModel, Field(discriminator="family")]
