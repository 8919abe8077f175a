"""Hardware check of a stopped job: `fsdp-pretrain doctor [torchrun options]`, which runs this module under torchrun.

Every rank times the same matrix product. Groups of ranks run timed all-reduces with known results: inside each node,
between all nodes, and in pairs of nodes, with other partners every round. A host that is slow with every partner is
named; two that are slow only with each other are named as a pair.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist

from fsdp_pretrain import open_files
from fsdp_pretrain.console import Parser, run_guarded
from fsdp_pretrain.parallel.mesh import RankInfo, device_of
from fsdp_pretrain.units import human_bytes

from . import torchrun
from .arguments import add_check_options

_REPEATS, _TRIES = 8, 3
T = TypeVar("T")


@dataclass
class RankFacts:
    """A rank: its device, total and free device memory (bytes), the shortest time of its matrix product."""

    host: str
    device: str
    devices: int
    free: int
    memory: int
    rank: int
    node: int
    matmul_seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.host} rank {self.rank}"


@dataclass
class GroupSum:
    """An all-reduce over a group of ranks: the best time of its slowest rank, and whether all results were right."""

    kind: str
    ranks: list[int]
    hosts: list[str]
    nodes: list[int]
    bus_bytes: float
    seconds: float
    right: bool

    def __str__(self) -> str:
        return f"ranks {', '.join(map(str, self.ranks))} on {', '.join(self.hosts)}"


@dataclass
class DoctorFindings:
    """What the check found; `problems` are texts that name host and rank."""

    hosts: list[str]
    ranks: list[RankFacts]
    sums: list[GroupSum]
    problems: list[str]


def main() -> int:
    """Check, print on rank 0, exit 0 or 1."""
    parser = Parser(prog="python -m fsdp_pretrain.launch.doctor", description=__doc__)
    add_check_options(parser)
    args = parser.parse_args()
    torchrun.die_with_launcher()
    return run_guarded(lambda: _check(args))


def _check(args: argparse.Namespace) -> int:
    ranks = RankInfo.from_environment()
    device = device_of(ranks)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = dist.HashStore() if "MASTER_ADDR" not in os.environ else None
    timeout = timedelta(seconds=args.timeout)
    open_files.raise_limit(open_files.files_needed(ranks.world, ranks.local_world))
    dist.init_process_group(backend, store=store, timeout=timeout, rank=ranks.rank, world_size=ranks.world)
    found = Checker(ranks, device, args).run()
    if ranks.rank == 0:
        print(json.dumps(asdict(found), indent=1) if args.json else render(found), flush=True)
    dist.destroy_process_group()
    if not found.problems:
        return 0
    # If a rank exited with 1, torchrun would print a long failure report below the table.
    return 0 if torchrun.leave_note(1, found.problems[0]) else 1


class Checker:
    """The measurements. All ranks call its methods together."""

    def __init__(self, ranks: RankInfo, device: torch.device, args: argparse.Namespace) -> None:
        self._ranks, self._device, self._slow, self._slow_sum = ranks, device, args.slow, args.slow_sum
        self._cuda = device.type == "cuda"
        megabytes = args.megabytes or (256 if self._cuda else 1)
        self._values = torch.empty(int(megabytes * 2**18), device=device)
        self._gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=args.timeout))
        self._all = self._gather(self._describe())
        self._nodes: dict[int, list[int]] = {}
        for one in self._all:
            self._nodes.setdefault(one.node, []).append(one.rank)

    def run(self) -> DoctorFindings:
        """Every check."""
        problems = self._compare_devices()
        self._time_products()
        usual = statistics.median_low(one.matmul_seconds for one in self._all)
        problems += [
            f"{one} multiplies matrices {one.matmul_seconds / usual - 1:.0%} slower than the median"
            for one in self._all
            if one.matmul_seconds > self._slow * usual
        ]
        sums = self._sum_in("inside", [ranks for ranks in self._nodes.values() if len(ranks) > 1])
        problems += self._judge(sums)
        if len(self._nodes) > 1:
            everyone = self._sum_in("between", list(zip(*self._nodes.values(), strict=False)))
            pairs = self._sum_in_pairs()
            problems += [*self._judge(everyone), *self._judge_pairs(pairs)]
            sums += [*everyone, *pairs]
        hosts = sorted({one.host for one in self._all})
        return DoctorFindings(hosts, self._all, sums, list(dict.fromkeys(problems)))

    # ------------------------------------------------------------------ measurements

    def _describe(self) -> RankFacts:
        if self._cuda:
            name, count = torch.cuda.get_device_name(self._device), torch.cuda.device_count()
            free, total = torch.cuda.mem_get_info(self._device)
        else:
            memory = psutil.virtual_memory()
            name, count, free, total = "cpu", 0, memory.available, memory.total
        rank = self._ranks.rank
        node = int(os.environ.get("GROUP_RANK", rank // self._ranks.local_world))
        return RankFacts(socket.gethostname(), name, count, free, total, rank, node)

    def _time_products(self) -> None:
        size, kind = (8192, torch.bfloat16) if self._cuda else (256, torch.float32)
        one = torch.ones(size, size, dtype=kind, device=self._device)
        into = torch.empty_like(one)

        def multiply() -> None:
            for _ in range(4):
                torch.mm(one, one, out=into)

        times = _repeat_while_slow(lambda: self._gather(self._best(multiply)), self._slow)
        for rank, seconds in zip(self._all, times, strict=True):
            rank.matmul_seconds = seconds

    def _best(self, act: Callable[[], object]) -> float:
        """The shortest of several runs of `act`: other load on the machine only adds time."""
        taken = []
        for _ in range(_REPEATS):
            self._synchronize()
            start = time.perf_counter()
            act()
            self._synchronize()
            taken.append(time.perf_counter() - start)
        return min(taken)

    def _synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self._device)

    def _gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self._ranks.world
        dist.all_gather_object(values, value, group=self._gloo)
        return values

    def _sum_in_pairs(self) -> list[GroupSum]:
        rounds = [[self._nodes[a] + self._nodes[b] for a, b in pairs] for pairs in pair_rounds(sorted(self._nodes))]
        tries: list[list[GroupSum]] = []

        def measure() -> list[float]:
            tries.append([one for groups in rounds for one in self._sum_in("pair", groups)])
            return [one.seconds for one in tries[-1]]

        best = _repeat_while_slow(measure, self._slow_sum)
        right = [all(one.right for one in pair) for pair in zip(*tries, strict=True)]
        return [replace(one, seconds=s, right=r) for one, s, r in zip(tries[0], best, right, strict=True)]

    def _sum_in(self, kind: str, groups: Sequence[Sequence[int]]) -> list[GroupSum]:
        """All-reduce in groups of ranks, all groups at once."""
        handles = [dist.new_group(list(ranks)) for ranks in groups]  # every rank makes every group
        mine = next((at for at, ranks in enumerate(groups) if self._ranks.rank in ranks), None)
        measured = None
        if mine is not None:
            right = self._is_right(groups[mine], handles[mine])
            measured = self._best(lambda: dist.all_reduce(self._values, group=handles[mine])), right
        by_rank = self._gather(measured)
        sums = []
        for ranks in groups:
            times = [found for rank in ranks if (found := by_rank[rank]) is not None]
            sums.append(
                GroupSum(
                    kind=kind,
                    ranks=list(ranks),
                    hosts=sorted({self._all[rank].host for rank in ranks}),
                    nodes=sorted({self._all[rank].node for rank in ranks}),
                    bus_bytes=2 * (len(ranks) - 1) / len(ranks) * self._values.numel() * 4,
                    seconds=max(seconds for seconds, _ in times),
                    right=all(right for _, right in times),
                )
            )
        return sums

    def _is_right(self, ranks: Sequence[int], group: Any) -> bool:
        """All-reduce known integers that differ per element; whether every result is exact."""
        places = torch.arange(self._values.numel(), device=self._device) % 1024
        place = ranks.index(self._ranks.rank) + 1
        self._values.copy_(places * place)
        dist.all_reduce(self._values, group=group)
        total = len(ranks) * (len(ranks) + 1) // 2
        right = bool((self._values == places * total).all())
        self._values.zero_()
        return right

    # ------------------------------------------------------------------ verdicts

    def _compare_devices(self) -> list[str]:
        usual = statistics.mode(one.device for one in self._all)
        most = max(one.memory for one in self._all)
        problems = []
        for one in self._all:
            if one.device != usual:
                problems.append(f"{one} is a {one.device}, the others are {usual}")
            elif one.memory < 0.95 * most:
                problems.append(f"{one} has {human_bytes(one.memory)} of memory, others {human_bytes(most)}")
        counts = {one.host: one.devices for one in self._all}
        most = max(counts.values())
        return problems + [f"{host} shows {n} devices, others {most}" for host, n in counts.items() if n < most]

    def _judge(self, sums: list[GroupSum]) -> list[str]:
        """Wrong sums, and groups slower than the median group."""
        problems = [f"a sum over {one} was wrong" for one in sums if not one.right]
        if len(sums) > 2:
            usual = statistics.median_low(one.seconds for one in sums)
            problems += [f"sums over {one} are slow" for one in sums if one.seconds > self._slow_sum * usual]
        return problems

    def _judge_pairs(self, pairs: list[GroupSum]) -> list[str]:
        """Name a node that is bad with all its partners, or pairs that are bad only together."""
        of = {node: [one for one in pairs if node in one.nodes] for node in self._nodes}
        # A bad node spoils all its pairs, which may be most of them: take each node's best pair.
        usual = statistics.median_low(min(one.seconds for one in mine) for mine in of.values() if mine)
        problems = []
        for what, bad in (
            ("sums wrongly", [one for one in pairs if not one.right]),
            ("is slow", [one for one in pairs if one.seconds > self._slow_sum * usual]),
        ):
            guilty = [node for node, mine in of.items() if len(mine) > 1 and all(one in bad for one in mine)]
            problems += [f"{self._host(node)} {what} with every other node it was paired with" for node in guilty]
            for one in bad:
                if not set(one.nodes) & set(guilty):
                    problems.append(f"the pair {' and '.join(map(self._host, one.nodes))} {what}")
        return problems

    def _host(self, node: int) -> str:
        return f"{self._all[self._nodes[node][0]].host} (node {node})"


def _repeat_while_slow(measure: Callable[[], list[float]], slow: float) -> list[float]:
    """Measure times; while one is slow, repeat and keep the shortest: a transient cause is no defect."""
    best = measure()
    for _ in range(_TRIES - 1):
        if max(best) <= slow * statistics.median_low(best):
            break
        best = list(map(min, best, measure()))
    return best


def pair_rounds(nodes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Rounds of node pairs with a new partner in each: about log2(nodes), at least 3 if there are enough nodes.

    The circle method (round-robin tournament): one node stays, the others rotate; of an odd number, one sits out.
    """
    circle: list[int | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    size = len(circle)
    rounds = []
    for _ in range(min(size - 1, max(3, (size - 1).bit_length()))):
        pairs = [(circle[at], circle[-1 - at]) for at in range(size // 2)]
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


def render(found: DoctorFindings) -> str:
    """The findings as a table."""
    lines = [f"{'host':24} {'node':>4} {'rank':>4} {'device':28} {'memory':>9} {'free':>9} {'matmul':>9}"]
    lines += [
        f"{one.host:24} {one.node:>4} {one.rank:>4} {one.device:28} {human_bytes(one.memory):>9} "
        f"{human_bytes(one.free):>9} {1000 * one.matmul_seconds:>7.2f}ms"
        for one in found.ranks
    ]
    for kind, text in (("inside", "inside a node"), ("between", "between nodes"), ("pair", "pairs of nodes")):
        rates = [one.bus_bytes / one.seconds / 1e9 for one in found.sums if one.kind == kind]
        if rates:
            lines.append(f"all-reduce {text}: {len(rates)} groups, {min(rates):.3g} to {max(rates):.3g} GB/s")
    lines += [f"BAD {problem}" for problem in found.problems] or ["nothing is wrong"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
