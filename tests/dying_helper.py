"""A helper process that dies `deaths` times and then waits for the end of its input, or for ever; see
test_helper_process.py."""

import sys
import time
from pathlib import Path
from typing import NamedTuple

from fsdp_pretrain.helper_process import read_settings


class DyingSettings(NamedTuple):
    """What it is told."""

    starts: str
    """File to which every start adds its number."""
    deaths: int
    stubborn: bool = False
    """Whether it also stays when its input ends."""
    restarts: int = 0


if __name__ == "__main__":
    settings = read_settings(DyingSettings)
    with Path(settings.starts).open("a") as file:
        file.write(f"{settings.restarts} ")
    if settings.restarts < settings.deaths:
        sys.exit(3)
    sys.stdin.readline()
    if settings.stubborn:
        time.sleep(3600)
