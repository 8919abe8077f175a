"""Published throughput of FSDP runs, and what the scale model says of them. No torch.

Only plain FSDP and HSDP in bf16: no tensor or pipeline parallelism, no float8. Tokens per second are per GPU. Where a
source does not state the network, it is assumed to be the usual one of the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fsdp_pretrain.config.model import AnyModel, GPTModel, LlamaModel

from . import devices
from .flops import flops_per_token
from .scale import FITTED, Cluster, Constants, Workload, step
from .sizes import sizes


def _llama(
    layers: int, hidden: int, heads: int, ffn: int, kv_heads: int | None = None, vocab: int = 32_000
) -> AnyModel:
    return LlamaModel(
        family="llama", layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=vocab
    )


def _gpt(layers: int, hidden: int, heads: int) -> AnyModel:
    return GPTModel(family="gpt", layers=layers, hidden=hidden, heads=heads, vocab=50_368, positions=2048)


_MODELS: dict[str, AnyModel] = {
    "Llama 2 7B": _llama(32, 4096, 32, 11_008),
    "Llama 2 13B": _llama(40, 5120, 40, 13_824),
    "Llama 34B": _llama(48, 8192, 64, 22_016, 8),
    "Llama 2 70B": _llama(80, 8192, 64, 28_672, 8),
    "Llama 3 8B": _llama(32, 4096, 32, 14_336, 8, 128_256),
    "Llama 3 70B": _llama(80, 8192, 64, 28_672, 8, 128_256),
    "Olmo 3 7B": _llama(32, 4096, 32, 11_008, vocab=100_352),
    "Olmo 3 32B": _llama(64, 5120, 40, 27_648, 8, 100_352),
    "MPT 1B": _gpt(24, 2048, 16),
    "MPT 3B": _gpt(32, 2560, 20),
    "MPT 7B": _gpt(32, 4096, 32),
    "MPT 13B": _gpt(40, 5120, 40),
    "MPT 30B": _gpt(48, 7168, 64),
    "MPT 70B": _gpt(80, 8192, 64),
}

_A100, _A100_40, _H100 = "NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-40GB", "NVIDIA H100 80GB HBM3"
_FMS = "fms-fsdp README (github.com/foundation-model-stack/fms-fsdp)"
_BLOG = "PyTorch blog 2024-05-21 (pytorch.org/blog/maximizing-training-throughput)"
_TITAN_A100 = "torchtitan docs/performance.md, 2024 (github.com/pytorch/torchtitan)"
_TITAN_H100 = "torchtitan benchmarks/llama3_h100_202412 (github.com/pytorch/torchtitan)"
_MPT = "llm-foundry scripts/train/benchmarking (github.com/mosaicml/llm-foundry)"
_OLMO = "Olmo 3 report, arXiv 2512.13961, and OLMo-core src/scripts/official/OLMo3"


@dataclass(frozen=True)
class Published:
    """A published run.

    Attributes:
        model, device: names.
        tokens: per second and GPU.
        fitted: the constants of the model were fitted to it.
    """

    source: str
    model: str
    device: str
    work: Workload
    cluster: Cluster
    tokens: float
    fitted: bool = False

    @property
    def name(self) -> str:
        """The run in short."""
        work, kind = self.work, self.device.removeprefix("NVIDIA ")[:4]
        parts = [f"{self.model}, {work.ranks} {kind}", f"HSDP {work.shards}" if work.replicas > 1 else "FSDP"]
        parts += [f"{work.recompute:.0%} recomputed"] if work.recompute else []
        parts.append(f"{work.micro_batches} x {work.tokens}" if work.micro_batches > 1 else f"{work.tokens}")
        return ", ".join([*parts, "compiled" if work.compiled else "eager"])


@dataclass(frozen=True)
class PublishedPrediction:
    """A published run and its prediction, in tokens per second and GPU."""

    published: Published
    predicted: float

    @property
    def error(self) -> float:
        """Relative; positive: predicted to be faster than it was."""
        return self.predicted / self.published.tokens - 1


def compare(runs: Sequence[Published], constants: Constants = FITTED) -> list[PublishedPrediction]:
    """Predict published runs."""
    return [PublishedPrediction(run, predicted_tokens(run.work, run.cluster, constants)) for run in runs]


def predicted_tokens(work: Workload, cluster: Cluster, constants: Constants = FITTED) -> float:
    """Tokens per second and rank."""
    return step(work, cluster, constants).tokens(work)


def fit(runs: Sequence[Published], precision: float = 0.002) -> Constants:
    """The constants with the least sum of squared logarithms of predicted / published, by coordinate descent."""

    def loss(constants: Constants) -> float:
        return sum(math.log1p(each.error) ** 2 for each in compare(runs, constants))

    best, size = replace(FITTED, products=0.8, throttled=0.7, overlap=0.8), 0.1
    least = loss(best)
    while size > precision:
        steps = (
            replace(best, **{name: min(1.0, max(0.05, getattr(best, name) + sign * size))})
            for name in ("products", "throttled", "overlap")
            for sign in (-1, 1)
        )
        found, candidate = min(((loss(each), each) for each in steps), key=lambda pair: pair[0])
        if found < least:
            best, least = candidate, found
        else:
            size /= 2
    return best


# ---------------------------------------------------------------------------------------------------------------- data


def _cluster(device: str, gigabits: float | None, bandwidth: float | None = None) -> Cluster:
    """Nodes of eight; `gigabits`: Gb/s from a node to the others, None: usual; `bandwidth`: of the device's memory."""
    kind = devices.find(device)
    assert kind is not None
    if bandwidth is not None:
        kind = replace(kind, bandwidth=bandwidth)
    return Cluster.of(kind, network=None if gigabits is None else gigabits * 1e9 / 8)


