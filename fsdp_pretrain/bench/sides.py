"""The other sides of `--peers`, each in a process of its own: `python -m fsdp_pretrain.bench CONFIG --side NAME`.

All train the same Llama on the same tokens in the same precision, in the loop of `minimal`:

- `minimal`: a model as one writes it by hand.
- `transformers`: LlamaForCausalLM with PyTorch's attention.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from fsdp_pretrain.checkpoint import hf_layout
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.model import LlamaModel
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.parallel import fsdp, mesh
from fsdp_pretrain.plan import flops
from fsdp_pretrain.plan.plan import count_parameters

from .minimal import Network, PlainLoop, build_minimal
from .steps import RandomSteps, step_times
from .times import MeasuredSteps


def measure(name: str, config: Config, *, steps: int, warmup: int) -> MeasuredSteps:
    """Time `steps` steps of another implementation after `warmup`, without a process group.

    Raises:
        ConfigError: its library is not installed.
    """
    assert isinstance(config.model, LlamaModel)
    alone = mesh.SingleProcess()
    device = alone.device = mesh.device_of(mesh.RankInfo.from_environment())
    with torch.device(device):
        network = NETWORKS[name](config.model, config.data.sequence_length)
    network.module.train()
    _initialise(network.module, config.model.std, config.run.seed)
    parameters = sum(parameter.numel() for parameter in network.module.parameters())
    assert parameters == count_parameters(config.model), f"{parameters:_} parameters"
    loop = PlainLoop(network, config, RandomSteps(config, alone), device, fsdp.compute_dtype(config, device))
    for _ in range(warmup):
        loop.step()
    _wait(device)
    start = time.perf_counter()
    for _ in range(steps):
        loop.step()
    _wait(device)
    seconds = (time.perf_counter() - start) / steps
    return step_times(
        config,
        device,
        batch=config.schedule.batch.full,
        steps=steps,
        seconds=seconds,
        loss=loop.loss(),
        memory=flops.memory_in_use(device),
        side=name,
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
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(f"transformers cannot be imported: {error}") from None
    values = hf_layout.to_hf(model, sequence_length=length, eod=0, dtype="float32")
    config = transformers.LlamaConfig.from_dict(values | {"use_cache": False})
    module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return Network(module, list(module.model.layers), lambda tokens: module(input_ids=tokens, use_cache=False).logits)


NETWORKS: dict[str, Callable[[LlamaModel, int], Network]] = {
    "minimal": lambda model, length: build_minimal(model),
    "transformers": _build_transformers,
}
"""Builds the model of a side for a sequence length, on the default device. Raises ConfigError."""
