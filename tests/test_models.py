"""The model families against closed forms and plain reference computations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_pretrain import models
from fsdp_pretrain.config.model import GLMModel, GPTModel, LlamaModel
from fsdp_pretrain.config.sections import OptimizerSection, Recompute
from fsdp_pretrain.models import loss
from fsdp_pretrain.models.decoder import Decoder
from fsdp_pretrain.models.layers import GeluMLP
from fsdp_pretrain.models.masks import Slots
from fsdp_pretrain.parallel import optimizer as optim
from fsdp_pretrain.parallel.fsdp import materialise

pytestmark = pytest.mark.quick
LLAMA: dict[str, Any] = {
    "family": "llama",
    "layers": 3,
    "hidden": 48,
    "heads": 6,
    "kv_heads": 2,
    "ffn": 80,
    "vocab": 97,
}
GPT: dict[str, Any] = {"family": "gpt", "layers": 3, "hidden": 48, "heads": 6, "vocab": 97, "positions": 40}


def make(values: dict[str, Any], seed: int = 1, **changes: Any) -> Decoder:
    kind = {"llama": LlamaModel, "gpt": GPTModel, "glm": GLMModel}[values["family"]]
    return materialise(models.build(kind(**{**values, **changes})), seed, torch.device("cpu"))


def tokens(batch: int = 3, length: int = 20, seed: int = 0) -> Tensor:
    return torch.randint(97, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("positions", ["sample", "document"])
@pytest.mark.parametrize("values", [LLAMA, GPT])
def test_every_document_of_a_sample_is_what_it_would_be_alone(values: dict[str, Any], positions: str) -> None:
    """Learned positions must restart for that; rotary ones are relative, so there a restart changes nothing."""
    model, x = make(values), tokens()
    lengths = torch.tensor([[7, 13, 0], [20, 0, 0], [1, 4, 15]], dtype=torch.int32)
    restart = Slots(lengths).positions(20) if positions == "document" else None
    packed = model(x, None, Slots(lengths), restart)
    alike = []
    for row, sizes in enumerate(lengths.tolist()):
        start = 0
        for size in filter(None, sizes):
            alone = model(x[row : row + 1, start : start + size])[0]
            alike.append(torch.allclose(packed[row, start : start + size], alone, rtol=1e-4, atol=1e-5))
            start += size
    assert alike == (
        [True] * 6 if positions == "document" or values is LLAMA else [True, False, True, True, False, False]
    )


def test_llama_against_plain_formulas() -> None:
    """One block and the head, reimplemented with nothing shared."""
    model = make(LLAMA, layers=1)
    x = tokens(1, 9)
    parameters = dict(model.named_parameters())

    def weight(name: str) -> Tensor:
        return parameters[name].detach().double()

    def rms(h: Tensor, g: Tensor) -> Tensor:
        return h / torch.sqrt((h**2).mean(-1, keepdim=True) + 1e-5) * g

    h = weight("embedding.weight")[x[0]]
    normed = rms(h, weight("blocks.0.attention_norm.weight"))
    q = (normed @ weight("blocks.0.attention.query.weight").T).view(9, 6, 8)
    k = (normed @ weight("blocks.0.attention.key.weight").T).view(9, 2, 8)
    v = (normed @ weight("blocks.0.attention.value.weight").T).view(9, 2, 8)
    rotated = []
    for part in (q, k):
        angle = torch.arange(9).double().view(9, 1, 1) * 10000.0 ** -(torch.arange(0, 8, 2).double() / 8)
        turn = torch.polar(torch.ones_like(angle), angle)
        spun = torch.complex(part[..., :4], part[..., 4:]) * turn
        rotated.append(torch.cat((spun.real, spun.imag), -1))
    q, k = rotated
    out = torch.empty(9, 6, 8, dtype=torch.float64)
    for head in range(6):
        scores = q[:, head] @ k[:, head // 3].T / math.sqrt(8)
        scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -math.inf)
        out[:, head] = scores.softmax(-1) @ v[:, head // 3]
    h = h + out.reshape(9, 48) @ weight("blocks.0.attention.out.weight").T
    normed = rms(h, weight("blocks.0.mlp_norm.weight"))
    gate = normed @ weight("blocks.0.mlp.gate.weight").T
    up = normed @ weight("blocks.0.mlp.up.weight").T
    h = h + (gate * torch.sigmoid(gate) * up) @ weight("blocks.0.mlp.down.weight").T
    logits = rms(h, weight("norm.weight")) @ weight("head.weight").T
    torch.testing.assert_close(model(x)[0].double(), logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("per_chunk", "kept"), [(1, 2**30), (2**12, 2**30), (2**12, 0), (2**26, 2**30), (2**26, 0)])
@pytest.mark.promise("exact-loss")
def test_loss_is_the_plain_cross_entropy_whatever_the_chunks(
    per_chunk: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "_LOGITS_PER_CHUNK", per_chunk)
    monkeypatch.setattr(loss, "_KEPT_BYTES", kept)
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 201, 16), torch.randn(97, 16)
    labels = torch.randint(97, (5, 201))
    labels[0, :50] = loss.IGNORE
    results = []
    for compute in (
        lambda h, w: loss.token_losses(h, w, labels)[0],
        lambda h, w: F.cross_entropy((h @ w.T).flatten(0, 1), labels.flatten(), reduction="none").view(5, 201),
    ):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        losses = compute(h, w)
        (losses.sum() / 7).backward()
        results.append((losses, h.grad, w.grad))
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=2e-5)
    assert results[0][0][0, :50].abs().sum() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gradient_of_the_loss_is_the_same_in_one_formula(dtype: torch.dtype) -> None:
    """To the bit: that which is compiled and that which is not, also for targets in another chunk or ignored."""
    torch.manual_seed(0)
    logits, labels = torch.randn(50, 40).to(dtype), torch.randint(-20, 60, (50,))
    inside, local = (labels >= 0) & (labels < 40), labels.clamp(0, 39).unsqueeze(1)
    weights, normalisers = torch.rand(50), logits.float().logsumexp(1)
    given = (local, inside, normalisers, 1.5 * weights.unsqueeze(1), weights)
    fused = loss._fused_backward_chunk(logits, *given)
    assert torch.equal(fused, loss._backward_chunk(logits.clone(), *given)) and fused.dtype is dtype


@pytest.mark.parametrize(("per_chunk", "kept"), [(2**12, 2**30), (2**12, 0), (2**25, 2**30)])
def test_log_normalisers_are_differentiable_too(per_chunk: int, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each position with its own weights for the loss and for the squared normaliser; in fp64 up to rounding."""
    monkeypatch.setattr(loss, "_LOGITS_PER_CHUNK", per_chunk)
    monkeypatch.setattr(loss, "_KEPT_BYTES", kept)
    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(2, 50, 16), torch.randn(97, 16), torch.randint(97, (2, 50))
    labels[1, 20:40] = loss.IGNORE
    a, b = torch.rand(2, 50), torch.rand(2, 50) * (labels != loss.IGNORE)
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    losses, normalisers = loss.token_losses(h, w, labels)
    (losses * a + normalisers.square() * b).sum().backward()
    h64, w64 = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = h64 @ w64.T
    plain = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(2, 50)
    (plain * a + logits.logsumexp(-1).square() * b).sum().backward()
    assert h.grad is not None and w.grad is not None and h64.grad is not None and w64.grad is not None
    torch.testing.assert_close(h.grad.double(), h64.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(w.grad.double(), w64.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.shows("A3")
@pytest.mark.parametrize("values", [LLAMA, GPT, {**LLAMA, "tied_head": True}, {**GPT, "tied_head": False}])
def test_shrink_changes_the_gradient_of_the_table_and_nothing_else(values: dict[str, Any]) -> None:
    x, found = tokens(), {}
    for shrink, head in ((1.0, True), (0.3, True), (0.3, False), (0.0, False)):
        model = make(values)
        model.set_recompute(1)
        model.embedding.shrink, model.embedding.shrink_head = shrink, head
        losses = model(x[:, :-1], x[:, 1:])
        losses.mean().backward()
        found[shrink, head] = (losses.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    losses, plain = found[1.0, True]
    _, without_input = found[0.0, False]
    for (shrink, head), (other, gradients) in found.items():
        assert torch.equal(losses, other)
        for name, gradient in gradients.items():
            expected = plain[name]
            if name == "embedding.weight":  # tied: g_in + g_out, where g_out is the gradient without input
                out = without_input[name]
                expected = shrink * plain[name] if head else shrink * (plain[name] - out) + out
            torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-8)
    assert without_input["embedding.weight"].any() == (make(values).head is None)


@pytest.mark.parametrize(
    ("values", "own"), [(LLAMA, False), (GPT, False), ({**GPT, "dropout": 0.2}, False), ({**GPT, "dropout": 0.2}, True)]
)
def test_recomputation_changes_no_gradient(values: dict[str, Any], own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`own`: with dropout in a feed-forward layer too, as a family of one's own may have it."""
    x, gradients = tokens(), []
    if own:
        compute = GeluMLP.compute
        monkeypatch.setattr(GeluMLP, "compute", lambda self, x: F.dropout(compute(self, x), 0.3))
    ways: tuple[Recompute, ...] = (0, 1, 2, "feed-forward")
    for recompute in ways:
        model = make(values)
        model.set_recompute(recompute)
        torch.manual_seed(0)
        model(x[:, :-1], x[:, 1:]).mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for other in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], other, strict=True))


