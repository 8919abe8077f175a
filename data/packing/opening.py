"""Builds the packer of a run from its configuration, for training, `where` and evaluation."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from fsdp_pretrain import extensions
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.data_section import DataSection, GLMObjective, Place, SourceSection
from fsdp_pretrain.config.skips import Skips
from fsdp_pretrain.data.corpus.cached import CacheUse
from fsdp_pretrain.errors import ConfigError, DataError

from .mixture import Mixture, MixtureWeight
from .objectives import Infilling, Specials
from .own_objective import ObjectiveContext, OwnObjective
from .packer import Packer
from .pieces import Pieces


def open_packer(config: Config, fetcher: Path | None = None) -> Packer:
    """The packer of a run. Raises DataError, and ConfigError if the corpora do not fit the model.

    `fetcher`: status file of the node's fetcher, see `CacheUse`.
    """
    data, pieces = config.data, Pieces(config.data.sequence_stages)
    excluded = read_exclusions(data.exclude) if data.exclude is not None else set()
    packer = Packer(
        [(source.name, source.path, _weight(source, pieces)) for source in data.sources],
        data.row,
        seed=data.seed,
        lanes=data.lanes,
        max_epochs={source.name: source.max_epochs for source in data.sources if source.max_epochs is not None},
        reshuffle=windows_at(data, data.reshuffle),
        exclude=excluded,
        read_timeout=config.read_timeout,
        slots=slots_of(data),
        stages=data.sequence_stages,
        cache=cache_use(config, fetcher),
    )
    if packer.tokenizer.vocab_size > config.model.vocab:
        raise ConfigError(
            f"model.vocab = {config.model.vocab}, but the corpora's tokenizer has {packer.tokenizer.vocab_size} tokens",
            effect="ids above the embedding table would crash a GPU kernel in the middle of a run",
            remedy=f"set model.vocab to at least {packer.tokenizer.vocab_size}",
        )
    _check_exclusions(excluded, packer)
    open_objective(config, packer)
    return packer


def _check_exclusions(excluded: Collection[tuple[str, str, int]], packer: Packer) -> None:
    """Raise DataError if a source has no such document. The list may be of more sources than the run has."""
    counts = {
        name: {shard.name: shard.documents for shard in corpus.manifest.shards}
        for name, corpus in packer.corpora.items()
    }
    for source, shard, document in excluded:
        if source in counts and document >= counts[source].get(shard, 0):
            raise DataError(
                f"data.exclude names document {document} of shard {shard} of {source}, which does not exist",
                effect="what is meant instead would be learned",
                remedy="write SOURCE SHARD DOCUMENT, as `fsdp-pretrain where` shows them",
            )


def cache_use(config: Config, fetcher: Path | None = None) -> CacheUse | None:
    """How the run's corpora by URL are read; None if the run has no cache."""
    cache = config.data.cache
    return None if cache is None else CacheUse(cache.dir, fetcher)


def windows_at(data: DataSection, places: Sequence[Place]) -> list[int]:
    """The first windows that changes at these places in the data can affect."""
    pieces = Pieces(data.sequence_stages)
    return [pieces.begun_at(place) for place in places]


def slots_of(data: DataSection) -> tuple[int, int] | None:
    """(pairs per sample, tokens per pair) of sources of prompts with answers; None if the objective allows none."""
    objective = data.objective
    if not isinstance(objective, GLMObjective):
        return None
    return objective.slots, data.sequence_length // objective.slots


def open_objective(config: Config, packer: Packer, *, seed: int | None = None) -> Infilling | OwnObjective | None:
    """What makes the samples of a run, with `data.seed` by default; None if they are causal. Raises ConfigError."""
    objective = config.data.objective
    if (part := extensions.parts("objectives").get(objective.kind)) is not None:
        known = {"vocab": packer.tokenizer.vocab_size, "model_vocab": config.model.vocab, "eod": packer.eod}
        names, drawn = packer.mixture.names, config.data.seed if seed is None else seed
        own: OwnObjective = part.load()(objective, ObjectiveContext(**known, seed=drawn, names=names))
        return own
    if not isinstance(objective, GLMObjective):
        return None
    return Infilling(
        objective,
        config.data.sequence_length,
        seed=config.data.seed if seed is None else seed,
        names=packer.mixture.names,
        pairs=packer.pairs,
        separator=packer.eod,
        ids=Specials.of(packer.tokenizer, config.model.vocab),
        two_dimensions=config.model.two_dimensions,
    )


