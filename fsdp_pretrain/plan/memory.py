"""Estimates a rank's training memory without a device.

Parameters, gradients and optimiser are computed: fp32 shards. The rest comes from running one micro-batch of the real
model forward and backward on the meta device, counting storages as they are allocated and freed; FSDP2's gathered and
reduced buffers are added when it would allocate them. Kernels that save less than PyTorch's generic code (fused
attention, RMSNorm, dropout) have stand-ins that save the same as they do.

Not counted: the CUDA context and NCCL (about 1 to 2 GiB outside PyTorch's allocator), fragmentation. Blocks are
estimated uncompiled; compiled ones save less.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from fsdp_pretrain import models
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.data.packing.batch import MicroBatch
from fsdp_pretrain.models import forward as packed
from fsdp_pretrain.models.masks import choose_backend
from fsdp_pretrain.parallel.fsdp import ShardedUnit, compute_dtype, units
from fsdp_pretrain.parallel.optimizer import state_tensors

_MASTER_BYTES = 4
"""Bytes per fp32 element of parameters, gradients, states of the optimiser and reduce-scatter buffers."""

_META = torch.device("meta")


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by part at one moment.

    Attributes:
        parameters, optimizer, gradients: fp32 shards.
        gathered: unsharded parameters in the compute dtype.
        reduce: unsharded gradients and reduce-scatter buffers.
        activations: tensors saved for backward, and working memory of blocks.
        logits: working memory of the loss.
        inputs: the micro-batch.
    """

    parameters: int
    optimizer: int
    gradients: int
    gathered: int
    reduce: int
    activations: int
    logits: int
    inputs: int

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def estimate(config: Config, *, shards: int, accumulates: bool, device: torch.device) -> MemoryEstimate:
    """Peak memory of a step on the rank that needs most.

    Args:
        shards: ranks per replica.
        accumulates: a step has several micro-batches per rank, so gradients exist from the start.
        device: `cuda` or `cpu`: determines the dtype of `train.precision = "auto"` and the kernels.
    """
    model = models.build(config.model)
    sizes = {name: _padded(p, shards) // shards * _MASTER_BYTES for name, p in model.named_parameters()}
    states = sum(sizes[name] * number for name, number in state_tensors(model, config.optimizer).items())
    step = _trace(model.to(compute_dtype(config, device)), config, shards, accumulates, device)
    return MemoryEstimate(parameters=sum(sizes.values()), optimizer=states, **step)


def _padded(parameter: Tensor, shards: int) -> int:
    """Elements of a parameter with its rows rounded up to a multiple of `shards`, as in FSDP2."""
    return math.ceil(parameter.shape[0] / shards) * shards * math.prod(parameter.shape[1:])


def _trace(
    model: models.Decoder, config: Config, shards: int, accumulates: bool, device: torch.device
) -> dict[str, int]:
    """The parts of `estimate` that change during a step, at its peak."""
    model.set_recompute(config.parallel.recompute)
    model.train()
    micro, data = _micro_batch(config), config.data
    inputs = [tensor for field in fields(micro) if (tensor := getattr(micro, field.name)) is not None]
    if choose_backend(config.parallel.attention, config.model, device) == "flex":
        # Block masks are small and the kernel saves no scores: like no mask.
        micro, data = replace(micro, prefix=None), data.model_copy(update={"attention": "causal"})
    meter = _Meter([*model.parameters(), *inputs])
    _Sharding(meter, shards, accumulates=accumulates).begin(
        model, units(model, reshard=config.parallel.reshard_after_forward)
    )

    def in_loss(_module: nn.Module, _inputs: Any, out: Tensor) -> None:
        meter.category = "logits"
        out.register_hook(lambda _grad: setattr(meter, "category", "activations"))

    model.norm.register_forward_hook(in_loss)
    bar = tqdm(total=len(model.blocks), desc="tracing a step", leave=False, disable=None)
    for block in model.blocks:
        block.register_forward_hook(lambda *_: bar.update() and None)
    kernels = _FusedKernels(device)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = _WithKernels(block, kernels)
    with bar, meter:
        with kernels:
            loss = packed.losses(model, micro, data, _META)[0].sum()
        loss.backward()
    meter.hold("inputs", sum(tensor.untyped_storage().nbytes() for tensor in inputs))
    return {**meter.highest, "inputs": meter.live["inputs"]}


def _micro_batch(config: Config) -> MicroBatch:
    size, length, objective = config.train.micro_batch, config.data.sequence_length, config.data.objective

    def integers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=_META)

    glm = objective.kind == "glm"
    slots = objective.slots if objective.kind == "glm" else 1
    two_dimensions = config.model.two_dimensions
    masked = glm or config.data.uses_lengths
    return MicroBatch(
        tokens=integers(size, length + 1),
        labels=integers(size, length) if glm or not config.data.loss_across_documents else None,
        lengths=integers(size, slots, dtype=torch.int32) if masked else None,
        sources=integers(size),
        prefix=integers(size, slots, dtype=torch.int32) if glm else None,
        positions=(integers(size, 2, length) if two_dimensions else integers(size, length)) if glm else None,
    )


