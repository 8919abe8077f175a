"""All locations of a run's checkpoints: its own directory, and its fallbacks. No torch.

A fallback (`checkpoint.fallback_dir`) may be shared by runs, so each has a subdirectory, named after the run and its
`run.dir`. The configurations of all segments are searched for fallbacks: one that later starts no longer name may still
hold the newest checkpoint.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import xxhash

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.record.files import RunDir

from .store import Checkpoint, CheckpointReader, Store


class Stores(CheckpointReader):
    """The checkpoints of a run, in `RUN/checkpoints` (`main`) and on other storage."""

    def __init__(self, main: Store, fallbacks: list[Store]) -> None:
        self.directory, self.main, self.fallbacks = main.directory, main, fallbacks

    @property
    def all(self) -> list[Store]:
        return [self.main, *self.fallbacks]

    def scan(self) -> list[Checkpoint]:
        """All directories with a checkpoint's name, oldest step first; of one step, the run's own last."""
        found = [checkpoint for store in self.all for checkpoint in store.scan()]
        return sorted(found, key=lambda item: (item.step, item.path.parent == self.directory))

    def sweep(self) -> None:
        for store in self.all:
            store.sweep()

    def is_in_fallback(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint is in a fallback."""
        return checkpoint.path.parent != self.directory


def stores(run: RunDir) -> Stores:
    """The stores of a run, from the configurations in its directory; ones that name another existing run directory
    (copied from that run) are ignored."""
    paths = [run.config, *(segment / "config.toml" for segment in run.segments)]
    places = {place: None for path in paths if (place := _named_in(path, run)) is not None}
    return Stores(Store(run.checkpoints), [Store(place) for place in places])


def newest_clean(reader: CheckpointReader, until: float) -> Checkpoint | None:
    """The newest verified checkpoint of step `until` or earlier that was not saved during an incident, or None."""
    found = [item for item in reader.scan() if item.problem is None and item.verified and item.step <= until]
    return next((item for item in reversed(found) if not item.manifest().suspect), None)


def fallback(config: Config) -> Store | None:
    """The store for checkpoints that cannot be written to the run directory, if configured."""
    place = config.checkpoint.fallback_dir
    return None if place is None else Store(_directory(place, config.run.name, config.run.dir))


def _directory(place: Path, name: str, run: Path) -> Path:
    return place / f"{name}-{xxhash.xxh3_64_hexdigest(str(run).encode())[:8]}"


def _named_in(path: Path, run: RunDir) -> Path | None:
    """The fallback in a resolved configuration, if it belongs to this run."""
    try:
        content = path.read_bytes()
        if b"fallback_dir" not in content:
            return None
        values: dict[str, Any] = tomllib.loads(content.decode())
        place, name, home = values["checkpoint"]["fallback_dir"], values["run"]["name"], Path(values["run"]["dir"])
    except (OSError, KeyError, TypeError, ValueError):  # reported where the configuration is needed
        return None
    if home.exists() and home.resolve() != run.path.resolve():
        return None
    return _directory(Path(place), name, home)
