"""Hardware check of a stopped job: `fsdp-pretrain doctor [torchrun options]`, which runs this module under torchrun.

Every rank times the same matrix product; groups of ranks sum what they know the sum of, and time it: inside each node,
between all nodes, and in pairs of nodes, every round with other partners. A host that is slow with every partner is
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
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

from .console import Parser, run_guarded
from .launch import torchrun
from .launch.doctor_command import add_options
from .mesh import Ranks, device_of
from .units import human_bytes

_REPEATS, _TRIES = 8, 3


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line of a rank."""
    parser = Parser(prog="python -m fsdp_pretrain.doctor", description=__doc__)
    add_options(parser)
    return parser.parse_args(arguments)


def main() -> int:
    """Check, print on rank 0, exit 0 or 1."""
    args = parse(sys.argv[1:])
    torchrun.die_with_launcher()
    return run_guarded(lambda: _check(args))


def _check(args: argparse.Namespace) -> int:
    ranks = Ranks.from_environment()
    device = device_of(ranks)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = dist.HashStore() if "MASTER_ADDR" not in os.environ else None
    timeout = timedelta(seconds=args.timeout)
    dist.init_process_group(backend, store=store, timeout=timeout, rank=ranks.rank, world_size=ranks.world)
    checker = Checker(ranks, device, args)
    found = checker.run()
    if ranks.rank == 0:
        print(json.dumps(found, indent=1) if args.json else render(found), flush=True)
    dist.destroy_process_group()
    if not found["problems"]:
        return 0
    # A rank that exits with 1 would make torchrun print a page about it below the table.
    return 0 if torchrun.leave_note(1, found["problems"][0]) else 1


