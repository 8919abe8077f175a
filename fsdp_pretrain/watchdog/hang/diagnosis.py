"""Finds the cause of a hang: from the position of every rank to a name and a reason.

All ranks wait for the missing one, so their step says nothing; phase, process state and stack do. A rank in a
collective is a victim, one elsewhere is a suspect; if all are in collectives, the minority in another one is. Of GPUs
the stacks say nothing, NCCL's flight recorders do. "No suspect" is a verdict only once all positions are known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_pretrain.units import human_time

from .collectives import Blocked, find_blocked
from .rank_monitor import RankSnapshot
from .stacks import DEVICE

_REASONS = {
    "dead": "has ended",
    "stopped": "is stopped (SIGSTOP, a debugger, or a frozen container)",
    "wedged": "has a wedged interpreter: {place} neither returns nor lets other threads run",
    "device": "waits in the kernel for a device or a file system",
    "data": "waits for data from {place}",
    "stuck": "is stuck in {place}",
}
_SHOWN = 3
"""Blocked collectives in a text."""


@dataclass(frozen=True)
class HangDiagnosis:
    """The verdict on a hang."""

    kind: str  # one of `_REASONS`, silent, unknown, desync, network; the first if there are several
    text: str  # one sentence, with all causes
    guilty: tuple[RankSnapshot, ...] = ()  # positions of the ranks held responsible; empty if no rank stands out
    silent: tuple[str, ...] = ()  # hosts that give no sign of life
    unknown: tuple[str, ...] = ()  # hosts that have not yet reported the positions of all their ranks

    @property
    def suspects(self) -> tuple[int, ...]:
        return tuple(snapshot.rank for snapshot in self.guilty)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts of the suspects, and the silent ones."""
        return _unique([*(snapshot.host for snapshot in self.guilty), *self.silent])

    @property
    def facts(self) -> dict[str, Any]:
        """JSON values for alarms and exit intents."""
        return {"verdict": self.kind, "suspects": list(self.suspects), "hosts": list(self.hosts)}


def diagnose(snapshots: list[RankSnapshot], quiet: Mapping[str, float], unreported: Collection[str]) -> HangDiagnosis:
    """Diagnose ranks of which none makes progress, naming all causes that apply.

    Args:
        snapshots: the known positions.
        quiet: hosts without reported positions that are silent, with the seconds of silence.
        unreported: hosts without reported positions that are alive.
    """
    unplaced = [snapshot for snapshot in snapshots if not snapshot.place and _kind(snapshot) is None]
    unknown = _unique([*unreported, *(snapshot.host for snapshot in unplaced)])
    kinds: dict[str, list[RankSnapshot]] = {}
    for snapshot in snapshots:
        if (kind := _kind(snapshot)) is not None:
            kinds.setdefault(kind, []).append(snapshot)
    if not (kinds.keys() - {"stuck"} or unknown or quiet) and (recorded := _diagnose_recorded(snapshots)) is not None:
        return recorded
    if len(kinds) > 1:
        kinds.pop("stuck", None)  # it may wait for the others outside a collective
    causes = {kind: _sentence(kind, kinds[kind]) for kind in _REASONS if kind in kinds}
    guilty = tuple(snapshot for kind in causes for snapshot in kinds[kind])
    if quiet:
        names = ", ".join(f"{host} for {human_time(seconds)}" for host, seconds in quiet.items())
        causes["silent"] = f"no heartbeat from {names}: the node is gone, frozen, or cannot reach the run directory"
    if causes:
        return HangDiagnosis(next(iter(causes)), "; ".join(causes.values()), guilty, tuple(quiet), unknown)
    if unknown:
        text = f"not all ranks of {', '.join(unknown)} have reported their position yet; the others wait"
        return HangDiagnosis("unknown", text, unknown=unknown)
    return _diagnose_victims(snapshots)


