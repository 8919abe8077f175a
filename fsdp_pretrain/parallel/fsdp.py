"""Shard a model from the meta device, in a fixed order, and initialise it.

activation checkpointing -> float8 -> compile -> fully_shard (blocks, then root) -> to_empty; then a checkpoint is
loaded, or the parameters are initialised by name.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.model import LlamaModel
from fsdp_pretrain.config.sections import ParallelSection
from fsdp_pretrain.models import Decoder
from fsdp_pretrain.models.layers import Constant, Initial
from fsdp_pretrain.models.masks import choose_backend

from .float8 import use_float8
from .mesh import World, local_part, local_rows

_ELEMENTS_PER_DRAW = 2**20


def parallelize(model: Decoder, config: Config, world: World) -> Decoder:
    """Shard a model on the meta device over the mesh and allocate its parameters, without values.

    Returns:
        The same object: parameters are fp32 DTensors (Replicate, Shard(0)); compute runs in `compute_dtype`.

    Raises:
        ConfigError: the configured attention backend or precision does not support this model on this device.
    """
    model.set_recompute(config.parallel.recompute)
    model.backend = choose_backend(config.parallel.attention, config.model, world.device)
    if config.train.precision == "bf16+fp8":
        use_float8(model, world.device)
    if compiles(config, world.device):
        _compile_for_each_length(config, len(model.blocks))
        model.compile_parts()
    dtype = compute_dtype(config, world.device)
    # Inputs are not cast: the residual stream already has the embedding's dtype, and rotary tables stay fp32.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype(config), cast_forward_inputs=False)
    for unit in units(model, reshard=config.parallel.reshard_after_forward):
        fully_shard(list(unit.modules), mesh=world.mesh, mp_policy=policy, reshard_after_forward=unit.reshard)
    fully_shard(model, mesh=world.mesh, mp_policy=policy, reshard_after_forward=False)
    if isinstance(model.embedding, FSDPModule):
        # Prefetch nothing more. By default its backward pass gathers the unit that was used before it: in a later
        # micro-batch the output matrix of the one before.
        model.embedding.set_modules_to_backward_prefetch([model.embedding])
    return _allocate(model, world.device)


def shard_for_inference(model: Decoder, world: World) -> Decoder:
    """Shard a model on the meta device over the mesh for forward passes, and allocate its parameters, without values.

    Parameters keep their dtype. Those of a unit are gathered only during its own part of a pass.
    """
    gathered = [*(unit.modules for unit in units(model, reshard=True)), (model,)]
    for modules in gathered:
        fully_shard(list(modules), mesh=world.mesh, reshard_after_forward=True)
        # If FSDP gathers a unit by itself, it keeps a second copy until the next unit is gathered.
        modules[0].register_forward_pre_hook(_unshard, prepend=True)
    return _allocate(model, world.device)


def _compile_for_each_length(config: Config, blocks: int) -> None:
    """Make torch compile once for each length of samples, instead of once for any length when a second one comes.

    The latter would be slower, and not the computation of a start after the change. For each length there is a graph of
    each kind of block, for training, its repetition in a fixed order, and held-out samples; torch ends the process at
    its limit, since no block may be left uncompiled.
    """
    settings, model = torch._dynamo.config, config.model
    lengths = len({config.data.sequence_length, *(stage.length for stage in config.data.stages)})
    kinds = 2 if isinstance(model, LlamaModel) or model.scores == "fused" else blocks  # of attention, or layers
    if lengths > 1:
        settings.automatic_dynamic_shapes = False
    settings.recompile_limit = max(settings.recompile_limit, 4 * lengths * kinds)


def _unshard(module: nn.Module, inputs: object) -> None:
    del inputs
    assert isinstance(module, FSDPModule)
    module.unshard()


@dataclass(frozen=True)
class ShardedUnit:
    """Modules whose parameters FSDP gathers together and whose gradients it reduces together.

    `reshard`: whether the parameters are freed after the forward pass and gathered again for the backward pass; else
    they stay gathered until the last backward pass of a step.
    """

    modules: tuple[nn.Module, ...]
    reshard: bool


def units(model: Decoder, *, reshard: bool) -> list[ShardedUnit]:
    """The units of a model, in the order of the forward pass; all other parameters are the root's.

    An untied output matrix is a unit, with the last norm: its gradients are reduced while the blocks compute, and its
    gather waits behind them. The last block and the output matrix stay gathered, since the backward pass needs them
    first, and so does the embedding, whose backward pass does not need its values.
    """
    last = len(model.blocks) - 1
    blocks = [ShardedUnit((block,), reshard and index < last) for index, block in enumerate(model.blocks)]
    if model.head is None:
        return blocks
    return [ShardedUnit((model.embedding,), False), *blocks, ShardedUnit((model.norm, model.head), False)]


def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    """dtype of the matrix products: as configured, by default bf16 on GPU and fp32 on CPU."""
    precision = config.train.precision
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" else "fp32"
    return {"fp16": torch.float16, "fp32": torch.float32}.get(precision, torch.bfloat16)


def reduce_dtype(config: Config) -> torch.dtype:
    """dtype in which ranks exchange and add up gradients."""
    return torch.bfloat16 if config.parallel.reduce == "bf16" else torch.float32


def compiles(config: Config, device: torch.device) -> bool:
    """Whether blocks are compiled: `parallel.compile`, or with `auto` the best for the device."""
    return config.compiles_on_gpu if device.type == "cuda" else config.parallel.compile is True


def materialise(model: Decoder, seed: int, device: torch.device) -> Decoder:
    """Allocate the parameters of a model on the meta device, and initialise them."""
    initialise_all(_allocate(model, device), seed)
    return model


def _allocate(model: Decoder, device: torch.device) -> Decoder:
    model.to_empty(device=device)
    assert not list(model.buffers()), "to_empty leaves garbage in buffers; compute such tensors in forward"
    return model


def initialise_all(model: Decoder, seed: int) -> None:
    """Give all parameters their initial values.

    They depend only on (seed, parameter name, shape): bit-identical for any mesh, without communication.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            initialise(parameter, model.initial(name), f"{seed}:{name}")


