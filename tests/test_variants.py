"""Mistral, Qwen2, Qwen3, Olmo 3 and Gemma 3 as variants of Llama: shapes, formulas, and what is refused.

`test_hf.py` compares them with transformers: logits, gradients, answers; imports, training on 2 x 2, exports.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from fsdp_pretrain import models
from fsdp_pretrain.config.model import LlamaModel, Model
from fsdp_pretrain.config.sections import OptimizerSection
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.hf.layout import architecture, read_model, to_hf
from fsdp_pretrain.parallel.fsdp import materialise
from fsdp_pretrain.parallel.optimizer import treatments

pytestmark = pytest.mark.quick
MODELS = Path(__file__).resolve().parent.parent / "configs/models"
WINDOWS = {"sliding_window": 8, "sliding_window_pattern": 2}
SMALL: dict[str, Any] = {"layers": 2, "hidden": 36, "heads": 4, "kv_heads": 2, "ffn": 40, "vocab": 97, "init_std": 0.2}

FAMILIES = get_args(LlamaModel.model_fields["family"].annotation)

PUBLISHED: dict[str, dict[str, Any]] = {
    "mistral-nemo-12b": {
        "model_type": "mistral", "head_dim": 128, "hidden_size": 5120, "intermediate_size": 14336,
        "max_position_embeddings": 131072, "num_attention_heads": 32, "num_hidden_layers": 40,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None,
        "tie_word_embeddings": False, "vocab_size": 131072,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 131072,
        "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "sliding_window": 131072, "tie_word_embeddings": False,
        "use_mrope": False, "use_sliding_window": False, "vocab_size": 152064,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3", "attention_bias": False, "head_dim": 128, "hidden_size": 1024, "intermediate_size": 3072,
        "max_position_embeddings": 32768, "max_window_layers": 28, "num_attention_heads": 16, "num_hidden_layers": 28,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1e6,
        "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
    },
    "olmo3-7b": {
        "model_type": "olmo3", "attention_bias": False, "hidden_size": 4096, "intermediate_size": 11008,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8, "max_position_embeddings": 65536,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
            "original_max_position_embeddings": 8192, "rope_type": "yarn",
        },
        "rope_theta": 500000, "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 100278,
    },
    "gemma3-1b": {
        "model_type": "gemma3_text", "attention_bias": False, "attn_logit_softcapping": None, "head_dim": 256,
        "final_logit_softcapping": None, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
        "intermediate_size": 6912, "max_position_embeddings": 32768, "num_attention_heads": 4,
        "num_hidden_layers": 26, "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
        "sliding_window_pattern": 6, "vocab_size": 262144,
    },
}  # fmt: skip
"""`config.json` as published: what matters of it."""


def write_config(folder: Path, content: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def shipped(name: str) -> LlamaModel:
    model = TypeAdapter(Model).validate_python(tomllib.loads((MODELS / f"{name}.toml").read_text())["model"])
    assert isinstance(model, LlamaModel)
    return model


# ------------------------------------------------------------------------ shapes


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shipped_shape_is_that_of_the_published_file(name: str, tmp_path: Path) -> None:
    section = shipped(name).model_copy(update={"declared_params": None})
    assert read_model(write_config(tmp_path, PUBLISHED[name])) == section
    assert read_model(write_config(tmp_path, to_hf(section, sequence_length=4096, eod=0, dtype="bfloat16"))) == section


@pytest.mark.parametrize("family", [*FAMILIES, "another"])
def test_a_family_that_the_exporter_does_not_know_is_refused(family: str) -> None:
    """Every family of the schema has a layout; one that is added to the schema alone is refused, not mistaken."""
    model = LlamaModel(family="llama", head_size=14, **SMALL).model_copy(update={"family": family})
    if family in FAMILIES:
        assert to_hf(model, sequence_length=32, eod=0, dtype="float32")["model_type"] == family
        return
    with pytest.raises(ConfigError, match=r"has no class for model\.family = another") as caught:
        to_hf(model, sequence_length=32, eod=0, dtype="float32")
    assert caught.value.exit == 78


@pytest.mark.parametrize("pattern", [2, 3, 4, 6])
@pytest.mark.parametrize("family", ["olmo3", "gemma3_text"])
def test_an_export_comes_in_again_whatever_the_pattern(family: Any, pattern: int, tmp_path: Path) -> None:
    """Patterns that are longer than the model are all the same: each block has a window."""
    model = LlamaModel(**{**SMALL, **WINDOWS, "family": family, "head_size": 8, "sliding_window_pattern": pattern})
    back = read_model(write_config(tmp_path, to_hf(model, sequence_length=32, eod=0, dtype="float32")))
    assert architecture(back) == architecture(model)
    assert architecture(back) != architecture(model.model_copy(update={"layers": 6, "sliding_window_pattern": 5}))


# ------------------------------------------------------------------------ formulas


@pytest.mark.parametrize(
    ("family", "added"),
    [
        ("mistral", set()),
        ("qwen2", {"query.bias", "key.bias", "value.bias"}),
        ("qwen3", {"query_norm.weight", "key_norm.weight"}),
    ],
)
def test_what_a_family_adds_starts_neutral_and_does_not_decay(family: Any, added: set[str]) -> None:
    plain, model = (
        materialise(models.build(LlamaModel(**{**SMALL, "family": kind, "hidden": 40})), 1, torch.device("cpu"))
        for kind in ("llama", family)
    )
    here, there = dict(model.named_parameters()), dict(plain.named_parameters())
    assert here.keys() - there.keys() == {f"blocks.{n}.attention.{name}" for n in range(2) for name in added}
    assert [name for name in here if name in there] == list(there)
    assert all(torch.equal(here[name], there[name]) for name in there)
    new = {name: value for name, value in here.items() if name not in there}
    assert all((value == (0.0 if name.endswith("bias") else 1.0)).all() for name, value in new.items())
    shapes = {name: tuple(value.shape) for name, value in here.items()}
    spared = {name for name, each in treatments(shapes, OptimizerSection(lr=1.0)).items() if each.weight_decay == 0.0}
    assert new.keys() <= spared and all(here[name].ndim == 2 for name in here.keys() - spared)


# ------------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"family": "qwen2", "sliding_window": 8},
            "sliding_window is of family = mistral or olmo3 or gemma3_text, not",
        ),
        (
            {"family": "mistral", "sliding_window": 8, "sliding_window_pattern": 2},
            "pattern is of family = olmo3 or gemma",
        ),
        ({"family": "olmo3", "sliding_window": 8}, "olmo3 needs sliding_window and sliding_window_pattern"),
        ({"family": "olmo3", **WINDOWS, "rope_local_base": 1.0}, "rope_local_base is of family = gemma3_text, not"),
        ({"family": "qwen3", "head_size": 9}, "an even head size, not 9"),
        ({"family": "llama", "hidden": 34}, "hidden = 34 is not a multiple of heads = 4"),
    ],
)
def test_shapes_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LlamaModel(**{**SMALL, **changes})
    assert LlamaModel(**{**SMALL, "family": "llama", "hidden": 34, "head_size": 8}).query_width == 32


QWEN, MISTRAL = PUBLISHED["qwen2.5-7b"], PUBLISHED["mistral-nemo-12b"]
OLMO, GEMMA = PUBLISHED["olmo3-7b"], PUBLISHED["gemma3-1b"]
TWO_BASES = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 1e4}}
WINDOW = "some layers see a window only, which is not built"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({**QWEN, "use_sliding_window": True, "max_window_layers": 21}, WINDOW),
        ({**QWEN, "layer_types": ["full_attention"] * 27 + ["sliding_attention"]}, WINDOW),
        ({**QWEN, "layer_types": 3}, WINDOW),
        (
            {**QWEN, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "'dynamic'; ours are default, linear, llama3, yarn",
        ),
        ({**OLMO, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}, "layer_types: ours is"),
        ({**OLMO, "layer_types": "full_attention"}, "layer_types: ours is"),
        ({**OLMO, "layer_types": ["full_attention"] * 32}, "sliding_window_pattern = 1"),
        ({**OLMO, "sliding_window": None}, "needs sliding_window"),
        ({**OLMO, "rope_parameters": TWO_BASES}, "rope_theta = 10000.0 in blocks with a window; ours is that of"),
        ({**GEMMA, "rope_parameters": {"sliding_attention": {"rope_type": "linear"}}}, "window have scaled rotary"),
        ({**GEMMA, "final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0; ours is None"),
        ({**GEMMA, "use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ({**GEMMA, "model_type": "gemma3"}, "model_type = 'gemma3'"),
        ({**PUBLISHED["qwen3-0.6b"], "attention_bias": True}, "attention_bias = True; ours is False"),
        ({**MISTRAL, "head_dim": "128"}, "head_dim = '128'"),
        ({**MISTRAL, "sliding_window": True}, "sliding_window = True"),
        ({**MISTRAL, "model_type": "mixtral"}, "model_type = 'mixtral'; known are"),
        (
            {**QWEN, "model_type": "qwen2_vl"},
            "known are llama, mistral, qwen2, qwen3, olmo3, gemma3_text, gpt2 and bloom",
        ),
    ],
)
def test_folders_of_models_that_are_not_built(content: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        read_model(write_config(tmp_path, content))
    assert refused.value.exit == 78


def test_a_window_that_is_not_in_force_is_no_obstacle(tmp_path: Path) -> None:
    whole = read_model(write_config(tmp_path, QWEN))
    assert read_model(write_config(tmp_path, {**QWEN, "layer_types": ["full_attention"] * 28})) == whole


def test_defaults_are_those_of_the_classes(tmp_path: Path) -> None:
    """A `config.json` that leaves out what its class has by default."""
    kinds = ("mistral", "qwen3", "olmo3", "gemma3_text")
    mistral, qwen, olmo, gemma = (read_model(write_config(tmp_path, {"model_type": kind})) for kind in kinds)
    assert isinstance(mistral, LlamaModel) and isinstance(qwen, LlamaModel)
    assert isinstance(olmo, LlamaModel) and isinstance(gemma, LlamaModel)
    assert (olmo.sliding_window, olmo.sliding_window_pattern, olmo.rope_base, olmo.norm_eps) == (4096, 4, 5e5, 1e-5)
    assert (gemma.sliding_window, gemma.sliding_window_pattern, gemma.rope_local_base) == (4096, 6, 1e4)
    assert (gemma.rope_base, gemma.hidden, gemma.tied_head, gemma.query_pre_attn_scalar) == (1e6, 2304, True, 256)
    assert (mistral.kv_heads, mistral.ffn, mistral.sliding_window, mistral.vocab) == (8, 14336, 4096, 32000)
    assert (qwen.kv_heads, qwen.ffn, qwen.head_dim, qwen.vocab) == (32, 22016, 128, 151936)
