"""The classes of transformers that our families are exported as: names of weights, and keys of `config.json`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class HFTensor:
    """One tensor of a Hugging Face folder.

    Attributes:
        theirs: its name there.
        ours: names of our parameters, which it holds concatenated along dim 0.
        transposed: whether the folder stores [in, out] (GPT-2's Conv1D).
        by_head: whether they are concatenated head by head (BLOOM).
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False
    by_head: bool = False


def _both(theirs: str, *ours: str, transposed: bool = False, by_head: bool = False) -> tuple[HFTensor, HFTensor]:
    """Weight and bias of a layer."""
    return (
        HFTensor(f"{theirs}.weight", tuple(f"{name}.weight" for name in ours), transposed, by_head),
        HFTensor(f"{theirs}.bias", tuple(f"{name}.bias" for name in ours), by_head=by_head),
    )


# `{}` is the number of the block. A model has a tensor if it has the first of our parameters in it.
LLAMA = (
    HFTensor("model.embed_tokens.weight", ("embedding.weight",)),
    HFTensor("model.layers.{}.input_layernorm.weight", ("blocks.{}.attention_norm.weight",)),
    *_both("model.layers.{}.self_attn.q_proj", "blocks.{}.attention.query"),
    *_both("model.layers.{}.self_attn.k_proj", "blocks.{}.attention.key"),
    *_both("model.layers.{}.self_attn.v_proj", "blocks.{}.attention.value"),
    HFTensor("model.layers.{}.self_attn.o_proj.weight", ("blocks.{}.attention.out.weight",)),
    HFTensor("model.layers.{}.self_attn.q_norm.weight", ("blocks.{}.attention.query_norm.weight",)),
    HFTensor("model.layers.{}.self_attn.k_norm.weight", ("blocks.{}.attention.key_norm.weight",)),
    HFTensor("model.layers.{}.post_attention_layernorm.weight", ("blocks.{}.mlp_norm.weight",)),
    HFTensor("model.layers.{}.mlp.gate_proj.weight", ("blocks.{}.mlp.gate.weight",)),
    HFTensor("model.layers.{}.mlp.up_proj.weight", ("blocks.{}.mlp.up.weight",)),
    HFTensor("model.layers.{}.mlp.down_proj.weight", ("blocks.{}.mlp.down.weight",)),
    HFTensor("model.norm.weight", ("norm.weight",)),
    HFTensor("lm_head.weight", ("head.weight",)),
)
_NORMS_BEHIND = (
    *(replace(each, theirs=each.theirs.replace("post_attention", "pre_feedforward")) for each in LLAMA),
    HFTensor("model.layers.{}.post_attention_layernorm.weight", ("blocks.{}.attention_behind_norm.weight",)),
    HFTensor("model.layers.{}.post_feedforward_layernorm.weight", ("blocks.{}.mlp_behind_norm.weight",)),
)
_GPT2 = (
    HFTensor("transformer.wte.weight", ("embedding.weight",)),
    HFTensor("transformer.wpe.weight", ("positions.weight",)),
    *_both("transformer.h.{}.ln_1", "blocks.{}.attention_norm"),
    *_both(
        "transformer.h.{}.attn.c_attn",
        "blocks.{}.attention.query",
        "blocks.{}.attention.key",
        "blocks.{}.attention.value",
        transposed=True,
    ),
    *_both("transformer.h.{}.attn.c_proj", "blocks.{}.attention.out", transposed=True),
    *_both("transformer.h.{}.ln_2", "blocks.{}.mlp_norm"),
    *_both("transformer.h.{}.mlp.c_fc", "blocks.{}.mlp.up", transposed=True),
    *_both("transformer.h.{}.mlp.c_proj", "blocks.{}.mlp.down", transposed=True),
    *_both("transformer.ln_f", "norm"),
    HFTensor("lm_head.weight", ("head.weight",)),
)
_BLOOM = (
    HFTensor("transformer.word_embeddings.weight", ("embedding.weight",)),
    *_both("transformer.word_embeddings_layernorm", "embedding_norm"),
    *_both("transformer.h.{}.input_layernorm", "blocks.{}.attention_norm"),
    *_both(
        "transformer.h.{}.self_attention.query_key_value",
        *("blocks.{}.attention.query", "blocks.{}.attention.key", "blocks.{}.attention.value"),
        by_head=True,
    ),
    *_both("transformer.h.{}.self_attention.dense", "blocks.{}.attention.out"),
    *_both("transformer.h.{}.post_attention_layernorm", "blocks.{}.mlp_norm"),
    *_both("transformer.h.{}.mlp.dense_h_to_4h", "blocks.{}.mlp.up"),
    *_both("transformer.h.{}.mlp.dense_4h_to_h", "blocks.{}.mlp.down"),
    *_both("transformer.ln_f", "norm"),
    HFTensor("lm_head.weight", ("head.weight",)),
)

# (our key, their key, default of transformers' class)
_LLAMA_KEYS: tuple[tuple[str, str, Any], ...] = (
    ("vocab", "vocab_size", 32000),
    ("layers", "num_hidden_layers", 32),
    ("hidden", "hidden_size", 4096),
    ("heads", "num_attention_heads", 32),
    ("kv_heads", "num_key_value_heads", None),
    ("head_size", "head_dim", None),
    ("ffn", "intermediate_size", 11008),
    ("norm_eps", "rms_norm_eps", 1e-6),
    ("init_std", "initializer_range", 0.02),
    ("tied_head", "tie_word_embeddings", False),
)
_GPT2_KEYS: tuple[tuple[str, str, Any], ...] = (
    ("vocab", "vocab_size", 50257),
    ("layers", "n_layer", 12),
    ("hidden", "n_embd", 768),
    ("heads", "n_head", 12),
    ("ffn", "n_inner", None),
    ("positions", "n_positions", 1024),
    ("norm_eps", "layer_norm_epsilon", 1e-5),
    ("init_std", "initializer_range", 0.02),
    *(("dropout", key, 0.1) for key in ("embd_pdrop", "attn_pdrop", "resid_pdrop")),  # the last is read
    ("tied_head", "tie_word_embeddings", True),
)
_BLOOM_KEYS: tuple[tuple[str, str, Any], ...] = (
    ("vocab", "vocab_size", 250880),
    ("layers", "n_layer", 2),
    ("hidden", "hidden_size", 64),
    ("heads", "n_head", 8),
    ("norm_eps", "layer_norm_epsilon", 1e-5),
    ("init_std", "initializer_range", 0.02),
    *(("dropout", key, 0.0) for key in ("attention_dropout", "hidden_dropout")),  # the last is read
    ("tied_head", "tie_word_embeddings", True),
)


@dataclass(frozen=True)
class HFClass:
    """A class of transformers for a family, or for some of its models.

    Attributes:
        tensors: its weights.
        keys: (our key, their key, default of the class).
        fixed: (their key, values equivalent to our model); the first is written, and is the default of the class.
        defaults: other defaults than in `keys`, by their key.
        pattern: default of `sliding_window_pattern`; None: all blocks are alike.
        rope_base, local_base: defaults of the rotary bases; None: all blocks have the same.
        ours: further values of our section.
        aliases: their keys by other names of them.
    """

    name: str
    tensors: tuple[HFTensor, ...]
    keys: tuple[tuple[str, str, Any], ...]
    fixed: tuple[tuple[str, tuple[Any, ...]], ...]
    defaults: dict[str, Any] = field(default_factory=dict)
    pattern: int | None = None
    rope_base: float = 10_000.0
    local_base: float | None = None
    ours: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)


