"""How a start ended, read from what it left: its segment, its exit intent, its last step, its checkpoints. No torch."""

from __future__ import annotations

import json
import socket
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.stores import stores
from ..config import load
from ..errors import Exit, UserError
from ..record.files import RunDir, last_lines, now, read_json, replace_file
from ..where import IN_FLIGHT, batches_after
from .torchrun import WRONG_OPTIONS


@dataclass(frozen=True)
class Outcome:
    """How one start ended.

    Attributes:
        code: what it decided to exit with; None if it died without deciding.
        reason: in its words.
        asked: it ended because somebody asked it to stop.
        avoid: hosts not to use again.
        segment: number of its segment; None if it did not come so far.
        step: last step in its record, or the one it resumed from; None if it did not come so far.
        ahead: the steps after that, of which one was being trained: see `where.batches_after`.
        verified: newest step with a verified checkpoint, or 0.
        met: whether the nodes found each other, so that there were ranks.
    """

    code: int | None
    reason: str
    asked: bool = False
    avoid: tuple[str, ...] = ()
    segment: int | None = None
    step: int | None = None
    ahead: tuple[dict[str, int], ...] = ()
    verified: int = 0
    met: bool = True


def newest_segment(run: RunDir) -> int:
    """Number of the newest segment, or 0."""
    segments = run.segments
    return int(segments[-1].name) if segments else 0


def segment_of(run: RunDir, before: int, host: str | None) -> int:
    """Number of the newest segment after `before` in which a host took part (None: whoever did), or `before`.

    A node that was frozen, or cut off, may find that the run went on without it. A segment whose hosts are not known
    yet counts.
    """
    for segment in reversed(run.segments):
        number = int(segment.name)
        if number <= before:
            break
        hosts = hosts_of(run, number)
        if host is None or not hosts or host in hosts:
            return number
    return before


def verified_step(run: RunDir) -> int:
    """The newest step that has a verified checkpoint, or 0."""
    try:
        found = stores(run).scan()
    except UserError:
        return 0
    return max((item.step for item in found if item.problem is None and item.verified), default=0)


def read_outcome(
    run: RunDir, before: int, note: Path, code: int, *, host: str | None = None, met: bool = True
) -> Outcome:
    """How the start that has just ended did.

    Args:
        run: the run directory.
        before: number of the newest segment when it began.
        note: where its ranks leave an exit code that was decided before there was a segment.
        code: of torchrun.
        host: name of this host if there are others.
        met: whether there were ranks.
    """
    number, verified = segment_of(run, before, host), verified_step(run)
    if number <= before:
        left = read_json(note)
        if left is not None:
            return Outcome(left["code"], left["reason"], verified=verified)
        if code == 0:
            return Outcome(0, "complete", verified=verified)
        if code == WRONG_OPTIONS:
            return Outcome(int(Exit.REFUSED), "torchrun does not know one of its options", verified=verified)
        return Outcome(None, f"torchrun exit {code} before training began", verified=verified, met=met or code != 1)
    segment = run.segment(number)
    intent = read_json(segment / "exit_intent.json") or {}
    last = _last_counters(segment)
    return Outcome(
        intent.get("code"),
        intent.get("reason", f"ended without a word (torchrun exit {code})"),
        asked=bool(intent.get("asked")),
        avoid=tuple(intent.get("avoid_hosts", ())),
        segment=number,
        step=last["step"] if last else None,
        ahead=tuple(batches_after(load(segment / "config.toml"), last, IN_FLIGHT)) if last else (),
        verified=verified,
    )


def _last_counters(segment: Path) -> dict[str, Any] | None:
    """What holds step, consumed and cursor at the end of a segment, or at its begin if it has no record."""
    newest = last_lines(segment / "metrics.jsonl")
    return newest[-1] if newest else read_json(segment / "lineage.json")


# ---------------------------------------------------------------------- what nodes tell each other


def tell_ended(run: RunDir, number: int) -> None:
    """Leave a mark that this node's part of a segment has ended. Raises OSError."""
    replace_file(run.segment(number) / "ended" / socket.gethostname(), f"{now()}\n")


def ended_hosts(run: RunDir, number: int) -> set[str]:
    """The hosts whose part of a segment has ended."""
    folder = run.segment(number) / "ended"
    return {path.name for path in folder.glob("*")} if folder.is_dir() else set()


def gone_hosts(run: RunDir, number: int) -> set[str]:
    """The same, and those that the watchdog has found to be lost."""
    intent = read_json(run.segment(number) / "exit_intent.json") or {}
    return ended_hosts(run, number) | set(intent.get("lost") or ())


def hosts_of(run: RunDir, number: int) -> set[str]:
    """The hosts of a segment; empty if it is not known."""
    environment = read_json(run.segment(number) / "environment.json") or {}
    return set(environment.get("hosts") or ())


def avoid(run: RunDir, hosts: Collection[str]) -> list[str]:
    """Add hosts to `RUN/avoid_hosts`, one per line; all that are in it now. Raises OSError."""
    known = avoided(run)
    new = [host for host in hosts if host not in known]
    if new:
        replace_file(run.avoid_hosts, "".join(f"{host}\n" for host in [*known, *new]))
    return [*known, *new]


def avoided(run: RunDir) -> list[str]:
    """The hosts in `RUN/avoid_hosts`."""
    try:
        return run.avoid_hosts.read_text(encoding="utf-8").split()
    except OSError:
        return []


def overrule(run: RunDir, segment: int | None, reason: str) -> None:
    """Record that the launcher gave up, over what the last start said of itself. Raises OSError."""
    facts = {"code": int(Exit.NEEDS_PERSON), "reason": reason, "time": now(), "host": socket.gethostname()}
    if segment is not None:
        path = run.segment(segment) / "exit_intent.json"
        replace_file(path, json.dumps({**facts, "was": read_json(path)}) + "\n")
    status = read_json(run.status)
    if status is not None:
        status.update(state="failed", exit_intent={"code": facts["code"], "reason": reason})
        replace_file(run.status, json.dumps(status, indent=1) + "\n")
