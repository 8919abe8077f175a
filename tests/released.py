"""Unpacks runs of earlier releases (`tests/releases`)."""

from __future__ import annotations

import tarfile
from pathlib import Path

ARCHIVES = sorted((Path(__file__).parent / "releases").glob("*.tar.xz"))
_MADE_IN = "/tmp/fsdp-pretrain-release"


def unpack(archive: Path, place: Path) -> Path:
    """Unpack a release's run as if it had been trained in `place`; its directory. Checkpoints stay as they are."""
    with tarfile.open(archive) as packed:
        packed.extractall(place, filter="data")
    run = place / "run"
    for path in (place / "run.toml", run / "config.toml", *run.glob("segments/*/config.toml")):
        path.write_text(path.read_text().replace(_MADE_IN, str(place)))
    return run
