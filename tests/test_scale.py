"""What 1,024 ranks share: reports of 128 nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_pretrain.watchdog.hang.peers import PeerNodes


@pytest.mark.quick
def test_a_thousand_ranks_report_through_a_small_file_per_node(tmp_path: Path) -> None:
    agents = [PeerNodes(tmp_path, node, 128, "attempt") for node in range(128)]
    own = {rank: (3, 1 + rank / 10_000) for rank in range(1024)}
    for node, agent in enumerate(agents):
        windows = {rank: own[rank] for rank in range(8 * node, 8 * node + 8)}
        agent.write(1, [], {}, windows, ended=node == 77)
    sizes = [path.stat().st_size for path in tmp_path.rglob("*.json")]
    assert len(sizes) == 128 and max(sizes) < 1000
    first, last = agents[0], agents[-1]
    assert first.read(all_=True) and first.leader is None
    reports = {other.number: other.report for other in first.others}
    assert {rank: found for report in reports.values() if report for rank, found in report.windows.items()} == {
        rank: found for rank, found in own.items() if rank >= 8
    }
    assert [number for number, report in reports.items() if report and report.ended] == [77]
    assert last.read(all_=False) and last.leader is not None
    assert [other.number for other in last.others if other.report is not None] == [0]  # not all read all
