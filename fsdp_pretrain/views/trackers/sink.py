"""What a tracker must be able to do, and the trackers that there are."""

from __future__ import annotations

import importlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.run.files import RunDir

from .points import PointValues
from .run_facts import RunFacts, read_config


class Sink(ABC):
    """The view of a run in one tracker, to which all points are given each time. All methods may raise anything.

    Attributes:
        watched: a file or directory that exists as long as the view does.
        opened: what a person opens to see it.
    """

    watched: Path
    opened: Path

    @abstractmethod
    def __init__(self, place: Path, facts: RunFacts) -> None:
        """Begin the view in a directory, in place of the one that is there."""

    @abstractmethod
    def write(self, points: Sequence[PointValues]) -> None:
        """Add points."""

    @abstractmethod
    def close(self, facts: RunFacts) -> None:
        """Finish the view, with the state and the times of the run."""


NAMES = ("aim", "tensorboard", "wandb")
"""Names of all sinks: of the package, the configuration key `record.NAME` and the verb."""


def sink(name: str) -> type[Sink]:
    """The sink of a name."""
    found: type[Sink] = importlib.import_module(f".{name}", __package__).SINK
    return found


def place(run: RunDir, name: str) -> Path:
    """The directory of a run's views in a tracker: `RUN/NAME`, or `record.aim_repo`. Raises OSError."""
    record: dict[str, Any] = read_config(run).get("record", {})
    repo = record.get("aim_repo") if name == "aim" else None
    return Path(repo or run.path / name).absolute()


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
