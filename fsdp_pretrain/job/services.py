"""Builds fetcher, recorder and heartbeat of a start."""

from __future__ import annotations

import sys
from pathlib import Path

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.data.corpus.files import reading
from fsdp_pretrain.data.fetch.process import NodeFetching
from fsdp_pretrain.heartbeat import Heartbeat
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.ranks import RankInfo
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.recorder import NotesOnlyRecorder, Recorder
from fsdp_pretrain.watchdog.hang.rank_client import PageHeartbeat, folder


def build_fetching(config: Config) -> NodeFetching | None:
    """This rank's side of the node's fetcher; None if the run has no cache."""
    if config.data.cache is None:
        return None
    ranks, pages = RankInfo.from_environment(), folder(config.run.dir)
    if not config.watchdog.enabled:  # agents of other runs remove folders without pages of live ranks
        pages = pages.parent.with_name(f"{pages.parent.name}-fetch") / pages.name
    return NodeFetching(config, pages, ranks)


def build_recorder(config: Config, world: World, run: RunDir, segment: Path) -> Recorder:
    """The recorder: on rank 0 it writes the record, on others only notes."""
    if not world.is_main:
        return NotesOnlyRecorder(run, segment)
    recorder = Recorder(
        run,
        segment,
        name=config.run.name,
        console_every=config.record.console_every,
        total_steps=config.schedule.steps,
    )
    recorder.status(force=True, state="starting")
    return recorder


def build_heartbeat(config: Config) -> Heartbeat:
    """This rank's heartbeat for the watchdog, active even before the rendezvous. Raises ConfigError."""
    ranks = RankInfo.from_environment()
    if not config.watchdog.enabled:
        return Heartbeat()
    try:
        return PageHeartbeat(config, ranks, reading)
    except OSError as error:
        print(f"warning: training without a watchdog on this rank: {error}", file=sys.stderr, flush=True)
        return Heartbeat()
