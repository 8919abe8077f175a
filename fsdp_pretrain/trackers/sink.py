"""The interface between the stream of points and a tracker, and the trackers that there are."""

from __future__ import annotations

import importlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.record.files import RunDir

from .points import Point
from .run_facts import RunFacts, read_config


class Sink(ABC):
    """The view of a run in one tracker. All methods may raise anything.

    Attributes:
        name: of the package, the configuration key `record.NAME` and the verb.
        title: for people.
        id: of the view among others in its place.
        watched: a file or directory that exists as long as the view does.
        opened: what a person opens to see it.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    id: str
    watched: Path
    opened: Path

    @abstractmethod
    def __init__(self, place: Path, facts: RunFacts, known: str | None, *, fresh: bool) -> None:
        """Open the view of id `known`, or make one (None). With `fresh`, all points are written again and replace
        those in it; otherwise only later ones follow."""

    @classmethod
    def place(cls, run: RunDir, record: dict[str, Any]) -> Path:
        """The directory of a run's views, by the section `record` of its configuration."""
        return run.path / cls.name

    @classmethod
    @abstractmethod
    def can_continue(cls, place: Path, known: str, *, in_order: bool) -> bool:
        """Whether later points can be added to a view. `in_order`: they follow those in it, and none is there yet;
        otherwise some may be there, or be values that were lost and trained again."""

    @classmethod
    @abstractmethod
    def set_aside(cls, place: Path, known: str, why: str) -> None:
        """Mark a view, if it exists, as one that is no longer the run's, for the reason `why`."""

    @classmethod  # noqa: B027 (not abstract: most have nothing to do)
    def adopt(cls, run: RunDir) -> None:
        """Set aside what earlier releases wrote, if anything."""

    @abstractmethod
    def write(self, points: Sequence[Point]) -> None:
        """Add points; a value or text that is already there (same name, context and step) is replaced."""

    @abstractmethod
    def close(self, facts: RunFacts) -> None:
        """Finish the view, with the state and the times of the run."""


NAMES = ("aim", "tensorboard", "wandb")
"""Names of all sinks, as in `record.NAME`."""


def sink(name: str) -> type[Sink]:
    """The sink of a name."""
    module = importlib.import_module(f".{name}", __package__)
    found: type[Sink] = module.SINK
    return found


def wanted(run: RunDir) -> list[str]:
    """Names of the trackers that a run's configuration asks for; none if it cannot be read."""
    try:
        record = read_config(run).get("record", {})
    except (OSError, ValueError):
        return []
    return [name for name in NAMES if record.get(name)]


def is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def check_installed(names: Iterable[str]) -> None:
    """Raise ConfigError if the package of a tracker is missing."""
    for name in names:
        if not is_installed(name):
            limit = " (Python 3.11 or 3.12)" if name == "aim" else ""
            raise ConfigError(
                f"{name} is not installed",
                remedy=f"in the checkout: pip install -e '.[{name}]'{limit}; or train with record.{name}=false and "
                f"build the same view later, wherever {name} is, with `fsdp-pretrain {name} RUN`",
            )
