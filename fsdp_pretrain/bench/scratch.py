"""A run directory for the time of a benchmark."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.record import run_id
from fsdp_pretrain.record.files import RunDir, replace_file

SEGMENT = 1
"""Number of the only start in it."""


@contextmanager
def scratch_run(config: Config, world: World, directory: Path, name: str = "bench") -> Iterator[Config]:
    """The configuration, with a new run directory below `directory` that is removed in the end. Collective."""
    place = directory.absolute() / f"{name}-{os.getppid()}"
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": place})})
    run = RunDir(place)
    if world.is_main:
        run.segment(SEGMENT).mkdir(parents=True)
        run_id.assign(place)
        for path in (run.config, run.segment(SEGMENT) / "config.toml"):
            replace_file(path, config.to_toml())
    world.barrier()
    run_id.bind(place, run_id.read(place))
    try:
        yield config
    finally:
        world.barrier()
        if world.is_main:
            shutil.rmtree(place, ignore_errors=True)
