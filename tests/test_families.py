"""Masks and the specifics of the Megatron-GPT and GLM families, against closed forms and reimplemented formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from test_models import GPT, make
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_mask, flex_attention

from fsdp_pretrain.config.model import GLMModel, GPTModel, RopeScaling
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.models.attention import scaled_attention
from fsdp_pretrain.models.decoder import Decoder
from fsdp_pretrain.models.layers import rotary_frequencies
from fsdp_pretrain.models.masks import (
    Slots,
    add_alibi,
    alibi_score_mod,
    alibi_slopes,
    block_mask,
    choose_backend,
    dense_mask,
)

pytestmark = pytest.mark.quick
CPU = torch.device("cpu")
GLM: dict[str, Any] = {"family": "glm", "layers": 3, "hidden": 48, "heads": 4, "vocab": 97}


def tokens(batch: int = 2, length: int = 20, seed: int = 0) -> Tensor:
    return torch.randint(97, (batch, length), generator=torch.Generator().manual_seed(seed))


def slots(lengths: list[list[int]], prefix: list[list[int]] | None = None) -> Slots:
    return Slots(torch.tensor(lengths), None if prefix is None else torch.tensor(prefix))


# ---------------------------------------------------------------------- masks


def rule(lengths: list[int], prefix: list[int] | None, window: int = 10**6) -> list[list[bool]]:
    """visible(q, k) = same slot and (k <= q or k in the slot's prefix) and q - k < window, token by token."""
    where = [(i, j) for i, length in enumerate(lengths) for j in range(length)]
    return [
        [a == b and (k <= q or k < (prefix[a] if prefix else 0)) and q - k < window for b, k in where] for a, q in where
    ]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_masks_are_the_rule_in_both_forms(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    prefix = data.draw(st.none() | st.tuples(*[st.integers(0, length) for length in lengths]).map(list))
    window = data.draw(st.none() | st.integers(1, 12))
    packed = slots([lengths], None if prefix is None else [prefix])
    size, expected = sum(lengths), torch.tensor(rule(lengths, prefix, window or 10**6))
    assert torch.equal(dense_mask(packed, size, CPU, window)[0, 0], expected)
    blocks = block_mask(packed, size, window)
    assert torch.equal(create_mask(blocks.mask_mod, 1, None, size, size, device="cpu")[0, 0], expected)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_blocks_are_those_with_something_to_see(data: st.DataObject) -> None:
    """A block mask lists every block of the rule; without a prefix no other; and as full only those seen entirely."""
    lengths = data.draw(st.lists(st.integers(1, 400), min_size=1, max_size=4))
    prefix = data.draw(st.none() | st.tuples(*[st.integers(0, length) for length in lengths]).map(list))
    window = data.draw(st.none() | st.integers(1, 500) | st.sampled_from([1, 127, 128, 129, 255, 256, 257]))
    packed, size = slots([lengths], None if prefix is None else [prefix]), sum(lengths)
    blocks = block_mask(packed, size, window)
    count, edge = -(-size // 128), -size % 128
    tiles = F.pad(dense_mask(packed, size, CPU, window)[0, 0], (0, edge, 0, edge)).view(count, 128, count, 128)
    seen = tiles.any(3).any(1)
    full = torch.zeros(count, count, dtype=torch.bool)
    for query, number in enumerate(blocks.full_kv_num_blocks[0, 0]):
        full[query, blocks.full_kv_indices[0, 0, query, :number]] = True
    listed = blocks.to_dense()[0, 0].bool()
    assert bool((listed >= seen).all()) and (prefix is not None or torch.equal(listed, seen))
    rows = torch.arange(count * 128).view(count, 128, 1, 1) < size  # rows after the end are computed and dropped
    assert bool((tiles | ~rows).all(3).all(1)[full].all())


@pytest.mark.parametrize("heads", [4, 6])
def test_alibi_is_the_same_with_both_kernels(heads: int) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, heads, 32, 16).unbind()
    for packed in (slots([[5, 9, 18], [32, 0, 0]]), slots([[32], [32]])):
        bias = add_alibi(dense_mask(packed, 32, CPU), heads, torch.float32)
        dense = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        blocks = flex_attention(query, key, value, alibi_score_mod(heads), block_mask(packed, 32))
        torch.testing.assert_close(blocks, dense, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("values", "device", "reason"),
    [
        (GLM, "cpu", "no backward pass on cpu"),
        ({**GPT, "hidden": 64, "heads": 8}, "cuda", "at least 16, not 8"),
        ({**GPT, "hidden": 96, "dropout": 0.1}, "cuda", "dropout"),
        ({**GPT, "hidden": 96, "scores": "layer_scaled"}, "cuda", "step by step"),
    ],
)
def test_a_kernel_that_cannot_serve_is_refused(values: dict[str, Any], device: str, reason: str) -> None:
    config = (GLMModel if values["family"] == "glm" else GPTModel)(**values)
    with pytest.raises(ConfigError, match=reason):
        choose_backend("flex", config, torch.device(device))
    assert choose_backend("auto", config, torch.device(device)) == "sdpa"


@pytest.mark.parametrize("heads", [6, 4])
def test_kernels_of_a_gpu(heads: int) -> None:
    config = GLMModel(**{**GLM, "hidden": 96, "heads": heads})
    assert [choose_backend(asked, config, torch.device("cuda")) for asked in ("auto", "flex", "sdpa")] == [
        "flex",
        "flex",
        "sdpa",
    ]


# ---------------------------------------------------------------------- scores


@pytest.mark.shows("B10")
@pytest.mark.parametrize("layer", [0, 1, 7, 69])
def test_scaled_scores_are_plain_attention(layer: int) -> None:
    torch.manual_seed(layer)
    query, key, value = (torch.randn(2, 3, 11, 16, dtype=torch.float32) for _ in range(3))
    mask = dense_mask(slots([[4, 7], [11, 0]], [[2, 3], [0, 0]]), 11, CPU)
    plain = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    torch.testing.assert_close(scaled_attention(query, key, value, mask, layer, 0.0), plain, rtol=1e-6, atol=1e-6)


@pytest.mark.shows("B10")
def test_scaled_scores_survive_fp16_where_plain_ones_do_not() -> None:
    query = key = torch.full((1, 1, 4, 64), 40.0, dtype=torch.float16)
    value, mask = torch.randn(1, 1, 4, 64).half(), dense_mask(None, 4, CPU)
    assert not torch.isfinite(query @ key.transpose(2, 3)).all()
    assert torch.isfinite(scaled_attention(query, key, value, mask, 30, 0.0)).all()


@pytest.mark.parametrize("values", [GPT, GLM, {**GPT, "positions": "alibi"}])
def test_models_with_scaled_scores_are_the_same_models(values: dict[str, Any]) -> None:
    x, packed = tokens(), slots([[8, 12], [20, 0]], None if values["family"] == "gpt" else [[3, 5], [20, 0]])
    for layout in (None, packed):
        torch.testing.assert_close(
            make(values, scores="layer_scaled")(x, None, layout), make(values)(x, None, layout), rtol=1e-4, atol=1e-5
        )


def test_dropout_is_of_training_alone() -> None:
    model, x = make(GPT, dropout=0.5), tokens()
    assert model.config.uses_dropout and not torch.equal(model(x), model(x))
    assert torch.equal(model.eval()(x), model(x))


# ---------------------------------------------------------------------- Megatron-GPT


def test_alibi_slopes() -> None:
    assert alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    # 12 heads: those of 8, then the 1st, 3rd, 5th and 7th of 16.
    assert alibi_slopes(12) == pytest.approx([2.0**-i for i in range(1, 9)] + [2.0**-e for e in (0.5, 1.5, 2.5, 3.5)])
    assert len(alibi_slopes(112)) == len(set(alibi_slopes(112))) == 112


def test_alibi_is_a_slope_times_the_key_index() -> None:
    """BLOOM adds slope * key index; ours differs by a constant per row, which the softmax does not see."""
    torch.manual_seed(0)
    scores = torch.randn(1, 6, 9, 9)
    bias = torch.tensor(alibi_slopes(6)).view(1, 6, 1, 1) * torch.arange(9)
    theirs = (scores + bias).masked_fill(torch.ones(9, 9).triu(1).bool(), -math.inf).softmax(-1)
    ours = (scores + add_alibi(dense_mask(None, 9, CPU), 6, torch.float32)).softmax(-1)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.shows("B22")
def test_embedding_norm_stands_before_positions() -> None:
    model, x = make(GPT, embedding_norm=True), tokens()
    assert model.count_parameters() == make(GPT).count_parameters() + 2 * 48
    normed = F.layer_norm(model.embedding(x), (48,), eps=1e-5)
    expected = normed + model.get_parameter("positions.weight")[:20]
    torch.testing.assert_close(model.embed_tokens(x, torch.arange(20)), expected)


@pytest.mark.parametrize(
    ("rule", "hidden", "std"),
    [("sqrt(2/(5h))", 11600, 0.005872), ("sqrt(1/(3h))", 14336, 0.004822), ("sqrt(1/(3h))", 12288, 0.005208)],
)
def test_rules_of_the_initial_values(rule: Any, hidden: int, std: float) -> None:
    config = GPTModel(family="gpt", layers=1, hidden=hidden, heads=1, vocab=9, positions=9, init_std=rule)
    assert config.std == pytest.approx(std, abs=5e-7)
    model = make(GPT, init_std=rule, hidden=384, vocab=999)
    expected = GPTModel(**{**GPT, "init_std": rule, "hidden": 384}).std
    assert float(model.embedding.weight.std()) == pytest.approx(expected, rel=0.02)
    assert float(model.get_parameter("blocks.1.mlp.down.weight").std()) == pytest.approx(expected / 6**0.5, rel=0.02)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_rope_scaling(kind: Any) -> None:
    plain = rotary_frequencies(128, 5e5, None, CPU)
    stretched = rotary_frequencies(128, 5e5, RopeScaling(kind=kind, factor=8), CPU)
    if kind == "linear":
        torch.testing.assert_close(stretched, plain / 8)
        return
    turns = 8192 * plain / (2 * math.pi)
    if kind == "yarn":  # 32 waves and more as they are, one and less divided, between them linear by dimension
        assert (stretched == plain).sum() == (turns >= 32).sum()
        torch.testing.assert_close(stretched[turns < 1], plain[turns < 1] / 8)
        steps = (stretched / plain)[(turns < 32) & (turns >= 1)].diff()
        torch.testing.assert_close(steps, steps.mean().expand(len(steps)), rtol=1e-3, atol=0)
        assert len(steps) > 9 and RopeScaling(kind=kind, factor=8).gain == pytest.approx(1.2079441541679836)
        return
    assert torch.equal(stretched[turns > 4], plain[turns > 4])
    torch.testing.assert_close(stretched[turns < 1], plain[turns < 1] / 8)
    between = (turns >= 1) & (turns <= 4)
    blend = (turns[between] - 1) / 3
    torch.testing.assert_close(stretched[between], (1 - blend) * plain[between] / 8 + blend * plain[between])
    assert between.any() and (stretched.diff() < 0).all()


# ---------------------------------------------------------------------- GLM


@pytest.mark.parametrize("positions", ["rope", "rope-2d"])
def test_glm_against_plain_formulas(positions: str) -> None:
    """A whole model with one blank, reimplemented in fp64 with nothing shared."""
    model, x = make(GLM, positions=positions, layers=2), tokens(1, 9)
    places = torch.tensor([[0, 1, 2, 3, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 2, 3, 4, 5]])
    values = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    for name, value in values.items():  # norms and biases away from 1 and 0
        if name.endswith("bias") or "norm" in name:
            value += torch.randn(value.shape, dtype=torch.float64) * 0.1
            dict(model.named_parameters())[name].data.copy_(value)

    def linear(h: Tensor, name: str) -> Tensor:
        return h @ values[f"{name}.weight"].T + values[f"{name}.bias"]

    def norm(h: Tensor, name: str) -> Tensor:
        h = (h - h.mean(-1, keepdim=True)) / torch.sqrt(h.var(-1, unbiased=False, keepdim=True) + 1e-5)
        return h * values[f"{name}.weight"] + values[f"{name}.bias"]

    def spin(part: Tensor, place: Tensor) -> Tensor:  # [9, heads, n], pairs (i, i + n / 2)
        n = part.shape[-1]
        angle = place.double().view(9, 1, 1) * 10000.0 ** -(torch.arange(0, n, 2).double() / n)
        spun = torch.complex(part[..., : n // 2], part[..., n // 2 :]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((spun.real, spun.imag), -1)

    def turn(part: Tensor) -> Tensor:
        if positions == "rope":
            return spin(part, places[0])
        return torch.cat((spin(part[..., :6], places[0]), spin(part[..., 6:], places[1])), -1)

    visible = torch.tensor(rule([9], [4]))
    alpha, h = 2.0, values["embedding.weight"][x[0]]  # (2 * 2)^(1/2)
    for block in ("blocks.0", "blocks.1"):
        u = norm(h, f"{block}.attention_norm")
        q, k, v = (linear(u, f"{block}.attention.{part}").view(9, 4, 12) for part in ("query", "key", "value"))
        q, k, mixed = turn(q), turn(k), torch.empty(9, 4, 12, dtype=torch.float64)
        for head in range(4):
            scores = (q[:, head] @ k[:, head].T / math.sqrt(12)).masked_fill(~visible, -math.inf)
            mixed[:, head] = scores.softmax(-1) @ v[:, head]
        h = alpha * u + linear(mixed.reshape(9, 48), f"{block}.attention.out")
        u = norm(h, f"{block}.mlp_norm")
        gate = linear(u, f"{block}.mlp.gate")
        gate = gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2)))
        h = alpha * u + linear(linear(u, f"{block}.mlp.up") * gate, f"{block}.mlp.down")
    expected = norm(h, "norm") @ values["embedding.weight"].T
    given_places = places[0].unsqueeze(0) if positions == "rope" else places.unsqueeze(0)
    logits = model(x, None, slots([[9]], [[4]]), given_places)[0].double()
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def test_deepnorm_initial_values_per_tensor_and_head() -> None:
    """Standard deviations of the table of GLM-130B, within 2%, for every head; 2L + 1 norms."""
    model = make(GLM, hidden=768, heads=4, layers=2, vocab=4000)
    h, f, beta = 768, 2048, 4**-0.5
    expected = {
        "query": h**-0.5,
        "key": h**-0.5,
        "value": beta * h**-0.5,
        "out": beta * h**-0.5,
        "up": beta * math.sqrt(2 / (h + f)),
        "gate": beta * math.sqrt(2 / (h + f)),
        "down": beta * math.sqrt(2 / (h + f)),
        "embedding": math.sqrt(2 / (4000 + h)),
    }
    for name, parameter in model.named_parameters():
        kind = name.split(".")[-2]
        if parameter.ndim == 1:
            assert (parameter == (1.0 if "norm" in kind and name.endswith("weight") else 0.0)).all(), name
        else:
            parts = parameter.chunk(4) if kind in ("query", "key", "value") else (parameter,)
            for part in parts:
                assert float(part.std()) == pytest.approx(expected[kind], rel=0.02), name
    assert sum(isinstance(module, nn.LayerNorm) for module in model.modules()) == 5
    with pytest.raises(KeyError):
        model.initial("blocks.0.attention.unknown.weight")


def blank(model: Decoder, x: Tensor, positions: Tensor | None = None) -> Tensor:
    """Logits with one slot of 12 tokens, its first 7 the prefix, and one of 8 with a prefix of 3."""
    return model(x, None, slots([[12, 8]], [[7, 3]]), positions)


@pytest.mark.parametrize("positions", ["rope", "rope-2d"])
def test_what_may_change_what(positions: str) -> None:
    model, x = make(GLM, positions=positions), tokens(1)
    before = blank(model, x)

    def changed(at: int) -> list[bool]:
        y = x.clone()
        y[0, at] = (y[0, at] + 1) % 97
        after = blank(model, y)
        return [not torch.equal(before[0, i], after[0, i]) for i in range(20)]

    assert changed(10) == [10 <= i < 12 for i in range(20)]  # part B: itself and later in its slot
    assert changed(6) == [i < 12 for i in range(20)]  # part A: the whole slot, and no other
    assert changed(14) == [i >= 12 for i in range(20)]


def test_positions_of_two_dimensions_need_a_model_that_has_them() -> None:
    with pytest.raises(ValueError, match="rope-2d"):
        make(GLM)(tokens(), None, None, torch.zeros(2, 2, 20, dtype=torch.int64))


@pytest.mark.shows("B14")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 64}, "multiple of 3"),
        ({"heads": 16}, "head size that is a multiple of 2"),
        ({"heads": 8, "positions": "rope-2d"}, "head size that is a multiple of 4"),
    ],
)
def test_shapes_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GLMModel(**{**GLM, **changes})
