"""A ladder: small runs of the target's shape, and what they say about its learning rate and loss.

The size N of a model is the parameters of its blocks, as in OLMo's ladder (arXiv 2412.04403). All runs train as many
tokens per N as the target. From the target's own, rate and batch follow N**LR_POWER and N**BATCH_POWER: those of Porian
et al. (arXiv 2406.19146), as that ladder rounds them.

For each N the loss is a parabola of log(rate) around the lowest, of one curvature for all; its lowest point moves as a
power of N (Li et al., arXiv 2503.04715); the loss there is E + A / N^alpha (Hoffmann et al., arXiv 2203.15556, eq. 2,
whose two terms are one at a fixed number of tokens per N). Intervals hold 95% of 1000 parametric bootstraps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdp_pretrain import models
from fsdp_pretrain.config import world_sizes
from fsdp_pretrain.config.base import Section
from fsdp_pretrain.config.config import Config, parse
from fsdp_pretrain.config.model import AnyModel
from fsdp_pretrain.config.resume_rules import load_recorded
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.models.flops import feed_forward, run_flops
from fsdp_pretrain.run.arguments import check_begun
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.metrics import read_metrics
from fsdp_pretrain.units import BatchSize, Progress, human_count

Array = NDArray[np.float64]
LARGEST, APART = 0.1, math.sqrt(10)  # the largest N by the target's; one N by the next smaller
LR_POWER, BATCH_POWER, RATES = -1 / 3, 2 / 3, (0.5, 1.0, 2.0)  # RATES: factors of the rule's, for each size
_LEAST = 3  # sizes of a fit, and rates of a size
_SAME = ("model.family", "model.vocab", "data.sequence_length", "optimizer.kind", "optimizer.lr_scale")
_ALPHAS, _DRAWS = np.geomspace(0.02, 2.0, 200), 1000


@dataclass(frozen=True)
class Rung:
    """A run of a ladder, or its target; `size` is N, `batch` in samples, `flops` model FLOPs, `ranks` how many of 8 it
    can be trained on, 0 if on none."""

    name: str
    size: int
    parameters: int
    tokens: int
    batch: int
    lr: float
    flops: float
    ranks: int


def size_of(model: AnyModel) -> int:
    """N: the number of parameters of a model's blocks."""
    return sum(p.numel() for name, p in models.build(model).named_parameters() if name.startswith("blocks."))


