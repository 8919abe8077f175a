"""A recorded run for tests that read one, see `tests/releases/make.py`."""

from __future__ import annotations

import tarfile
from pathlib import Path

from fsdp_pretrain.config.resume_rules import load_recorded

ARCHIVE = Path(__file__).parent / "releases/0.1.0.tar.xz"
_MADE_IN = "/tmp/fsdp-pretrain-release"


def unpack(place: Path) -> Path:
    """Unpack it as if it had been trained in `place`; its directory. Checkpoints stay as they are."""
    with tarfile.open(ARCHIVE) as packed:
        packed.extractall(place, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # from 3.11.4 on
    run = place / "run"
    for path in (place / "run.toml", run / "config.toml", *run.glob("segments/*/config.toml")):
        path.write_text(path.read_text().replace(_MADE_IN, str(place)))
        if path.parent != place:  # without free keys that are no more
            path.write_text(load_recorded(path).to_toml())
    return run