class Checker:
    """The measurements. All ranks call its methods together.

    Args:
        ranks: who this process is.
        device: of this rank.
        args: see `add_options`.
    """

    def __init__(self, ranks: Ranks, device: torch.device, args: argparse.Namespace) -> None:
        self._ranks, self._device, self._slow, self._slow_sum = ranks, device, args.slow, args.slow_sum
        megabytes = args.megabytes or (256 if device.type == "cuda" else 1)
        self._values = torch.empty(int(megabytes * 2**18), device=device)
        self._gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=args.timeout))
        node = int(os.environ.get("GROUP_RANK", ranks.rank // ranks.local_world))
        self._all = self._gather({**self._describe(), "rank": ranks.rank, "node": node})
        self._nodes: dict[int, list[int]] = {}
        for one in self._all:
            self._nodes.setdefault(one["node"], []).append(one["rank"])

    def run(self) -> dict[str, Any]:
        """Every check.

        Returns:
            `ranks`: facts by rank, with the seconds of the matrix product; `sums`: groups of ranks with times;
            and `problems`, texts that name host and rank.
        """
        problems = self._look_at_devices()
        multiply = self._multiply()
        timed = self._again(lambda: [{"seconds": taken} for taken in self._gather(self._best(multiply))], self._slow)
        seconds = [one["seconds"] for one in timed]
        for one, taken in zip(self._all, seconds, strict=True):
            one["matmul_seconds"] = taken
        usual = statistics.median_low(seconds)
        problems += [
            f"{_name(one)} multiplies matrices {one['matmul_seconds'] / usual - 1:.0%} slower than the median"
            for one in self._all
            if one["matmul_seconds"] > self._slow * usual
        ]
        sums = self._sum_in("inside", [ranks for ranks in self._nodes.values() if len(ranks) > 1])
        problems += self._judge(sums)
        if len(self._nodes) > 1:
            between = [list(peers) for peers in zip(*self._nodes.values(), strict=False)]
            everyone = self._sum_in("between", between)
            problems += self._judge(everyone)
            rounds = pair_rounds(sorted(self._nodes))
            paired = self._again(lambda: [one for pairs in rounds for one in self._sum_pairs(pairs)], self._slow_sum)
            problems += self._judge_pairs(paired)
            sums += [*everyone, *paired]
        hosts = sorted({one["host"] for one in self._all})
        return {"hosts": hosts, "ranks": self._all, "sums": sums, "problems": list(dict.fromkeys(problems))}

    # ------------------------------------------------------------------ measurements

    def _describe(self) -> dict[str, Any]:
        cuda = self._device.type == "cuda"
        free, total = torch.cuda.mem_get_info(self._device) if cuda else (0, 0)
        if not cuda:
            memory = psutil.virtual_memory()
            free, total = memory.available, memory.total
        name = torch.cuda.get_device_name(self._device) if cuda else "cpu"
        count = torch.cuda.device_count() if cuda else 0
        return {"host": socket.gethostname(), "device": name, "devices": count, "free": free, "memory": total}

    def _multiply(self) -> Callable[[], None]:
        cuda = self._device.type == "cuda"
        size, kind = (8192, torch.bfloat16) if cuda else (256, torch.float32)
        one = torch.ones(size, size, dtype=kind, device=self._device)
        into = torch.empty_like(one)

        def act() -> None:
            for _ in range(4):
                torch.mm(one, one, out=into)

        return act

    def _best(self, act: Callable[[], None]) -> float:
        """The shortest of several times that `act` takes: what others do on the machine only ever adds."""
        taken = []
        for _ in range(_REPEATS):
            self._synchronize()
            start = time.perf_counter()
            act()
            self._synchronize()
            taken.append(time.perf_counter() - start)
        return min(taken)

    @staticmethod
    def _again(measure: Callable[[], list[dict[str, Any]]], slow: float) -> list[dict[str, Any]]:
        """Measure; while something looks slow, do so again and keep the best times: a passing cause is no defect."""
        found = measure()
        for _ in range(_TRIES - 1):
            if max(one["seconds"] for one in found) <= slow * statistics.median_low(one["seconds"] for one in found):
                break
            for one, later in zip(found, measure(), strict=True):
                one["seconds"] = min(one["seconds"], later["seconds"])
                one["right"] = one.get("right", True) and later.get("right", True)
        return found

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self._ranks.world
        dist.all_gather_object(values, value, group=self._gloo)
        return values

    def _sum_in(self, kind: str, groups: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        """Sum in groups of ranks, all groups at once: kind, ranks, hosts, seconds, bytes over the bus, right or not."""
        mine = None
        for ranks in groups:  # every rank makes every group
            group = dist.new_group(list(ranks))
            if self._ranks.rank in ranks:
                mine = (list(ranks), group)
        measured = None
        if mine is not None:
            ranks, group = mine
            wrong = self._is_wrong(ranks, group)
            seconds = self._best(lambda: dist.all_reduce(self._values, group=group))
            measured = (ranks, seconds, wrong)
        found: dict[tuple[int, ...], dict[str, Any]] = {}
        for one in self._gather(measured):
            if one is None:
                continue
            ranks, seconds, wrong = one
            entry = found.setdefault(tuple(ranks), {"seconds": 0.0, "right": True})
            entry["seconds"] = max(entry["seconds"], seconds)
            entry["right"] &= not wrong
        volume = self._values.numel() * 4
        return [
            {
                "kind": kind,
                "ranks": list(ranks),
                "hosts": sorted({self._all[rank]["host"] for rank in ranks}),
                "bus_bytes": 2 * (len(ranks) - 1) / len(ranks) * volume,
                **entry,
            }
            for ranks, entry in found.items()
        ]

    def _is_wrong(self, ranks: list[int], group: Any) -> bool:
        """Sum known whole numbers, different in every place; whether any sum is not what it must be."""
        places = torch.arange(self._values.numel(), device=self._device) % 1024
        place = ranks.index(self._ranks.rank) + 1
        self._values.copy_(places * place)
        dist.all_reduce(self._values, group=group)
        total = len(ranks) * (len(ranks) + 1) // 2
        wrong = bool((self._values != places * total).any())
        self._values.zero_()
        return wrong

    def _sum_pairs(self, pairs: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        groups = [self._nodes[one] + self._nodes[other] for one, other in pairs]
        return [
            {**measured, "nodes": list(pair)}
            for measured, pair in zip(self._sum_in("pair", groups), sorted(pairs), strict=True)
        ]

    # ------------------------------------------------------------------ verdicts

    def _look_at_devices(self) -> list[str]:
        usual = statistics.mode(one["device"] for one in self._all)
        most = max(one["memory"] for one in self._all)
        problems = []
        for one in self._all:
            if one["device"] != usual:
                problems.append(f"{_name(one)} is a {one['device']}, the others are {usual}")
            elif one["memory"] < 0.95 * most:
                problems.append(f"{_name(one)} has {human_bytes(one['memory'])} of memory, others {human_bytes(most)}")
        counts = {one["host"]: one["devices"] for one in self._all}
        fewer = [host for host, count in counts.items() if count < max(counts.values())]
        return problems + [f"{host} shows {counts[host]} devices, others {max(counts.values())}" for host in fewer]

    def _judge(self, sums: list[dict[str, Any]]) -> list[str]:
        """Wrong sums, and groups slower than their like."""
        problems = [f"a sum over {_group(one)} was wrong" for one in sums if not one["right"]]
        if len(sums) > 2:
            usual = statistics.median_low(one["seconds"] for one in sums)
            problems += [f"sums over {_group(one)} are slow" for one in sums if one["seconds"] > self._slow_sum * usual]
        return problems

    def _judge_pairs(self, pairs: list[dict[str, Any]]) -> list[str]:
        """Name a node that is bad with all its partners, or pairs that are bad only together."""
        of = {node: [one for one in pairs if node in one["nodes"]] for node in self._nodes}
        # A bad node spoils all its pairs, which may be most of them: every node counts with its best.
        usual = statistics.median_low(min(one["seconds"] for one in mine) for mine in of.values() if mine)
        problems = []
        for what, bad in (
            ("sums wrongly", [one for one in pairs if not one["right"]]),
            ("is slow", [one for one in pairs if one["seconds"] > self._slow_sum * usual]),
        ):
            guilty = [node for node, mine in of.items() if len(mine) > 1 and all(one in bad for one in mine)]
            problems += [f"{self._host(node)} {what} with every other node it was paired with" for node in guilty]
            for one in bad:
                if not set(one["nodes"]) & set(guilty):
                    names = " and ".join(self._host(node) for node in one["nodes"])
                    problems.append(f"the pair {names} {what}")
        return problems

    def _host(self, node: int) -> str:
        return f"{self._all[self._nodes[node][0]]['host']} (node {node})"


def pair_rounds(nodes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Rounds in which nodes are paired, each with another partner every time: at least 2 and about log2 of them.

    The circle method: one node stays, the others turn; of an odd number one sits out in every round.
    """
    circle: list[int | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    size = len(circle)
    rounds = []
    for _ in range(min(size - 1, max(3, (size - 1).bit_length()))):
        pairs = [(circle[at], circle[-1 - at]) for at in range(size // 2)]
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


def _name(one: dict[str, Any]) -> str:
    return f"{one['host']} rank {one['rank']}"


def _group(one: dict[str, Any]) -> str:
    return f"ranks {', '.join(map(str, one['ranks']))} on {', '.join(one['hosts'])}"


def render(found: dict[str, Any]) -> str:
    """What `Checker.run` found, for people."""
    lines = [f"{'host':24} {'node':>4} {'rank':>4} {'device':28} {'memory':>9} {'free':>9} {'matmul':>9}"]
    lines += [
        f"{one['host']:24} {one['node']:>4} {one['rank']:>4} {one['device']:28} {human_bytes(one['memory']):>9} "
        f"{human_bytes(one['free']):>9} {1000 * one['matmul_seconds']:>7.2f}ms"
        for one in found["ranks"]
    ]
    for kind, text in (("inside", "inside a node"), ("between", "between nodes"), ("pair", "pairs of nodes")):
        rates = [one["bus_bytes"] / one["seconds"] / 1e9 for one in found["sums"] if one["kind"] == kind]
        if rates:
            lines.append(f"all-reduce {text}: {len(rates)} groups, {min(rates):.3g} to {max(rates):.3g} GB/s")
    lines += [f"BAD {problem}" for problem in found["problems"]] or ["nothing is wrong"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