def initialise(parameter: Tensor, initial: Initial, key: str) -> None:
    """Fill `parameter` (plain, or a DTensor sharded over dim 0) with its part of the full initial tensor."""
    if isinstance(initial, Constant):
        parameter.fill_(initial.value)
        return
    local, first = local_part(parameter), local_rows(parameter).start
    # Blocks of rows have their own generators, so a rank draws only the blocks that overlap its shard.
    row_size = math.prod(parameter.shape[1:])
    per_block = max(1, _ELEMENTS_PER_DRAW // row_size)
    row, end = first, first + local.shape[0]
    while row < end:
        block = row // per_block
        height = min(per_block, parameter.shape[0] - block * per_block)
        seed = int.from_bytes(hashlib.sha256(f"{key}:{block}".encode()).digest()[:7], "little")
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(height, *parameter.shape[1:], generator=generator) * initial.std
        stop = min(end, block * per_block + height)
        local[row - first : stop - first] = values[row - block * per_block : stop - block * per_block]
        row = stop


def reshard(model: Decoder) -> None:
    """Free the parameters that stay gathered after a forward pass, for one without a backward pass, which would do so.

    Until then `model.parameters()` are gathered copies, and after an update they would be stale.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def set_last_micro_batch(model: Decoder, last: bool, parallel: ParallelSection) -> None:
    """Set whether the next backward pass is the last of the step.

    FSDP reduce-scatters gradients over the shard axis after every micro-batch (so no rank holds a full set), and
    all-reduces them over the replicas only after the last; in bf16 after every one, since it would add up in bf16 until
    then (pytorch#194628). Until the last, parameters that stay gathered after the forward pass also do so after the
    backward pass.
    """
    staying = [unit.modules[0] for unit in units(model, reshard=parallel.reshard_after_forward) if not unit.reshard]
    for module in (model, *staying):
        assert isinstance(module, FSDPModule)
        module.set_reshard_after_backward(last, recurse=False)
    assert isinstance(model, FSDPModule)
    model.set_requires_all_reduce(last or parallel.reduce == "bf16")
    model.set_is_last_backward(last)
