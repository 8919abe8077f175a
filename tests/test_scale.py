"""What 1,024 ranks share: a simulated corpus, real except for the tokens; reports of 128 nodes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from simulated import simulated_corpus

from fsdp_pretrain.watchdog.hang.peers import PeerNodes

SIZES = """
import json, os, sys
from pathlib import Path
import psutil
from data.packing.packer import Packer

def memory():  # without pages of mapped files, which all ranks of a node share
    found = psutil.Process().memory_info()
    return found.rss - found.shared

before = memory()
packer = Packer([("a", Path(sys.argv[1]), 1.0)], 2048, seed=1, lanes=256)
packer.pack(0, 1)
manifest = packer.corpora["a"].manifest
print(json.dumps({"memory": memory() - before, "documents": manifest.documents, "shards": len(manifest.shards)}))
"""


def test_a_large_corpus_takes_little_memory(tmp_path: Path, helpers: Any) -> None:
    """Less than 100 MB in each process."""
    tokens, shards = 4 * 10**9, 500
    simulated_corpus(tmp_path / "corpus", tokens, shards)
    line = [sys.executable, "-c", SIZES, str(tmp_path / "corpus")]
    done = subprocess.run(line, capture_output=True, text=True, env=helpers.environment(), cwd="/")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["memory"] < 100e6 and found["shards"] == shards and found["documents"] > tokens / 1100


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
