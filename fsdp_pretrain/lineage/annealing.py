"""The settings of a fork that anneals: the learning rate decays from where it is, perhaps on another mixture.

They are ordinary settings, so the new run is steered, resumed and reported like any other.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from fsdp_pretrain.checkpoint.manifest import SavedState
from fsdp_pretrain.checkpoint.store import CONFIG, Checkpoint, Store
from fsdp_pretrain.config.base import Section
from fsdp_pretrain.config.config import Config, load
from fsdp_pretrain.config.data_section import SourceSection
from fsdp_pretrain.config.resume_rules import load_recorded
from fsdp_pretrain.config.timeline import TimelineEntry
from fsdp_pretrain.config.toml_file import inline
from fsdp_pretrain.data.packing.mixture import MixtureWeight
from fsdp_pretrain.data.packing.pieces import Pieces
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.run import overrides
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.units import Progress

from .continuation import Branch

_CLOSE = 1e-9
"""Relative difference of rates that counts as none."""


class _Mix(Section):
    """A file for `--mix`."""

    sources: list[SourceSection] = Field(min_length=1)


@dataclass(frozen=True)
class Annealing:
    """What is asked for.

    Attributes:
        length: of the decay; then the run ends.
        to: share of the present learning rate at its end.
        mix: TOML file with `[[sources]]` as in `[data]`, each with a constant weight: the mixture from there on.
    """

    length: Progress
    to: float
    mix: Path | None = None


def changes(
    run: RunDir, step: int, asked: Annealing, others: Sequence[str] = ()
) -> tuple[list[str], list[TimelineEntry]]:
    """The settings, as `section.key=value`, of a fork that anneals from a checkpoint, and its further timeline entries:
    where the timeline has set the rate before, only a later entry can. `others`: settings of the fork, such as another
    batch, in whose steps the decay is counted.

    Raises:
        UserError: there is no such checkpoint; the rate is steered otherwise behind it; the file is no mixture.
    """
    checkpoint = Store(run.checkpoints).find(step)
    saved = checkpoint.train_state()
    config = overrides.apply(run.config, (), overrides.read(run))
    schedule, at = config.schedule, saved.consumed
    was, scale = _rate(checkpoint, at), schedule.values_at(at).lr_scale
    if not was or not scale:
        raise ConfigError(f"the learning rate of step {step} is 0: there is nothing to decay from")
    steps = asked.length.unit == "step"  # counted from here: the run may have had another batch before
    of_batch = [text for text in others if text.strip().startswith("train.")]
    batch = load(run.config, of_batch).schedule.batch if of_batch else schedule.batch
    ahead = asked.length.value if steps else batch.steps_between(at, schedule.behind(at, asked.length))
    end = batch.ahead(at, ahead)
    peak = was / scale
    rate = {"lr": peak, "min_lr": peak * asked.to}
    decay: dict[str, str | float] = {
        "optimizer.curve": "wsd",
        "optimizer.decay": f"{end} samples",
        "optimizer.decay_length": f"{end - at} samples",
        "train.duration": f"{end} samples",
    }
    entries, past = list[TimelineEntry](), [placed.entry for placed in schedule.timeline if placed.at <= at]
    if any(key.removeprefix("optimizer.") in rate for entry in past for key, _ in entry.changes()):
        here = {"at": f"{at} samples", "reason": "fork --anneal", "optimizer": rate}
        entries.append(TimelineEntry.model_validate(here))
    else:
        decay |= {f"optimizer.{key}": value for key, value in rate.items()}
    settings = [f"{key}={inline(value)}" for key, value in decay.items()]
    if asked.mix is not None:
        settings.append(f"data.sources={inline(_sources(config, saved, asked.mix, end - at))}")
    return settings, entries


def rates(branch: Branch, asked: Annealing) -> list[float]:
    """The learning rates of the fork at its beginning, half-way, and at its end.

    Raises ConfigError unless the first is the run's own there, and the last its share.
    """
    at, schedule = branch.state.consumed, branch.after.schedule
    was, is_ = _rate(branch.checkpoint, at), schedule.values_at(at, behind=True).lr
    end = schedule.lr_at(schedule.total)
    if abs(is_ - was) > _CLOSE * was or abs(end - asked.to * was) > _CLOSE * was:
        raise ConfigError(
            f"the rate would go from {was:.6g} to {is_:.6g} at the fork and end at {end:.6g}: the timeline steers it",
            effect="nothing was made",
            remedy="fork without --anneal and set the decay yourself, or end the changes of the timeline before it",
        )
    return [is_, schedule.lr_at((at + schedule.total) // 2), end]


def _rate(checkpoint: Checkpoint, at: int) -> float:
    """The learning rate with which the step of a checkpoint was trained, whatever the run has changed since."""
    return load_recorded(checkpoint.path / CONFIG, own=False).schedule.lr_at(at)


def _sources(config: Config, saved: SavedState, path: Path, samples: int) -> list[dict[str, Any]]:
    """`data.sources` in which the mixture of the file begins at the checkpoint's place in the data. Raises ConfigError,
    also if no sample of the next `samples` could be of it."""
    try:
        mix = _Mix.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, ValidationError) as error:
        raise ConfigError(
            f"{path} is not a mixture: {error}", remedy="write [[sources]] with name, path, weight"
        ) from None
    pieces, news = Pieces(config.data.sequence_stages), {source.name: source for source in mix.sources}
    here, place = f"{saved.cursor} samples", pieces.begun(saved.cursor)  # `place` in windows, as the recorded plan is
    if (begins := pieces.first_sample(place)) >= saved.cursor + samples:
        raise ConfigError(
            f"the mixture can change at sample {begins:_}, not before (data.stages), and the decay ends earlier",
            remedy="choose a longer --anneal, or a checkpoint from there on",
        )
    sources = []
    for old in config.data.sources:
        recorded = saved.identity.mixture.get(old.name)
        plan = None if recorded is None else MixtureWeight.from_json(recorded)
        if plan is None or plan.start >= place:
            continue  # it has not begun: the file alone decides on it
        new, over = news.pop(old.name, None), plan.stop is not None and plan.stop <= place
        shown = old.model_dump(mode="json", exclude_none=True, exclude=None if over else {"stop"})
        if over and new is None:
            sources.append(shown)
            continue
        past, ahead = ([point for point in plan.points if (point[0] < place) == before] for before in (True, False))
        if over or (ahead and ahead[0][1] != past[-1][1]):  # a ramp is under way
            raise ConfigError(
                f"the weight of {old.name} changes, or has ended, around sample {saved.cursor:_}",
                remedy="fork without --mix, and set data.sources yourself",
            )
        if new is None:
            sources.append({**shown, "stop": here})
            continue
        if str(new.path) != str(old.path):
            raise ConfigError(f"{old.name} is {new.path} in {path}, and {old.path} in the run", remedy="rename it")
        places = [(f"{pieces.first_sample(first)} samples", value) for first, value in past]
        jump = [(here, past[-1][1]), (here, _constant(new, path))]
        points = [{"at": at, "value": value} for at, value in (*places, *jump)]
        sources.append({**shown, "weight": points, **_limits(new)})
    begun = [
        {**source.model_dump(mode="json", exclude_none=True), "weight": _constant(source, path), "start": here}
        for source in news.values()
    ]
    return sources + begun


def _limits(source: SourceSection) -> Mapping[str, Any]:
    return {} if source.max_epochs is None else {"max_epochs": source.max_epochs}


def _constant(source: SourceSection, path: Path) -> float:
    if isinstance(source.weight, list) or source.start.value or source.stop is not None:
        raise ConfigError(f"{path}: the weight of {source.name} must be a number, from the fork to the end of the run")
    return source.weight
