"""What the parts of a start have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .config import Config
from .control import Inbox
from .mesh import World
from .record.recorder import Recorder
from .watchdog.heart import Heart


@dataclass(frozen=True)
class RunContext:
    """One start of a run, as one rank sees it.

    Attributes:
        config: the run.
        world: all ranks.
        recorder: writes the record (silent on other ranks than 0).
        inbox: requests to this rank.
        heart: reports to the watchdog what this rank does.
        beside: names of what runs on this node beside training just now.
    """

    config: Config
    world: World
    recorder: Recorder
    inbox: Inbox
    heart: Heart = field(default_factory=Heart)
    beside: Callable[[], list[str]] = list
