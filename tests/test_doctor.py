"""The hardware check, on four ranks that are a node each, with faults injected into one of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_pretrain.launch import doctor
from fsdp_pretrain.launch.doctor import RankFacts, pair_rounds
from fsdp_pretrain.ranks import RankInfo

SLOW = "import time, torch\nreal = {call}\ndef slow(*a, **k):\n    time.sleep(0.05)\n    return real(*a, **k)\n{call} = slow\n"
WRONG = (
    "import torch.distributed as dist\nreal = dist.all_reduce\n"
    "def wrong(values, **k):\n    values[7] += 1\n    return real(values, **k)\ndist.all_reduce = wrong\n"
)


def check(
    start_command: Any, helpers: Any, path: Path, ranks: int, faults: dict[int, str]
) -> tuple[list[int], dict[str, Any]]:
    """Exit codes of the ranks, and the first one's output."""
    port, processes = helpers.port(), []
    # On a busy machine anything can look slow: only what is made slow is judged strictly.
    calls = ("torch.mm", "torch.distributed.all_reduce")
    slow, slow_sum = (6 if SLOW.format(call=call) in faults.values() else 10**6 for call in calls)
    for rank in range(ranks):
        variables = {"RANK": rank, "LOCAL_RANK": 0, "GROUP_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": 1}
        extra = {key: str(value) for key, value in variables.items()}
        if rank in faults:
            extra["EXECUTE_FIRST"] = str(path / f"fault-{rank}.py")
            Path(extra["EXECUTE_FIRST"]).write_text(faults[rank])
        environment = helpers.environment(**extra, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        arguments = ("--json", "--slow", slow, "--slow-sum", slow_sum)
        processes.append(start_command("fsdp_pretrain.launch.doctor", *arguments, environment=environment))
    codes = [process.wait() for process in processes]
    out, err = processes[0].output()
    assert out, err
    return codes, json.loads(out)


@pytest.mark.shows("A9")
@pytest.mark.parametrize(
    ("faults", "named", "unnamed"),
    [
        ({}, [], ["BAD"]),
        (
            {1: SLOW.format(call="torch.distributed.all_reduce")},
            ["(node 1) is slow with every other node"],
            ["the pair"],
        ),
        (
            {3: WRONG},
            ["(node 3) sums wrongly with every other node"],
            ["the pair", "slow"],
        ),
    ],
    ids=["sound", "slow-node", "wrong-sums"],
)
def test_the_bad_node_is_named(
    start_command: Any, helpers: Any, tmp_path: Path, faults: dict[int, str], named: list[str], unnamed: list[str]
) -> None:
    codes, found = check(start_command, helpers, tmp_path, 4, faults)
    problems = "\n".join(found["problems"])
    assert codes == [1 if faults else 0] * 4, problems
    assert all(text in problems for text in named) and not any(text in problems for text in unnamed), problems
    assert len(found["ranks"]) == 4 and len(found["sums"]) == 6
    assert all(one["rate"] == pytest.approx(4 * 2**18 / one["seconds"]) for one in found["sums"])


@pytest.mark.quick
def test_a_pair_that_does_not_answer_is_not_waited_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """New groups do not inherit the timeout of the default group."""
    given = list[Any]()
    monkeypatch.setattr(doctor.dist, "new_group", lambda ranks, timeout=None: given.append(timeout))
    monkeypatch.setattr(doctor, "_gather", lambda value: [(1.0, True)] * 2)
    facts = [RankFacts(rank, rank, "host", "cpu", 1.0) for rank in range(2)]
    doctor._sums(RankInfo(2, 3, 0, 1), torch.device("cpu"), facts)
    assert given and set(given) == {doctor._TIMEOUT}


@pytest.mark.slow
def test_two_nodes_are_named_together(start_command: Any, helpers: Any, tmp_path: Path) -> None:
    """Of two, nobody can say which is bad."""
    _, found = check(start_command, helpers, tmp_path, 2, {1: WRONG})
    (problem,) = found["problems"]
    assert problem.startswith("the pair ") and "(node 0) and " in problem and "(node 1) sums wrongly" in problem


def test_other_hardware_is_named() -> None:
    ranks = [doctor.RankFacts(rank, rank // 8, f"n{rank // 8}", "8 x H100 with 80 GiB", 1.0) for rank in range(24)]
    ranks[9].hardware, ranks[17].matmul_seconds = "7 x H100 with 80 GiB", 1.2
    problems = list(doctor._bad_ranks(ranks, 1.15))
    assert [problem.partition(" has ")[0].partition(" multiplies ")[0] for problem in problems] == [
        "n1 rank 9",
        "n2 rank 17",
    ]


@pytest.mark.parametrize("nodes", [2, 3, 16, 125])
def test_pairs_change_from_round_to_round(nodes: int) -> None:
    """Every round pairs a node at most once, at most one sits out, and no pair meets twice."""
    rounds = pair_rounds(range(nodes))
    assert len(rounds) == max(1, min(nodes - 1 + nodes % 2, max(3, (nodes + nodes % 2 - 1).bit_length())))
    for pairs in rounds:
        assert len({node for pair in pairs for node in pair}) == 2 * len(pairs) >= nodes - 1
    assert len({pair for pairs in rounds for pair in pairs}) == sum(map(len, rounds))
