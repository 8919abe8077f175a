"""Peak memory of a rank in a whole training step, without a device or memory: `python tests/fake_step.py [NAME ...]`.

The trainer, FSDP2, autograd and the optimiser are the real ones, on fake tensors and a process group that sends nothing;
all storages are counted. Blocks and loss are eager. Prints the peaks beside those of `plan`.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from gpu_operators import of_a_gpu
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_pretrain.bench import fake_ranks, steps
from fsdp_pretrain.config.config import Config, load
from fsdp_pretrain.plan import memory

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


@dataclasses.dataclass(frozen=True)
class Shape:
    """A shipped run, or a shipped model in the run of the 7B, on `nodes` of eight ranks."""

    name: str
    file: str
    micro_batches: int
    overrides: tuple[str, ...] = ()
    nodes: int = 1

    def config(self, folder: Path) -> Config:
        path = CONFIGS / self.file
        if path.parent.name == "models":
            run = (CONFIGS / "runs/llama-7b-hsdp.toml").read_text().replace("../models/llama-7b.toml", str(path))
            path = folder / path.name
            path.write_text(run)
        return load(path, ["parallel.compile=false", *self.overrides])


RECOMPUTED = ("parallel.recompute=1",)
SHAPES = [
    Shape("7B", "runs/llama-7b-hsdp.toml", 1),
    Shape("7B, recomputed", "runs/llama-7b-hsdp.toml", 1, RECOMPUTED),
    Shape("7B, two micro-batches, recomputed", "runs/llama-7b-hsdp.toml", 2, RECOMPUTED),
    Shape("7B, three, recomputed", "runs/llama-7b-hsdp.toml", 3, RECOMPUTED),
    Shape("7B, two, feed-forward recomputed", "runs/llama-7b-hsdp.toml", 2, ("parallel.recompute=feed-forward",)),
    Shape("7B, two, not resharded", "runs/llama-7b-hsdp.toml", 2, ("parallel.reshard_after_forward=false",)),
    Shape("7B, two, 64 x 8", "runs/llama-7b-hsdp.toml", 2, nodes=64),
    Shape("7B, two, reduced in bf16, 64 x 8", "runs/llama-7b-hsdp.toml", 2, ("parallel.reduce=bf16",), nodes=64),
    Shape("Llama 8B, two", "models/llama-8b.toml", 2),
    Shape("Llama 8B, two, recomputed", "models/llama-8b.toml", 2, RECOMPUTED),
    Shape("Llama 70B, two, recomputed, 64 x 8", "models/llama-70b.toml", 2, RECOMPUTED, nodes=64),
    Shape("Qwen3 0.6B, two", "models/qwen3-0.6b.toml", 2),
    Shape("Qwen3 0.6B, two, recomputed", "models/qwen3-0.6b.toml", 2, RECOMPUTED),
    Shape("tr1-13b (GPT, fp16, dropout), two, recomputed", "runs/tr1-13b.toml", 2),
    Shape("GLM-130B, causal, two, recomputed, 64 x 8", "models/glm-130b.toml", 2, RECOMPUTED, nodes=64),
]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that live. `peak` is the most so far; it may be set."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._storages: dict[int, tuple[int, Any]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # its parts come here
        out = function(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor) and each.device.type != "meta":
                self._see(each.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)  # torch keeps the object of a storage for as long as the storage lives

        def ended(_reference: Any) -> None:
            self._add(-self._storages.pop(key)[0])

        before, reference = self._storages.get(key, (0, None))
        self._storages[key] = storage.nbytes(), reference or weakref.ref(storage, ended)
        self._add(storage.nbytes() - before)

    def _add(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)

    @contextmanager
    def with_resizes(self) -> Iterator[None]:
        """Also count what storages gain or lose by `resize_`, by which FSDP2 frees gathered parameters."""
        plain = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            out = plain(storage, size)
            self._see(storage)
            return out

        with patch.object(torch.UntypedStorage, "resize_", resize), self:
            yield


def peak(config: Config, ranks: int, micro_batches: int) -> int:
    """Bytes that live at the highest point of a step on rank 0, once the optimiser has its states."""
    meter = LiveBytes()
    with (
        fake_ranks.connect(config.parallel, ranks) as world,
        FakeTensorMode(),
        of_a_gpu(),
        meter.with_resizes(),
    ):
        trainer = steps.build(config, world, batch=ranks * micro_batches * config.train.micro_batch)
        trainer.step()
        meter.peak = 0
        trainer.step()
    return meter.peak


def planned(config: Config, micro_batches: int) -> int:
    """The same, as `plan` estimates it."""
    return memory.estimate(
        config, shards=fake_ranks.NODE, micro_batches=micro_batches, device=torch.device("cuda")
    ).total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="shapes whose names contain it; default: all")
    args = parser.parse_args()
    print(f"| torch {torch.__version__} | measured | `plan` | |\n|---|---|---|---|")
    for shape in SHAPES:
        if args.names and not any(name in shape.name for name in args.names):
            continue
        with tempfile.TemporaryDirectory() as folder:
            config = shape.config(Path(folder))
        found = peak(config, shape.nodes * fake_ranks.NODE, shape.micro_batches)
        expected = planned(config, shape.micro_batches)
        row = f"{found / 2**30:.2f} GiB | {expected / 2**30:.2f} | {expected / found - 1:+.2%}"
        print(f"| {shape.name} | {row} |", flush=True)


if __name__ == "__main__":
    main()
