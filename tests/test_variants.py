"""Mistral, Qwen2 and Qwen3 as variants of Llama: shapes, formulas, and what is refused.

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
from fsdp_pretrain.config.config import load
from fsdp_pretrain.config.model import LlamaModel, Model
from fsdp_pretrain.config.sections import OptimizerSection
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.hf.layout import read_model, to_hf
from fsdp_pretrain.parallel.fsdp import materialise
from fsdp_pretrain.parallel.optimizer import treatments

pytestmark = pytest.mark.quick
MODELS = Path(__file__).resolve().parent.parent / "configs/models"
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
        ({"family": "qwen2", "sliding_window": 8}, "sliding_window is of family = mistral, not of qwen2"),
        ({"family": "qwen3", "head_size": 9}, "an even head size, not 9"),
        ({"family": "llama", "hidden": 34}, "hidden = 34 is not a multiple of heads = 4"),
    ],
)
def test_shapes_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LlamaModel(**{**SMALL, **changes})
    assert LlamaModel(**{**SMALL, "family": "llama", "hidden": 34, "head_size": 8}).query_width == 32


def test_samples_longer_than_the_window_are_refused(lab: Any) -> None:
    assert load(lab.config(model={"family": "mistral", "sliding_window": 32}))
    with pytest.raises(ConfigError, match=r"(?s)exceeds model.sliding_window = 31.*set data.sequence_length <= 31"):
        load(lab.config(model={"family": "mistral", "sliding_window": 31}))


QWEN, MISTRAL = PUBLISHED["qwen2.5-7b"], PUBLISHED["mistral-nemo-12b"]
WINDOW = "some layers see a window only, which is not built"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({**QWEN, "use_sliding_window": True, "max_window_layers": 21}, WINDOW),
        ({**QWEN, "layer_types": ["full_attention"] * 27 + ["sliding_attention"]}, WINDOW),
        ({**QWEN, "layer_types": 3}, WINDOW),
        ({**QWEN, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type = 'yarn'; ours are default, linear"),
        ({**QWEN, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic'"),
        ({**PUBLISHED["qwen3-0.6b"], "attention_bias": True}, "attention_bias = True; ours is False"),
        ({**MISTRAL, "head_dim": "128"}, "head_dim = '128'"),
        ({**MISTRAL, "sliding_window": True}, "sliding_window = True"),
        ({**MISTRAL, "model_type": "mixtral"}, "model_type = 'mixtral'; known are"),
        ({**QWEN, "model_type": "qwen2_vl"}, "known are llama, mistral, qwen2, qwen3 and gpt2"),
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
    mistral, qwen = (read_model(write_config(tmp_path, {"model_type": kind})) for kind in ("mistral", "qwen3"))
    assert isinstance(mistral, LlamaModel) and isinstance(qwen, LlamaModel)
    assert (mistral.kv_heads, mistral.ffn, mistral.sliding_window, mistral.vocab) == (8, 14336, 4096, 32000)
    assert (qwen.kv_heads, qwen.ffn, qwen.head_dim, qwen.vocab) == (32, 22016, 128, 151936)
