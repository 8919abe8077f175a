"""What the parts of a start share."""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.data.fetch.process import NodeFetching
from fsdp_pretrain.heartbeat import Heartbeat
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.run.recorder import Recorder
from fsdp_pretrain.run.requests import Inbox


@dataclass(frozen=True)
class RunContext:
    """One start of a run, as one rank sees it.

    Attributes:
        config: the run's configuration.
        world: all ranks.
        recorder: writes the record (silent on ranks other than 0).
        inbox: requests to this rank.
        heartbeat: reports to the watchdog what this rank does.
        fetching: of blocks from remote storage; None if the training data is in files.
    """

    config: Config
    world: World
    recorder: Recorder
    inbox: Inbox
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    fetching: NodeFetching | None = None
