"""Status of the fetcher of a node (`fsdp_pretrain.data.fetch`): a small file in local memory."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from .files import replace_file


def status_file(pages: Path, first_rank: int) -> Path:
    """Status file of the node whose first rank is `first_rank`; `pages` is the folder of the ranks' pages."""
    return pages / f"fetcher-{first_rank}.json"


def log_folder(run: Path) -> Path:
    """The folder in a run directory with the log of each node's fetcher."""
    return run / "storage"


@dataclass(frozen=True)
class FetcherStatus:
    """State of one node's fetcher at one instant."""

    time: float = 0.0  # when it was written, seconds since 1970
    problem: str = ""  # the present failure, with object and cause; empty if there is none
    since: float = 0.0  # when the failure began, seconds since 1970; 0 without one
    lasting: bool = False  # whether a person must repair it: no access, a damaged or replaced object
    ready: int = 0  # number of coming steps whose blocks are all in the cache

    def write(self, path: Path) -> None:
        """Replace the status file. Raises OSError."""
        replace_file(path, json.dumps(asdict(self)))


def read(path: Path) -> FetcherStatus | None:
    """The status in a file; None if there is none."""
    try:
        return FetcherStatus(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
