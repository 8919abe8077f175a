"""Permanent changes by rollbacks, forks and `control set`: `RUN/overrides.toml`, part of the configuration at every
start.

A run is restarted many times with its first command, often automatically. So changes made by a rollback are kept in
the run directory and win over the configuration file; skipped samples, and timeline entries of `control set`, are added
to those of the file. A command line that contradicts them is refused rather than obeyed or ignored.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import tomli_w
from pydantic import AfterValidator, Field

from fsdp_pretrain.config.base import Section
from fsdp_pretrain.config.config import Config, load, with_timeline
from fsdp_pretrain.config.skips import Skips
from fsdp_pretrain.config.timeline import TimelineEntry
from fsdp_pretrain.config.toml_file import index, inline
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.units import SampleRange

from . import run_id
from .files import RunDir, replace_file
from .lineage import decided_rollback

_HEADER = (
    "# Part of the configuration at every start of this run. Written by `fsdp-pretrain rollback`, `fork` and\n"
    "# `control set`; change it by hand only while no job runs. `set` wins over the file, `skip` is added to\n"
    "# data.skip, `timeline` to timeline.\n"
)


def _merge(spans: Iterable[SampleRange]) -> tuple[SampleRange, ...]:
    return tuple(SampleRange(*pair) for pair in Skips((span.first, span.stop) for span in spans).ranges)


def _in_samples(timeline: tuple[TimelineEntry, ...]) -> tuple[TimelineEntry, ...]:
    if not all(length.unit == "sample" for entry in timeline for length in entry.lengths()):
        raise ValueError("places and lengths in `timeline` must be in samples: a step is as large as its batch")
    return timeline


class Overrides(Section):
    """Permanent changes of a run's configuration: `section.key=value`, each key once; samples to skip; and timeline
    entries, in the order in which they were given."""

    set: Annotated[tuple[str, ...], Field(strict=False)] = ()
    skip: Annotated[tuple[SampleRange, ...], Field(strict=False), AfterValidator(_merge)] = ()
    timeline: Annotated[tuple[TimelineEntry, ...], Field(strict=False), AfterValidator(_in_samples)] = ()

    def add(self, changes: Sequence[str], skip: Sequence[SampleRange]) -> Overrides:
        """These overrides plus further ones; a later value of a key replaces earlier ones of it and of keys below."""
        values: dict[str, str] = {}
        for text in (*self.set, *changes):
            key = text.partition("=")[0].strip()
            for below in [earlier for earlier in values if f"{earlier}.".startswith(f"{key}.")]:
                del values[below]
            values[key] = text
        return self.model_copy(update={"set": tuple(values.values()), "skip": _merge((*self.skip, *skip))})

    def without(self, dropped: Sequence[TimelineEntry]) -> Overrides:
        """These overrides without some timeline entries."""
        return self.model_copy(update={"timeline": tuple(entry for entry in self.timeline if entry not in dropped)})

    def to_toml(self) -> str:
        """The contents of `overrides.toml`."""
        return _HEADER + tomli_w.dumps({"set": [], "skip": [], **self.model_dump(mode="json", exclude_defaults=True)})

    @classmethod
    def from_toml(cls, text: str, where: Path) -> Overrides:
        """Parse the contents of `overrides.toml`. Raises ConfigError."""
        try:
            return cls.model_validate(tomllib.loads(text))
        except ValueError as error:
            raise ConfigError(
                f"{where} cannot be read: {error}",
                effect="the run would continue without the changes of a rollback, a fork or `control set`",
                remedy="restore it; the config.toml of the newest segment has the same values",
            ) from None

    def __str__(self) -> str:
        return "; ".join([*self.set, *(f"skip {span}" for span in self.skip), *map(str, self.timeline)])


def read(run: RunDir) -> Overrides:
    """The overrides of a run, including those of a rollback in progress. Raises ConfigError, DamagedFileError."""
    decided = decided_rollback(run)
    if decided is not None:
        return Overrides.from_toml(decided.overrides, run.rollback)
    try:
        return Overrides.from_toml(run.overrides.read_text(encoding="utf-8"), run.overrides)
    except FileNotFoundError:
        return Overrides()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {run.overrides}: {error}") from None


def apply(
    path: str | Path, arguments: Sequence[str], overrides: Overrides, dropped: Sequence[TimelineEntry] = ()
) -> Config:
    """The configuration of a file, `key=value` arguments and a run's overrides, without the entries `dropped`. Raises
    ConfigError if the configuration is invalid, or the arguments contradict the overrides."""
    config = load(path, [*arguments, *overrides.set])
    if arguments and overrides.set and (obeyed := load(path, [*overrides.set, *arguments])) != config:
        resolved, commanded = (tree.model_dump(mode="json") for tree in (config, obeyed))
        keys = [text.partition("=")[0].strip() for text in arguments]
        values = [(key, value(resolved, key), value(commanded, key)) for key in keys]
        wrong = [f"{key}: {kept} is set, not {asked}" for key, kept, asked in values if kept != asked]
        raise ConfigError(
            f"the command line contradicts {config.run.dir / 'overrides.toml'}:\n    " + "\n    ".join(wrong),
            effect="a restart with an old command would undo what a rollback or fork decided",
            remedy="leave these keys off the command line; `fsdp-pretrain rollback RUN --to STEP --set key=value` "
            "changes them for good",
        )
    if overrides.skip:
        spans = _merge((*config.data.skip, *overrides.skip))
        skip = f"data.skip={inline([str(span) for span in spans])}"
        config = load(path, [*arguments, *overrides.set, skip])
    # The run's own config.toml has them already.
    timeline = [entry for entry in config.timeline if entry not in overrides.timeline and entry not in dropped]
    timeline += overrides.timeline
    return config if timeline == config.timeline else with_timeline(config, timeline, Path(path))


def load_run(path: str | Path, arguments: Sequence[str] = ()) -> tuple[Config, Overrides]:
    """The configuration of a start, and the run directory's overrides in it.

    Raises ConfigError, also for the configuration in a run directory that was moved or copied.
    """
    config = load(path, arguments)
    folder = Path(path).absolute().parent
    own = Path(path).name == "config.toml" and run_id.read(folder) is not None
    named = any(text.partition("=")[0].strip() == "run.dir" for text in arguments)
    if own and not named and not (config.run.dir.exists() and config.run.dir.samefile(folder)):
        raise ConfigError(
            f"{path} says that its run is in {config.run.dir}; this directory was moved or copied from there",
            effect=f"the run would start or continue in {config.run.dir}, not here",
            remedy=f"append run.dir={folder} to continue here; training then writes it into {path}",
        )
    overrides = read(RunDir(config.run.dir))
    return apply(path, arguments, overrides), overrides


def add_entry(run: RunDir, entry: TimelineEntry) -> Overrides:
    """Add a timeline entry durably, for all later starts. Returns all overrides.

    Raises OSError; ConfigError if the present overrides cannot be read.
    """
    standing = read(run)
    after = standing.model_copy(update={"timeline": (*standing.timeline, entry)})
    replace_file(run.overrides, after.to_toml())
    return after


def value(tree: Any, key: str) -> Any:
    """The value of a dotted key in a dumped configuration, or None."""
    for part in key.split("."):
        if isinstance(tree, list):
            number = index(tree, part)
            tree = None if number is None else tree[number]
        else:
            tree = tree.get(part) if isinstance(tree, dict) else None
    return tree
