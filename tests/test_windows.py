"""Blocks with a window: the logits of transformers, documents, and what `plan` counts.

`test_families.py` has the masks, `test_scorer.py` decoding with a cache, `test_hf.py` imports, training and exports.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import ROOT
from pydantic import TypeAdapter

from fsdp_pretrain import models
from fsdp_pretrain.config.config import load
from fsdp_pretrain.config.model import LlamaModel, Model
from fsdp_pretrain.hf.folder import Folder
from fsdp_pretrain.hf.layout import read_model, weights
from fsdp_pretrain.models.decoder import Decoder
from fsdp_pretrain.models.flops import flops_per_token, hardware_flops_per_token
from fsdp_pretrain.models.masks import Slots, block_mask
from fsdp_pretrain.parallel.fsdp import materialise
from fsdp_pretrain.plan import memory

pytestmark = pytest.mark.quick
SMALL: dict[str, Any] = {"layers": 4, "hidden": 48, "heads": 6, "kv_heads": 2, "ffn": 80, "vocab": 97, "init_std": 0.2}
WINDOWS = {"sliding_window": 5, "sliding_window_pattern": 2}
MODELS: dict[str, dict[str, Any]] = {
    "mistral": {**SMALL, "family": "mistral", "sliding_window": 5},
    "olmo3": {
        **SMALL,
        **WINDOWS,
        "family": "olmo3",
        "rope_scaling": {"kind": "yarn", "factor": 4.0, "original_length": 9},
    },
    "gemma3_text": {**SMALL, **WINDOWS, "family": "gemma3_text", "rope_local_base": 50.0, "query_pre_attn_scalar": 11},
}


def make(name: str, **changes: Any) -> Decoder:
    return materialise(models.build(LlamaModel(**{**MODELS[name], **changes})), 1, torch.device("cpu"))


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(97, (batch, length), generator=torch.Generator().manual_seed(0))


# ------------------------------------------------------------------------ transformers

TINY = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "sliding_window": 9, "eos_token_id": 0, "pad_token_id": None,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8, "beta_fast": 32.0, "beta_slow": 1.0}
THEIRS: dict[str, dict[str, Any]] = {
    "mistral": TINY,
    "olmo3": {**TINY, "rope_theta": 5e5, "rope_scaling": {**YARN, "attention_factor": 1.2079441541679836}},
    "gemma3_text": {**TINY, "num_hidden_layers": 6, "head_dim": 12, "query_pre_attn_scalar": 20, "bos_token_id": 0},
}


@pytest.mark.promise("hugging-face")
@pytest.mark.parametrize("name", THEIRS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name, **THEIRS[name]))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path)
    config = read_model(tmp_path)
    folder, ours = Folder(tmp_path, config, config), models.build(config).to_empty(device="cpu")
    with torch.no_grad():
        for parameter_name, parameter in ours.named_parameters():
            parameter.copy_(folder.read(parameter_name))
        x = tokens(2, 40)
        here, there = ours(x), theirs.eval()(x).logits
    assert here.std() > 0.01 and float((here - there).abs().max() / there.abs().max()) < 1e-5
    stored, values = theirs.state_dict(), dict(ours.named_parameters())
    tied = {"lm_head.weight"} if config.tied_head else set()
    table = weights(config, list(values))
    assert {weight.theirs for weight in table} == stored.keys() - tied
    assert all(torch.equal(values[weight.ours[0]], stored[weight.theirs]) for weight in table)


# ------------------------------------------------------------------------ windows


@pytest.mark.parametrize("name", MODELS)
def test_a_window_as_long_as_the_sample_is_none(name: str) -> None:
    """And a shorter one changes the logits of tokens behind it alone."""
    x, kept = tokens(2, 20), {}
    for window in (7, 19, 20, 21):
        model = make(name, sliding_window=window)
        kept[window] = model(x), model.contexts(None, model.embedding(x), x[0])
    assert torch.equal(kept[20][0], kept[21][0])
    assert all(context[0] is None for context in kept[20][1])
    torch.testing.assert_close(kept[7][0][:, :7], kept[20][0][:, :7], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(kept[7][0][:, 7:], kept[20][0][:, 7:], atol=1e-3)
    assert not torch.equal(kept[19][0][:, 19], kept[20][0][:, 19])


@pytest.mark.parametrize("name", MODELS)
def test_documents_see_their_own_windows(name: str) -> None:
    model, x = make(name), tokens(2, 20)
    lengths = torch.tensor([[7, 13], [20, 0]], dtype=torch.int32)
    packed = model(x, None, Slots(lengths))
    for row, start, stop in ((0, 0, 7), (0, 7, 20), (1, 0, 20)):
        alone = model(x[row : row + 1, start:stop])[0]
        torch.testing.assert_close(packed[row, start:stop], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", [1, 2, 128, 129, 130, 256, 257, 699])
def test_block_masks_end_with_the_window(window: int) -> None:
    """In a sample of one document, exactly the blocks that hold a key that is seen."""
    listed = block_mask(Slots(torch.tensor([[700]])), 700, window).to_dense()[0, 0].sum(1)
    first = [max(0, query - window + 1) // 128 for query in range(0, 700, 128)]  # block of the first key of each block
    assert listed.tolist() == [query - key + 1 for query, key in enumerate(first)]


def test_blocks_of_a_pattern() -> None:
    model = LlamaModel(**{**MODELS["olmo3"], "layers": 9, "sliding_window_pattern": 4})
    assert [model.slides(layer) for layer in range(9)] == [True, True, True, False, True, True, True, False, True]
    assert all(LlamaModel(**MODELS["mistral"]).slides(layer) for layer in range(4))


def test_gemma_begins_neutral() -> None:
    """Its weights of norms count from 1: they begin at 0, and its norms are those of the others at 1."""
    model = make("gemma3_text")
    norms = {name: value for name, value in model.named_parameters() if "norm" in name}
    assert len(norms) == 4 * 6 + 1 and not any(value.any() for value in norms.values())
    x = torch.randn(3, 48)
    torch.testing.assert_close(model.norm(x), torch.nn.functional.rms_norm(x, (48,), eps=1e-5))


# ------------------------------------------------------------------------ plan


def test_flops_of_olmo_3_7b_by_hand() -> None:
    """24 blocks see 4,096 tokens, 8 see all: at 8,192 tokens 24 x 4096 + 8 x 8192 instead of 32 x 8192."""
    values = tomllib.loads((ROOT / "configs/models/olmo3-7b.toml").read_text())["model"]
    model, parameters = TypeAdapter(Model).validate_python(values), values["declared_params"]
    seen = 24 * 4096 + 8 * 8192
    assert flops_per_token(parameters, model, 8192) == 6 * parameters + 12 * 4096 * seen
    products = 2 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    blocks, head = 32 * products + 4 * 4096 * seen, 2 * 4096 * 100278
    assert hardware_flops_per_token(model, 8192) == 3 * (blocks + head)
    assert hardware_flops_per_token(model, 8192, recompute=1) == 4 * blocks + 3 * head
    whole = products + 4 * 4096 * 8192  # every fourth block from the first has a window
    assert hardware_flops_per_token(model, 8192, recompute=4) == 3 * (blocks + head) + 8 * (whole - 4 * 4096 * 4096)
    assert flops_per_token(parameters, model, 2048) == 6 * parameters + 12 * 4096 * 32 * 2048


def test_memory_of_a_window_is_its_mask_or_nothing(lab: Any) -> None:
    """On a GPU block masks skip what is not seen; elsewhere a dense mask is there during the whole step."""
    sizes = {}
    for window in (8, 64):
        model = {"family": "olmo3", "kv_heads": 4, "sliding_window": window, "sliding_window_pattern": 2}
        config = load(lab.config(f"w{window}", model=model | {"hidden": 64, "heads": 4}, data={"sequence_length": 64}))
        for device in ("cpu", "cuda"):
            found = memory.estimate(config, shards=1, micro_batches=1, device=torch.device(device))
            sizes[device, window] = found.activations
    assert sizes["cuda", 8] == sizes["cuda", 64]
    assert sizes["cpu", 8] - sizes["cpu", 64] >= 64 * 64
