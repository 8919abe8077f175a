"""The yardstick: Llama and a training loop as one writes them by hand, without anything that a long run needs.

Plain modules, PyTorch's attention, one cross-entropy over all logits, fused AdamW, clipping. No FSDP, no schedule, no
record, no checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.model import LlamaModel
from fsdp_pretrain.parallel import fsdp
from fsdp_pretrain.train.trainer import DataStream


@dataclass(frozen=True)
class Network:
    """A model of any library.

    Attributes:
        module: has the parameters, fp32.
        blocks: its decoder blocks, each compiled on its own if the configuration says so.
        logits: int64 [B, S] -> [B, S, V], in the dtype of the parameters.
    """

    module: nn.Module
    blocks: Sequence[nn.Module]
    logits: Callable[[Tensor], Tensor]


class MinimalBlock(nn.Module):
    """One decoder block; parameters have the names of `models.llama.LlamaBlock`."""

    def __init__(self, config: LlamaModel) -> None:
        super().__init__()
        hidden, narrow = config.hidden, config.kv_width
        self.head_dim, self.grouped = config.head_dim, narrow != hidden
        self.attention_norm = nn.RMSNorm(hidden, eps=config.norm_eps)
        self.attention = _layers(
            query=(hidden, hidden), key=(hidden, narrow), value=(hidden, narrow), out=(hidden, hidden)
        )
        self.mlp_norm = nn.RMSNorm(hidden, eps=config.norm_eps)
        self.mlp = _layers(gate=(hidden, config.ffn), up=(hidden, config.ffn), down=(config.ffn, hidden))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, S, H]; cos and sin fp32 [S, head_dim / 2]."""
        y = self.attention_norm(x)
        query = _rotate(self._heads(self.attention["query"](y)), cos, sin)
        key = _rotate(self._heads(self.attention["key"](y)), cos, sin)
        value = self._heads(self.attention["value"](y))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.grouped)
        x = x + self.attention["out"](mixed.transpose(1, 2).flatten(2))
        y = self.mlp_norm(x)
        out: Tensor = x + self.mlp["down"](F.silu(self.mlp["gate"](y)) * self.mlp["up"](y))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        """[B, S, heads * d] -> [B, heads, S, d]."""
        return x.view(x.shape[0], x.shape[1], -1, self.head_dim).transpose(1, 2)


class MinimalLlama(nn.Module):
    """Embedding, blocks, norm, output matrix; parameters have the names of `models.llama.Llama`."""

    def __init__(self, config: LlamaModel) -> None:
        super().__init__()
        self.head_dim, self.base = config.head_dim, config.rope_base
        self.embedding = nn.Embedding(config.rows, config.hidden)
        self.blocks = nn.ModuleList(MinimalBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden, config.rows, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits: int64 [B, S] -> [B, S, V]."""
        dimensions = torch.arange(0, self.head_dim, 2, device=tokens.device, dtype=torch.float32)
        positions = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)
        angles = torch.outer(positions, self.base ** (-dimensions / self.head_dim))
        x, cos, sin = self.embedding(tokens), angles.cos(), angles.sin()
        for block in self.blocks:
            x = block(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build_minimal(config: LlamaModel) -> Network:
    """The minimal model, on the default device."""
    model = MinimalLlama(config)
    return Network(model, list(model.blocks), model)


def _layers(**shapes: tuple[int, int]) -> nn.ModuleDict:
    """Linear layers without bias, by name: (inputs, outputs)."""
    return nn.ModuleDict({name: nn.Linear(*shape, bias=False) for name, shape in shapes.items()})


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, heads, S, d], element i paired with i + d / 2, in fp32."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class PlainLoop:
    """Trains a network: micro-batches, clipping, fused AdamW.

    Precision is that of FSDP2 with fp32 parameters: matrix products in `dtype` on a copy of the parameters, gradients
    added up, clipped and applied in fp32. With fp32 there is no copy.

    Args:
        network: on `device`.
        config: its optimiser, clipping and whether blocks are compiled; schedules are left out.
        batches: of which only the tokens are used.
        dtype: of the matrix products.
    """

    def __init__(
        self, network: Network, config: Config, batches: DataStream, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._logits, self._batches, self._device = network.logits, batches, device
        self._limit = config.train.grad_clip
        self._weights: list[Tensor] = list(network.module.parameters())
        self._masters, self._copies = self._weights, dtype is not torch.float32
        if self._copies:
            self._masters = [weight.detach() for weight in self._weights]
            for weight, master in zip(self._weights, self._masters, strict=True):
                weight.data = weight.data.to(dtype)
                master.grad = torch.zeros_like(master)
        self._optimizer = _adamw(self._masters, config)
        self._cross_entropy: Callable[[Tensor, Tensor], Tensor] = _cross_entropy
        if fsdp.compiles(config, device):
            self._cross_entropy = torch.compile(_cross_entropy)
            for block in network.blocks:
                block.compile()
        self._loss = torch.zeros((), device=device)

    def step(self) -> None:
        """Issue one optimiser step."""
        batch = next(self._batches)
        self._loss.zero_()
        for number, micro in enumerate(batch.micro):
            tokens = micro.tokens.to(self._device, non_blocking=True)
            loss = self._cross_entropy(self._logits(tokens[:, :-1].contiguous()), tokens[:, 1:]) / batch.targets
            loss.backward()
            self._loss += loss.detach()
            if self._copies:
                self._take_gradients(first=number == 0)
        if self._limit:
            nn.utils.clip_grad_norm_(self._masters, self._limit)
        self._optimizer.step()
        if not self._copies:
            self._optimizer.zero_grad()
            return
        with torch.no_grad():
            torch._foreach_copy_(self._weights, self._masters)

    def loss(self) -> float:
        """Mean loss of the last step, in nats per target; waits for the device."""
        return float(self._loss)

    @torch.no_grad()
    def _take_gradients(self, *, first: bool) -> None:
        """Add the gradients of a micro-batch to those of the step, in fp32."""
        sums = [master.grad for master in self._masters if master.grad is not None]
        gradients = [weight.grad for weight in self._weights if weight.grad is not None]
        if first:
            torch._foreach_copy_(sums, gradients)
        else:
            torch._foreach_add_(sums, gradients)
        for weight in self._weights:
            weight.grad = None


def _adamw(parameters: list[Tensor], config: Config) -> torch.optim.AdamW:
    """Fused, with the run's settings at a constant rate; vectors (norms) do not decay."""
    section = config.optimizer
    groups = [
        {"params": [each for each in parameters if each.ndim > 1], "weight_decay": section.weight_decay},
        {"params": [each for each in parameters if each.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps, fused=True)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the loss: [B, S, V], int64 [B, S] -> fp32 scalar."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
