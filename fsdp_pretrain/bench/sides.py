"""The other sides of `--peers`, each in a process of its own: `python -m fsdp_pretrain.bench CONFIG --side NAME`.

All train the same Llama on the same tokens in the same precision, in the loop of `minimal`:

- `minimal`: a model as one writes it by hand.
- `transformers`: LlamaForCausalLM with PyTorch's attention.
- `torchtitan`: its Llama 3 (release 0.2, whose interface 0.3 replaced).
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

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

_TITAN = "0.2."
"""Releases of torchtitan whose interface is known here."""


def measure(name: str, config: Config, *, steps: int, warmup: int) -> MeasuredSteps:
    """Time `steps` steps of another implementation after `warmup`, without a process group.

    Raises:
        ConfigError: its library is not installed, or is of a release that this benchmark does not know.
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
    library = _import("transformers")
    values = hf_layout.to_hf(model, sequence_length=length, eod=0, dtype="float32")
    config = library.LlamaConfig.from_dict(values | {"use_cache": False})
    module = library.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return Network(module, list(module.model.layers), lambda tokens: module(input_ids=tokens, use_cache=False).logits)


def _build_torchtitan(model: LlamaModel, length: int) -> Network:
    if problem := titan_problem():
        raise ConfigError(problem)
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


def titan_problem() -> str | None:
    """Why torchtitan cannot be compared, or None."""
    try:
        version = metadata.version("torchtitan")
    except metadata.PackageNotFoundError:
        return "torchtitan is not installed"
    known = version.startswith(_TITAN)
    return None if known else f"torchtitan is {version}; known is {_TITAN}x: pip install 'torchtitan=={_TITAN}*'"


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"{name} cannot be imported: {error}") from None


NETWORKS: dict[str, Callable[[LlamaModel, int], Network]] = {
    "minimal": lambda model, length: build_minimal(model),
    "transformers": _build_transformers,
    "torchtitan": _build_torchtitan,
}
"""Builds the model of a side for a sequence length, on the default device. Raises ConfigError."""
