"""The Hugging Face layout of our models: weight names and `config.json`, in both directions.

Llama and GPT use the layouts of `LlamaForCausalLM` (`Mistral...`, `Qwen2...`, `Qwen3...`) and `GPT2LMHeadModel`.
transformers has no class that computes the same as our GLM, so it has no folder.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fsdp_pretrain import extensions
from fsdp_pretrain.config.model import AnyModel, GPTModel, LlamaModel, Model
from fsdp_pretrain.errors import ConfigError, DataError
from fsdp_pretrain.run.state_files import StateFile
from fsdp_pretrain.units import human_bytes

FACTS = "fsdp_pretrain.json"
JSON_BYTES = 4 * 2**20
"""Largest JSON file to read; models need about 100 bytes per tensor. Parsing can take 45 times as much memory."""


class ExportFacts(StateFile):
    """`fsdp_pretrain.json` of an export: facts that an evaluation needs and `config.json` has no place for.

    Attributes:
        step, tokens: how far the model was trained.
        sequence_length: tokens of a training sample.
        eod: id of the document separator.
    """

    step: int
    tokens: int
    sequence_length: int
    eod: int


@dataclass(frozen=True)
class HFTensor:
    """One tensor of a Hugging Face folder.

    Attributes:
        theirs: its name there.
        ours: names of our parameters, which it holds concatenated along dim 0.
        transposed: whether the folder stores [in, out] (GPT-2's Conv1D).
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False


def _both(theirs: str, *ours: str, transposed: bool = False) -> tuple[HFTensor, HFTensor]:
    """Weight and bias of a layer."""
    return (
        HFTensor(f"{theirs}.weight", tuple(f"{name}.weight" for name in ours), transposed),
        HFTensor(f"{theirs}.bias", tuple(f"{name}.bias" for name in ours)),
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


@dataclass(frozen=True)
class HFLayout:
    """The layout of an extension's family.

    Attributes:
        config: keys of `config.json` from the model's section: `architectures`, `model_type` and the shape; the size of
            the vocabulary, token ids and dtype are added.
        tensors: as `LLAMA`, in the order of the model.
    """

    config: Callable[[Any], dict[str, Any]]
    tensors: tuple[HFTensor, ...] = LLAMA


def _own_layout(family: str) -> HFLayout | None:
    """The layout of an extension's family; None for our own. Raises ConfigError if it has none."""
    if (part := extensions.parts("families").get(family)) is None:
        return None
    if part.layout is None:
        raise ConfigError(
            f"model.family = {family} has no layout of a Hugging Face folder",
            effect="nothing was exported",
            remedy="give its `Part` a `layout`, see docs/extend.md, or evaluate the checkpoint itself",
        )
    layout: HFLayout = extensions.import_object(part.layout)
    return layout


_BASE = re.compile(r"^(model|transformer)\.")
_COMPUTED = re.compile(r"(\.attn\.(masked_)?bias|\.rotary_emb\.inv_freq)$")
"""Buffers that old versions of transformers stored: masks and frequencies, not weights."""


def weights(model: AnyModel, names: Collection[str]) -> list[HFTensor]:
    """The folder's tensors for the parameters `names` of a model, in model order.

    Raises ConfigError if the layout lacks a parameter.
    """
    own = _own_layout(model.family)
    table = own.tensors if own else LLAMA if isinstance(model, LlamaModel) else _GPT2
    outside = [weight for weight in table if "{}" not in weight.theirs]
    inside = [weight for weight in table if "{}" in weight.theirs]
    blocks = [
        HFTensor(weight.theirs.format(n), tuple(name.format(n) for name in weight.ours), weight.transposed)
        for n in range(model.layers)
        for weight in inside
    ]
    first = table.index(inside[0])
    tensors = [weight for weight in (*outside[:first], *blocks, *outside[first:]) if weight.ours[0] in names]
    lost = set(names) - {name for weight in tensors for name in weight.ours}
    if lost:
        raise ConfigError(f"the layout of {table[0].theirs.partition('.')[0]} has no place for {sorted(lost)[0]}")
    return tensors


def without_base(name: str) -> str:
    """The name of a tensor in folders that were saved from the model without its head."""
    return _BASE.sub("", name)


def is_computed(name: str) -> bool:
    """Whether a tensor of a folder is a computed buffer, not a weight."""
    return bool(_COMPUTED.search(name))


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
    ("dropout", "resid_pdrop", 0.1),
    ("tied_head", "tie_word_embeddings", True),
)
# (their key, values equivalent to our model; the first is written, and is the default of their class)
_LLAMA_FIXED: tuple[tuple[str, tuple[Any, ...]], ...] = (("hidden_act", ("silu", "swish")),)
_GPT2_FIXED: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("activation_function", ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")),  # all three are the tanh approximation
    ("scale_attn_weights", (True,)),
    ("scale_attn_by_inverse_layer_idx", (False,)),
    ("add_cross_attention", (False,)),
)


@dataclass(frozen=True)
class _LlamaClass:
    """A class of transformers for a family of `LlamaModel`, as it differs from Llama's.

    Attributes:
        keys: further (our key, their key, default).
        fixed: further keys, with the values that are equivalent to our model.
        defaults: other defaults, by their key.
    """

    name: str
    keys: tuple[tuple[str, str, Any], ...] = ()
    fixed: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    defaults: dict[str, Any] = field(default_factory=dict)


_QWEN = {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32}
_LLAMA_CLASSES = {
    "llama": _LlamaClass("LlamaForCausalLM", fixed=(("attention_bias", (False,)), ("mlp_bias", (False,)))),
    "mistral": _LlamaClass(
        "MistralForCausalLM",
        keys=(("sliding_window", "sliding_window", 4096),),
        defaults={"intermediate_size": 14336, "num_key_value_heads": 8},
    ),
    "qwen2": _LlamaClass("Qwen2ForCausalLM", defaults=_QWEN),
    "qwen3": _LlamaClass(
        "Qwen3ForCausalLM", fixed=(("attention_bias", (False,)),), defaults={**_QWEN, "head_dim": 128}
    ),
}
"""By family, which is also their `model_type`."""


def to_hf(model: AnyModel, *, sequence_length: int, eod: int, dtype: str) -> dict[str, Any]:
    """Contents of `config.json`.

    Args:
        sequence_length: tokens of a training sample, written as `max_position_embeddings` of Llama and its variants.
        eod: the document separator, written as `bos_token_id` and `eos_token_id`.
        dtype: of the weights, such as `bfloat16`.

    Raises:
        ConfigError: transformers has no class that computes this model.
    """
    common: dict[str, Any] = {"vocab_size": model.rows, "bos_token_id": eod, "eos_token_id": eod, "pad_token_id": None}
    common |= {"dtype": dtype, "torch_dtype": dtype, "use_cache": True}  # `torch_dtype` is what 4.x reads
    if own := _own_layout(model.family):
        return {**own.config(model), **common}
    if isinstance(model, LlamaModel) and model.family in _LLAMA_CLASSES:
        hf_class, values = _LLAMA_CLASSES[model.family], model.model_dump()
        values |= {"kv_heads": model.kv_heads or model.heads, "head_size": model.head_dim, "init_std": model.std}
        return {
            "architectures": [hf_class.name],
            "model_type": model.family,
            **{theirs: values[ours] for ours, theirs, _ in (*_LLAMA_KEYS, *hf_class.keys)},
            **{key: allowed[0] for key, allowed in (*_LLAMA_FIXED, *hf_class.fixed)},
            "attention_dropout": 0.0,
            "max_position_embeddings": sequence_length,
            **_rope_to_hf(model),
            **common,
        }
    odd = []
    if isinstance(model, GPTModel) and model.positions == "alibi":
        odd.append('positions = "alibi"')
    if isinstance(model, GPTModel) and model.embedding_norm:
        odd.append("embedding_norm")
    if odd or not isinstance(model, GPTModel):
        raise ConfigError(
            f"transformers has no class for model.{' and model.'.join(odd) or f'family = {model.family}'}",
            effect="nothing was exported: a folder would load without an error and compute something else",
            remedy="evaluate the checkpoint itself with `fsdp-eval run`; torch.distributed.checkpoint reads it, too",
        )
    values = model.model_dump()
    values |= {"ffn": model.ffn_width, "init_std": model.std}
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{theirs: values[ours] for ours, theirs, _ in _GPT2_KEYS},
        **{key: allowed[0] for key, allowed in _GPT2_FIXED},
        "embd_pdrop": model.dropout,
        "attn_pdrop": model.dropout,
        **common,
    }


