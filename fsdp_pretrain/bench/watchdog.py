"""Cost of the watchdog: `python -m fsdp_pretrain.bench CONFIG --watchdog DIR`.

Measures one heartbeat, the CPU time of an agent of eight ranks with the run's settings and a step every three seconds,
and the ratio of step times with and without watchdog. Steps of both kinds alternate, and so does their order, so that a
busy machine affects both alike.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.record.files import RunDir, now
from fsdp_pretrain.record.step_record import StepRecord
from fsdp_pretrain.train.trainer import Trainer
from fsdp_pretrain.watchdog.heartbeat.page import Page, Phase
from fsdp_pretrain.watchdog.heartbeat.rank_client import AgentProcess, Heartbeat, PageHeartbeat

from .scratch import SEGMENT, scratch_run

_BEATS, _RANKS, _STEP, _STARTS = 200_000, 8, 3.0, 10.0


def measure(
    build: Callable[[Config, World, Heartbeat], tuple[Trainer, Any]],
    config: Config,
    world: World,
    directory: Path,
    *,
    steps: int,
    warmup: int,
    seconds: float,
) -> dict[str, Any]:
    """Measure; `agent` is the same on every rank. Collective.

    Args:
        build: returns a trainer and its recorder for configuration, world and heartbeat.
        config: of the run; its directory is replaced.
        directory: on any storage; what is written there is removed.
        steps: pairs of steps to time.
        warmup: pairs before them.
        seconds: duration of the agent's measurement.
    """
    with scratch_run(config, world, directory) as scratch:
        heartbeat = PageHeartbeat(
            scratch,
            rank=world.rank,
            local_rank=world.rank % world.local_world,
            local_ranks=world.local_world,
            node=world.rank // world.local_world,
            nodes=world.size // world.local_world,
            reading={},
        )
        heartbeat.belongs_to(SEGMENT)
        without, _ = build(scratch, world, Heartbeat())
        watched, records = build(scratch, world, heartbeat)
        pairs = [_pair((without, watched), (n % 2, 1 - n % 2)) for n in range(warmup + steps)][warmup:]
        heartbeat.close()
    # In a run directory of its own: in that of the steps, their agent leads, and this one would only wait.
    with scratch_run(config, world, directory, "bench-agent") as scratch:
        agent = world.decide(lambda: _agent(scratch, records.records[-1], seconds))
    return {
        "heartbeat_microseconds": _beat(directory),
        "agent": agent,
        "step_seconds": statistics.median(wall for _, (wall, _) in pairs),
        "step_ratio": _interval([b[0] / a[0] for a, b in pairs]),
        "processor_ratio": _interval([b[1] / a[1] for a, b in pairs]),
        "pairs": steps,
    }


def _beat(directory: Path) -> float:
    """Microseconds of CPU time per heartbeat."""
    path = directory / f"bench-beat-{os.getpid()}.page"
    page = Page(path, rank=0, segment=1)
    found = []
    for _ in range(5):
        start = time.process_time()
        for _ in range(_BEATS):
            page.beat(Phase.COMPUTE)
        found.append((time.process_time() - start) / _BEATS * 1e6)
    path.unlink()
    return min(found)


def _pair(trainers: tuple[Trainer, Trainer], order: tuple[int, int]) -> list[tuple[float, float]]:
    """One step of each trainer, in this order. Returns (wall, CPU) seconds of the first and of the second trainer."""
    found = [(0.0, 0.0)] * 2
    for which in order:
        wall, used = time.perf_counter(), time.process_time()
        trainers[which].step()
        trainers[which].collect(keep=0)
        found[which] = (time.perf_counter() - wall, time.process_time() - used)
    return found


def _interval(ratios: list[float]) -> list[float]:
    """Median and its 95% confidence interval from order statistics, valid for any distribution."""
    ordered, half = sorted(ratios), 0.98 * math.sqrt(len(ratios))
    low, high = math.floor(len(ratios) / 2 - half), math.ceil(len(ratios) / 2 + half)
    return [statistics.median(ordered), ordered[max(0, low)], ordered[min(len(ratios) - 1, high)]]


def _agent(config: Config, record: StepRecord, seconds: float) -> dict[str, float]:
    """CPU time and memory of an agent of eight ranks, including its helpers."""
    pages = config.run.dir / "pages"
    own = [Page(pages / f"rank-{rank}.page", rank=rank, segment=SEGMENT) for rank in range(_RANKS)]
    process = AgentProcess(config, pages, node=0, nodes=1, ranks=range(_RANKS)).process
    assert process is not None
    metrics, before = RunDir(config.run.dir).segment(SEGMENT) / "metrics.jsonl", dict[int, float]()
    beginning, started = time.monotonic(), 0.0
    for step in itertools.count(1):
        for page in own:
            page.step(step)
            page.beat(Phase.COMPUTE)
        with metrics.open("a", encoding="utf-8") as file:
            file.write(record.model_copy(update={"step": step, "segment": SEGMENT, "time": now()}).to_line() + "\n")
        time.sleep(_STEP)
        passed = time.monotonic() - beginning
        if not before and passed > _STARTS:  # all its probes have run once
            before, started = _cpu(process.pid), time.monotonic()
        if passed > _STARTS + seconds:
            break
    after, elapsed = _cpu(process.pid), time.monotonic() - started
    memory = sum(psutil.Process(pid).memory_info().rss for pid in after if psutil.pid_exists(pid))
    used = sum(after.values()) - sum(before.values())  # not by pid: the time of an ended child moves to its parent
    process.kill()  # it ignores requests to stop while it has ranks
    process.wait(30)
    return {"ranks": _RANKS, "core_share": used / elapsed, "memory_bytes": memory, "seconds": elapsed}


def _cpu(pid: int) -> dict[int, float]:
    """CPU seconds by pid of a process and its descendants; ended children count with their parents."""
    found = {}
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):  # a probe that has just ended
            found[process.pid] = sum(process.cpu_times()[:4])
    return found


def render(result: dict[str, Any]) -> str:
    """The results as text for people."""
    agent = result["agent"]
    wall, used = ("{:.4f} [{:.4f} to {:.4f}]".format(*result[name]) for name in ("step_ratio", "processor_ratio"))
    return "\n".join(
        [
            f"one heartbeat                {result['heartbeat_microseconds']:.2f} us",
            f"agent of {agent['ranks']} ranks            {agent['core_share']:.3%} of a core over "
            f"{agent['seconds']:.0f}s, {agent['memory_bytes'] / 2**20:.0f} MiB with its helpers",
            f"steps with / without        {wall} in {result['pairs']} pairs of {result['step_seconds']:.3g}s",
            f"their processor time         {used}",
        ]
    )
