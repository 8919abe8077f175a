"""What ranks do for the mirror: restore from it before a start, run its uploader, wait for it at the end."""

from __future__ import annotations

import threading
import time
from functools import partial

from fsdp_pretrain.checkpoint.resume import ResumeOptions
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.heartbeat import Heartbeat, Phase
from fsdp_pretrain.helper_process import HelperProcess
from fsdp_pretrain.mirror.restore import Restoration, compare_with_mirror, restore
from fsdp_pretrain.mirror.uploader import UploaderSettings
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.run import mirror_status, run_id
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.units import human_time

from .run_context import RunContext
from .waiting import decide_in_turns

_COMPLETE_SECONDS, _STOP_SECONDS = 600.0, 20.0
"""How long a complete run, and one that was asked to stop, wait for the mirror."""


def restored_from_mirror(config: Config, world: World, options: ResumeOptions, heartbeat: Heartbeat) -> bool:
    """Compare the run directory with its mirror, and restore it if that is needed and allowed. Collective.

    Returns:
        Whether it was restored; then what was read of the run directory before is outdated.

    Raises:
        UserError: see `mirror.restore`.
    """
    run, tasks, stop = RunDir(config.run.dir), list[Restoration](), threading.Event()

    def compare() -> bool:
        task = compare_with_mirror(config, restore=options.from_mirror, fresh=options.fresh)
        if task is not None:
            tasks.append(task)
        return task is not None

    if not world.decide(compare):
        return False
    try:
        decide_in_turns(world, heartbeat, Phase.START, lambda: restore(tasks[0], run, stop))
    finally:
        stop.set()
    return True


def start_uploader(run: RunDir, segment: int) -> HelperProcess:
    """Start the uploader of a run with a mirror.

    Args:
        segment: number of this start's segment, whose configuration it reads.
    """
    settings = UploaderSettings(str(run.path), run_id.bound_to(run.path) or "", segment)
    return HelperProcess(
        "fsdp_pretrain.mirror.uploader",
        str(run.path),
        settings=settings,
        log=mirror_status.folder(run) / "log",
        nice=10,
        died=partial(mirror_status.tell_death, run, segment),
    )


def flush_mirror(run: RunContext, uploader: HelperProcess | None, *, complete: bool) -> None:
    """Wait until the mirror has the last checkpoint and the record: up to ten minutes after a complete run, and up to
    20 seconds after a request to stop. Collective.

    `uploader`: on rank 0, if the run has a mirror; else None.
    """
    if run.config.checkpoint.mirror is None:
        return
    limit = _COMPLETE_SECONDS if complete else _STOP_SECONDS
    start = time.monotonic()
    if uploader is not None:
        uploader.finish()
        run.recorder.say(f"waiting up to {human_time(limit)} for the mirror")

    def ended() -> bool | None:
        """Whether the uploader has finished; None: it died, or the time is up."""
        if uploader is None or uploader.finished:
            return True
        return None if uploader.ended or time.monotonic() - start >= limit else False

    while (done := run.world.decide(ended)) is False:
        run.heartbeat.beat(Phase.SAVE)
        time.sleep(0.2)
    if done is None:
        run.recorder.say("the mirror lacks the end of this start; the next one copies it")