def _fms() -> Iterator[Published]:
    """fms-fsdp on 128 A100 (400 Gb/s) and 96 H100 (800 Gb/s): 4k, micro-batch 2, bf16 reductions; FSDP1.

    Columns: model; tokens; recomputed share, 3 (HFU / MFU - 1) as published, since blocks are recomputed selectively;
    for both devices. 7B is HSDP in nodes, others FSDP over all.
    """
    compiled = [
        ("Llama 2 7B", 4550, 0.0, 9600, 0.0),
        ("Llama 2 13B", 2150, 0.39, 4850, 0.21),
        ("Llama 34B", 820, 1.0, 1830, 0.87),
        ("Llama 2 70B", 410, 1.0, 890, 0.71),
    ]
    eager = [
        ("Llama 2 7B", 3700, 0.0, 7500, 0.0),
        ("Llama 2 13B", 1800, 0.47, 3800, 0.43),
        ("Llama 34B", 700, 1.0, 1550, 1.0),
        ("Llama 2 70B", 370, 1.0, 800, 1.0),
    ]
    for rows in (compiled, eager):
        for model, on_a100, recomputed_a100, on_h100, recomputed_h100 in rows:
            for device, ranks, gigabits, tokens, recomputed in (
                (_A100, 128, 400, on_a100, recomputed_a100),
                (_H100, 96, 800, on_h100, recomputed_h100),
            ):
                shards = 8 if model == "Llama 2 7B" else ranks
                work = Workload(
                    _MODELS[model], 4096, 2, 1, shards, ranks // shards,
                    recompute=recomputed, compiled=rows is compiled, gradient_bytes=2,
                )  # fmt: skip
                fitted = rows is compiled and model in ("Llama 2 7B", "Llama 2 70B")
                yield Published(_FMS, model, device, work, _cluster(device, gigabits), tokens, fitted)


