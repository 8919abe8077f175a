"""Records as a run writes them, for tests that write a run instead of training it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fsdp_pretrain.checkpoint.manifest import CheckpointManifest
from fsdp_pretrain.checkpoint.store import CONFIG, TRAIN_STATE, Checkpoint, Store, describe_file
from fsdp_pretrain.run.environment import WorldShape
from fsdp_pretrain.run.step_record import LossSum, Ramps, ReadSeconds, Replicas, StepRecord, StepSeconds, parse

_PARTS = {"loss": LossSum, "seconds": StepSeconds, "ramps": Ramps, "replicas": Replicas, "data_read": ReadSeconds}
WORLD = WorldShape(size=1, replicas=1, shards=1)


def step_record(step: int, *, batch: int = 8, length: int = 32, **changes: Any) -> StepRecord:
    """The metrics record of a step; `changes` are values of a line, or of `StepRecord`."""
    consumed = step * batch
    values: dict[str, Any] = {
        "step": step, "consumed": consumed, "cursor": consumed, "tokens": consumed * length, "batch": batch,
        "sequence_length": length, "loss": {"sum": 512.0, "count": 256}, "sources": {"a": LossSum(sum=512.0, count=256)},
        "grad_norm": 0.5, "loss_scale": None, "skipped": False, "not_finite": None, "lr": 1e-3,
        "ramps": {"shares": {"a": 1.0}}, "mixture": {"a": 1.0}, "data_digest": f"{step:016x}", "documents": 1,
        "separators": 1, "adjacent_specials": 0, "quarantined": 0, "data_read": {"file": "shard-7.bin"},
        "seconds": {"iteration": 0.5, "data": 0.0, "checkpoint": 0.0}, "tokens_per_second": 1e4,
        "memory_bytes": 2**30, "segment": 1, "time": "2026-06-01T12:00:00.000Z", **changes,
    }  # fmt: skip
    for key, made in _PARTS.items():
        if isinstance(values.get(key), dict):
            values[key] = made(**values[key])
    return StepRecord(**values)


def metric(step: int, **changes: Any) -> dict[str, Any]:
    """The values of its line, as the real writer writes it, with `changes`."""
    known = {key: value for key, value in changes.items() if key in (*StepRecord.model_fields, "length")}
    line: dict[str, Any] = json.loads(step_record(step, **known).to_line())
    return {**line, **{key: value for key, value in changes.items() if key not in known}}


def parsed(line: dict[str, Any]) -> StepRecord:
    """The record of a line's values."""
    record = parse(json.dumps(line))
    assert record is not None, line
    return record


def manifest(step: int, attempt: Path, *, batch: int = 8, length: int = 32, **changes: Any) -> CheckpointManifest:
    """The manifest of a trainer for a checkpoint that is completely written into `attempt`."""
    consumed = step * batch
    values: dict[str, Any] = {
        "step": step, "consumed": consumed, "cursor": consumed, "batch": batch, "tokens": consumed * length,
        "world": WORLD, "run": "x", "segment": 1, "final": False, "torch": "2.13", "fsdp_pretrain": "0.1.0",
        "state_digest": "0" * 16, "committed": "2026-06-01T12:00:00.000Z",
        "files": [describe_file(path) for path in sorted(attempt.iterdir())], **changes,
    }  # fmt: skip
    return CheckpointManifest(**values)


WEIGHTS = "__0_0.distcp"
CHECKPOINT = {WEIGHTS: b"weights", ".metadata": b"meta", TRAIN_STATE: b"{}", CONFIG: b""}


def commit(
    store: Store, step: int, files: dict[str, bytes] = CHECKPOINT, *, verified: bool = True, **changes: Any
) -> Checkpoint:
    """Commit a checkpoint of these files, with changes to its manifest, as a save does."""
    attempt = store.begin(step)
    for name, content in files.items():
        (attempt / name).write_bytes(content)
    made = store.commit(attempt, manifest(step, attempt, **changes))
    return made.mark_verified() if verified else made


def flip(path: Path, at: int | None = None, bit: int = 0) -> None:
    """Flip a bit of a byte of a file, by default of the middle one."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 1 << bit
    path.write_bytes(content)


def results(**changes: Any) -> dict[str, Any]:
    """Results of an evaluation."""
    return {"step": 1, "tokens": 1, "scores": {}, "seconds": 1.0, "time": "2026-06-01T12:00:00.000Z", **changes}