def _rope_to_hf(model: LlamaModel) -> dict[str, Any]:
    """Rotary keys for transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`)."""
    scaling = model.rope_scaling
    rope: dict[str, Any] = {"rope_type": "default"}
    if scaling is not None:
        rope = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            rope |= {
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": scaling.original_length,
            }
    return {
        "rope_theta": model.rope_base,
        "rope_scaling": None if scaling is None else rope,
        "rope_parameters": {**rope, "rope_theta": model.rope_base},
    }


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a folder. Raises DataError."""
    try:
        with path.open("rb") as file:
            text = file.read(JSON_BYTES + 1)
        if len(text) > JSON_BYTES:
            raise ValueError(f"it is larger than {human_bytes(JSON_BYTES)}")
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"cannot read {path}: {error}") from None
    return content


def read_model(folder: Path) -> AnyModel:
    """The `[model]` section that matches a folder.

    Raises:
        DataError: `config.json` cannot be read.
        ConfigError: it describes a model that this trainer does not have; all mismatches are listed.
    """
    path = folder / "config.json"
    content = read_json_object(path)
    kind, problems, values, theirs = content.get("model_type"), list[str](), None, dict[str, str]()
    if content.get("quantization_config"):
        problems.append("quantization_config: quantised weights cannot be trained")
    if content.get("transformers_weights"):
        problems.append("transformers_weights: the weights are in a file of another name")
    if isinstance(kind, str) and kind in _LLAMA_CLASSES:
        values = _llama_from_hf(kind, content, problems)
        theirs = {ours: key for ours, key, _ in (*_LLAMA_KEYS, *_LLAMA_CLASSES[kind].keys)}
    elif kind == "gpt2":
        values, theirs = _values(content, _GPT2_KEYS, _GPT2_FIXED, problems), {ours: key for ours, key, _ in _GPT2_KEYS}
        values = {"family": "gpt", **values}
    else:
        known = f"known are {', '.join(_LLAMA_CLASSES)} and gpt2"
        problems.append(f"model_type = {reprlib.repr(kind)}; {known}")
    model: AnyModel | None = None
    if values is not None:
        try:
            model = TypeAdapter[AnyModel](Model).validate_json(json.dumps(values), strict=True)
        except ValidationError as error:
            for item in error.errors(include_url=False):
                key = ".".join(theirs.get(str(part), str(part)) for part in item["loc"][1:])
                problems.append(f"{key} = {reprlib.repr(item['input'])}: {item['msg']}" if key else item["msg"])
    if isinstance(model, LlamaModel) and model.head_dim * model.heads == model.hidden:
        model = model.model_copy(update={"head_size": None})
    if problems or model is None:
        raise ConfigError(f"{path} describes a model that this trainer does not have:\n    " + "\n    ".join(problems))
    return model


def _values(
    content: dict[str, Any],
    keys: tuple[tuple[str, str, Any], ...],
    fixed: tuple[tuple[str, tuple[Any, ...]], ...],
    problems: list[str],
) -> dict[str, Any]:
    """The values of `config.json` by our keys; adds a problem for each fixed key with a value that we lack."""
    for key, allowed in fixed:
        value = content.get(key, allowed[0])
        if value not in allowed:
            problems.append(f"{key} = {reprlib.repr(value)}; ours is {allowed[0]!r}")
    return {ours: content.get(theirs, default) for ours, theirs, default in keys}


def _llama_from_hf(family: str, content: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    hf_class = _LLAMA_CLASSES[family]
    content = {**hf_class.defaults, **content}
    values = _values(content, (*_LLAMA_KEYS, *hf_class.keys), (*_LLAMA_FIXED, *hf_class.fixed), problems)
    if family.startswith("qwen"):
        problems += _qwen_window(content)
    rope = content.get("rope_scaling") or content.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        problems.append(f"rope_parameters = {reprlib.repr(rope)}: not a JSON object")
        rope = {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", content.get("partial_rotary_factor")) not in (None, 1, 1.0):
        problems.append("partial_rotary_factor: ours rotates whole heads")
    scaling: dict[str, Any] | None = None
    if kind in ("linear", "llama3"):
        scaling = {"kind": kind, "factor": rope.get("factor")}
    elif kind != "default":
        problems.append(f"rope_type = {reprlib.repr(kind)}; ours are default, linear and llama3")
    if scaling is not None and kind == "llama3":
        longest = content.get("max_position_embeddings", 2048)
        scaling["original_length"] = rope.get("original_max_position_embeddings", longest)
        for name, ours in (("low_freq_factor", 1.0), ("high_freq_factor", 4.0)):
            if (theirs := rope.get(name)) != ours:
                problems.append(f"{name} = {reprlib.repr(theirs)}; ours is {ours}")
    places = {"config.json": content, **{name: content.get(name) for name in ("rope_parameters", "rope_scaling")}}
    bases = {
        name: keys["rope_theta"] for name, keys in places.items() if isinstance(keys, dict) and "rope_theta" in keys
    }
    base = rope.get("rope_theta", next(iter(bases.values()), 10_000.0))
    if any(value != base for value in bases.values()):
        listed = ", ".join(f"{reprlib.repr(value)} in {name}" for name, value in bases.items())
        problems.append(f"rope_theta = {listed}: which one counts depends on the version of transformers")
    return {"family": family, **values, "rope_base": base, "rope_scaling": scaling}


def _qwen_window(content: dict[str, Any]) -> Iterator[str]:
    """A problem if some layers use sliding-window attention. Most folders have the keys, but do not use them."""
    kinds = content.get("layer_types") or []
    full = isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)
    if content.get("use_sliding_window") or not full:
        yield "use_sliding_window, layer_types: some layers see a window only, which is not built"


_FREE = {"declared_params", "init_std", "dropout", "scores", "vocab", "vocab_multiple"}
"""Keys that do not change what given weights compute, or (vocabulary) are compared as rows."""


def architecture(model: AnyModel) -> dict[str, Any]:
    """The keys of a section that determine what given weights compute, with defaults filled in."""
    values = model.model_dump(mode="json", exclude=_FREE)
    if isinstance(model, LlamaModel):
        scaling = model.rope_scaling
        values |= {"kv_heads": model.kv_heads or model.heads, "head_size": model.head_dim}
        if scaling is not None and scaling.kind == "linear":
            values["rope_scaling"] = {"kind": scaling.kind, "factor": scaling.factor}
    else:
        values |= {"ffn": model.ffn_width}
    return values
