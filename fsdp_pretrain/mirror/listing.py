"""What is in the mirror of a run directory, for `fsdp-pretrain checkpoints`. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fsdp_pretrain.checkpoint.listing import Row
from fsdp_pretrain.config.resume_rules import load_compatible
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.record import run_id
from fsdp_pretrain.record.files import RunDir

from .checkpoint_copy import read_back
from .layout import MirroredCheckpoint, RunMirror, taken

_LISTING_PATIENCE = 5.0


def open_mirror(run: RunDir) -> RunMirror:
    """The mirror of a run. Raises ConfigError if it has none, MirrorError if that is another run's, RemoteError."""
    config = load_compatible(run.config)
    if config.checkpoint.mirror is None:
        raise ConfigError(f"{run.path} has no mirror", remedy="checkpoint.mirror names one, for the next start")
    mirror = RunMirror(config, patience=_LISTING_PATIENCE)
    found, own = mirror.run_id(), run_id.read(run.path)
    if found is not None and own is not None and found != own:
        raise taken(mirror.url, found)
    return mirror


def with_mirror(rows: list[Row], mirror: RunMirror) -> list[Row]:
    """Rows of local checkpoints, marked with their state in the mirror, and rows of those that are only there."""
    items = {item.step: item for item in mirror.scan()}
    local = {row.step for row in rows}
    marked = [row.model_copy(update={"mirror": _state(items.get(row.step))}) for row in rows]
    return sorted(
        [*marked, *(_row(mirror, item) for step, item in items.items() if step not in local)], key=lambda row: row.step
    )


def verify_mirror(
    mirror: RunMirror, step: int | None, shown: Callable[[list[MirroredCheckpoint]], Iterable[MirroredCheckpoint]]
) -> list[Row]:
    """Rows of the checkpoints in the mirror, or of one, after reading them back. Raises ConfigError, RemoteError."""
    chosen = [item for item in mirror.scan() if step in (None, item.step)]
    if step is not None and not chosen:
        raise ConfigError(f"{mirror.url} has no checkpoint of step {step}")
    rows = []
    for item in shown(chosen):
        row = _row(mirror, item)
        wrong = read_back(mirror, item) if item.problem is None else []
        if item.problem is not None and item.raw is not None:
            wrong = [item.problem]
        row.state = "damaged" if wrong else "verified" if item.problem is None else "incomplete"
        row.problem = wrong[0] if wrong else None
        row.mirror = None
        rows.append(row)
    return rows


def _state(item: MirroredCheckpoint | None) -> str:
    if item is None:
        return "absent"
    return "whole" if item.problem is None else "incomplete" if item.raw is None else f"damaged ({item.problem})"


def _row(mirror: RunMirror, item: MirroredCheckpoint) -> Row:
    """A checkpoint that is in the mirror alone."""
    row = Row(
        step=item.step,
        path=str(mirror.url / item.name),
        fallback=False,
        state="mirrored" if item.problem is None else "incomplete" if item.raw is None else "damaged",
        pinned=item.pinned,
        mirror=_state(item),
    )
    if item.problem is None:
        manifest = item.manifest()
        row.bytes = sum(entry.bytes for entry in manifest.files)
        row.committed, row.world, row.suspect = manifest.committed, manifest.world, manifest.suspect
        row.optimizer = manifest.optimizer
    return row