@pytest.mark.parametrize("values", [{**LLAMA, "hidden": 384, "ffn": 512}, {**GPT, "hidden": 384}])
def test_initial_values(values: dict[str, Any]) -> None:
    """Standard deviations per tensor; every parameter is initialised."""
    model = make(values)
    for name, parameter in model.named_parameters():
        kind = name.split(".")[-2]
        if "norm" in kind or name.endswith("bias"):
            assert (parameter == (0.0 if name.endswith("bias") else 1.0)).all(), name
        else:
            expected = 0.02 / math.sqrt(6) if kind in ("out", "down") else 0.02
            assert float(parameter.std()) == pytest.approx(expected, rel=0.03), name
            assert abs(float(parameter.mean())) < expected / 20, name
    with pytest.raises(KeyError):
        model.initial("blocks.0.attention.unknown.weight")


@pytest.mark.shows("B4")
def test_initial_values_depend_on_seed_and_name_only() -> None:
    a, b, c = make(LLAMA, 1), make(LLAMA, 1), make(LLAMA, 2)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.embedding.weight, c.embedding.weight)
    assert not torch.equal(a.blocks[0].mlp.up.weight, a.blocks[1].mlp.up.weight)
    assert not torch.equal(a.blocks[0].mlp.up.weight, a.blocks[0].mlp.gate.weight)


def test_no_two_rows_are_alike() -> None:
    """Drawing in blocks must not repeat a block (the trap of initialising sharded tensors)."""
    weight = make({**LLAMA, "vocab": 70_000}).embedding.weight
    assert len(torch.unique(weight[:, 0])) > 69_000


def test_asking_for_optimiser_state_takes_no_step() -> None:
    model = make(LLAMA)
    before = [parameter.clone() for parameter in model.parameters()]
    optimizer = optim.Optimizer(model, OptimizerSection(lr=1e-3))
    states = optimizer.state_by_name()
    assert set(states) == {name for name, _ in model.named_parameters()}
    assert all(float(state["step"]) == 0 for state in states.values())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
