"""NCCL's flight recorder: torch remembers the last collectives of a rank, and writes them to a file when asked.

A rank that waits for its GPU is in `synchronize`, whatever the GPU waits for; only the recorder knows. `enable` lets it
write beside the rank's page. The agent asks through a named pipe, at which torch looks once a second.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import pickle
import re
import zlib
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel, Field

from .collectives import GroupProgress

_PREFIX = "nccl-rank-"
_KEPT = 2000
"""Collectives that are remembered: more than a GPU's queue of work holds."""
_LARGEST = 1 << 26
"""Bytes of a dump that are read; one has about a million."""


def enable(pages: Path, end_after: float | None) -> None:
    """Let NCCL of this process record, and dump beside the rank's page. Variables that are set stay as they are.

    Call it before the process group is made. Without NCCL it has no effect.

    `end_after`: seconds after which the agent ends a hung rank at the latest; NCCL's monitor of its own threads, which
    ends a rank too, is later. None: the agent ends none.
    """
    prefix = str(pages / _PREFIX)
    variables = {
        ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): str(_KEPT),
        ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"): prefix,
        ("TORCH_NCCL_DEBUG_INFO_PIPE_FILE",): prefix,
        ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1",  # also makes torch look at the pipe every second
        ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",): None if end_after is None else str(int(end_after) + 60),
    }
    for names, value in variables.items():
        if value is not None and not any(name in os.environ for name in names):
            os.environ[names[0]] = value


class FlightRecorder:
    """The recorder of a rank as its agent sees it.

    Attributes:
        path: the file of its dumps.
        progress: what the last one says, as `find_blocked` expects it; empty without one.
        awaited: whether it was asked, and nothing could be read since.
    """

    def __init__(self, pages: Path, rank: int) -> None:
        self.path, self._pipe = pages / f"{_PREFIX}{rank}", pages / f"{_PREFIX}{rank}.pipe"
        self.progress: tuple[GroupProgress, ...] = ()
        self.awaited = False
        self._seen: tuple[int, int] | None = None

    def ask(self) -> None:
        """Ask for a dump, without waiting; nothing happens without a pipe that is read."""
        self._seen = self._version()
        with contextlib.suppress(OSError):
            pipe = os.open(self._pipe, os.O_WRONLY | os.O_NONBLOCK)
            try:
                self.awaited = os.write(pipe, b"dump") > 0
            finally:
                os.close(pipe)

    def update(self) -> bool:
        """Read a new dump. Returns whether there is one; one that is damaged, or not yet whole, is none."""
        if (version := self._version()) in (None, self._seen):
            return False
        self._seen = version
        try:
            with self.path.open("rb") as file:
                self.progress, self.awaited = parse(file.read(_LARGEST)), False
        except (OSError, ValueError):
            return False
        return True

    def _version(self) -> tuple[int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size


class _Entry(BaseModel):
    record_id: int
    pg_id: int
    process_group: tuple[str, str]
    collective_seq_id: int
    is_p2p: bool
    profiling_name: str = Field(max_length=100)
    input_sizes: list[list[int]]
    input_dtypes: list[str]


class _Status(BaseModel):
    last_enqueued_collective: int = -1
    last_started_collective: int = -1
    last_completed_collective: int = -1


class _Group(BaseModel):
    desc: str = Field(max_length=100)
    ranks: str


class _Dump(BaseModel):
    """The parts of a dump that are used. Calls and status of a group have its number, the group itself has its name."""

    entries: list[_Entry]
    pg_status: dict[int, _Status]
    pg_config: dict[str, _Group]

    def progress(self, name: str, number: int | None) -> tuple[float, GroupProgress]:
        """The progress in a group, and its place among all; `number` is None if it had no collective yet."""
        group, status = self.pg_config[name], _Status() if number is None else self.pg_status[number]
        calls = {e.collective_seq_id: e for e in self.entries if e.pg_id == number and not e.is_p2p}
        ended = max(0, status.last_completed_collective)
        first = calls.get(ended + 1)
        tensors = [] if first is None else [*zip(first.input_dtypes, first.input_sizes, strict=False)]
        progress = GroupProgress(
            group=f"{name}-{zlib.crc32(group.ranks.encode()):08x}",  # groups without common ranks may share a name
            label=group.desc or name,
            size=len(re.findall(r"\d+", group.ranks)),
            called=max(ended, status.last_enqueued_collective, *calls),
            begun=status.last_started_collective,
            ended=ended,
            operation="" if first is None else first.profiling_name.removeprefix("nccl:"),
            tensors=" ".join(f"{kind} {size}" for kind, size in tensors[:1]) + (" ..." if tensors[1:] else ""),
        )
        return math.inf if not progress.waits else -1 if first is None else first.record_id, progress


def parse(data: bytes) -> tuple[GroupProgress, ...]:
    """What a dump says of each group, as `find_blocked` expects it. Raises ValueError: it is none, or not whole."""
    try:
        dump = _Dump.model_validate(_Plain(io.BytesIO(data)).load())
    except Exception as error:  # an Unpickler raises nearly any, and pydantic its own
        raise ValueError(f"not a dump of the flight recorder: {error!r}") from None
    numbers = {entry.process_group[0]: entry.pg_id for entry in dump.entries}
    left, unnamed = dump.pg_config.keys() - numbers.keys(), dump.pg_status.keys() - numbers.values()
    if len(left) == len(unnamed) == 1:  # the calls of a group that makes few are forgotten
        numbers |= zip(left, unnamed, strict=True)
    known = [name for name in dump.pg_config if name in numbers or not unnamed]
    found = [dump.progress(name, numbers.get(name)) for name in known]
    return tuple(progress for _, progress in sorted(found, key=lambda each: each[0]))


class _Plain(pickle.Unpickler):
    """Unpickles containers, text and numbers. As nothing has a name here, there is nothing that a pickle could call."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError(str(pid))