def _blog() -> Iterator[Published]:
    """fms-fsdp compiled on 464 H100 with 3.2 Tb/s: only MFU, two digits; recomputation assumed as on 96 H100."""
    for model, mfu, recomputed in (
        ("Llama 2 7B", 0.45, 0.0),
        ("Llama 2 13B", 0.43, 0.21),
        ("Llama 34B", 0.38, 0.87),
        ("Llama 2 70B", 0.38, 0.71),
    ):
        shards = 8 if model == "Llama 2 7B" else 464
        shape, cluster = _MODELS[model], _cluster(_H100, 3200)
        work = Workload(shape, 4096, 2, 1, shards, 464 // shards, recompute=recomputed, gradient_bytes=2)
        tokens = mfu * cluster.device.peak / flops_per_token(sizes(shape).total, shape, 4096)
        yield Published(_BLOG, model, _H100, work, cluster, tokens)


def _titan() -> Iterator[Published]:
    """torchtitan, FSDP2, fp32 reductions.

    H100: 8k, micro-batch 2, devices with 2.4 TB/s and a limit of 500 W; every second product is recomputed, no
    attention, which is 0.4 of the forward pass. A100: network and compilation not stated, taken as eager; `selective
    layer` is every second block.
    """
    for ranks, tokens, compiled in ((8, 6667, True), (128, 6514, True), (8, 5762, False), (128, 5605, False)):
        work = Workload(_MODELS["Llama 3 8B"], 8192, 2, 1, ranks, 1, recompute=0.4, compiled=compiled)
        cluster = _cluster(_H100, 3200, bandwidth=2.4e12)
        yield Published(_TITAN_H100, "Llama 3 8B", _H100, work, cluster, tokens, fitted=compiled)
    for model, length, micro_batch, recomputed, tokens in (
        ("Llama 3 8B", 8192, 1, 0.5, 2904),
        ("Llama 3 70B", 8192, 1, 1.0, 331),
        ("Llama 2 13B", 4096, 2, 0.0, 2162),
        ("Llama 2 13B", 4096, 2, 0.5, 1914),
        ("Llama 2 70B", 4096, 2, 1.0, 353),
    ):
        work = Workload(_MODELS[model], length, micro_batch, 1, 64, 1, recompute=recomputed, compiled=False)
        yield Published(_TITAN_A100, model, _A100, work, _cluster(_A100, None), tokens)


def _mpt() -> Iterator[Published]:
    """MPT with Composer's FSDP: 2k, eager. A100 over 1,600 Gb/s; of H100 the network is not stated.

    Columns: model, device, ranks, micro-batch, micro-batches, recomputed share, bytes per reduced gradient, tokens.
    """
    fitted = [("MPT 70B", _A100, 32, 2, 16, 1.0, 2, 373), ("MPT 70B", _A100, 64, 8, 4, 1.0, 2, 410)]
    others = [
        ("MPT 7B", _A100_40, 8, 12, 4, 1.0, 2, 3679),
        ("MPT 7B", _A100_40, 16, 16, 1, 1.0, 2, 3645),
        ("MPT 7B", _A100_40, 32, 18, 1, 1.0, 2, 3725),
        ("MPT 7B", _A100_40, 128, 18, 1, 1.0, 2, 3623),
        ("MPT 13B", _A100_40, 8, 4, 16, 1.0, 2, 1668),
        ("MPT 13B", _A100_40, 32, 14, 1, 1.0, 2, 1998),
        ("MPT 13B", _A100_40, 128, 16, 1, 1.0, 2, 1972),
        ("MPT 30B", _A100_40, 32, 4, 1, 1.0, 2, 857),
        ("MPT 30B", _A100_40, 128, 6, 1, 1.0, 2, 865),
        ("MPT 70B", _A100_40, 64, 2, 1, 1.0, 2, 276),
        ("MPT 70B", _A100_40, 128, 4, 1, 1.0, 2, 376),
        ("MPT 7B", _A100, 8, 6, 2, 0.0, 4, 4641),
        ("MPT 13B", _A100, 8, 2, 3, 0.0, 4, 2262),
        ("MPT 1B", _H100, 8, 14, 1, 0.0, 4, 45_455),
        ("MPT 1B", _H100, 64, 20, 1, 0.0, 4, 44_402),
        ("MPT 3B", _H100, 64, 6, 3, 0.0, 4, 22_525),
        ("MPT 7B", _H100, 8, 6, 1, 0.0, 4, 10_643),
        ("MPT 13B", _H100, 8, 2, 1, 0.0, 4, 4792),
        ("MPT 13B", _H100, 64, 2, 1, 0.0, 4, 4800),
        ("MPT 30B", _H100, 32, 14, 3, 1.0, 4, 2308),
        ("MPT 70B", _H100, 32, 2, 16, 1.0, 4, 882),
        ("MPT 70B", _H100, 64, 8, 4, 1.0, 4, 1039),
    ]
    for row in (*fitted, *others):
        model, device, ranks, micro_batch, micro_batches, recomputed, gradient_bytes, tokens = row
        work = Workload(
            _MODELS[model], 2048, micro_batch, micro_batches, ranks, 1,
            recompute=recomputed, compiled=False, gradient_bytes=gradient_bytes,
        )  # fmt: skip
        cluster = _cluster(device, None if device == _H100 else 1600)
        yield Published(_MPT, model, device, work, cluster, tokens, fitted=row in fitted)


def _olmo() -> Iterator[Published]:
    """Olmo 3 at 8k; ranks from batch and micro-batch of its scripts. 3 of 4 layers attend to 4k, counted as 8k."""
    for model, micro_batch, shards, replicas, tokens in (
        ("Olmo 3 7B", 2, 8, 32, 7700),
        ("Olmo 3 32B", 1, 64, 16, 1960),
    ):
        work = Workload(_MODELS[model], 8192, micro_batch, 1, shards, replicas)
        yield Published(_OLMO, model, _H100, work, _cluster(_H100, None), tokens)


RUNS: tuple[Published, ...] = (*_fms(), *_blog(), *_titan(), *_mpt(), *_olmo())
"""Every run whose configuration is known well enough, whatever the model says of it."""