def smaller(model: AnyModel, share: float) -> AnyModel:
    """A model with about `share` of the parameters in its blocks, not checked. Depth, width and feed-forward layer
    shrink alike; heads keep their width, or get narrower, down to 32, if it would round the model's by over 1/8. Of
    blocks with windows, the last has none if it would otherwise be of no block."""
    group, width, wide = model.query_width // model.kv_width, model.head_dim, model.hidden / model.query_width
    least, groups = min(32, width // 2), model.query_width * share ** (1 / 3) / (group * width)
    while width >= 2 * least and width % 8 == 0 and abs(groups - round(groups)) > groups / 8:
        width, groups = width // 2, groups * 2
    heads = group * max(1, round(groups))
    hidden = heads * width if wide == 1 else 16 * max(1, round(heads * width * wide / 16))
    ffn = feed_forward(model)[0] * hidden / model.hidden
    unit = 64 if ffn >= 1024 else 16
    layers = max(1, round(model.layers * share * (model.hidden / hidden) ** 2))
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "ffn": unit * max(1, round(ffn / unit))}
    scalar, pattern = (getattr(model, key, None) or 1 for key in ("query_pre_attn_scalar", "sliding_window_pattern"))
    optional = {"kv_heads": heads // group, "head_size": width, "sliding_window_pattern": max(2, min(pattern, layers))}
    optional["query_pre_attn_scalar"] = max(1, scalar * width // model.head_dim)
    sizes |= {key: value for key, value in optional.items() if getattr(model, key, None) is not None}
    small = model.model_copy(update=sizes)
    return small.model_copy(update={"declared_params": models.build(small).count_parameters()})


def ladder(config: Config, count: int, out: Path) -> list[Config]:
    """The runs of `count` sizes, in order of size and rate, with their directories in `out`.

    Raises ConfigError: `count` is less than 3, the model too small for it, or the configuration has a timeline.
    """
    if count < _LEAST or config.timeline:
        cause = f"a ladder has at least {_LEAST} sizes, and no timeline that sets the rates it tries"
        raise ConfigError(cause, remedy="`timeline=[]` leaves it out")
    shapes = [smaller(config.model, LARGEST / APART**n) for n in reversed(range(count))]
    size, sizes = size_of(config.model), [size_of(model) for model in shapes]
    if len({*sizes}) < count or sizes[-1] > size / 5:
        raise ConfigError(f"the blocks' {human_count(size)} parameters are too few for {count} smaller models")
    pairs = zip(shapes, sizes, strict=True)
    return [_run(config, model, n / size, factor, out) for model, n in pairs for factor in RATES]


def _run(config: Config, model: AnyModel, share: float, factor: float, out: Path) -> Config:
    """A run with `share` of the target's N, and that share of all that is counted in steps, samples or tokens. It has
    no ramp of the batch and no evaluations; its held-out loss is measured at the end. Its batch splits over 8 ranks, or
    over fewer, if it would be rounded by more than 1/16; for that its model may have fewer shards, too."""
    target, full, shard = config.schedule, config.schedule.batch.full, config.parallel.shard
    rule = full * share**BATCH_POWER
    while shard != "node" and shard % 2 == 0 and 16 * shard > rule:
        shard //= 2
    ranks = 1 if shard == "node" else shard
    while ranks < 8 and 16 * ranks <= rule:
        ranks *= 2
    batch, lr = ranks * max(1, round(rule / ranks)), float(f"{factor * config.optimizer.lr * share**LR_POWER:.3g}")
    micro = next(n for n in range(config.train.micro_batch, 0, -1) if batch % (ranks * n) == 0)
    length = Progress(max(1, round(target.tokens(target.total) * share)), "token")
    name, samples = f"{human_count(size_of(model))}-lr{lr:g}", BatchSize(batch, "sample")
    changes: dict[str, dict[str, Any]] = {
        "run": {"name": f"{config.run.name}-{name}", "dir": out / name},
        "train": {"duration": length, "global_batch": samples, "micro_batch": micro, "batch_ramp": None},
        "parallel": {"shard": shard},
        "optimizer": {"lr": lr, "min_lr": lr * config.optimizer.min_lr / config.optimizer.lr},
        "checkpoint": {"every": Progress(-(-length.value // 4), "token"), "keep_every": None, "keep_last": 2},
        "eval": {"every": None, "loss_every": length, "loss_samples": config.heldout_samples},
    }
    scaled = _scaled(_without_ramp(config), {"token": share, "sample": share, "step": share * full / batch})
    changed = {key: getattr(scaled, key).model_copy(update=values) for key, values in changes.items()}
    return parse(scaled.model_copy(update={**changed, "model": model}).to_toml())


def _without_ramp(config: Config) -> Config:
    """The lengths of the curve that a ramp makes of steps of several sizes, in samples instead."""
    target, optimizer = config.schedule, config.optimizer
    samples = {"warmup": target.warmup, "decay": target.decay, "decay_length": target.decay - target.decay_start}
    given = {key: getattr(optimizer, key) for key in samples if config.train.batch_ramp is not None}
    in_steps = {key for key, length in given.items() if length is not None and length.unit == "step"}
    changed = optimizer.model_copy(update={key: Progress(samples[key], "sample") for key in in_steps})
    return config.model_copy(update={"optimizer": changed})


def _scaled(part: Any, by: dict[str, float]) -> Any:
    """A section in which every amount of training is multiplied by the factor of its unit."""
    if type(part) is Progress:
        return Progress(max(1, round(part.value * by[part.unit])) if part.value else 0, part.unit)
    if isinstance(part, Section):
        return part.model_copy(update={name: _scaled(value, by) for name, value in part})
    return [_scaled(value, by) for value in part] if isinstance(part, list) else part


def rung(config: Config) -> Rung:
    """A run in numbers."""
    schedule, parameters = config.schedule, models.build(config.model).count_parameters()
    tokens, flops = schedule.tokens(schedule.total), run_flops(config, parameters)
    name, size = config.run.dir.name, size_of(config.model)
    ranks = max((each for each in world_sizes.feasible(config) if each <= 8), default=0)
    return Rung(name, size, parameters, tokens, schedule.batch.full, config.optimizer.lr, flops, ranks)


def render(runs: Sequence[Rung], target: Rung) -> str:
    """The ladder and its target as a table, with what they cost."""
    lines = [f"  {'run':20} in blocks      all   tokens  batch      lr      FLOPs  ranks to 8"]
    for each in [*runs, target]:
        counts = "".join(f" {human_count(count):>8}" for count in (each.size, each.parameters, each.tokens))
        lines.append(f"  {each.name:20} {counts} {each.batch:6_} {each.lr:9g} {each.flops:10.3g} {each.ranks:11}")
    total = sum(each.flops for each in runs)
    return "\n".join(
        [*lines, f"  {len(runs)} small runs: {total:.3g} FLOPs, {total / target.flops:.2%} of the target's"]
    )


@dataclass(frozen=True)
class Trial:
    """The end of a run of size N: batch in samples; losses in nats per token, `heldout` if it was measured there."""

    size: int
    batch: int
    lr: float
    loss: float
    heldout: float | None
    diverged: bool

    def end(self, measure: str) -> float:
        return self.loss if measure == "training" or self.heldout is None else self.heldout


@dataclass(frozen=True)
class Extrapolation:
    """What a ladder says about its target.

    Attributes:
        measure: the loss: `held-out` or `training`.
        best: the best rate and the loss there, by size.
        batch: samples of a step, which `lr` is for.
        lr, loss: of a run of the target: estimate and ends of the interval; None if there are `problems`.
    """

    measure: str
    best: dict[int, tuple[float, float]]
    batch: int
    lr: list[float] | None
    loss: list[float] | None
    problems: list[str]


def read(run: RunDir, target: Config, n: int) -> Trial:
    """The end of a run: the mean loss of its last 5% of steps, and the held-out loss after the last. `n`: target's N.

    Raises ConfigError: it is not of the target's ladder, is unfinished, or its rate was changed on the way.
    """
    check_begun(run)
    config, records = load_recorded(run.config), list(read_metrics(run))
    schedule, size = config.schedule, size_of(config.model)
    values = [(key, attrgetter(key)(config), attrgetter(key)(target)) for key in _SAME]
    wrong = [f"{key} = {mine}, and the target has {theirs}" for key, mine, theirs in values if mine != theirs]
    tokens, asked = schedule.tokens(schedule.total) / size, target.schedule.tokens(target.schedule.total) / n
    if not 0.9 < tokens / asked < 1.1:
        wrong.append(f"it has {tokens:.3g} tokens per parameter of its blocks, and the target has {asked:.3g}")
    if not records or records[-1].consumed < schedule.end:
        wrong.append(f"it was left after {records[-1].step if records else 0} of {schedule.steps} steps")
    planned = (math.isclose(step.lr, schedule.lr_at(step.consumed), rel_tol=1e-6) for step in records)
    if config.timeline or not all(planned):
        wrong.append("its rate is not known, since it was changed on the way")
    if wrong:
        raise ConfigError(f"{run.path} is not of this ladder: {'; '.join(wrong)}", remedy="leave it out")
    held = (records[-1].heldout or {}).values()
    heldout = sum(each.mean * each.count for each in held) / sum(each.count for each in held) if held else None
    window, losses = max(1, len(records) // 20), np.array([step.loss.mean for step in records])
    means = np.convolve(losses, np.full(window, 1 / window), "valid")  # NaN at steps that were skipped
    loss = float(means[-1])
    diverged = not math.isfinite(loss + (heldout or 0)) or loss > 1.1 * float(np.nanmin(means))
    return Trial(size, schedule.batch.full, config.optimizer.lr, loss, heldout, diverged)


class _Laws:
    """The fits to each column of `loss` [trials, columns]; x is log(rate), `row` the index into `sizes`."""

    @np.errstate(divide="ignore", invalid="ignore")  # without a bend there is no lowest point
    def __init__(self, sizes: Array, row: NDArray[np.intp], x: Array, loss: Array, target: int) -> None:
        one, middle, far = np.eye(len(sizes))[row], x.mean(), np.log(sizes / target)
        x = (x - middle)[:, None]
        solved = np.linalg.lstsq(np.hstack([one, one * x, x**2]), loss, rcond=None)[0]
        level, slope, self.bend = np.split(solved, [len(sizes), 2 * len(sizes)])
        best, self.lowest = -slope / (2 * self.bend), level - slope**2 / (4 * self.bend)
        power, lr = np.polyfit(far, best, 1)
        shapes = np.exp(-_ALPHAS[:, None] * far)  # (N / target)^-alpha, [alphas, sizes]
        mean = shapes.mean(1, keepdims=True)
        scale = (shapes - mean) @ self.lowest / ((shapes - mean) ** 2).sum(1, keepdims=True)
        limit = self.lowest.mean(0) - scale * mean
        scale = np.where(limit < 0, shapes @ self.lowest / (shapes**2).sum(1, keepdims=True), scale)  # no loss below 0
        limit = np.maximum(limit, 0)  # E
        laws = limit[:, None] + scale[:, None] * shapes[:, :, None]  # [alphas, sizes, columns]
        alpha, column = ((laws - self.lowest) ** 2).sum(1).argmin(0), np.arange(loss.shape[1])
        self.best, self.lr, self.loss = best + middle, lr + middle, (limit + scale)[alpha, column]
        self.predicted = laws[alpha, :, column].T[row] + self.bend * (x - lr - power * far[row][:, None]) ** 2


def fit(trials: Sequence[Trial], target: int, batch: int) -> Extrapolation:
    """Extrapolate to a target of this N. Proposes its `batch`, unless that of the largest runs, by the rule, is another
    by more than the rounding of small ones."""
    used = [trial for trial in trials if not trial.diverged]
    measure = "training" if any(trial.heldout is None for trial in used) else "held-out"
    sizes = sorted({trial.size for trial in trials})
    largest = max(trials, key=lambda trial: trial.size)
    rule = largest.batch * (target / largest.size) ** BATCH_POWER
    batch = batch if abs(math.log(rule / batch)) < 0.1 else round(rule)
    rates = {size: sorted({trial.lr for trial in used if trial.size == size}) for size in sizes}
    few = [f"{human_count(n)} has {len(lr)} rates without divergence" for n, lr in rates.items() if len(lr) < _LEAST]
    few += [f"there are {len(sizes)} sizes"] if len(sizes) < _LEAST else []
    if few:
        return Extrapolation(measure, {}, batch, None, None, [f"{text}; {_LEAST} are the least" for text in few])
    lowest = {n: min((trial.end(measure), trial.lr) for trial in used if trial.size == n)[::-1] for n in sizes}
    near = {n: sorted(rates[n], key=lambda lr: abs(math.log(lr / lowest[n][0])))[:_LEAST] for n in sizes}
    used = [trial for trial in used if trial.lr in near[trial.size]]  # farther away it is no parabola
    losses = np.array([trial.end(measure) for trial in used])
    x, row = np.log([trial.lr for trial in used]), np.searchsorted(sizes, [trial.size for trial in used])
    law = _Laws(np.array(sizes, np.float64), row, x, losses[:, None], target)
    random, free = np.random.default_rng(0), len(used) - 6  # the laws have six parameters
    sigma = np.sqrt(((losses[:, None] - law.predicted) ** 2).sum() / free)
    noise = sigma * np.sqrt(free / random.chisquare(free, _DRAWS))  # sigma is an estimate, too
    drawn = law.predicted + noise * random.standard_normal((len(used), _DRAWS))
    draws = _Laws(np.array(sizes, np.float64), row, x, drawn, target)
    bends = (draws.bend > 0).mean() > 0.975
    best = {n: (math.exp(law.best[i, 0]), float(law.lowest[i, 0])) for i, n in enumerate(sizes)} if bends else lowest
    problems = []
    for n, (at, _) in best.items():
        if not rates[n][0] < at < rates[n][-1]:
            more = rates[n][0] / 2 if at <= rates[n][0] else 2 * rates[n][-1]
            problems.append(f"the best rate of {human_count(n)} is at the edge of those tried: try {more:.3g}")
    if not bends:
        problems.append("the losses of a size do not bend as a parabola, or by less than their noise")
    if (np.diff([best[n][1] for n in sizes]) >= 0).any():
        problems.append("the loss does not fall with the size")
    if problems:
        return Extrapolation(measure, best, batch, None, None, problems)
    ends = draws.loss + noise * random.standard_normal(_DRAWS)
    lr, loss = ([float(x[0]), *np.percentile(y, [2.5, 97.5])] for x, y in ((law.lr, draws.lr), (law.loss, ends)))
    return Extrapolation(measure, best, batch, [math.exp(value) for value in lr], [float(value) for value in loss], [])


def render_fit(found: Extrapolation, trials: Sequence[Trial], target: Config) -> str:
    """The losses of each size, the lowest point of its parabola, and the proposal."""
    lines = []
    for size in sorted({trial.size for trial in trials}):
        ends = sorted((trial.lr, trial.end(found.measure)) for trial in trials if trial.size == size)
        at = "best lr {:.3g}, loss {:.4f}".format(*found.best[size]) if size in found.best else "no parabola"
        lines.append(f"  {human_count(size):>8}: {at}; at " + ", ".join(f"{lr:g} {loss:.4f}" for lr, loss in ends))
    if found.lr is not None and found.loss is not None:
        lr, at, loss = ("{:.3g} ({:.3g} to {:.3g})".format(*found.lr), f"{found.batch:_} samples", found.loss)
        lines += [
            f"  {target.run.name}: optimizer.lr = {lr}, at train.global_batch = {at}; it has {target.optimizer.lr:g}",
            f"  its {found.measure} loss at the end: {loss[0]:.3f} ({loss[1]:.3f} to {loss[2]:.3f})",
        ]
    return "\n".join(lines)
