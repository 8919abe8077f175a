"""What a tracker shows of a run as a whole: name, tags, state, and when it really began and ended."""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import dataclass
from typing import Any

from fsdp_pretrain.run import exit_intent, journal, lineage, lock, run_id, status
from fsdp_pretrain.run.files import RunDir, seconds_of

STATES = {"running", "complete", "stopped", "failed", "killed"}


@dataclass(frozen=True)
class RunFacts:
    """A run as a tracker names it.

    Attributes:
        name: `run.name`.
        state: running, complete, stopped, failed, or killed (it ended without reporting a reason).
        tags: model family, `record.tags`, and the state, which is the last one.
        config: the resolved configuration.
        started, ended: seconds since 1970; `ended` is None while it runs.
        views: ids of its views, 64 hexadecimal digits each: one for each line that a rollback ended, and last that of
            the present line.
    """

    name: str
    state: str
    tags: list[str]
    config: dict[str, Any]
    started: float
    ended: float | None
    views: list[str]


def read_config(run: RunDir) -> dict[str, Any]:
    """The resolved configuration of a run as plain values. Raises OSError, TOMLDecodeError."""
    return tomllib.loads(run.config.read_text(encoding="utf-8"))


def read_facts(run: RunDir) -> RunFacts:
    """The facts of a run that was started. Raises OSError, UserError."""
    config = read_config(run)
    nodes = lineage.nodes(run)
    identity = run_id.read(run.path) or str(run.path.resolve())
    rollbacks = sum(node.kind in lineage.ABANDONING for node in nodes)
    state, ended = _end(run)
    return RunFacts(
        name=str(config["run"]["name"]),
        state=state,
        tags=[config["model"]["family"], *config.get("record", {}).get("tags", []), state],
        config=config,
        started=_start(run),
        ended=ended,
        views=[hashlib.sha256(f"{identity} {number}".encode()).hexdigest() for number in range(rollbacks + 1)],
    )


def _start(run: RunDir) -> float:
    """The time of the first entry of the journal; in a fork, of the fork, since earlier ones are the parent's."""
    started = 0.0
    for entry in journal.read(run):
        if not started or entry["kind"] == "fork":
            started = seconds_of(entry["time"]) or 0.0
    return started


def _end(run: RunDir) -> tuple[str, float | None]:
    """The state, and when the run ended."""
    newest = status.read(run)
    if newest.state not in status.ENDED and lock.is_held(run):
        return "running", None
    last_trained = newest.of_run
    last_heartbeat = seconds_of(last_trained.heartbeat) or run.config.stat().st_mtime
    if last_trained.state not in status.ENDED:
        return "killed", last_heartbeat
    intent = exit_intent.read(run.segment(last_trained.segment or 0))  # its time: the process may live on for a while
    return last_trained.state, seconds_of(intent and intent.time) or last_heartbeat
