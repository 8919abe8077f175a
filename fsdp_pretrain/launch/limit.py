"""Stopping before a time limit: when the limit is, and how long saving and stopping take."""

from __future__ import annotations

import os
import statistics

from fsdp_pretrain.run import journal
from fsdp_pretrain.run.files import RunDir, tail_offset
from fsdp_pretrain.run.metrics import last_records
from fsdp_pretrain.run.step_record import LAG

_SAVES, _MARGIN = 5, 1.5  # newest saves that count; factor on the estimate
LEAST = 120.0
"""Least seconds of grace, which a run without a record gets."""
_STEPS_TO_AGREE = 2 + LAG
"""The step in which the request arrives, the one that sums it over the ranks, and those until the sum is read."""


def grace(run: RunDir) -> float:
    """Seconds before the limit at which the ranks are to be asked to stop: estimated from the record, with a margin.

    A save may be in flight when the request arrives; it is awaited before the final save.
    """
    by_segment = ([record.seconds.iteration for record in last_records(segment)] for segment in reversed(run.segments))
    steps = next(filter(None, by_segment), None)
    recent = [entry for entry, _ in journal.entries(run.journal, tail_offset(run.journal, 1 << 20))]
    saves = [entry["seconds"] for entry in journal.of_kind(recent, "checkpoint")][-_SAVES:]
    if not steps or not saves:
        return LEAST
    return max(LEAST, float(_MARGIN * (_STEPS_TO_AGREE * statistics.median(steps) + 2 * max(saves))))


def deadline(time_limit: float | None, now: float, wall: float) -> float | None:
    """When the job will be ended, on the clock of `now`; None: no limit is known.

    Args:
        time_limit: seconds from now, from the command line; Slurm may set an earlier end (`SLURM_JOB_END_TIME`).
        now: time of `time.monotonic`.
        wall: the same moment in seconds since 1970.
    """
    ends = [time_limit] if time_limit is not None else []
    slurm = os.environ.get("SLURM_JOB_END_TIME", "")
    if slurm.isdecimal():
        ends.append(int(slurm) - wall)
    return now + min(ends) if ends else None
