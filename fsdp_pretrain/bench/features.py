"""Everything on against everything off: `python -m fsdp_pretrain.bench CONFIG --features DIR`.

Two trainers in one process take turns. One has neither watchdog nor files: its record stays in memory. The other has
the heartbeat and the watchdog's process, metrics, journal and status on disk, and, in every second of its turns, a
checkpoint that is saved, verified and retained beside the steps of that turn. The order rotates, so that a busy machine
or disk affects all alike; compare the ratios, which are computed within rounds.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsdp_pretrain.checkpoint.manager import CheckpointManager
from fsdp_pretrain.checkpoint.manifest import RunIdentity, TokenizerIdentity
from fsdp_pretrain.checkpoint.training_objects import TrainingObjects
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.models import Decoder
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.parallel.optimizer import AdamW
from fsdp_pretrain.record.files import RunDir
from fsdp_pretrain.train.build import build_heartbeat, build_recorder
from fsdp_pretrain.train.trainer import LAG, Trainer

from .ranges import median_range, show_range
from .scratch import SEGMENT, scratch_run

_TURNS = ("off", "on", "saving")
_NEVER = 10**9


def measure(
    build: Callable[..., tuple[Trainer, Any]],
    config: Config,
    world: World,
    directory: Path,
    *,
    rounds: int,
    steps: int,
    warmup: int,
) -> dict[str, Any]:
    """Time turns of all kinds. Collective.

    Args:
        build: returns a trainer and its recorder, see `steps.build`.
        config: of the run; its directory is replaced.
        directory: on the storage to measure; what is written there is removed.
        rounds: to measure, after one that is not counted.
        steps: of each turn.
        warmup: steps of both trainers before.
    """
    with contextlib.redirect_stdout(sys.stderr), scratch_run(_with_everything(config), world, directory) as scratch:
        run, heartbeat = RunDir(scratch.run.dir), build_heartbeat(scratch)
        heartbeat.belongs_to(SEGMENT)
        recorder = build_recorder(scratch, world, run, run.segment(SEGMENT))
        off, _ = build(scratch, world)
        on, _ = build(
            scratch,
            world,
            heartbeat,
            recorder=recorder,
            saver=lambda model, optimizer: _manager(scratch, world, run, model, optimizer),
        )
        for trainer in (off, on):
            _turn(trainer, warmup, saves=False)
        found = []
        for number in range(rounds + 1):
            order = [_TURNS[(number + place) % len(_TURNS)] for place in range(len(_TURNS))]
            found.append({kind: _turn(off if kind == "off" else on, steps, saves=kind == "saving") for kind in order})
        heartbeat.close()
        recorder.close()
    return _summary(found[1:], steps)


def _with_everything(config: Config) -> Config:
    """Watchdog, checks and background saves on; console lines are rare, as they are in a long run."""
    changes = {
        "watchdog": config.watchdog.model_copy(update={"enabled": True}),
        "record": config.record.model_copy(update={"console_every": _NEVER}),
        "checkpoint": config.checkpoint.model_copy(update={"background": True, "verify": True, "keep_last": 2}),
    }
    return config.model_copy(update=changes)


def _manager(config: Config, world: World, run: RunDir, model: Decoder, optimizer: AdamW) -> CheckpointManager:
    """Saves into the scratch run, whose data nobody will ask for."""
    data = RunIdentity(
        model=config.model.model_dump(mode="json"),
        data={},
        mixture={},
        corpora={},
        reshuffle=[],
        tokenizer=TokenizerIdentity(fingerprint="", eod=0),
    )
    return CheckpointManager(
        TrainingObjects(world, run, model, optimizer, config, data),
        segment=SEGMENT,
        guard=lambda: None,
        protected=tuple,
        suspicion=lambda: None,
        clean_until=tuple,
    )


def _turn(trainer: Trainer, steps: int, *, saves: bool) -> tuple[float, float]:
    """(wall, processor) seconds of some steps until the device has finished them, and the save, if any, with them."""
    wall, used = time.perf_counter(), time.process_time()
    if saves:
        trainer.checkpoint()
    for _ in range(steps):
        trainer.step()
        trainer.collect(keep=LAG)
    if saves:
        trainer.saves.finish()
    trainer.collect(keep=0)
    return time.perf_counter() - wall, time.process_time() - used


def _summary(found: list[dict[str, tuple[float, float]]], steps: int) -> dict[str, Any]:
    def ratio(kind: str, which: int) -> list[float]:
        return median_range([each[kind][which] / each["off"][which] for each in found])

    return {
        "rounds": len(found),
        "steps": steps,
        "step_seconds": {kind: median_range([each[kind][0] / steps for each in found]) for kind in _TURNS},
        "step_ratio": ratio("on", 0),
        "processor_ratio": ratio("on", 1),
        "saving_step_ratio": ratio("saving", 0),
        "saving_processor_ratio": ratio("saving", 1),
        "seconds_per_save": median_range([each["saving"][0] - each["on"][0] for each in found]),
    }


def render(result: dict[str, Any]) -> str:
    """The results as text for people."""
    show = {name: show_range(result[name], 4) for name in result if name.endswith(("_ratio", "_save"))}
    off = show_range(result["step_seconds"]["off"])
    return "\n".join(
        [
            f"{result['rounds']} rounds of {result['steps']} steps, median [least to most]:",
            f"  everything off       {off}s a step",
            f"  on, of off           step {show['step_ratio']}, processor {show['processor_ratio']}",
            f"  on with a save a turn  step {show['saving_step_ratio']}, processor {show['saving_processor_ratio']}; "
            f"a save costs {show['seconds_per_save']}s",
        ]
    )
