"""The trainer beside other implementations of its model: `python -m fsdp_pretrain.bench CONFIG --peers`.

In every round each side trains in a fresh process, the next round in the opposite order. So no side inherits memory,
caches or a warm device from another, two models never have to fit on a GPU together, and a neighbour's load falls on
all sides alike. Compare the ratios: they are computed within rounds.

The other sides train the same Llama on the same tokens in the same precision, in a loop as one writes it by hand: one
cross-entropy over all logits, clipping, fused AdamW; no FSDP, no schedule, no record, no checks.

- `plain`: the trainer's own model; what it gains on `ours` is the cost of everything around the model.
- `transformers`: LlamaForCausalLM with PyTorch's attention.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_pretrain import models
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.model import LlamaModel
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.hf import layout as hf_layout
from fsdp_pretrain.models.masks import choose_backend
from fsdp_pretrain.parallel import fsdp, mesh
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.plan.plan import count_parameters
from fsdp_pretrain.ranks import RankInfo
from fsdp_pretrain.train.batch_reader import DataStream

from . import measured
from .measured import MeasuredSteps, Spread
from .steps import RandomSteps, initialise, step_times

OURS = "ours"


@dataclass
class Comparison:
    """The results of all rounds."""

    rounds: list[dict[str, MeasuredSteps]] = field(default_factory=list)  # results of each round by side
    failed: dict[str, str] = field(default_factory=dict)  # reasons by side; a side that failed is not started again

    def ratio(self, side: str) -> Spread | None:
        """A side's step time divided by ours in the same round; None without a common round."""
        both = [
            times[side].speed.seconds_per_step / times[OURS].speed.seconds_per_step
            for times in self.rounds
            if {side, OURS} <= times.keys()
        ]
        return Spread.of(both) if both else None


def compare(config: Config, command: Sequence[str], *, rounds: int, limit: float) -> Comparison:
    """Measure all sides in alternating rounds. An interrupt ends the comparison early, with the results so far.

    Args:
        config: what to train.
        command: arguments of the benchmark that describe `config`.
        limit: seconds after which a side's process is ended.

    Raises:
        ConfigError: not every side can train this.
    """
    _check(config)
    result, remaining = Comparison(), [OURS, *NETWORKS]
    with contextlib.suppress(KeyboardInterrupt):
        for number in range(rounds):
            by_side: dict[str, MeasuredSteps] = {}
            result.rounds.append(by_side)
            for side in remaining if number % 2 == 0 else remaining[::-1]:
                times = measured.measure([*command, "--side", side], limit=limit)
                if isinstance(times, str):
                    result.failed[side] = times
                else:
                    by_side[side] = times
                print(f"round {number + 1} of {rounds}, {side}: {times}", file=sys.stderr, flush=True)
            remaining = [side for side in remaining if side in by_side]
    return result


def _check(config: Config) -> None:
    """Raise ConfigError if other implementations would not compute the same."""
    model, train = config.model, config.train
    checks = [(f"model.family = {model.family}", model.family != "llama")]
    if isinstance(model, LlamaModel):
        checks += [
            ("model.head_size", model.query_width != model.hidden),
            ("model.tied_head", model.tied_head),
            ("model.rope_scaling", model.rope_scaling is not None),
        ]
    checks += [
        ("data.attention = document", config.data.attention == "document"),
        ("train.z_loss", train.z_loss > 0),
        (f"train.precision = {train.precision}", train.precision in ("fp16", "bf16+fp8")),
        ("parallel.recompute", config.parallel.recompute != 0),
        (f"optimizer.kind = {config.optimizer.kind}", config.optimizer.kind != "adamw"),
        ("optimizer.groups", bool(config.optimizer.groups)),
        ("optimizer.embedding_shrink", config.optimizer.embedding_shrink != 1),
    ]
    unsupported = [key for key, differs in checks if differs]
    if unsupported:
        raise ConfigError(
            f"--peers cannot compare this configuration: {', '.join(unsupported)}",
            effect="other implementations would compute something else, or more",
            remedy="take it out, or override it on the command line",
        )


