"""What 1,024 ranks share: a simulated corpus, real except for the tokens."""

from __future__ import annotations

import json
from pathlib import Path

from processes import python
from simulated import simulated_corpus

SIZES = """
import json, os, sys
from pathlib import Path
import psutil
from fsdp_pretrain.data.packing.packer import Packer

def memory():  # without pages of mapped files, which all ranks of a node share
    found = psutil.Process().memory_info()
    return found.rss - found.shared

before = memory()
packer = Packer([("a", Path(sys.argv[1]), 1.0)], 2048, seed=1, lanes=256)
packer.pack(0, 1)
manifest = packer.corpora["a"].manifest
print(json.dumps({"memory": memory() - before, "documents": manifest.documents, "shards": len(manifest.shards)}))
"""


def test_a_large_corpus_takes_little_memory(tmp_path: Path) -> None:
    """Less than 100 MB in each process."""
    tokens, shards = 4 * 10**9, 500
    simulated_corpus(tmp_path / "corpus", tokens, shards)
    found = json.loads(python("-c", SIZES, tmp_path / "corpus").stdout)
    assert found["memory"] < 100e6 and found["shards"] == shards and found["documents"] > tokens / 1100