def _diagnose_victims(snapshots: list[RankSnapshot]) -> HangDiagnosis:
    """Diagnose ranks that all wait in collectives: a minority in another collective is the suspect."""
    groups = Counter(snapshot.group for snapshot in snapshots if snapshot.group)
    if len(groups) > 1:
        (most, size), *_ = groups.most_common()
        odd = tuple(snapshot for snapshot in snapshots if snapshot.group != most)
        if size > len(odd):
            where = odd[0].collective or odd[0].place
            return HangDiagnosis(
                "desync", f"{_names(odd)} waits in {where}, the others in {most[0]}: they are out of step", odd
            )
        names = " and ".join(sorted({group[0] or "?" for group in groups}))
        return HangDiagnosis("desync", f"the ranks wait in different operations, {names}: they are out of step")
    where = next((snapshot.collective for snapshot in snapshots if snapshot.collective), "a collective operation")
    cause = " or a device hangs" if where == DEVICE else ""
    return HangDiagnosis("network", f"all ranks wait in {where}: the connection between them is blocked{cause}")


def _diagnose_recorded(snapshots: list[RankSnapshot]) -> HangDiagnosis | None:
    """What the flight recorders say of the collective that the GPUs wait in; None if they name none.

    They know better than stacks which rank is stuck: a host whose GPU waits may be anywhere when its queue is full.
    """
    ranks = {snapshot.rank: snapshot for snapshot in snapshots}
    blocked = find_blocked({rank: snapshot.collectives for rank, snapshot in ranks.items()})
    if not blocked:
        return None
    text = "; ".join(_blocked_sentence(each, [ranks[rank] for rank in each.ranks]) for each in blocked[:_SHOWN])
    text += f"; and {len(blocked) - _SHOWN} more groups" if len(blocked) > _SHOWN else ""
    guilty = tuple(ranks[rank] for rank in dict.fromkeys(rank for each in blocked for rank in each.ranks))
    kind = {"absent": "stuck", "odd": "desync", "late": "device"}.get(blocked[0].problem, "network")
    if kind == "stuck" and all(snapshot.collective is not None for snapshot in guilty):
        kind = "desync"  # it waits elsewhere
    return HangDiagnosis(kind, text, guilty)


def _blocked_sentence(blocked: Blocked, guilty: list[RankSnapshot]) -> str:
    name, count = blocked.name, f"{blocked.waiting} ranks wait"
    if blocked.problem == "absent":
        return f"{_names(guilty)} has not called {name}, in which {count}: it is in {guilty[0].place}"
    if blocked.problem == "odd":
        calls = " and ".join(blocked.operations)
        return f"{_names(guilty) or 'a part of the ranks'} is out of step in {name}: the ranks call {calls} there"
    if blocked.problem == "late":
        return f"the GPU of {_names(guilty)} has not come to {name}, in which {count}"
    return f"all {count} in {name}: the connection between them is blocked or a device hangs"


def _kind(snapshot: RankSnapshot) -> str | None:
    """The problem of one rank, a key of `_REASONS`; None for a victim, or if its position is unknown."""
    if snapshot.state in "XZ":
        return "dead"
    if snapshot.state == "T":
        return "stopped"
    if snapshot.state == "D":
        return "device"
    if snapshot.wedged:
        return "wedged"
    if snapshot.collective is not None:
        return None
    if snapshot.phase == "data" or snapshot.reading:
        return "data"
    return "stuck" if snapshot.place else None


def _sentence(kind: str, guilty: list[RankSnapshot]) -> str:
    place = (guilty[0].reading if kind == "data" else "") or guilty[0].place or "an unknown place"
    return f"{_names(guilty)} {_REASONS[kind].format(place=place)}"


def _names(snapshots: Sequence[RankSnapshot]) -> str:
    names = ", ".join(f"rank {snapshot.rank} ({snapshot.host}, pid {snapshot.pid})" for snapshot in snapshots[:4])
    return names + (f" and {len(snapshots) - 4} more" if len(snapshots) > 4 else "")


def _unique(hosts: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(hosts))