def render(result: Comparison) -> Iterator[str]:
    """The results as lines of text."""
    shared = next((times for by_side in result.rounds for times in by_side.values()), None)
    if shared is None:
        yield "no side could be measured"
    else:
        yield (
            f"{shared.run}: {shared.dtype}, {'compiled' if shared.compiled else 'eager'}, {shared.speed.device}, torch "
            f"{shared.torch}; {len(result.rounds)} rounds of {shared.steps} steps, median [least to most]"
        )
    for side in (OURS, *NETWORKS):
        if results := [by_side[side] for by_side in result.rounds if side in by_side]:
            ratio = "" if side == OURS or result.ratio(side) is None else f", {result.ratio(side)} of ours"
            seconds = Spread.of([times.speed.seconds_per_step for times in results])
            yield f"  {side:<13} step {seconds}s{ratio}; loss {results[-1].loss:.3f}"
            yield f"  {'':<13} the last: {results[-1]}"
    yield from (f"  {side:<13} failed: {reason}" for side, reason in result.failed.items())


# ---------------------------------------------------------------------- the other sides


@dataclass(frozen=True)
class Network:
    """A model of any library."""

    module: nn.Module  # holds the parameters, fp32
    blocks: Sequence[nn.Module]  # its decoder blocks, each compiled on its own if the configuration says so
    logits: Callable[[Tensor], Tensor]  # int64 [B, S] -> [B, S, V], in the dtype of the parameters


def measure_side(name: str, config: Config, *, steps: int, warmup: int) -> MeasuredSteps:
    """Time `steps` steps of another implementation after `warmup`, without a process group. Raises ConfigError if its
    library is not installed."""
    alone = mesh.SingleProcess()
    device = alone.device = mesh.device_of(RankInfo.from_environment())
    with torch.device(device):
        network = NETWORKS[name](config, alone)
    network.module.train()
    parameters = sum(parameter.numel() for parameter in network.module.parameters())
    assert parameters == count_parameters(config.model), f"{parameters:_} parameters"
    loop = PlainLoop(network, config, RandomSteps(config, alone), device, fsdp.compute_dtype(config, device))
    for _ in range(warmup):
        loop.step()
    loop.loss()  # waits for the device
    start = time.perf_counter()
    for _ in range(steps):
        loop.step()
    loss = loop.loss()
    seconds, batch = (time.perf_counter() - start) / steps, config.schedule.batch.full
    return step_times(config, alone, batch=batch, steps=steps, seconds=seconds, loss=loss, side=name)


def _build_plain(config: Config, world: World) -> Network:
    model = models.build(config.model).to_empty(device=world.device)
    model.backend = choose_backend(config.parallel.attention, config.model, world.device)
    initialise(model, config, world)
    return Network(model, list(model.blocks), model)


def _build_transformers(config: Config, world: World) -> Network:
    """LlamaForCausalLM with its own initial values, on the default device."""
    del world
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(f"transformers cannot be imported: {error}") from None
    assert isinstance(config.model, LlamaModel)
    values = hf_layout.to_hf(config.model, sequence_length=config.data.sequence_length, eod=0, dtype="float32")
    hf_config = transformers.LlamaConfig.from_dict(values | {"use_cache": False})
    module = transformers.AutoModelForCausalLM.from_config(hf_config, attn_implementation="sdpa")
    return Network(module, list(module.model.layers), lambda tokens: module(input_ids=tokens, use_cache=False).logits)


NETWORKS: dict[str, Callable[[Config, World], Network]] = {"plain": _build_plain, "transformers": _build_transformers}
"""Builders of the model of a side, on the default device, which is that of the world. They raise ConfigError."""


class PlainLoop:
    """Trains a network: micro-batches, clipping, fused AdamW.

    Precision is that of FSDP2 with fp32 parameters: matrix products in `dtype` on a copy of the parameters, gradients
    added up, clipped and applied in fp32. With fp32 there is no copy.

    Args:
        network: the model, on `device`.
        config: gives the optimiser, clipping and whether blocks are compiled; schedules are left out.
        batches: batches of steps, of which only the tokens are used.
        dtype: dtype of the matrix products.
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
                self._accumulate_gradients(first=number == 0)
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
    def _accumulate_gradients(self, *, first: bool) -> None:
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
    """Fused AdamW with the run's settings at a constant rate; vectors (norms) do not decay."""
    section = config.optimizer
    groups = [
        {"params": [weight for weight in parameters if weight.ndim > 1], "weight_decay": section.weight_decay},
        {"params": [weight for weight in parameters if weight.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps, fused=True)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the loss: [B, S, V], int64 [B, S] -> fp32 scalar."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