class _Sharding:
    """Memory of FSDP2 in addition to the shards: gathered parameters and unsharded gradients.

    Units that are not resharded stay gathered until their gradients are reduced, or until the end if a step has several
    micro-batches; the root always stays until the end. Of the resharded units one is gathered at a time, plus one
    all-gather buffer, its own or its neighbour's. When the gradients of a unit are complete, they are copied into one
    fp32 buffer, which stays until the next unit's.
    """

    def __init__(self, meter: _Meter, shards: int, *, accumulates: bool) -> None:
        self._meter, self._shards, self._accumulates = meter, shards, accumulates
        self._reducing = 0

    def begin(self, model: nn.Module, units: list[ShardedUnit]) -> None:
        """Count the gathered parameters, and hook the gradients."""
        parts = [[weight for module in unit.modules for weight in module.parameters()] for unit in units]
        inside = {id(parameter) for part in parts for parameter in part}
        root = [parameter for parameter in model.parameters() if id(parameter) not in inside]
        sizes = [self._gathered(part) for part in parts]
        passing = max((size for unit, size in zip(units, sizes, strict=True) if unit.reshard), default=0)
        staying = sum(size for unit, size in zip(units, sizes, strict=True) if not unit.reshard)
        if self._shards > 1:  # a forward pass ends with the all-gather buffer of its last unit
            passing = max(2 * passing, sizes[-1])
        self._meter.hold("gathered", self._gathered(root) + staying + passing)
        if self._accumulates:
            everything = [*root, *(parameter for part in parts for parameter in part)]
            self._meter.hold("gradients", self._elements(everything) // self._shards * _MASTER_BYTES)
        self._watch(root, release=0)
        for unit, part, size in zip(units, parts, sizes, strict=True):
            self._watch(part, release=0 if unit.reshard or self._accumulates else size)

    def _gathered(self, part: list[nn.Parameter]) -> int:
        return sum(_padded(parameter, self._shards) * parameter.element_size() for parameter in part)

    def _elements(self, unit: list[nn.Parameter]) -> int:
        return sum(_padded(parameter, self._shards) for parameter in unit)

    def _watch(self, unit: list[nn.Parameter], release: int) -> None:
        waiting = {id(parameter) for parameter in unit}

        def arrived(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self._meter.move(parameter.grad, "reduce")
            waiting.discard(id(parameter))
            if not waiting:
                self._reduce(unit)
                self._meter.hold("gathered", -release)

        for parameter in unit:
            parameter.register_post_accumulate_grad_hook(arrived)

    def _reduce(self, unit: list[nn.Parameter]) -> None:
        buffer = self._elements(unit) * _MASTER_BYTES
        self._meter.hold("reduce", -self._reducing)
        self._meter.hold("reduce", buffer)
        self._reducing = buffer
        for parameter in unit:
            parameter.grad = None
        shard = buffer // self._shards
        self._meter.hold("gradients", shard)
        if self._accumulates:  # added to the existing gradients
            self._meter.hold("gradients", -shard)


class _Meter(TorchDispatchMode):
    """Counts the bytes of live storages, except those of `known` tensors.

    Attributes:
        category: the category of tensors that are allocated now.
        live: current bytes by category.
        highest: `live` at its highest sum.
    """

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.category = "activations"
        parts = ("gradients", "gathered", "reduce", "activations", "logits", "inputs")
        self.live: Counter[str] = Counter(dict.fromkeys(parts, 0))
        self.highest: dict[str, int] = dict(self.live)
        self._known = {id(tensor.untyped_storage()) for tensor in known}
        self._counted: dict[int, tuple[str, int, Any]] = {}

    def hold(self, category: str, size: int) -> None:
        self.live[category] += size
        if size > 0 and self.live.total() > sum(self.highest.values()):
            self.highest = dict(self.live)

    def move(self, tensor: Tensor, category: str) -> None:
        key = id(tensor.untyped_storage())
        if key in self._counted:
            before, size, reference = self._counted[key]
            self._counted[key] = category, size, reference
            self.live[before] -= size
            self.live[category] += size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.logsumexp.default:  # its temporary exp(input), which the meta kernel omits
            scratch = args[0].numel() * args[0].element_size()
            self.hold(self.category, scratch)
            self.hold(self.category, -scratch)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)  # PyTorch keeps the object of a storage for as long as the storage lives
        if key in self._known or key in self._counted:
            return

        def freed(_reference: Any) -> None:
            category, size, _ = self._counted.pop(key)
            self.live[category] -= size

        self._counted[key] = self.category, storage.nbytes(), weakref.ref(storage, freed)
        self.hold(self.category, storage.nbytes())


class _FusedKernels(TorchFunctionMode):
    """Replaces operations that have fused kernels on `device` by stand-ins."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._stand_ins: dict[Any, Callable[..., Tensor]] = {F.scaled_dot_product_attention: _attention}
        if device.type == "cuda":
            self._stand_ins |= {F.rms_norm: _rms_norm, F.dropout: _dropout}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._stand_ins.get(func, func)(*args, **(kwargs or {}))


class _WithKernels(nn.Module):
    """A block that uses the stand-ins in recomputation too, for which PyTorch turns function modes off."""

    def __init__(self, block: nn.Module, kernels: _FusedKernels) -> None:
        super().__init__()
        self._block, self._kernels = block, kernels

    def forward(self, *args: Any) -> Any:
        with self._kernels:
            return self._block(*args)


class _Fused(torch.autograd.Function):
    """A kernel that saves its inputs (if `keeps`), `kept` more bytes and possibly its output, and needs `scratch` bytes
    backward."""

    @staticmethod
    def forward(ctx: Any, keeps: bool, kept: int, scratch: int, keeps_output: bool, *inputs: Tensor) -> Tensor:
        out = torch.empty_like(inputs[0])
        more = torch.empty(kept, dtype=torch.uint8, device=_META)
        ctx.save_for_backward(*(inputs if keeps else ()), more, *([out] if keeps_output else []))
        ctx.inputs, ctx.scratch = [(tensor.shape, tensor.dtype) for tensor in inputs], scratch
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scratch = torch.empty(ctx.scratch, dtype=torch.uint8, device=_META)
        outs = [torch.empty(shape, dtype=dtype, device=_META) for shape, dtype in ctx.inputs]
        del scratch
        return None, None, None, None, *outs


def _rms_norm(x: Tensor, normalized_shape: Any, weight: Tensor, eps: float | None = None) -> Tensor:
    rows = x.numel() // x.shape[-1]
    out: Tensor = _Fused.apply(True, 4 * rows, 0, False, x, weight)
    return out


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Fused dropout saves one byte per element."""
    out: Tensor = _Fused.apply(False, x.numel(), 0, False, x) if training and p else x
    return out


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Fused attention saves its output and one fp32 number per row; with a boolean mask also a bias of its size.

    With a mask and fewer KV heads than heads no fused kernel of PyTorch applies: all probabilities are saved.
    """
    batch, heads, length, size = query.shape
    kept, scratch = 4 * batch * heads * length, 4 * batch * heads * length * size  # backward: fp32 sums of query grads
    if attn_mask is not None and enable_gqa:
        kept += batch * heads * length * length * query.element_size()
        scratch = 2 * batch * heads * length * length * query.element_size()
    elif attn_mask is not None and attn_mask.dtype == torch.bool:
        kept += attn_mask.numel() * query.element_size()
    out: Tensor = _Fused.apply(True, kept, scratch, True, query, key, value)
    return out
