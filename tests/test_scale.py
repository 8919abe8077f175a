"""What 1,024 ranks share: a simulated corpus of 2T tokens, real except for the tokens; reports of 128 nodes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated import simulated_corpus

from data.packing.loader import Loader
from data.packing.packer import Packer
from data.packing.position import Position
from fsdp_pretrain.config.schedule import BatchSchedule, share_of
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


@pytest.fixture(scope="module")
def packer(tmp_path_factory: pytest.TempPathFactory) -> Packer:
    """On 2B tokens in 100 shards."""
    path = tmp_path_factory.mktemp("simulated") / "corpus"
    simulated_corpus(path, 2 * 10**9, 100)
    return Packer([("a", path, 1.0)], 2048, seed=1, lanes=256)


@pytest.mark.quick
def test_ranks_build_what_the_arithmetic_says(packer: Packer) -> None:
    """Real loaders of a few of 1,024 ranks give the samples of their slices."""
    cursor, batches, rows = 123_457, BatchSchedule(8192), set()
    for rank in (0, 1, 511, 1023):
        step = Loader(packer, batches, rank=rank, world=1024, micro_batch=8, prefetch=0).build(Position(cursor=cursor))
        share = share_of(cursor, 8192, rank, 1024)
        assert share == range(cursor + 8 * rank, cursor + 8 * rank + 8)
        assert torch.equal(step.micro[0].tokens, torch.from_numpy(packer.pack(share[0], 8).tokens))
        assert not step.quarantined
        rows |= {tuple(row.nonzero()[0]) for row in step.micro[0].tokens.numpy()}
    assert len(rows) > 16  # separator positions distinguish the samples


@pytest.mark.parametrize(
    ("tokens", "shards"), [(4 * 10**9, 500), pytest.param(2 * 10**12, 20_000, marks=pytest.mark.slow)]
)
def test_a_large_corpus_takes_little_memory(tmp_path: Path, helpers: Any, tokens: int, shards: int) -> None:
    """Two trillion tokens, too: less than 100 MB in each process."""
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
