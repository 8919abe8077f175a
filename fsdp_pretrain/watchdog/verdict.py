"""Who holds up a run that hangs: from where every rank stands to a name and a reason. No torch.

All ranks of a job wait for the one that does not come, so the step they are in tells nothing. Phase, state of the
process and stack do: who is in a collective operation is a victim, who is elsewhere is the suspect; where all are in
one, those in another than most are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ..units import human_time
from .ranks import Standing


@dataclass(frozen=True)
class Verdict:
    """What a hang looks like.

    Attributes:
        kind: dead, stopped, wedged, device, data, stuck, silent, desync, network.
        suspects: ranks that are held responsible; empty if nothing tells them from the others.
        hosts: of the suspects.
        text: one sentence.
    """

    kind: str
    suspects: tuple[int, ...]
    hosts: tuple[str, ...]
    text: str


_REASONS = {
    "dead": "has ended",
    "stopped": "is stopped (SIGSTOP, a debugger, or a frozen container)",
    "wedged": "has a wedged interpreter: {place} neither returns nor lets other threads run",
    "device": "waits in the kernel for a device or a file system",
    "data": "waits for data from {place}",
    "stuck": "is stuck in {place}",
}


def judge(standings: list[Standing], quiet: Mapping[str, float] | None = None) -> Verdict:
    """The verdict on ranks none of which makes progress.

    Args:
        standings: of all nodes that told.
        quiet: hosts that did not, and for how many seconds they have given no sign.
    """
    kinds: dict[str, list[Standing]] = {}
    for standing in standings:
        if (kind := _kind(standing)) is not None:
            kinds.setdefault(kind, []).append(standing)
    for kind, reason in _REASONS.items():
        if found := kinds.get(kind):
            place = (found[0].reading if kind == "data" else "") or found[0].place or "an unknown place"
            return _verdict(kind, found, reason.format(place=place))
    if quiet:
        names = ", ".join(f"{host} for {human_time(seconds)}" for host, seconds in quiet.items())
        text = f"nothing is heard of {names}: the node is gone, frozen, or does not see the run directory"
        return Verdict("silent", (), tuple(quiet), text)
    groups = Counter(standing.group for standing in standings if standing.group)
    if len(groups) > 1:
        (most, size), *_ = groups.most_common()
        odd = [standing for standing in standings if standing.group != most]
        if size > len(odd):
            where = odd[0].collective or odd[0].place
            return _verdict("desync", odd, f"waits in {where}, the others in {most[0]}: they have lost step")
        names = " and ".join(sorted({group[0] or "?" for group in groups}))
        return Verdict("desync", (), (), f"the ranks wait in different operations, {names}: they have lost step")
    where = next((standing.collective for standing in standings if standing.collective), "a collective operation")
    return Verdict("network", (), (), f"all ranks wait in {where}: the connection between them is held up")


def _kind(standing: Standing) -> str | None:
    """What is wrong with one rank; None if it is a victim."""
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


def _verdict(kind: str, found: list[Standing], reason: str) -> Verdict:
    names = ", ".join(f"rank {standing.rank} ({standing.host}, pid {standing.pid})" for standing in found[:4])
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    hosts = tuple(dict.fromkeys(standing.host for standing in found))
    return Verdict(kind, tuple(standing.rank for standing in found), hosts, f"{names}{more} {reason}")
