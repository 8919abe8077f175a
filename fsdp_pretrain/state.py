"""Where a run is: the counters that travel in every checkpoint, and what must not change between starts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from .config import Config
from .errors import ConfigError
from .record.files import now

FORMAT = 1


@dataclass
class TrainState:
    """Counters of a run. Random numbers need none: they are functions of (seed, step, rank).

    Attributes:
        step: optimiser steps taken.
        consumed: samples trained; drives every schedule.
        cursor: samples read, those skipped included; the position in the data.
        batch: samples of the last step.
    """

    step: int = 0
    consumed: int = 0
    cursor: int = 0
    batch: int = 0

    def to_json(self, *, identity: dict[str, Any], **facts: Any) -> str:
        """Contents of a checkpoint's `train_state.json`."""
        content = {"format": FORMAT, **vars(self), "written": now(), **facts, "identity": identity}
        return json.dumps(content, indent=1) + "\n"

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> TrainState:
        """The counters in a `train_state.json`."""
        return cls(**{key: int(content[key]) for key in ("step", "consumed", "cursor", "batch")})


def identity(config: Config, fingerprints: dict[str, str], tokenizer: dict[str, Any]) -> dict[str, Any]:
    """What defines the model, the order of the data and what is learned from it: no resume may change it.

    Args:
        fingerprints: corpus fingerprint by source name.
        tokenizer: its `fingerprint` and `eod`.
    """
    return {
        "model": config.model.model_dump(mode="json", exclude={"declared_params"}),
        "data": {
            "sequence_length": config.data.sequence_length,
            "seed": config.data.seed,
            "lanes": config.data.lanes,
            "attention": config.data.attention,
            "positions": config.data.positions,
            "loss_across_documents": config.data.loss_across_documents,
            "sources": {
                source.name: {"weight": source.weight, "fingerprint": fingerprints[source.name]}
                for source in config.data.sources
            },
        },
        "tokenizer": tokenizer,
    }


def differences(old: Any, new: Any, prefix: str = "") -> list[str]:
    """`key: old -> new` for every leaf in which two trees differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(key for key in new if key not in old)]
        return [
            line
            for key in keys
            for line in differences(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else str(key))
        ]
    return [] if old == new else [f"{prefix}: {_short(old)} -> {_short(new)}"]


def _short(value: Any) -> str:
    text = "absent" if value is None else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def check_identity(stored: dict[str, Any], current: dict[str, Any], where: str) -> None:
    """Raise ConfigError if a resume would change the model or the data under the run."""
    changed = differences(stored, current)
    if changed:
        raise ConfigError(
            f"{where} was trained with another model or other data:\n    " + "\n    ".join(changed),
            effect="resuming would continue a different run under the same name",
            remedy="restore these settings or corpora, or start a new run in another run.dir",
        )
