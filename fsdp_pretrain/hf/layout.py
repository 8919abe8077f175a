"""The Hugging Face layout of our models: weight names and `config.json`, in both directions.

Llama and GPT use the layouts of the classes in `classes`. transformers has no class that computes the same as our GLM,
so it has no folder.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fsdp_pretrain import extensions
from fsdp_pretrain.config.model import AnyModel, GPTModel, LlamaModel, Model, RopeScaling
from fsdp_pretrain.errors import ConfigError, DataError
from fsdp_pretrain.run.state_files import StateFile
from fsdp_pretrain.units import human_bytes

from .classes import GPT_CLASSES, LLAMA, LLAMA_CLASSES, HFClass, HFTensor

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
    table = own.tensors if own else _class_of(model)[1].tensors
    outside = [weight for weight in table if "{}" not in weight.theirs]
    inside = [weight for weight in table if "{}" in weight.theirs]
    blocks = [
        replace(weight, theirs=weight.theirs.format(n), ours=tuple(name.format(n) for name in weight.ours))
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
    kind, hf_class = _class_of(model)
    values = {**model.model_dump(), "init_std": getattr(model, "std", None)}
    if isinstance(model, LlamaModel):
        values |= _filled(model)
        further = {"attention_dropout": 0.0, "max_position_embeddings": sequence_length}
        further |= _blocks_to_hf(model, hf_class)
    else:
        values, further = {**values, "ffn": model.ffn_width}, {}
    return {
        "architectures": [hf_class.name],
        "model_type": kind,
        **{theirs: values[ours] for ours, theirs, _ in hf_class.keys},
        **{key: allowed[0] for key, allowed in hf_class.fixed},
        **further,
        **common,
    }


def _class_of(model: AnyModel) -> tuple[str, HFClass]:
    """The class of transformers that computes a model of our own families, after its `model_type`.

    Raises ConfigError if there is none.
    """
    if isinstance(model, LlamaModel) and model.family in LLAMA_CLASSES:
        return model.family, LLAMA_CLASSES[model.family]
    odd = []
    if isinstance(model, GPTModel) and model.positions == "alibi":
        odd.append('positions = "alibi"')
    if isinstance(model, GPTModel) and model.embedding_norm:
        odd.append("embedding_norm")
    if isinstance(model, GPTModel) and len(odd) != 1 and (not odd or model.ffn_width == 4 * model.hidden):
        kind = "bloom" if odd else "gpt2"
        return kind, GPT_CLASSES[kind]
    raise ConfigError(
        f"transformers has no class for model.{' and model.'.join(odd) or f'family = {model.family}'}",
        effect="nothing was exported: a folder would load without an error and compute something else",
        remedy="evaluate the checkpoint itself with `fsdp-eval run`; torch.distributed.checkpoint reads it, too",
    )


_SCALINGS: dict[str, tuple[tuple[str, tuple[Any, ...]], ...]] = {
    "linear": (),
    "llama3": (("low_freq_factor", (1.0,)), ("high_freq_factor", (4.0,))),
    "yarn": (
        *(("beta_fast", (32.0, None)), ("beta_slow", (1.0, None)), ("truncate", (True, None))),
        *(("mscale", (None,)), ("mscale_all_dim", (None,))),
    ),
}
"""Kinds of rotary scaling, and their keys with the values that are ours; the first is written, if there is one."""


def _blocks_to_hf(model: LlamaModel, hf_class: HFClass) -> dict[str, Any]:
    """Rotary keys for transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`), and kinds of blocks."""
    scaling, rope = model.rope_scaling, dict[str, Any](rope_type="default")
    if scaling is not None:
        known = {key: allowed[0] for key, allowed in _SCALINGS[scaling.kind] if allowed[0] is not None}
        rope = {"rope_type": scaling.kind, "factor": scaling.factor, **known}
        if scaling.kind != "linear":
            rope["original_max_position_embeddings"] = scaling.original_length
        if scaling.kind == "yarn":
            rope["attention_factor"] = scaling.gain
    full = {**rope, "rope_theta": model.rope_base}
    keys: dict[str, Any] = {"rope_theta": model.rope_base, "rope_parameters": full}
    keys["rope_scaling"] = None if scaling is None else rope
    if hf_class.pattern is not None:
        local = model.rope_local_base or model.rope_base
        kinds = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": local}}
        types = [f"{'sliding' if model.slides(layer) else 'full'}_attention" for layer in range(model.layers)]
        keys |= {"rope_parameters": kinds, "layer_types": types}
        if hf_class.local_base is not None:
            keys["rope_local_base_freq"] = local
    return keys


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
    hf_class = {**LLAMA_CLASSES, **GPT_CLASSES}.get(kind) if isinstance(kind, str) else None
    if hf_class is not None:
        values = _values(content, hf_class, problems)
        values |= _llama_from_hf(kind, content, problems) if kind in LLAMA_CLASSES else {"family": "gpt"}
        theirs = {ours: key for ours, key, _ in hf_class.keys}
    else:
        known = f"known are {', '.join(LLAMA_CLASSES)}, {' and '.join(GPT_CLASSES)}"
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


def _values(content: dict[str, Any], hf_class: HFClass, problems: list[str]) -> dict[str, Any]:
    """The values of `config.json` by our keys; adds a problem for each fixed key with a value that we lack."""
    content = {**hf_class.defaults, **{hf_class.aliases.get(key, key): value for key, value in content.items()}}
    for key, allowed in hf_class.fixed:
        value = content.get(key, allowed[0])
        if value not in allowed:
            problems.append(f"{key} = {reprlib.repr(value)}; ours is {allowed[0]!r}")
    return {**{ours: content.get(theirs, default) for ours, theirs, default in hf_class.keys}, **hf_class.ours}


def _llama_from_hf(family: str, content: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """The family, rotary keys and kinds of blocks by our keys."""
    hf_class = LLAMA_CLASSES[family]
    if family.startswith("qwen"):
        problems += _qwen_window(content)
    if hf_class.pattern is None:
        return {"family": family, **_rope_from_hf(content, hf_class.rope_base, problems)}
    content = {**hf_class.defaults, **content}
    ropes, local = content.get("rope_parameters"), dict[str, Any]()
    if isinstance(ropes, dict) and ropes.keys() & {"full_attention", "sliding_attention"}:
        local = ropes.get("sliding_attention") or {}
        content = {**content, "rope_parameters": ropes.get("full_attention")}
    rope = _rope_from_hf(content, hf_class.rope_base, problems)
    base = content.get("rope_local_base_freq", hf_class.local_base or rope["rope_base"])
    if not isinstance(local, dict) or local.get("rope_type", "default") != "default":
        problems.append("rope_parameters: blocks with a window have scaled rotary positions")
    else:
        base = local.get("rope_theta", base)
    if hf_class.local_base is not None:
        rope["rope_local_base"] = base
    elif base != rope["rope_base"]:
        problems.append(f"rope_theta = {reprlib.repr(base)} in blocks with a window; ours is that of the others")
    return {"family": family, **rope, "sliding_window_pattern": _pattern_from_hf(content, hf_class, problems)}


def _pattern_from_hf(content: dict[str, Any], hf_class: HFClass, problems: list[str]) -> object:
    """Every n-th block has no window."""
    kinds = content.get("layer_types")
    if kinds is None:
        return content.get("sliding_window_pattern", hf_class.pattern)
    kinds = kinds if isinstance(kinds, list) else []
    longer = max(hf_class.pattern or 0, len(kinds) + 1)
    pattern = kinds.index("full_attention") + 1 if "full_attention" in kinds else longer
    wanted = ["sliding_attention" if (n + 1) % pattern else "full_attention" for n in range(len(kinds))]
    if kinds != wanted or len(kinds) != content.get("num_hidden_layers"):
        problems.append("layer_types: ours is full_attention for every n-th block, else sliding_attention")
    return pattern


def _rope_from_hf(content: dict[str, Any], base: float, problems: list[str]) -> dict[str, Any]:
    """Rotary keys by our keys; `base`: the default of the class."""
    rope = content.get("rope_scaling") or content.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        problems.append(f"rope_parameters = {reprlib.repr(rope)}: not a JSON object")
        rope = {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", content.get("partial_rotary_factor")) not in (None, 1, 1.0):
        problems.append("partial_rotary_factor: ours rotates whole heads")
    scaling: dict[str, Any] | None = None
    if isinstance(kind, str) and kind in _SCALINGS:
        scaling = {"kind": kind, "factor": rope.get("factor")}
        for name, allowed in _SCALINGS[kind]:
            if (theirs := rope.get(name)) not in allowed:
                problems.append(f"{name} = {reprlib.repr(theirs)}; ours is {allowed[0]}")
    elif kind != "default":
        problems.append(f"rope_type = {reprlib.repr(kind)}; ours are default, {', '.join(_SCALINGS)}")
    if scaling is not None and kind != "linear":
        longest = content.get("max_position_embeddings", 2048)
        scaling["original_length"] = rope.get("original_max_position_embeddings", longest)
    gain, factor = rope.get("attention_factor"), rope.get("factor")
    if kind == "yarn" and gain is not None and isinstance(factor, int | float) and factor >= 1:
        ours = RopeScaling.model_construct(kind="yarn", factor=factor).gain
        if not isinstance(gain, int | float) or not math.isclose(gain, ours, rel_tol=1e-6):
            problems.append(f"attention_factor = {reprlib.repr(gain)}; ours is {ours}")
    places = {"config.json": content, **{name: content.get(name) for name in ("rope_parameters", "rope_scaling")}}
    bases = {
        name: keys["rope_theta"] for name, keys in places.items() if isinstance(keys, dict) and "rope_theta" in keys
    }
    base = rope.get("rope_theta", next(iter(bases.values()), base))
    if any(value != base for value in bases.values()):
        listed = ", ".join(f"{reprlib.repr(value)} in {name}" for name, value in bases.items())
        problems.append(f"rope_theta = {listed}: which one counts depends on the version of transformers")
    return {"rope_base": base, "rope_scaling": scaling}


def _qwen_window(content: dict[str, Any]) -> Iterator[str]:
    """A problem if some layers use sliding-window attention. Most folders have the keys, but do not use them."""
    kinds = content.get("layer_types") or []
    full = isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)
    if content.get("use_sliding_window") or not full:
        yield "use_sliding_window, layer_types: some layers see a window only, which is not built"


def _filled(model: LlamaModel) -> dict[str, Any]:
    """Keys whose defaults depend on others, with these."""
    return {
        "kv_heads": model.kv_heads or model.heads,
        "head_size": model.head_dim,
        "rope_local_base": model.rope_local_base or model.rope_base,
        "query_pre_attn_scalar": model.query_pre_attn_scalar or model.head_dim,
    }


_FREE = {"declared_params", "init_std", "dropout", "scores", "vocab", "vocab_multiple"}
"""Keys that do not change what given weights compute, or (vocabulary) are compared as rows."""


def architecture(model: AnyModel) -> dict[str, Any]:
    """The keys of a section that determine what given weights compute, with defaults filled in."""
    values = model.model_dump(mode="json", exclude=_FREE)
    if isinstance(model, LlamaModel):
        scaling = model.rope_scaling
        values |= _filled(model)
        if (pattern := model.sliding_window_pattern) is not None:  # all longer ones leave no block without a window
            values["sliding_window_pattern"] = min(pattern, model.layers + 1)
        if scaling is not None and scaling.kind == "linear":
            values["rope_scaling"] = {"kind": scaling.kind, "factor": scaling.factor}
    else:
        values |= {"ffn": model.ffn_width}
    return values
