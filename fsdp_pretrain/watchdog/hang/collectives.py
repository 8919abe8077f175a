"""Which collective on the GPUs blocks a run, from how far every rank is in those of each process group.

NCCL numbers the collectives of a group in the order of the calls, on every rank. Hosts run ahead of their GPUs, so the
last call says little: the others wait for the first collective that has not ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class GroupProgress:
    """How far a rank is in the collectives of one of its process groups, which count from 1; sent between nodes."""

    group: str  # this and the next: its name on all of its ranks, and a name for people
    label: str
    size: int  # number of its ranks
    called: int  # the last collective that the host has called
    begun: int  # the last one that the GPU has begun; -1 without `TORCH_NCCL_ENABLE_TIMING`
    ended: int  # the last one that has ended on the GPU
    # this and the next: of the first that has not ended; empty if there is none, or it is not known
    operation: str = ""
    tensors: str = ""

    @property
    def waits(self) -> bool:
        """Whether the rank waits for the end of a collective."""
        return self.called > self.ended


@dataclass(frozen=True)
class Blocked:
    """A collective that does not end.

    Attributes:
        name: its number, group, operation and tensors.
        waiting: number of ranks that have called it.
        problem: `absent`: `ranks` have not called it. `odd`: `ranks` have called another operation, none if that is
            half of them. `late`: the GPUs of `ranks` have not come to it. `network`: all are in it.
        operations: those that were called, the most frequent first.
    """

    name: str
    waiting: int
    problem: str
    ranks: tuple[int, ...]
    operations: tuple[str, ...]


def find_blocked(ranks: Mapping[int, Sequence[GroupProgress]]) -> list[Blocked]:
    """The collectives that are the cause of a hang, not its effect; empty if that cannot be said.

    `ranks`: by rank the progress in all of its groups, first those in which it waits, that of the oldest call first.
    """
    groups: dict[str, dict[int, GroupProgress]] = {}
    for rank, progress in ranks.items():
        for member in progress:
            groups.setdefault(member.group, {})[rank] = member
    found = {group: _examine(members) for group, members in groups.items() if any(m.waits for m in members.values())}
    # A rank that waits in one group is absent in another as an effect, unless all that are absent wait.
    for effects in ({rank for rank, progress in ranks.items() if any(m.waits for m in progress)}, set[int]()):
        absent: dict[tuple[int, ...], Blocked] = {}
        for each in sorted(found.values(), key=lambda each: -each.waiting):
            if each.problem == "absent" and (causes := tuple(rank for rank in each.ranks if rank not in effects)):
                absent.setdefault(causes, replace(each, ranks=causes))
        if absent:
            return list(absent.values())
    return [
        each
        for group, each in found.items()
        if all(len(groups[group]) == member.size for member in groups[group].values())
        and all(ranks[rank][0].group == group for rank in groups[group])
    ]


def _examine(members: Mapping[int, GroupProgress]) -> Blocked:
    """Compare the ranks of a group, of which at least one waits."""
    number = max(each.ended for each in members.values() if each.waits) + 1
    first = {rank: each for rank, each in members.items() if each.waits and each.ended == number - 1}
    calls = Counter(each.operation for each in first.values() if each.operation).most_common()
    usual = next(each for each in first.values() if not calls or each.operation == calls[0][0])
    begun = number if any(each.begun >= number for each in members.values()) else -1
    is_divided = len(calls) > 1 and calls[0][1] == calls[1][1]
    suspects = {
        "absent": [rank for rank, each in members.items() if each.called < number],
        "odd": [rank for rank, each in first.items() if each.operation not in ("", usual.operation)],
        "late": [rank for rank, each in members.items() if each.ended < number - 1 or each.begun < begun],
    }
    problem = next((problem for problem, found in suspects.items() if found), "network")
    what = f", {usual.operation} {usual.tensors}" if usual.operation else ""
    return Blocked(
        name=f"collective {number} of {usual.label}{what}",
        waiting=sum(each.called >= number for each in members.values()),
        problem=problem,
        ranks=() if problem == "odd" and is_divided else tuple(sorted(suspects.get(problem, ()))),
        operations=tuple(operation for operation, _ in calls),
    )
