"""`environment.json` of a segment: what its start ran on and with, as far as others ask for it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from . import state_files
from .files import RunDir
from .state_files import StateFile

ENVIRONMENT = "environment.json"


class WorldShape(BaseModel):
    """Ranks of a job: how many, as how many replicas of how many shards."""

    model_config = ConfigDict(strict=True, frozen=True)

    size: int
    replicas: int
    shards: int


class Environment(StateFile):
    """What a start ran on and with; see `environment.describe` for who writes it.

    Attributes:
        time: when all ranks had met.
        launched: when its process began.
        host, hosts: of rank 0; of all ranks, with the number of ranks of each.
        world: the ranks.
        device, python, torch, cuda, nccl, driver, fsdp_pretrain: names and versions; None where there is none.
        git: state of the code.
        variables: of its environment.
    """

    time: str | None = None
    launched: str | None = None
    host: str = "?"
    hosts: dict[str, int] = Field(default_factory=dict)
    world: WorldShape | None = None
    device: str | None = None
    python: str | None = None
    torch: str | None = None
    cuda: str | None = None
    nccl: str | None = None
    driver: str | None = None
    fsdp_pretrain: str | None = None
    git: dict[str, Any] | None = None
    variables: dict[str, str] = Field(default_factory=dict)


def read(run: RunDir, segment: int) -> Environment | None:
    """Of a segment; None if it has none. Raises DamagedFileError."""
    return state_files.read(run.segment(segment) / ENVIRONMENT, Environment)


def view(run: RunDir, segment: int) -> Environment:
    """Of a segment; nothing is known if it has none, or a damaged one."""
    return state_files.view(run.segment(segment) / ENVIRONMENT, Environment) or Environment()
