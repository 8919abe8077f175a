"""Permanent changes by rollbacks and forks: `RUN/overrides.toml`, part of the configuration at every start.

A run is restarted many times with its first command, often automatically. So changes made by a rollback are kept in
the run directory and win over the configuration file; skipped samples are added to the file's. A command line that
contradicts them is refused rather than obeyed or ignored.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from fsdp_pretrain.config.config import Config, load
from fsdp_pretrain.config.skips import Skips
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.units import SampleRange

from .files import RunDir
from .lineage import decided_rollback

_HEADER = (
    "# Part of the configuration at every start of this run. Written by `fsdp-pretrain rollback` and `fork`;\n"
    "# change it by hand only while no job runs. `set` wins over the file, `skip` is added to data.skip.\n"
)


@dataclass(frozen=True)
class Overrides:
    """Permanent changes of a run's configuration: `section.key=value`, each key once; and samples to skip."""

    set: tuple[str, ...] = ()
    skip: tuple[SampleRange, ...] = ()

    def add(self, changes: Sequence[str], skip: Sequence[SampleRange]) -> Overrides:
        """These plus further ones; a later value of a key replaces the earlier."""
        values = {text.partition("=")[0].strip(): text for text in (*self.set, *changes)}
        return Overrides(tuple(values.values()), _merge((*self.skip, *skip)))

    def to_toml(self) -> str:
        """Contents of the file."""
        return _HEADER + tomli_w.dumps({"set": list(self.set), "skip": [str(span) for span in self.skip]})

    @classmethod
    def from_toml(cls, text: str, where: Path) -> Overrides:
        """Read the contents of the file. Raises ConfigError."""
        try:
            content = tomllib.loads(text)
            changes = content.pop("set", [])
            skip = _merge([SampleRange.parse(span) for span in content.pop("skip", [])])
            if content or not all(isinstance(item, str) for item in changes):
                raise ValueError("it may have only `set` and `skip`, two lists of strings")
        except (tomllib.TOMLDecodeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{where} cannot be read: {error}",
                effect="the run would continue without the changes of a rollback or fork",
                remedy="restore it; the config.toml of the newest segment has the same values",
            ) from None
        return cls(tuple(changes), skip)

    def __str__(self) -> str:
        return "; ".join([*self.set, *(f"skip {span}" for span in self.skip)])


def _merge(spans: Sequence[SampleRange]) -> tuple[SampleRange, ...]:
    return tuple(SampleRange(*pair) for pair in Skips((span.first, span.stop) for span in spans).ranges)


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


def apply(path: str | Path, arguments: Sequence[str], overrides: Overrides) -> Config:
    """The configuration of a file, `key=value` arguments and a run's overrides.

    Raises:
        ConfigError: it is invalid, or the arguments contradict the overrides.
    """
    config = load(path, [*arguments, *overrides.set])
    if arguments and overrides.set and (obeyed := load(path, [*overrides.set, *arguments])) != config:
        mine, theirs = (tree.model_dump(mode="json") for tree in (config, obeyed))
        keys = [text.partition("=")[0].strip() for text in arguments]
        values = [(key, value(mine, key), value(theirs, key)) for key in keys]
        wrong = [f"{key}: {kept} is set, not {asked}" for key, kept, asked in values if kept != asked]
        raise ConfigError(
            f"the command line contradicts {config.run.dir / 'overrides.toml'}:\n    " + "\n    ".join(wrong),
            effect="a restart with an old command would undo what a rollback or fork decided",
            remedy="leave these keys off the command line; `fsdp-pretrain rollback RUN --to STEP --set key=value` "
            "changes them for good",
        )
    if overrides.skip:
        spans = _merge((*config.data.skip, *overrides.skip))
        skip = f"data.skip={json.dumps([str(span) for span in spans])}"
        config = load(path, [*arguments, *overrides.set, skip])
    return config


def load_run(path: str | Path, arguments: Sequence[str] = ()) -> tuple[Config, Overrides]:
    """The configuration of a start, and the run directory's overrides in it. Raises ConfigError."""
    config = load(path, arguments)
    overrides = read(RunDir(config.run.dir))
    return apply(path, arguments, overrides), overrides


def value(tree: Any, key: str) -> Any:
    """The value of a dotted key in a dumped configuration, or None."""
    for part in key.split("."):
        if isinstance(tree, list):
            tree = tree[int(part)] if part.isdigit() and int(part) < len(tree) else None
        else:
            tree = tree.get(part) if isinstance(tree, dict) else None
    return tree
