"""What is in the mirror of a run directory, for `fsdp-pretrain checkpoints`. No torch."""

from __future__ import annotations

from fsdp_pretrain.checkpoint.listing import Row
from fsdp_pretrain.config.resume_rules import load_recorded
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.record.files import RunDir

from .layout import MirroredCheckpoint, RunMirror

_LISTING_PATIENCE = 5.0


def open_mirror(run: RunDir) -> RunMirror:
    """The mirror of a run. Raises ConfigError if it has none."""
    config = load_recorded(run.config)
    if config.checkpoint.mirror is None:
        raise ConfigError(f"{run.path} has no mirror", remedy="checkpoint.mirror names one, for the next start")
    return RunMirror(config, patience=_LISTING_PATIENCE)


def with_mirror(rows: list[Row], mirror: RunMirror) -> list[Row]:
    """Rows of local checkpoints, marked with their state in the mirror, and rows of those that are only there. Raises
    RemoteError."""
    items = {item.step: item for item in mirror.look().checkpoints}
    local = {row.step for row in rows}
    marked = [row.model_copy(update={"mirror": _state(items.get(row.step))}) for row in rows]
    there = [_row(mirror, item) for step, item in items.items() if step not in local]
    return sorted([*marked, *there], key=lambda row: row.step)


def _state(item: MirroredCheckpoint | None) -> str:
    if item is None:
        return "absent"
    return "whole" if item.problem is None else "incomplete" if item.raw is None else f"damaged ({item.problem})"


def _row(mirror: RunMirror, item: MirroredCheckpoint) -> Row:
    """A checkpoint that is in the mirror alone."""
    row = Row(
        step=item.step,
        path=str(mirror.url / item.name),
        state="mirrored" if item.problem is None else "incomplete" if item.raw is None else "damaged",
        pinned=item.pinned,
        mirror=_state(item),
    )
    if item.problem is None:
        row.describe(item.manifest())
    return row
