"""Records as a run writes them, for tests that write a run rather than train it."""

from __future__ import annotations

from typing import Any

WORLD = {"size": 1, "replicas": 1, "shards": 1}


def metric(step: int, *, batch: int = 8, length: int = 32, **changes: Any) -> dict[str, Any]:
    """The metrics record of a step."""
    consumed = step * batch
    counters = {"step": step, "consumed": consumed, "cursor": consumed, "tokens": consumed * length}
    return {
        **counters, "batch": batch, "sequence_length": length, "loss": {"sum": 512.0, "count": 256},
        "sources": {"a": {"sum": 512.0, "count": 256}}, "grad_norm": 0.5, "loss_scale": None, "overflow": False,
        "skipped": False, "not_finite": None, "lr": 1e-3, "ramps": {"lr": 1e-3, "shares": {"a": 1.0}}, "mfu": None,
        "mixture": {"a": 1.0}, "data_digest": f"{step:016x}", "documents": 1, "separators": 1, "adjacent_specials": 0,
        "quarantined": 0, "data_read": {"file": "shard-7.bin"}, "seconds": {"iteration": 0.5, "data": 0.0, "checkpoint": 0.0},
        "tokens_per_second": 1e4, "memory_bytes": 2**30, "segment": 1, "time": "2026-06-01T12:00:00.000Z", **changes,
    }  # fmt: skip


def facts(step: int, *, batch: int = 8, length: int = 32, **changes: Any) -> dict[str, Any]:
    """What a trainer tells the store of a checkpoint."""
    consumed = step * batch
    counters = {"step": step, "consumed": consumed, "cursor": consumed, "batch": batch, "tokens": consumed * length}
    versions = {"torch": "2.13", "fsdp_pretrain": "0.1.0"}
    ours = {"run": "x", "segment": 1, "final": False, "world": WORLD, "state_digest": "0" * 16, **versions}
    return {**counters, **ours, **changes}


def results(**changes: Any) -> dict[str, Any]:
    """What an evaluation gives."""
    return {"step": 1, "tokens": 1, "scores": {}, "seconds": 1.0, "time": "2026-06-01T12:00:00.000Z", **changes}
