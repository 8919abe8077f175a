"""`fsdp-pretrain plan --predict`: how fast a configuration would train on 8 to 1,024 devices. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from statistics import mean, median
from typing import Any

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.units import human_count, human_time
from fsdp_pretrain.watchdog.hang.deadlines import LONGEST

from . import devices, published
from .devices import Device
from .flops import flops_per_token, recomputed_share
from .overheads import DAY, Operations, Overheads, overheads
from .published import PublishedPrediction
from .scale import FITTED, Cluster, Constants, Step, Workload, step
from .sizes import check_declared, sizes

SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
UNKNOWN_RATES = ("fp32", "bf16+fp8")
"""Precisions for which no rates are on file."""
_STATE = 16
"""Bytes per parameter of fp32 parameters, gradients and moments."""


@dataclass(frozen=True)
class Prediction:
    """A run on a number of ranks.

    Attributes:
        batch: samples per step.
        as_configured: that is the configured batch; otherwise the nearest that splits into micro-batches.
        fits: the state of a rank is smaller than its memory; what else is in it is not estimated.
        step: seconds by part.
        tokens: per second and rank, while it trains.
        days: for the whole run, with all costs.
    """

    ranks: int
    shards: int
    replicas: int
    micro_batches: int
    batch: int
    as_configured: bool
    fits: bool
    step: Step
    tokens: float
    mfu: float
    costs: Overheads
    days: float


@dataclass(frozen=True)
class Table:
    """Predictions of a run, what they assume, and how far the model is from published runs."""

    run: str
    device: str
    cluster: Cluster
    operations: Operations
    constants: Constants
    predictions: list[Prediction]
    comparisons: list[PublishedPrediction]

    def to_json(self) -> dict[str, Any]:
        """JSON values; infinite times are None."""
        return {
            "run": self.run,
            "device": self.device,
            "cluster": asdict(self.cluster),
            "operations": asdict(self.operations),
            "constants": asdict(self.constants),
            "predictions": [_prediction_json(each) for each in self.predictions],
            "published": [_comparison_json(each) for each in self.comparisons],
        }


def _prediction_json(prediction: Prediction) -> dict[str, Any]:
    values = asdict(prediction)
    values["step"]["seconds"] = prediction.step.seconds
    if not prediction.costs.goodput:
        values["days"] = None
    if not values["costs"]["between"] < float("inf"):
        values["costs"]["between"] = None
    return values


def _comparison_json(comparison: PublishedPrediction) -> dict[str, Any]:
    run = comparison.published
    return {
        "name": run.name,
        "device": run.device,
        "source": run.source,
        "tokens": run.tokens,
        "predicted": comparison.predicted,
        "error": comparison.error,
        "fitted": run.fitted,
    }


def predict(
    config: Config,
    device: str | None,
    *,
    world: int | None = None,
    gpus_per_node: int = 8,
    link: float | None = None,
    network: float | None = None,
    operations: Operations | None = None,
) -> Table:
    """Predict a run on `SIZES` devices, or the nearest numbers that its shards divide, and on `world`.

    Args:
        device: the driver's name of the device.
        link: bytes/s from a device to the others of its node; default: that of the device.
        network: bytes/s from a node to the others; default: an adapter per device.
        operations: default: as in the configuration, for the rest the defaults of `Operations`.

    Raises:
        ConfigError: the device or its rate is not known, or the model is not the declared one.
    """
    check_declared(config.model, sizes(config.model).total)
    cluster = Cluster.of(known_device(config, device), gpus_per_node, link, network)
    operations = operations or operations_of(config)
    if world is not None and world % _shards(config, cluster, world):
        raise ConfigError(
            f"shards of {_shards(config, cluster, world)} ranks do not divide the world size {world}",
            remedy="predict for a multiple of it",
        )
    unit = _shards(config, cluster, cluster.gpus)
    counts = {max(1, round(size / unit)) * unit for size in SIZES} | ({world} if world else set())
    predictions = [_predict(config, cluster, operations, count) for count in sorted(counts)]
    return Table(
        run=config.run.name,
        device=device or "",
        cluster=cluster,
        operations=operations,
        constants=FITTED,
        predictions=predictions,
        comparisons=published.compare(published.RUNS),
    )


def predict_one(config: Config, device: str, ranks: int, gpus_per_node: int = 8) -> Prediction:
    """The prediction for one number of ranks, with default links and storage. Raises ConfigError."""
    cluster = Cluster.of(known_device(config, device), gpus_per_node, None, None)
    return _predict(config, cluster, operations_of(config), ranks)


def known_device(config: Config, name: str | None) -> Device:
    """The device of this name. Raises ConfigError if it is not known, or its rate in the configured precision."""
    device = devices.find(name or "")
    if device is None:
        raise ConfigError(
            f"what a device {name!r} can do is not known" if name else "the speed of a --device is needed",
            remedy=f"name one of these, as its driver does: {', '.join(devices.names())}",
        )
    if config.train.precision in UNKNOWN_RATES:
        raise ConfigError(
            f'only the rates of bf16 and fp16 are known, not those of train.precision = "{config.train.precision}"'
        )
    return device


def operations_of(config: Config, storage: float | None = None, failures: float | None = None) -> Operations:
    """What the configuration says of saves and of hanging ranks."""
    defaults = Operations()
    return Operations(
        storage=defaults.storage if storage is None else storage,
        failures=defaults.failures if failures is None else failures,
        detect=config.watchdog.hang.hard.value,
        background=config.checkpoint.background,
        verify=config.checkpoint.verify,
    )


def _shards(config: Config, cluster: Cluster, ranks: int) -> int:
    return min(ranks, cluster.gpus) if config.parallel.shard == "node" else config.parallel.shard


def workload(config: Config, cluster: Cluster, ranks: int, length: int | None = None) -> Workload:
    """A step of the full batch on `ranks`, with as many micro-batches as come closest to it, at least one.

    `length`: of its samples; default: `data.sequence_length`.
    """
    shards, parallel = _shards(config, cluster, ranks), config.parallel
    micro_batch, length = config.train.micro_batch, length or config.data.sequence_length
    return Workload(
        model=config.model,
        sequence_length=length,
        micro_batch=micro_batch,
        micro_batches=max(1, round(config.schedule.batch.full / (ranks * micro_batch))),
        shards=shards,
        replicas=ranks // shards,
        recompute=recomputed_share(config.model, length, parallel.recompute),
        compiled=config.compiles_on_gpu,
        reshard=parallel.reshard_after_forward,
    )


def _predict(config: Config, cluster: Cluster, operations: Operations, ranks: int) -> Prediction:
    schedule, work = config.schedule, workload(config, cluster, ranks)
    parts = step(work, cluster)
    batch = work.micro_batches * work.micro_batch * ranks
    every = config.save_every(config.schedule.total)
    steps = every.value if every.unit == "step" else schedule.lengths.interval(every) / batch
    longest = LONGEST
    operations = replace(operations, detect=max(operations.detect, min(30 * parts.seconds, longest)))
    costs = overheads(work, cluster, operations, interval=steps * parts.seconds)
    tokens = parts.tokens(work)
    flops = flops_per_token(work.sizes.total, config.model, config.data.sequence_length)
    seconds = 0.0
    for length, samples in schedule.lengths.between(0, schedule.total).items():
        staged = workload(config, cluster, ranks, length)
        seconds += samples * length / (step(staged, cluster).tokens(staged) * ranks)
    return Prediction(
        ranks=ranks,
        shards=work.shards,
        replicas=work.replicas,
        micro_batches=work.micro_batches,
        batch=batch,
        as_configured=batch == schedule.batch.full,
        fits=_STATE * work.sizes.total / work.shards < cluster.device.bytes,
        step=parts,
        tokens=tokens,
        mfu=tokens * flops / cluster.device.peak,
        costs=costs,
        days=seconds / costs.goodput / DAY if costs.goodput else float("inf"),
    )


# ---------------------------------------------------------------------------------------------------------------- text


def render(table: Table) -> str:
    """The table for people."""
    cluster, operations = table.cluster, table.operations
    return "\n".join(
        [
            f"{table.run} on {table.device}, {cluster.gpus} per node; {cluster.link / 1e9:g} GB/s to a neighbour, "
            f"{cluster.network * 8 / 1e9:g} Gb/s from node to node; storage {operations.storage / 1e9:g} GB/s; "
            f"{1000 * operations.failures:.3g} failures per 1,000 node-days",
            *_render_steps(table.predictions),
            "",
            *_render_costs(table.predictions),
            "",
            *_render_comparisons(table),
        ]
    )


def _render_steps(predictions: list[Prediction]) -> Iterator[str]:
    parts = [each.name for each in fields(Step)]
    yield "  " + "".join(f"{name:>12}" for name in ("ranks", "mesh", "batch", "step", *parts, "tokens/s", "MFU"))
    for row in predictions:
        marks = ("" if row.as_configured else "*") + ("" if row.fits else "!")
        cells = [f"{row.ranks}", f"{row.replicas} x {row.shards}", f"{row.batch}{marks}", _seconds(row.step.seconds)]
        cells += [_seconds(getattr(row.step, name)) for name in parts]
        yield "  " + "".join(f"{cell:>12}" for cell in (*cells, f"{row.tokens:,.0f}", f"{row.mfu:.1%}"))
    yield "  step and its parts: seconds; gather, reduce: communication that is not hidden; tokens/s: per device"
    if not all(row.as_configured for row in predictions):
        yield "  *: not the configured batch, which does not split into micro-batches there; the run has as many tokens"
    if not all(row.fits for row in predictions):
        yield "  !: does not fit: parameters, gradients and optimiser alone are larger than the memory"


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value < 100 else f"{value:.1f}"


def _render_costs(predictions: list[Prediction]) -> Iterator[str]:
    names = ("ranks", "save", "stall", "fails every", "restart", "lost", "goodput", "days", "tokens/day")
    yield "  " + "".join(f"{name:>12}" for name in names)
    for row in predictions:
        costs = row.costs
        times = [costs.save, costs.stall, costs.between, costs.restart, costs.lost]
        cells = [f"{row.ranks}", *(human_time(each) if each < float("inf") else "never" for each in times)]
        kept = row.tokens * row.ranks * costs.goodput * DAY
        cells += [f"{costs.goodput:.2%}", f"{row.days:.1f}", human_count(kept)]
        yield "  " + "".join(f"{cell:>12}" for cell in cells)
    yield "  save: until it is verified; stall: of it, what training waits; lost: training, by a failure"


def _render_comparisons(table: Table) -> Iterator[str]:
    """All that was fitted, and the published runs on similar devices."""
    tested = [abs(each.error) for each in table.comparisons if not each.published.fitted]
    yield (
        f"  published runs: the error is {mean(tested):.1%} in the mean, {median(tested):.1%} in the median, "
        f"{max(tested):.0%} at worst, of {len(tested)} to which nothing was fitted"
    )
    throttles = table.cluster.device.throttles
    shown = [each for each in table.comparisons if each.published.cluster.device.throttles == throttles]
    head = "on similar devices; micro-batches x tokens of a rank"
    yield f"    {head:80}{'tokens/s':>9}{'predicted':>11}{'error':>8}"
    for each in shown:
        run, mark = each.published, "f" if each.published.fitted else ""
        yield f"  {mark:2}{run.name:80}{run.tokens:>9,.0f}{each.predicted:>11,.0f}{each.error:>+8.1%}"
    yield "  f: one of the runs to which the model's three constants were fitted"
