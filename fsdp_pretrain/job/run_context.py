"""Objects that the parts of a start share."""

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
    """One start of a run, on one rank."""

    config: Config
    world: World
    recorder: Recorder  # writes the record (silent on ranks other than 0)
    inbox: Inbox  # requests to this rank
    heartbeat: Heartbeat = field(default_factory=Heartbeat)  # reports this rank's phases to the watchdog
    fetching: NodeFetching | None = None  # fetches blocks of corpora from remote storage; None if the data is in files
