"""How a start ended, from what it left behind: segment, exit intent, last step, checkpoints."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from fsdp_pretrain.checkpoint.store import Store
from fsdp_pretrain.config.resume_rules import load_recorded
from fsdp_pretrain.data.packing.position import Position
from fsdp_pretrain.errors import ConfigError, Exit, UserError
from fsdp_pretrain.lineage.provenance import batches_after
from fsdp_pretrain.run import environment, exit_intent, lineage, state_files, status
from fsdp_pretrain.run.exit_intent import EXIT_INTENT, ExitIntent
from fsdp_pretrain.run.files import RunDir, now, replace_file
from fsdp_pretrain.run.metrics import last_records
from fsdp_pretrain.run.step_record import IN_FLIGHT, StepRecord

from .torchrun import WRONG_OPTIONS

_HOST = re.compile(r"[A-Za-z0-9._:-]+")


@dataclass(frozen=True)
class StartOutcome:
    """How one start ended."""

    code: int | None  # the exit code it decided on; None if it died without deciding
    reason: str  # the reason for ending that it gave
    asked: bool = False  # whether it was asked to stop
    avoid: tuple[str, ...] = ()  # hosts not to use again
    segment: int | None = None  # number of its segment; None if it ended before creating one
    step: int | None = None  # last recorded step, or the one it resumed from; None if neither is known
    ahead: tuple[dict[str, int], ...] = ()  # the following steps, one of which was in training: see `batches_after`
    verified: int = 0  # newest step with a verified checkpoint at its end, or 0; the next: at its beginning
    verified_before: int = 0
    joined: bool = True  # whether the rendezvous succeeded, so that there were ranks
    at: float = 0.0  # when it ended (`time.monotonic`)
    seconds: float = 0.0  # how long it took


def newest_segment(run: RunDir) -> int:
    """Number of the newest segment, or 0."""
    segments = run.segments
    return int(segments[-1].name) if segments else 0


def segment_of(run: RunDir, before: int, host: str | None) -> int:
    """Number of the newest segment after `before` in which a host took part (None: any host), or `before`.

    The run may have continued without a node that was frozen or cut off. A segment whose hosts are not known yet
    counts.
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
        checkpoints = Store(run.checkpoints).scan()
    except UserError:
        return 0
    return max((item.step for item in checkpoints if item.problem is None and item.verified), default=0)


def read_outcome(
    run: RunDir, before: int, note: Path, code: int, *, host: str | None = None, joined: bool = True
) -> StartOutcome:
    """How the start that has just ended went.

    Args:
        run: the run directory.
        before: number of the newest segment when it started.
        note: where its ranks leave an exit code decided before there was a segment.
        code: exit code of torchrun.
        host: name of this host if the job has others.
        joined: whether there were ranks.
    """
    number = segment_of(run, before, host)
    if number <= before:
        noted = state_files.view(note, ExitIntent)
        if noted is not None:
            return StartOutcome(noted.code, noted.reason)
        if code == 0:
            return StartOutcome(0, "complete")
        if code == WRONG_OPTIONS:
            return StartOutcome(int(Exit.REFUSED), "torchrun rejected its options")
        return StartOutcome(None, f"torchrun exit {code} before training began", joined=joined or code != 1)
    step, ahead = _last_place(run, number)
    reason = f"ended without giving a reason (torchrun exit {code})"
    ended = StartOutcome(None, reason, segment=number, step=step, ahead=tuple(ahead))
    try:
        intent = state_files.read(run.segment(number) / EXIT_INTENT, ExitIntent)
    except UserError as error:
        return replace(ended, reason=f"torchrun exit {code}; why is not known: {error.cause}")
    if intent is None:
        return ended
    avoid = tuple(intent.avoid_hosts)
    return replace(ended, code=intent.code, reason=intent.reason, asked=intent.asked, avoid=avoid)


def _last_place(run: RunDir, number: int) -> tuple[int | None, list[dict[str, int]]]:
    """The last step of a segment (the one it started at if nothing was recorded), and the next batches, if known."""
    segment = run.segment(number)
    newest = last_records(segment)
    place: StepRecord | lineage.LineageNode | None = newest[-1] if newest else None
    with contextlib.suppress(UserError):  # the next start refuses a damaged lineage
        place = place or next((node for node in lineage.nodes(run) if node.segment == number), None)
    if place is None or place.consumed is None or place.cursor is None:
        return None if place is None else place.step, []
    at = Position(place.step, place.consumed, place.cursor)
    with contextlib.suppress(UserError):
        return place.step, batches_after(load_recorded(segment / "config.toml"), at, IN_FLIGHT)
    return place.step, []


# ---------------------------------------------------------------------- what nodes leave for each other


def mark_ended(run: RunDir, number: int) -> None:
    """Leave a mark that this node's part of a segment has ended. Raises OSError."""
    replace_file(run.segment(number) / "ended" / socket.gethostname(), f"{now()}\n")


def ended_hosts(run: RunDir, number: int) -> set[str]:
    """The hosts whose part of a segment has ended."""
    folder = run.segment(number) / "ended"
    return {path.name for path in folder.glob("*")} if folder.is_dir() else set()


def gone_hosts(run: RunDir, number: int) -> set[str]:
    """`ended_hosts`, and the hosts that the watchdog reported as lost."""
    intent = exit_intent.read(run.segment(number))
    return ended_hosts(run, number) | set(intent.lost if intent is not None else ())


def hosts_of(run: RunDir, number: int) -> set[str]:
    """The hosts of a segment; empty if not known."""
    return set(environment.view(run, number).hosts)


def avoid(run: RunDir, hosts: Collection[str]) -> None:
    """Add hosts to `RUN/avoid_hosts`, one per line. Raises OSError, ConfigError."""
    present = avoided(run)
    new = [host for host in hosts if host not in present]
    if new:
        replace_file(run.avoid_hosts, "".join(f"{host}\n" for host in [*present, *new]))


def avoided(run: RunDir) -> list[str]:
    """The hosts in `RUN/avoid_hosts`. Raises ConfigError."""
    try:
        hosts = run.avoid_hosts.read_text(encoding="utf-8").split()
        for host in hosts:
            if not _HOST.fullmatch(host):
                raise ValueError(f"{host!r} is not the name of a host")
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{run.avoid_hosts} cannot be read: {error}",
            effect="the run could be started on a host that was found broken",
            remedy="restore it, one host per line, or remove it; the journal names the hosts "
            f"(`fsdp-pretrain journal {run.path} --kind avoid-hosts`)",
        ) from None
    return hosts


def overrule(run: RunDir, segment: int | None, reason: str) -> None:
    """Record that the launcher gave up, overruling what the last start recorded. Raises OSError."""
    code = int(Exit.NEEDS_PERSON)
    if segment is not None:
        before = exit_intent.read(run.segment(segment))
        facts = {"code": code, "reason": reason, "time": now(), "host": socket.gethostname()}
        state_files.write(run.segment(segment) / EXIT_INTENT, {**facts, "was": before and before.model_dump()})
    if run.status.exists():
        status.update(run, **status.ended(code, reason))
