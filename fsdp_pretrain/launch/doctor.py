"""Hardware check of a stopped job: `fsdp-pretrain doctor [torchrun options]`, which runs this module under torchrun.

Every rank times the same matrix product. Pairs of nodes, with other partners every round, run timed all-reduces with
known results over all their ranks. A node that is bad with every partner is named; two that are bad only with each
other are named as a pair.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from statistics import median_low, mode
from typing import Any

import torch
import torch.distributed as dist

from fsdp_pretrain import open_files
from fsdp_pretrain.console import Parser, run_guarded
from fsdp_pretrain.parallel.mesh import device_of
from fsdp_pretrain.ranks import RankInfo
from fsdp_pretrain.units import human_bytes

from . import torchrun

_REPEATS = 20
_TIMEOUT = timedelta(seconds=120)
"""Timeout of a collective."""


@dataclass
class RankFacts:
    """Facts about a rank: GPUs and memory of its host as text, and the shortest time of its matrix product."""

    rank: int
    node: int
    host: str
    hardware: str
    matmul_seconds: float


@dataclass
class NodeSum:
    """An all-reduce over all ranks of two nodes, or of the only one."""

    nodes: list[int]
    seconds: float  # the best time of the slowest rank
    right: bool  # whether all results were correct
    rate: float  # bus bandwidth of a rank in bytes per second


def main() -> int:
    """Check, print the result on rank 0, and return 0 or 1."""
    parser = Parser(prog="python -m fsdp_pretrain.launch.doctor", description=__doc__)
    parser.add_argument("--slow", type=float, default=1.15, help="matrix products, of their median (default: 1.15)")
    parser.add_argument("--slow-sum", type=float, default=1.5, help="all-reduces, of theirs (default: 1.5)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torchrun.die_with_launcher()
    return run_guarded(lambda: _check(args))


def _check(args: argparse.Namespace) -> int:
    info = RankInfo.from_environment()
    device = device_of(info)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    open_files.raise_limit(open_files.files_needed(info.world, info.local_world))
    dist.init_process_group(backend, timeout=_TIMEOUT, rank=info.rank, world_size=info.world)
    ranks = _products(info, device)
    sums = _sums(info, device, ranks)
    problems = [*_bad_ranks(ranks, args.slow), *_bad_nodes(ranks, sums, args.slow_sum)]
    if info.rank == 0:
        result = {
            "ranks": [asdict(rank) for rank in ranks],
            "sums": [asdict(pair) for pair in sums],
            "problems": problems,
        }
        print(json.dumps(result, indent=1) if args.json else "\n".join(_table(ranks, sums, problems)), flush=True)
    dist.destroy_process_group()
    # If a rank exited with 1, torchrun would print a long failure report below the table.
    return 0 if not problems or torchrun.leave_note(1, problems[0]) else 1


def _products(info: RankInfo, device: torch.device) -> list[RankFacts]:
    """Hardware and matrix product time of every rank."""
    size, kind, hardware = 256, torch.float32, "cpu"
    if device.type == "cuda":
        memory = human_bytes(torch.cuda.get_device_properties(device).total_memory)
        hardware = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(device)} with {memory}"
        size, kind = 8192, torch.bfloat16
    ones = torch.ones(size, size, dtype=kind, device=device)
    into = torch.empty_like(ones)
    seconds = _best(lambda: torch.mm(ones, ones, out=into), device)
    return _gather(RankFacts(info.rank, info.node, socket.gethostname(), hardware, seconds))


def _sums(info: RankInfo, device: torch.device, ranks: Sequence[RankFacts]) -> list[NodeSum]:
    """Time all-reduces in rounds of node pairs."""
    values = torch.empty((256 if device.type == "cuda" else 1) * 2**18, device=device)
    sums = []
    for pairs in pair_rounds(sorted({rank.node for rank in ranks})):
        members = {pair: [rank.rank for rank in ranks if rank.node in pair] for pair in pairs}
        groups = {pair: dist.new_group(pair_ranks, timeout=_TIMEOUT) for pair, pair_ranks in members.items()}
        mine = next((pair for pair, pair_ranks in members.items() if info.rank in pair_ranks), None)
        by_rank = _gather(None if mine is None else _sum(groups[mine], values))
        for pair, pair_ranks in members.items():
            seconds = max(by_rank[rank][0] for rank in pair_ranks)
            rate = 2 * (len(pair_ranks) - 1) / len(pair_ranks) * values.nbytes / seconds
            sums.append(NodeSum(list(pair), seconds, all(by_rank[rank][1] for rank in pair_ranks), rate))
    return sums


def _sum(group: Any, values: torch.Tensor) -> tuple[float, bool]:
    """Seconds of an all-reduce, and whether the sum of known integers, which differ by element, is exact."""
    size, factor = dist.get_world_size(group), dist.get_rank(group) + 1
    pattern = torch.arange(len(values), device=values.device) % 1024
    values.copy_(pattern * factor)
    dist.all_reduce(values, group=group)
    right = bool((values == pattern * (size * (size + 1) // 2)).all())
    values.zero_()
    return _best(lambda: dist.all_reduce(values, group=group), values.device), right


def _best(act: Callable[[], object], device: torch.device) -> float:
    """The shortest of several runs of `act`: other load on the machine only adds time."""
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        act()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)  # over gloo, which the default group has for the CPU
    return values


def pair_rounds(nodes: Sequence[int]) -> list[list[tuple[int, ...]]]:
    """Rounds of node pairs with a new partner in each: about log2(nodes) rounds, at least 3 if there are enough nodes.

    The circle method (round-robin tournament): one node stays, the others rotate; of an odd number, one sits out. A
    single node is a group of its own.
    """
    if len(nodes) == 1:
        return [[(nodes[0],)]]
    circle: list[int | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    size = len(circle)
    rounds: list[list[tuple[int, ...]]] = []
    for _ in range(min(size - 1, max(3, (size - 1).bit_length()))):
        pairs = [(circle[at], circle[-1 - at]) for at in range(size // 2)]
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


def _bad_ranks(ranks: Sequence[RankFacts], slow: float) -> Iterator[str]:
    """Ranks with other hardware than most, or slow products."""
    common, usual = mode(rank.hardware for rank in ranks), median_low(rank.matmul_seconds for rank in ranks)
    for rank in ranks:
        if rank.hardware != common:
            yield f"{rank.host} rank {rank.rank} has {rank.hardware}, most have {common}"
        if rank.matmul_seconds > slow * usual:
            share = rank.matmul_seconds / usual - 1
            yield f"{rank.host} rank {rank.rank} multiplies matrices {share:.0%} slower than the median"


def _bad_nodes(ranks: Sequence[RankFacts], sums: Sequence[NodeSum], slow: float) -> Iterator[str]:
    """Nodes that are bad with all their partners, and pairs that are bad only together."""
    names = {rank.node: f"{rank.host} (node {rank.node})" for rank in reversed(ranks)}
    sums_of = {node: [pair for pair in sums if node in pair.nodes] for node in sorted(names)}
    # A bad node spoils all its sums, which may be most of them: take each node's best.
    usual = median_low(min(pair.seconds for pair in mine) for mine in sums_of.values() if mine)
    for what, bad in (
        ("sums wrongly", [pair for pair in sums if not pair.right]),
        ("is slow", [pair for pair in sums if pair.seconds > slow * usual]),
    ):
        guilty = {node for node, mine in sums_of.items() if len(mine) > 1 and all(pair in bad for pair in mine)}
        yield from (f"{names[node]} {what} with every other node it was paired with" for node in sorted(guilty))
        for pair in bad:
            if not guilty & set(pair.nodes):
                who = " and ".join(names[node] for node in pair.nodes)
                yield f"the pair {who} {what}" if len(pair.nodes) > 1 else f"{who} {what}"


def _table(ranks: Sequence[RankFacts], sums: Sequence[NodeSum], problems: Sequence[str]) -> Iterator[str]:
    yield f"{'host':24} {'node':>4} {'rank':>4} {'matmul':>9}  hardware"
    for rank in ranks:
        yield f"{rank.host:24} {rank.node:>4} {rank.rank:>4} {1000 * rank.matmul_seconds:>7.2f}ms  {rank.hardware}"
    rates = [pair.rate / 1e9 for pair in sums]
    yield f"all-reduce over nodes: {len(sums)} groups, {min(rates):.3g} to {max(rates):.3g} GB/s"
    yield from [f"BAD {problem}" for problem in problems] or ["nothing is wrong"]


if __name__ == "__main__":
    sys.exit(main())