_KEYS = (*_LLAMA_KEYS, ("sliding_window", "sliding_window", 4096))
_SILU = ("hidden_act", ("silu", "swish"))
_NO_BIAS = ("attention_bias", (False,))
_MISTRAL = {"intermediate_size": 14336, "num_key_value_heads": 8}
_QWEN = {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32}
_OLMO = {"vocab_size": 50304, "rms_norm_eps": 1e-5}
_GEMMA = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True,
}  # fmt: skip
_GEMMA_KEYS = (*_KEYS, ("query_pre_attn_scalar", "query_pre_attn_scalar", 256))
_GEMMA_FIXED = (
    *(("hidden_activation", ("gelu_pytorch_tanh",)), _NO_BIAS, ("use_bidirectional_attention", (False, None))),
    *(("final_logit_softcapping", (None,)), ("attn_logit_softcapping", (None,))),
)
LLAMA_CLASSES = {
    "llama": HFClass("LlamaForCausalLM", LLAMA, _LLAMA_KEYS, (_SILU, _NO_BIAS, ("mlp_bias", (False,)))),
    "mistral": HFClass("MistralForCausalLM", LLAMA, _KEYS, (_SILU,), _MISTRAL),
    "qwen2": HFClass("Qwen2ForCausalLM", LLAMA, _LLAMA_KEYS, (_SILU,), _QWEN),
    "qwen3": HFClass("Qwen3ForCausalLM", LLAMA, _LLAMA_KEYS, (_SILU, _NO_BIAS), {**_QWEN, "head_dim": 128}),
    "olmo3": HFClass("Olmo3ForCausalLM", _NORMS_BEHIND, _KEYS, (_SILU, _NO_BIAS), _OLMO, 4, 500_000.0),
    "gemma3_text": HFClass(
        "Gemma3ForCausalLM", _NORMS_BEHIND, _GEMMA_KEYS, _GEMMA_FIXED, _GEMMA, 6, 1_000_000.0, 10_000.0
    ),
}
"""By family, which is also their `model_type`."""
GPT_CLASSES = {
    "gpt2": HFClass(
        "GPT2LMHeadModel",
        _GPT2,
        _GPT2_KEYS,
        (
            ("activation_function", ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")),  # all are the tanh approximation
            ("scale_attn_weights", (True,)),
            ("scale_attn_by_inverse_layer_idx", (False,)),
            ("add_cross_attention", (False,)),
        ),
    ),
    "bloom": HFClass(
        "BloomForCausalLM",
        _BLOOM,
        _BLOOM_KEYS,
        (("apply_residual_connection_post_layernorm", (False,)),),
        ours={"positions": "alibi", "embedding_norm": True},
        aliases={"n_embed": "hidden_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
    ),
}
"""Of `GPTModel`, by their `model_type`."""
