"""Who holds up a run that hangs: from where every rank stands to a name and a reason. No torch.

All ranks of a job wait for the one that does not come, so the step they are in says nothing. Phase, state of the
process and stack do: who is in a collective operation is a victim, who is elsewhere is the suspect; where all are in
one, those in another than most are. That nothing sets a rank apart can be said once it is known where all stand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_pretrain.units import human_time

from .rank_monitor import RankSnapshot

_REASONS = {
    "dead": "has ended",
    "stopped": "is stopped (SIGSTOP, a debugger, or a frozen container)",
    "wedged": "has a wedged interpreter: {place} neither returns nor lets other threads run",
    "device": "waits in the kernel for a device or a file system",
    "data": "waits for data from {place}",
    "stuck": "is stuck in {place}",
}


@dataclass(frozen=True)
class HangDiagnosis:
    """What a hang looks like.

    Attributes:
        kind: one of `_REASONS`, silent, unknown, desync, network; the first of several.
        text: one sentence, with all causes.
        guilty: where the ranks stand that are held responsible; empty if nothing tells them from the others.
        silent: hosts that give no sign.
        unknown: hosts that have not yet said where all of their ranks stand.
    """

    kind: str
    text: str
    guilty: tuple[RankSnapshot, ...] = ()
    silent: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def suspects(self) -> tuple[int, ...]:
        return tuple(each.rank for each in self.guilty)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Of the suspects, and those that are silent."""
        return _unique([*(each.host for each in self.guilty), *self.silent])

    @property
    def facts(self) -> dict[str, Any]:
        """What it comes to, JSON values for alarms and exit intents."""
        return {"verdict": self.kind, "suspects": list(self.suspects), "hosts": list(self.hosts)}


def judge(standings: list[RankSnapshot], quiet: Mapping[str, float], untold: Collection[str]) -> HangDiagnosis:
    """The verdict on ranks none of which makes progress. Causes that are true at once are all named.

    Args:
        standings: as far as they are known.
        quiet: hosts that did not report theirs, and for how many seconds they have given no sign.
        untold: hosts that did not report theirs, and give signs.
    """
    unknown = _unique([*untold, *(each.host for each in standings if not each.place and _kind(each) is None)])
    kinds: dict[str, list[RankSnapshot]] = {}
    for standing in standings:
        if (kind := _kind(standing)) is not None:
            kinds.setdefault(kind, []).append(standing)
    if len(kinds) > 1:
        kinds.pop("stuck", None)  # it may wait for the others, in a place that is no collective operation
    causes = {kind: _sentence(kind, kinds[kind]) for kind in _REASONS if kind in kinds}
    guilty = tuple(standing for kind in causes for standing in kinds[kind])
    if quiet:
        names = ", ".join(f"{host} for {human_time(seconds)}" for host, seconds in quiet.items())
        causes["silent"] = f"nothing is heard of {names}: the node is gone, frozen, or does not see the run directory"
    if causes:
        return HangDiagnosis(next(iter(causes)), "; ".join(causes.values()), guilty, tuple(quiet), unknown)
    if unknown:
        text = f"nothing is known yet of where all ranks of {', '.join(unknown)} stand; the others wait"
        return HangDiagnosis("unknown", text, unknown=unknown)
    return _judge_victims(standings)


def _judge_victims(standings: list[RankSnapshot]) -> HangDiagnosis:
    """All wait in collective operations: in the same one, or those in another than most are the suspects."""
    groups = Counter(standing.group for standing in standings if standing.group)
    if len(groups) > 1:
        (most, size), *_ = groups.most_common()
        odd = tuple(standing for standing in standings if standing.group != most)
        if size > len(odd):
            where = odd[0].collective or odd[0].place
            return HangDiagnosis(
                "desync", f"{_names(odd)} waits in {where}, the others in {most[0]}: they have lost step", odd
            )
        names = " and ".join(sorted({group[0] or "?" for group in groups}))
        return HangDiagnosis("desync", f"the ranks wait in different operations, {names}: they have lost step")
    where = next((standing.collective for standing in standings if standing.collective), "a collective operation")
    return HangDiagnosis("network", f"all ranks wait in {where}: the connection between them is held up")


def _kind(standing: RankSnapshot) -> str | None:
    """What is wrong with one rank; None if it is a victim, or has not answered and its process does not say why."""
    if standing.state in "XZ":
        return "dead"
    if standing.state == "T":
        return "stopped"
    if standing.state == "D":
        return "device"
    if standing.wedged:
        return "wedged"
    if standing.collective is not None:
        return None
    if standing.phase == "data" or standing.reading:
        return "data"
    return "stuck" if standing.place else None


def _sentence(kind: str, found: list[RankSnapshot]) -> str:
    place = (found[0].reading if kind == "data" else "") or found[0].place or "an unknown place"
    return f"{_names(found)} {_REASONS[kind].format(place=place)}"


def _names(found: Sequence[RankSnapshot]) -> str:
    names = ", ".join(f"rank {standing.rank} ({standing.host}, pid {standing.pid})" for standing in found[:4])
    return names + (f" and {len(found) - 4} more" if len(found) > 4 else "")


def _unique(hosts: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(hosts))
