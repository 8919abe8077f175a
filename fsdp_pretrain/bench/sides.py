"""One side of `--peers`, in a process of its own: `python -m fsdp_pretrain.bench CONFIG --side NAME`.

All sides train the same Llama on the same tokens in the same precision. What a side is:

- `ours`: the trainer's own step, as in every benchmark here.
- `minimal`: a loop as one writes it by hand, see `minimal`.
- `transformers`: LlamaForCausalLM with PyTorch's attention, in that loop.
- `torchtitan`: its Llama 3 (release 0.2, whose interface 0.3 replaced), in that loop.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from data.packing.loader import StepBatch
from fsdp_pretrain.checkpoint import hf_layout
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.model import LlamaModel
from fsdp_pretrain.parallel import fsdp
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.plan import flops, plan
from fsdp_pretrain.train.trainer import LAG, DataStream, Trainer

from .minimal import Network, PlainLoop, build_minimal
from .peers import Measured, titan_problem


@dataclass(frozen=True)
class Side:
    """Something that trains.

    Attributes:
        step: issues one optimiser step.
        loss: the mean loss of the last step, in nats per target; waits for the device.
        parameters: their number, tied ones once.
    """

    step: Callable[[], None]
    loss: Callable[[], float]
    parameters: int


class MissingPeerError(Exception):
    """The library of a side is not installed, or is of a release that this benchmark does not know."""


class CountedTokens:
    """Batches, of which it keeps the number of targets and the sum of the ids of the first: equal on equal sides."""

    def __init__(self, batches: DataStream) -> None:
        self._batches, self.blank = batches, batches.blank
        self.targets = self.sum = 0

    def __next__(self) -> StepBatch:
        batch = next(self._batches)
        if not self.targets:
            self.targets, self.sum = batch.targets, sum(int(micro.tokens.sum()) for micro in batch.micro)
        return batch


def build_ours(
    build: Callable[[Config, World], tuple[Trainer, Any]], config: Config, world: World
) -> tuple[Side, CountedTokens]:
    """The trainer; `build` returns it with the recorder of its step records."""
    trainer, records = build(config, world)
    tokens = trainer.data = CountedTokens(trainer.data)

    def step() -> None:
        trainer.step()
        trainer.collect(keep=LAG)

    def loss() -> float:
        trainer.collect(keep=0)
        return float(records.records[-1].loss.mean)

    return Side(step, loss, trainer.model.count_parameters()), tokens


def build_peer(name: str, config: Config, batches: DataStream, device: torch.device) -> tuple[Side, CountedTokens]:
    """Another implementation. Raises MissingPeerError."""
    assert isinstance(config.model, LlamaModel)
    with torch.device(device):
        network = NETWORKS[name](config.model, config.data.sequence_length)
    network.module.train()
    _initialise(network.module, config.model.std, config.run.seed)
    parameters = sum(parameter.numel() for parameter in network.module.parameters())
    tokens = CountedTokens(batches)
    loop = PlainLoop(network, config, tokens, device, fsdp.compute_dtype(config, device))
    return Side(loop.step, loop.loss, parameters), tokens


def measure(
    side: Side, tokens: CountedTokens, config: Config, device: torch.device, *, steps: int, warmup: int
) -> Measured:
    """Time `steps` steps after `warmup`, until the device has finished them."""
    expected = plan.count_parameters(config.model)
    assert side.parameters == expected, f"{side.parameters:_} parameters instead of {expected:_}"
    for _ in range(warmup):
        side.step()
    _wait(device)
    wall, used = time.perf_counter(), time.process_time()
    for _ in range(steps):
        side.step()
    _wait(device)
    wall, used = time.perf_counter() - wall, time.process_time() - used
    return Measured(
        seconds=wall / steps,
        processor=used / steps,
        memory=flops.memory_in_use(device),
        loss=side.loss(),
        parameters=side.parameters,
        targets=tokens.targets,
        tokens_sum=tokens.sum,
        device=flops.device_name(device),
        torch=torch.__version__,
        compiled=fsdp.compiles(config, device),
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def _initialise(module: nn.Module, std: float, seed: int) -> None:
    """Norms 1, all else N(0, std^2): speed hardly depends on values, but it does on zeros."""
    torch.manual_seed(seed)
    for parameter in module.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=std)
        else:
            parameter.fill_(1.0)


def _build_transformers(model: LlamaModel, length: int) -> Network:
    library = _import("transformers")
    values = hf_layout.to_hf(model, sequence_length=length, eod=0, dtype="float32")
    config = library.LlamaConfig.from_dict(values | {"use_cache": False})
    module = library.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return Network(module, list(module.model.layers), lambda tokens: module(input_ids=tokens, use_cache=False).logits)


def _build_torchtitan(model: LlamaModel, length: int) -> Network:
    if problem := titan_problem():
        raise MissingPeerError(problem)
    of = _import("torchtitan.models.llama3.model.args")
    module = _import("torchtitan.models.llama3.model.model").Transformer(
        of.TransformerModelArgs(
            dim=model.hidden,
            n_layers=model.layers,
            n_heads=model.heads,
            n_kv_heads=model.kv_heads,
            vocab_size=model.rows,
            # It computes the width as a multiplier times 8 * hidden / 3, rounded up to a multiple: to this one.
            multiple_of=model.ffn,
            ffn_dim_multiplier=0.5 * model.ffn / (8 * model.hidden / 3),
            norm_eps=model.norm_eps,
            rope_theta=model.rope_base,
            max_seq_len=length,
        )
    )
    return Network(module, list(module.layers.values()), module)


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPeerError(f"{name} cannot be imported: {error}") from None


NETWORKS: dict[str, Callable[[LlamaModel, int], Network]] = {
    "minimal": lambda model, length: build_minimal(model),
    "transformers": _build_transformers,
    "torchtitan": _build_torchtitan,
}
"""Builds the model of a side for a sequence length, on the default device. Raises MissingPeerError."""
