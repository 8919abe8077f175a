"""What the fetcher of a node (`data.fetch`) says about itself: a small file in local memory, and lines in the run
directory. No torch."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from .atomic import replace_file
from .units import human_bytes

_LAST_BYTES = 4096
"""At the end of a record; a line is shorter."""


def status_file(pages: Path, first_rank: int) -> Path:
    """Of the fetcher of the node whose first rank this is. `pages`: the folder of the ranks' pages."""
    return pages / f"fetcher-{first_rank}.json"


def record_folder(run: Path) -> Path:
    """Under the run directory: a file of lines, and a log, for each node."""
    return run / "storage"


@dataclass(frozen=True)
class FetcherStatus:
    """One node's fetcher at one instant.

    Attributes:
        time: when it was written, seconds since 1970.
        host, node: where it runs.
        pid: of the fetcher.
        problem: what fails now, with object and cause; empty if nothing does.
        since: when that began, seconds since 1970; 0 without a problem.
        lasting: it does not end without a person: no access, a damaged or replaced object.
        ready: steps ahead of the ranks whose blocks are all in the cache.
        step: that all ranks of the node have built.
        cached, size: bytes of blocks in the cache, and its limit at present.
        requests, retries, bytes: of the storage, since the fetcher was started.
        blocks: fetched.
        evictions: blocks that were dropped.
        corrupted: answers with a wrong checksum, which were not used.
    """

    time: float = 0.0
    host: str = ""
    node: int = 0
    pid: int = 0
    problem: str = ""
    since: float = 0.0
    lasting: bool = False
    ready: int = 0
    step: int = 0
    cached: int = 0
    size: int = 0
    requests: int = 0
    retries: int = 0
    bytes: int = 0
    blocks: int = 0
    evictions: int = 0
    corrupted: int = 0

    def write(self, path: Path) -> None:
        """Raises OSError."""
        replace_file(path, self.to_json())

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        cached = f"{human_bytes(self.cached)} of {human_bytes(self.size)} cached"
        read = f"{human_bytes(self.bytes)} fetched in {self.requests:_} requests ({self.retries:_} retries)"
        problem = f"; {self.problem}" if self.problem else ""
        return f"{self.host}: {cached}, all of the next {self.ready:_} steps; {read}{problem}"


def parse(text: str) -> FetcherStatus | None:
    """The status in a line or file; None if it is damaged."""
    try:
        found = json.loads(text)
        known = {field.name for field in fields(FetcherStatus)}
        return FetcherStatus(**{name: value for name, value in found.items() if name in known})
    except (ValueError, TypeError, AttributeError):
        return None


def read(path: Path) -> FetcherStatus | None:
    """The status in a file; None if there is none."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def newest(run: Path) -> list[FetcherStatus]:
    """The last line of each node's record."""
    found = []
    for path in sorted(record_folder(run).glob("node-*.jsonl")):
        with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LAST_BYTES))
            lines = [status for line in file.read().splitlines() if (status := parse(line.decode())) is not None]
            found += lines[-1:]
    return found
