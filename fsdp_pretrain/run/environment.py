"""`environment.json` and `corpora.json` of a segment: hardware, software and data, as far as programs read them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from fsdp_pretrain.config.resume_rules import differences

from . import state_files
from .files import RunDir
from .state_files import StateFile

ENVIRONMENT, CORPORA = "environment.json", "corpora.json"
_COMPUTES = {"world", "device", "torch"}
"""Fields on which the last digits of a step depend."""


class WorldShape(BaseModel):
    """The ranks of a job: `size` ranks are `replicas` replicas of `shards` shards."""

    model_config = ConfigDict(strict=True, frozen=True)

    size: int
    replicas: int
    shards: int


class Environment(StateFile):
    """The hardware and software of a start, written from `train/environment.py`."""

    time: str | None = None  # when all ranks had connected
    launched: str | None = None  # when the process of rank 0 started
    host: str = "?"  # host of rank 0
    hosts: dict[str, int] = Field(default_factory=dict)  # number of ranks by host
    world: WorldShape | None = None
    device: str | None = None
    python: str | None = None
    torch: str | None = None
    cuda: str | None = None
    nccl: str | None = None
    driver: str | None = None
    fsdp_pretrain: str | None = None
    git: dict[str, Any] | None = None
    variables: dict[str, str] = Field(default_factory=dict)  # environment variables


class Corpora(StateFile):
    """The data of a start, written from `train/environment.py`."""

    corpora: dict[str, str]  # fingerprint of every source, by its name
    excluded: str | None = None  # digest of the documents of `data.exclude`, see `Packer`; None: not recorded


def read(run: RunDir, segment: int) -> Environment | None:
    """A segment's environment, or None. Raises DamagedFileError, StorageError."""
    return state_files.read(run.segment(segment) / ENVIRONMENT, Environment)


def view(run: RunDir, segment: int) -> Environment:
    """A segment's environment; the defaults if it is missing or damaged."""
    return state_files.view(run.segment(segment) / ENVIRONMENT, Environment) or Environment()


def excluded(run: RunDir, segment: int) -> str | None:
    """Digest of the documents that a segment excluded; None if it is not recorded."""
    recorded = state_files.view(run.segment(segment) / CORPORA, Corpora)
    return None if recorded is None else recorded.excluded


def unlike(run: RunDir, one: int, other: int) -> list[str]:
    """Differences between the machines of two segments that change a step's last digits, as `key: old -> new`."""
    old, new = (view(run, number).model_dump(include=_COMPUTES) for number in (one, other))
    return differences(old, new)
