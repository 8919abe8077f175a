"""What the fetcher of a node (`fsdp_pretrain.data.fetch`) says about itself: a small file in local memory."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from .files import replace_file


def status_file(pages: Path, first_rank: int) -> Path:
    """Of the fetcher of the node whose first rank this is. `pages`: the folder of the ranks' pages."""
    return pages / f"fetcher-{first_rank}.json"


def log_folder(run: Path) -> Path:
    """Under the run directory: the log of each node's fetcher."""
    return run / "storage"


@dataclass(frozen=True)
class FetcherStatus:
    """One node's fetcher at one instant.

    Attributes:
        time: when it was written, seconds since 1970.
        problem: what fails now, with object and cause; empty if nothing does.
        since: when that began, seconds since 1970; 0 without a problem.
        lasting: it does not end without a person: no access, a damaged or replaced object.
        ready: steps ahead of the ranks whose blocks are all in the cache.
    """

    time: float = 0.0
    problem: str = ""
    since: float = 0.0
    lasting: bool = False
    ready: int = 0

    def write(self, path: Path) -> None:
        """Raises OSError."""
        replace_file(path, json.dumps(asdict(self)))


def read(path: Path) -> FetcherStatus | None:
    """The status in a file; None if there is none."""
    try:
        return FetcherStatus(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
