"""What is in the mirror of a run directory, for `fsdp-pretrain checkpoints`. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from fsdp_pretrain.checkpoint.listing import Row
from fsdp_pretrain.checkpoint.manifest import FileEntry
from fsdp_pretrain.config.resume_rules import load_compatible
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.record.files import RunDir

from .layout import MirroredCheckpoint, RunMirror
from .restore import AT_ONCE

_LISTING_PATIENCE = 5.0


def open_mirror(run: RunDir) -> RunMirror:
    """The mirror of a run. Raises ConfigError if it has none."""
    config = load_compatible(run.config)
    if config.checkpoint.mirror is None:
        raise ConfigError(f"{run.path} has no mirror", remedy="checkpoint.mirror names one, for the next start")
    return RunMirror(config, patience=_LISTING_PATIENCE)


def with_mirror(rows: list[Row], mirror: RunMirror) -> list[Row]:
    """Rows of local checkpoints, marked with their state in the mirror, and rows of those that are only there. Raises
    RemoteError."""
    items = {item.step: item for item in mirror.look().checkpoints}
    local = {row.step for row in rows}
    marked = [row.model_copy(update={"mirror": _state(items.get(row.step))}) for row in rows]
    there = [_row(mirror, item, _state(item)) for step, item in items.items() if step not in local]
    return sorted([*marked, *there], key=lambda row: row.step)


def verify_mirror(
    mirror: RunMirror, step: int | None, shown: Callable[[list[MirroredCheckpoint]], Iterable[MirroredCheckpoint]]
) -> list[Row]:
    """Rows of the checkpoints in the mirror, or of one, after reading them back. Raises ConfigError, RemoteError."""
    chosen = [item for item in mirror.look().checkpoints if step in (None, item.step)]
    if step is not None and not chosen:
        raise ConfigError(f"{mirror.url} has no checkpoint of step {step}")
    return [_row(mirror, item, None, read_back(mirror, item)) for item in shown(chosen)]


def read_back(mirror: RunMirror, item: MirroredCheckpoint) -> list[str]:
    """Read a checkpoint in the mirror. Returns one text per bad file. Raises RemoteError."""
    if item.problem is not None:
        return [] if item.raw is None else [item.problem]

    def one(entry: FileEntry) -> str:
        return mirror.fetch(f"{item.name}/{entry.name}", entry)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(filter(None, pool.map(one, item.manifest().files)))


def _state(item: MirroredCheckpoint | None) -> str:
    if item is None:
        return "absent"
    return "whole" if item.problem is None else "incomplete" if item.raw is None else f"damaged ({item.problem})"


def _row(mirror: RunMirror, item: MirroredCheckpoint, state: str | None, wrong: list[str] | None = None) -> Row:
    """A checkpoint of the mirror; `wrong`: what was found when it was read back."""
    whole = "mirrored" if wrong is None else "verified"
    row = Row(
        step=item.step,
        path=str(mirror.url / item.name),
        fallback=False,
        state="incomplete" if item.raw is None else "damaged" if item.problem or wrong else whole,
        pinned=item.pinned,
        problem=wrong[0] if wrong else None,
        mirror=state,
    )
    if item.problem is None:
        row.describe(item.manifest())
    return row
