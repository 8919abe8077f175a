"""Which rank this process is, and which others there are."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .errors import ConfigError


@dataclass(frozen=True)
class RankInfo:
    """The ranks of this process from torchrun's environment; without torchrun, those of a single process."""

    rank: int
    world: int
    local_rank: int
    local_world: int

    @property
    def node(self) -> int:
        """Number of this node among those of the job."""
        return int(os.environ.get("GROUP_RANK", self.rank // self.local_world))

    @property
    def of_node(self) -> range:
        """The ranks of this node."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_world)

    @classmethod
    def from_environment(cls) -> RankInfo:
        """Read torchrun's variables. Raises ConfigError if only some of them are set."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        values = [os.environ.get(name) for name in names]
        if all(value is None for value in values):
            return cls(0, 1, 0, 1)
        missing = [name for name, value in zip(names, values, strict=True) if value is None]
        if missing:
            raise ConfigError(
                f"the environment has some of torchrun's variables but not {', '.join(missing)}",
                remedy="start with torchrun, or unset RANK and WORLD_SIZE to run a single process",
            )
        return cls(*(int(value) for value in values if value is not None))
