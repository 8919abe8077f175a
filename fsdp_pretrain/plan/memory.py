"""Estimates a rank's training memory without a device.

Parameters and optimiser are computed: fp32 shards. The rest comes from running one or two micro-batches of the real
model forward and backward on the meta device, counting storages as they are allocated and freed; FSDP2's shards of
gradients, gathered and reduced buffers are added when it would allocate them. Kernels that save less than PyTorch's
generic code (fused attention, RMSNorm, dropout) have stand-ins that save the same as they do.

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
from fsdp_pretrain.parallel.fsdp import ShardedUnit, compute_dtype, reduce_dtype, units
from fsdp_pretrain.parallel.optimizer import state_tensors

_MASTER_BYTES = 4
"""Bytes per fp32 element of parameters, gradients and states of the optimiser."""

_META = torch.device("meta")
_WINDOW = {"sliding_window", "sliding_window_pattern"}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by part at one moment."""

    parameters: int  # this and the next two: fp32 shards
    optimizer: int
    gradients: int
    gathered: int  # unsharded parameters in the compute dtype
    reduce: int  # unsharded gradients and reduce-scatter buffers
    activations: int  # tensors saved for backward, and working memory of blocks
    logits: int  # working memory of the loss
    inputs: int  # the micro-batch

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def estimate(config: Config, *, shards: int, micro_batches: int, device: torch.device) -> MemoryEstimate:
    """Peak memory of a step on the rank that needs most.

    Args:
        shards: ranks per replica.
        micro_batches: micro-batches of a rank in a step.
        device: `cuda` or `cpu`: determines the dtype of `train.precision = "auto"` and the kernels.
    """
    model = models.build(config.model)
    sizes = {name: _padded(p, shards) // shards * _MASTER_BYTES for name, p in model.named_parameters()}
    states = sum(sizes[name] * number for name, number in state_tensors(model, config.optimizer).items())
    step = _trace(model.to(compute_dtype(config, device)), config, shards, micro_batches, device)
    return MemoryEstimate(parameters=sum(sizes.values()), optimizer=states, **step)


def _padded(parameter: Tensor, shards: int) -> int:
    """Elements of a parameter with its rows rounded up to a multiple of `shards`, as in FSDP2."""
    return math.ceil(parameter.shape[0] / shards) * shards * math.prod(parameter.shape[1:])


def _trace(
    model: models.Decoder, config: Config, shards: int, micro_batches: int, device: torch.device
) -> dict[str, int]:
    """The parts of `estimate` that change during a step, at its peak."""
    model.set_recompute(config.parallel.recompute)
    model.train()
    micro, data = _micro_batch(config), config.data
    inputs = [tensor for field in fields(micro) if (tensor := getattr(micro, field.name)) is not None]
    if choose_backend(config.parallel.attention, config.model, device) == "flex":
        # Block masks are small and the kernel saves no scores: like no mask.
        micro, data = replace(micro, prefix=None), data.model_copy(update={"attention": "causal"})
        model.config = config.model.model_copy(update=dict.fromkeys(config.model.model_fields_set & _WINDOW))
    meter = _Meter([*model.parameters(), *inputs])
    sharded = units(model, reshard=config.parallel.reshard_after_forward)
    sharding = _Sharding(meter, model, sharded, shards, reduce_dtype(config).itemsize)

    def in_loss(_module: nn.Module, _inputs: Any, out: Tensor) -> None:
        meter.category = "logits"
        out.register_hook(lambda _grad: setattr(meter, "category", "activations"))

    model.norm.register_forward_hook(in_loss)
    passes = min(micro_batches, 2)  # the third begins as the second
    bar = tqdm(total=passes * len(model.blocks), desc="tracing a step", leave=False, disable=None)
    for block in model.blocks:
        block.register_forward_hook(lambda *_: bar.update() and None)
    kernels = _FusedKernels(device)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = _WithKernels(block, kernels)
    with bar, meter:
        for number in range(1, passes + 1):
            sharding.backward, sharding.last = False, number == micro_batches
            with kernels:
                loss = packed.losses(model, micro, data, _META)[0].sum()
            sharding.backward = True
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


@dataclass
class _Unit:
    """Parameters that FSDP2 gathers together."""

    parameters: list[nn.Parameter]
    elements: int  # of all shards, padded
    stays: bool  # whether it is resharded only after the last backward pass of a step
    gathered: bool = False  # whether its parameters are there now
    fetched: bool = False  # whether an all-gather buffer with them is there now, for the backward pass
    reduced: bool = False  # whether its shard has gradients


class _Sharding:
    """Memory of FSDP2 in addition to the shards: gathered parameters and unsharded gradients, as it allocates them.

    In the forward pass the all-gather buffer of a unit stays until the next unit is copied out of its own; in the
    backward pass that of the next unit is there beside a gathered one. Complete gradients of a unit are copied into one
    buffer in the dtype of the exchange, which stays until the next unit's, even if that is of the next micro-batch.
    What is all-reduced stays until it is again; in fp32 that is the shard of the gradients itself.

    Attributes:
        backward: whether the backward pass has begun. Recomputation gathers nothing.
        last: whether the pass is the last of a step.
    """

    def __init__(
        self, meter: _Meter, model: nn.Module, units: list[ShardedUnit], shards: int, reduce_width: int
    ) -> None:
        self._meter, self._shards, self._reduce_width = meter, shards, reduce_width
        self._width = next(model.parameters()).element_size()
        self.backward = self.last = False
        self._forward_buffer = self._reduce_buffer = 0
        before, inside = None, set[int]()
        for each in units:
            parameters = [parameter for module in each.modules for parameter in module.parameters()]
            inside |= {id(parameter) for parameter in parameters}
            unit = self._unit(parameters, stays=not each.reshard)
            self._watch(unit, each.modules[0], each.modules[-1], before)
            before = unit
        rest = [parameter for parameter in model.parameters() if id(parameter) not in inside]
        self._watch(self._unit(rest, stays=True), model, model, None)
        model.register_forward_hook(lambda *_: self._keep_buffer(0))

    def _unit(self, parameters: list[nn.Parameter], *, stays: bool) -> _Unit:
        return _Unit(parameters, sum(_padded(parameter, self._shards) for parameter in parameters), stays)

    def _watch(self, unit: _Unit, first: nn.Module, last: nn.Module, before: _Unit | None) -> None:
        """Follow a unit through its modules, from the first to the last, and its gradients."""
        waiting = {id(parameter) for parameter in unit.parameters}

        def enter(*_: Any) -> None:
            if not unit.gathered:
                self._gather(unit)

        def leave(_module: nn.Module, _inputs: Any, out: Tensor) -> None:
            if self.backward:
                return
            if not unit.stays:
                self._free(unit)
            out.register_hook(lambda _grad: self._prepare(unit, before))

        def arrived(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self._meter.move(parameter.grad, "reduce")
            waiting.discard(id(parameter))
            if not waiting:
                self._reduce(unit)
                waiting.update(id(parameter) for parameter in unit.parameters)

        first.register_forward_pre_hook(enter)
        last.register_forward_hook(leave)
        for parameter in unit.parameters:
            parameter.register_post_accumulate_grad_hook(arrived)

    def _hold(self, unit: _Unit, copies: int = 1) -> None:
        self._meter.hold("gathered", copies * unit.elements * self._width)

    def _gather(self, unit: _Unit) -> None:
        """In the forward pass."""
        if self._shards > 1:
            self._hold(unit)
            self._keep_buffer(unit.elements * self._width)
        self._hold(unit)
        unit.gathered = True

    def _keep_buffer(self, size: int) -> None:
        """Free the all-gather buffer of the unit before, and keep one of `size` that is already counted."""
        self._meter.hold("gathered", -self._forward_buffer)
        self._forward_buffer = size

    def _prepare(self, unit: _Unit, before: _Unit | None) -> None:
        """Gather a unit for its backward pass, and fetch the one before it."""
        if not unit.gathered:
            self._fetch(unit)
            self._hold(unit)
            unit.gathered = True
        if unit.fetched:
            self._hold(unit, -1)
            unit.fetched = False
        if before is not None and not before.gathered:
            self._fetch(before)

    def _fetch(self, unit: _Unit) -> None:
        if self._shards > 1 and not unit.fetched:
            self._hold(unit)
            unit.fetched = True

    def _free(self, unit: _Unit) -> None:
        self._hold(unit, -1)
        unit.gathered = False

    def _reduce(self, unit: _Unit) -> None:
        if self.last or not unit.stays:
            self._free(unit)
        buffer = unit.elements * self._reduce_width
        self._meter.hold("reduce", -self._reduce_buffer)
        self._meter.hold("reduce", buffer)
        self._reduce_buffer = buffer
        for parameter in unit.parameters:
            parameter.grad = None
        shard = unit.elements // self._shards * _MASTER_BYTES
        self._meter.hold("gradients", shard)
        if unit.reduced:  # added to the existing gradients
            self._meter.hold("gradients", -shard)
        elif self._reduce_width != _MASTER_BYTES:
            self._meter.hold("reduce", unit.elements // self._shards * self._reduce_width)
        unit.reduced = True


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
