"""The kernels that `torch.compile` makes of a block and of the loss for an H100, without one:
`python tests/inductor_kernels.py [NAME ...]` prints their numbers, with --code their code.

Inductor decomposes, fuses and writes Triton's code as on the device; neither Dynamo nor Triton runs, and Triton need not
be installed. It has no public way to do so: everything private of torch is used in this file only, see `INTERNALS`.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from gpu_operators import of_a_gpu
from pydantic import TypeAdapter
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.node import map_aggregate
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._pytree import tree_flatten, tree_unflatten

from fsdp_pretrain import models
from fsdp_pretrain.config.model import AnyModel
from fsdp_pretrain.models import loss

INTERNALS = (
    "_dynamo.device_interface, _functorch.aot_autograd.aot_export_joint_simple, _functorch.partitioners, and of "
    "_inductor: codecache.CacheBase, decomposition, debug, fx_passes.joint_graph and post_grad, graph.GraphLowering, "
    "runtime.hints, scheduler.has_triton, virtualized.V"
)
BATCH, LENGTH = 2, 4096
WIDE: dict[str, Any] = {"layers": 2, "hidden": 4096, "heads": 32, "vocab": 32_000}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "ffn": 11_008},
    "qwen2": {"family": "qwen2", "ffn": 11_008, "kv_heads": 8},
    "qwen3": {"family": "qwen3", "ffn": 11_008, "kv_heads": 8},
    "gpt": {"family": "gpt", "positions": LENGTH},
    "glm": {"family": "glm", "ffn": 11_008},
}
DEVICE = torch.device("cuda", 0)
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    gcnArchName="",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65_536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=80 * 2**30,
)


@dataclass(frozen=True)
class Kernels:
    """The launches of a graph."""

    products: int  # matrix products
    attention: int  # attention, forward or backward
    fused: int  # Triton kernels that Inductor wrote
    further: tuple[str, ...]  # what torch does beside them, by name

    @classmethod
    def of(cls, code: str) -> Kernels:
        """The launches in code that Inductor wrote."""
        lines = code[code.index("def call(") :].split("\ndef ")[0]
        calls = re.findall(r"\b(extern_kernels\.\w+|torch\.ops\.[\w.]+|triton_\w+\.run)\(|\.(sum)\(dim", lines)
        names = Counter("".join(call) for call in calls)
        products = sum(names.pop(f"extern_kernels.{name}", 0) for name in ("mm", "addmm", "bmm", "baddbmm"))
        attention = [name for name in names if "attention" in name]
        fused = [name for name in names if name.startswith("triton_")]
        counts = [sum(names.pop(name) for name in kind) for kind in (attention, fused)]
        return cls(products, *counts, tuple(sorted(names.elements())))


def of_block(family: dict[str, Any]) -> dict[str, str]:
    """Code of the forward and of the backward pass of a block in bf16."""
    config = TypeAdapter(AnyModel).validate_python({**WIDE, **family})
    model = models.build(config).to(torch.bfloat16)
    block = model.blocks[1]
    names = [name for name, _ in block.named_parameters()]
    fake = FakeTensorMode()
    with fake:
        x = torch.empty(BATCH, LENGTH, config.hidden, dtype=torch.bfloat16, requires_grad=True)
        weights = [torch.empty(p.shape, dtype=p.dtype, requires_grad=True) for p in block.parameters()]
        further, form = tree_flatten(model.context(torch.arange(LENGTH)))

    def run(x: Tensor, *tensors: Tensor) -> tuple[Tensor]:
        own, context = tensors[: len(names)], tree_unflatten(list(tensors[len(names) :]), form)
        return (torch.func.functional_call(block, dict(zip(names, own, strict=True)), (x, None, *context)),)

    with _readable(), of_a_gpu():
        from torch._functorch.partitioners import min_cut_rematerialization_partition
        from torch._inductor.fx_passes.joint_graph import joint_graph_passes
        from torch._inductor.virtualized import V

        joint = _traced(run, [x, *weights, *further], fake, joint=True)
        with V.set_fake_mode(fake):
            joint_graph_passes(joint)
        forward, backward = min_cut_rematerialization_partition(joint, None, num_fwd_outputs=1)
        return {"forward": _code(forward, fake), "backward": _code(backward, fake, is_backward=True)}


def of_loss() -> dict[str, str]:
    """Code of the two kernels of the loss, for a chunk of 2^25 logits."""
    rows, fake, found = BATCH * LENGTH, FakeTensorMode(), {}
    row, column = (rows,), (rows, 1)
    kernels = {
        "forward": (loss._forward_chunk, [row, row]),
        "backward": (loss._fused_backward_chunk, [row, column, row]),
    }
    for name, (kernel, shapes) in kernels.items():
        with fake:
            logits = torch.empty(rows, 2**25 // rows, dtype=torch.bfloat16)
            targets = [torch.empty(column, dtype=torch.int64), torch.empty(row, dtype=torch.bool)]
            inputs = [logits, *targets, *(torch.empty(shape) for shape in shapes)]

        def run(*tensors: Tensor, kernel: Callable[..., Any] = kernel) -> tuple[Tensor, ...]:
            out = kernel(*tensors)
            return out if isinstance(out, tuple) else (out,)

        with _readable():
            found[name] = _code(_traced(run, inputs, fake, joint=False), fake, is_inference=True)
    return found


def _traced(function: Callable[..., Any], inputs: list[Tensor], fake: FakeTensorMode, *, joint: bool) -> GraphModule:
    """A function as a graph of aten operators, decomposed as for Inductor; `joint`: and its backward pass."""
    from torch._functorch.aot_autograd import aot_export_joint_simple
    from torch._inductor.decomposition import select_decomp_table

    with fake:
        return aot_export_joint_simple(function, inputs, trace_joint=joint, decompositions=select_decomp_table())


def _code(graph: GraphModule, fake: FakeTensorMode, *, is_backward: bool = False, is_inference: bool = False) -> str:
    """What Inductor writes for a graph on `DEVICE`."""
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    def moved(value: Any) -> Any:
        return DEVICE if isinstance(value, torch.device) else value

    inputs = []
    for node in graph.graph.nodes:
        node.args, node.kwargs = map_aggregate(node.args, moved), map_aggregate(node.kwargs, moved)
        if node.op == "placeholder":
            given = node.meta["val"]
            with fake:
                inputs.append(torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=DEVICE))
    graph.recompile()
    with _a_gpu_is_here(), V.set_fake_mode(fake), V.set_debug_handler(DebugContext()):
        FakeTensorProp(graph, fake).propagate_dont_convert_inputs(*inputs)
        post_grad_passes(graph, is_inference)
        FakeTensorProp(graph, fake).propagate_dont_convert_inputs(*inputs)
        lowering = GraphLowering(graph, example_inputs=inputs, is_backward=is_backward, is_inference=is_inference)
        with V.set_graph_handler(lowering):
            lowering.run(*inputs)
            code = lowering.codegen()[0]
    return getattr(code, "value", code)


@contextmanager
def _a_gpu_is_here() -> Iterator[None]:
    """Let Inductor believe that there is an H100, and Triton."""
    from torch._dynamo import device_interface
    from torch._inductor import scheduler
    from torch._inductor.codecache import CacheBase
    from torch._inductor.runtime.hints import DeviceProperties
    from torch.utils import _triton

    class Interface(device_interface.CudaInterface):
        get_device_properties = staticmethod(lambda device=None: H100)
        get_compute_capability = staticmethod(lambda device=None: 10 * H100.major + H100.minor)
        current_device = staticmethod(lambda: 0)

    device_interface.get_interface_for_device("cpu")  # fills the table
    with ExitStack() as stack:
        stack.enter_context(torch._inductor.config.patch(compile_threads=1))  # starts no processes
        stack.enter_context(patch.dict(device_interface.device_interfaces, {"cuda": Interface, "cuda:0": Interface}))
        for where, name, answer in (
            (torch.cuda, "get_device_properties", H100),
            (torch.cuda, "get_device_capability", (H100.major, H100.minor)),
            (torch.cuda, "current_device", 0),
            (scheduler, "has_triton", True),
            (_triton, "triton_hash_with_backend", "none"),
        ):
            stack.enter_context(patch.object(where, name, lambda *_, answer=answer: answer))
        for remembered in (DeviceProperties.create, CacheBase.get_system):
            remembered.cache_clear()
            stack.callback(remembered.cache_clear)
        yield


@contextmanager
def _readable() -> Iterator[None]:
    """Say where to look if it is torch that has changed."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(
            f"no code for an H100 from torch {torch.__version__}: {type(error).__name__}: {error}\n"
            "tests/inductor_kernels.py was written for torch 2.11 and 2.13. If torch has changed, compare what it uses "
            f"with torch's own _inductor/compile_fx.py: {INTERNALS}"
        ) from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join([*FAMILIES, 'loss'])}; default: all")
    parser.add_argument("--code", action="store_true", help="print the code")
    args = parser.parse_args()
    print(f"| torch {torch.__version__} | products | attention | Triton kernels | further |\n|---|---|---|---|---|")
    for name in args.names or [*FAMILIES, "loss"]:
        for which, code in (of_loss() if name == "loss" else of_block(FAMILIES[name])).items():
            found = Kernels.of(code)
            row = f"{found.products} | {found.attention} | {found.fused} | {', '.join(found.further)}"
            print(f"| {name}, {which} | {row} |", flush=True)
            if args.code:
                print(code)


if __name__ == "__main__":
    main()
