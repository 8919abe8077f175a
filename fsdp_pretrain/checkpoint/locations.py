"""Where the checkpoints of a run are. No torch."""

from __future__ import annotations

from fsdp_pretrain.record.files import RunDir

from .store import Checkpoint, Store


def stores(run: RunDir) -> Store:
    """The checkpoints of a run."""
    return Store(run.checkpoints)


def newest_clean(store: Store, until: float) -> Checkpoint | None:
    """The newest verified checkpoint of step `until` or earlier that was not saved during an incident, or None."""
    found = [item for item in store.scan() if item.problem is None and item.verified and item.step <= until]
    return next((item for item in reversed(found) if not item.manifest().suspect), None)