def open_skips(config: Config) -> Skips:
    """The samples that a run skips."""
    return Skips((span.first, span.stop) for span in config.data.skip)


def data_at(config: Config, consumed: int) -> dict[str, Any]:
    """Position in the data after `consumed` trained samples: `cursor`, and planned `shares` by source.

    Uses the configuration alone, so sources that end by `max_epochs` are still listed. Raises DataError.
    """
    cursor = open_skips(config).after(0, consumed)
    return {"cursor": cursor, "shares": shares_at(config, cursor)}


def shares_at(config: Config, cursor: int) -> dict[str, float]:
    """Planned shares of the sources at sample `cursor`, from the configuration alone. Raises DataError."""
    pieces = Pieces(config.data.sequence_stages)
    mixture = Mixture({source.name: _weight(source, pieces) for source in config.data.sources})
    return mixture.shares(pieces.place(cursor)[0])


def check_supply(config: Config, packer: Packer, *, cursor: int, consumed: int) -> None:
    """Raise DataError unless the mixture lasts from these counters to the end of the run.

    With stages of shorter samples, also raise ConfigError if the skipped samples do not explain the counters, since the
    number of trained tokens would be unknown.
    """
    skips = open_skips(config)
    if config.data.stages and (expected := skips.after(0, consumed)) != cursor:
        raise ConfigError(
            f"with data.skip as it is, the run would have read {expected:_} samples after training {consumed:_}, but "
            f"it has read {cursor:_}",
            effect="with data.stages, how many tokens were trained depends on the samples that were skipped: schedules "
            "in tokens would jump",
            remedy="restore the ranges of data.skip that are past, and begin new ones at a sample that is still ahead",
        )
    batch = config.schedule.batch
    trained = batch.ahead(consumed, batch.steps_between(consumed, config.schedule.end))
    last, capacity = skips.after(cursor, trained - consumed), packer.capacity
    if capacity is not None and last > capacity:
        epochs = ", ".join(f"{name} after {epochs:.2f} epochs" for name, epochs in packer.epochs_read(capacity).items())
        raise DataError(
            f"the run reads {last:_} samples, but the mixture ends after {capacity:_} ({epochs})",
            effect="the run would stop in the middle of its schedule",
            remedy="raise max_epochs or stop of a source, add data, or shorten train.duration",
        )


def _weight(source: SourceSection, pieces: Pieces) -> MixtureWeight:
    """A source's weight by window. Raises ConfigError if places in different units are not in order."""
    if isinstance(source.weight, list):
        points = tuple((pieces.begun_at(point.at), point.value) for point in source.weight)
    else:
        points = ((0, source.weight),)
    start, stop = pieces.begun_at(source.start), None if source.stop is None else pieces.begun_at(source.stop)
    mixed = source.stop is not None and source.stop.unit != source.start.unit  # of one unit, they were compared before
    if any(later < earlier for (earlier, _), (later, _) in pairwise(points)):
        raise ConfigError(f"data.sources.{source.name}: the points of `weight` are not in order")
    if stop is not None and (stop < start or (mixed and stop == start)):
        raise ConfigError(f"data.sources.{source.name}: `stop` = {source.stop} is not after `start` = {source.start}")
    return MixtureWeight(points, start, stop)


def read_exclusions(path: Path) -> set[tuple[str, str, int]]:
    """(source, shard, document) of each line of `data.exclude`. Raises DataError."""
    excluded = set()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read data.exclude = {path}: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        parts = re.fullmatch(r"\s*(\S+)\s+(\S.*?)\s+(\d+)\s*", line)  # names of shards may hold spaces
        if parts is None:
            raise DataError(
                f"{path}, line {number} is not a document: {line[:60]!r}",
                remedy="write SOURCE SHARD DOCUMENT, as `fsdp-pretrain where` shows them",
            )
        excluded.add((parts[1], parts[2], int(parts[3])))
    return excluded
