"""What `plan` says of corpora in remote storage, against what a node really uses and fetches."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import random_corpus
from test_forecast import fetch_all

from fsdp_pretrain.config.schedule import BatchSchedule
from fsdp_pretrain.config.skips import Skips
from fsdp_pretrain.data.fetch.forecast import Forecast
from fsdp_pretrain.data.fetch.window import Window
from fsdp_pretrain.data.packing.packer import Packer
from fsdp_pretrain.data.packing.position import Position

LENGTH, LANES, BATCH, STEPS = 64, 2, 8, 5500


@pytest.fixture(scope="module")
def corpus(module_lab: Any, tokenizer: Any) -> Path:
    """2M tokens in blocks of 8,000."""
    lengths = np.random.default_rng(1).integers(20, 380, 10_000).tolist()
    return random_corpus(module_lab.path / "corpus", tokenizer, [lengths], block_tokens=8_000)


def config(lab: Any, corpus: Path, size: str, place: str, **data: Any) -> Path:
    made: Path = lab.config(
        "plan",
        data={
            "sequence_length": LENGTH,
            "lanes": LANES,
            "sources": [{"name": "text", "path": place}],
            "cache": {"dir": str(lab.path / "cache"), "size": size},
            **data,
        },
        train={"duration": f"{STEPS} steps", "global_batch": f"{BATCH} samples", "micro_batch": 1},
    )
    return made


def plan(run_command: Any, config: Path, *options: str) -> Any:
    done = run_command("fsdp_pretrain.cli", "plan", config, *options, expect=0)
    return json.loads(done.stdout) if "--json" in options else done.stdout


def test_what_is_planned_is_what_a_node_uses(module_lab: Any, run_command: Any, corpus: Path) -> None:
    """A fetcher with the recommended cache fetches about each block once per epoch; one for everything, once in all."""
    said = plan(run_command, config(module_lab, corpus, "800KB", f"file://{corpus}"), "--json")["storage"]
    packer = Packer([("text", corpus, 1.0)], LENGTH, seed=1234, lanes=LANES)
    sizes = {"text": packer.corpora["text"].blocks[:, 4] * 2 + packer.corpora["text"].blocks[:, 2] * 4}
    whole, end = int(sizes["text"].sum()), STEPS * BATCH
    assert said["whole"] == whole and 2 * said["least"] - 1 <= said["recommended"] <= 2 * said["least"]
    forecast = Forecast(packer, BatchSchedule(BATCH), Skips(), Position(), world=1, ranks=range(1), until=end)
    fetched = fetch_all(Window(forecast, {0: "text"}, sizes), said["recommended"])
    assert fetched < 1.1 * whole * packer.epochs_read(end)["text"]
    enough = plan(run_command, config(module_lab, corpus, "1GB", f"file://{corpus}"), "--json")
    assert not any("cache" in warning for warning in enough["warnings"])


def test_a_small_cache_is_a_warning_and_storage_away_is_none(
    module_lab: Any, run_command: Any, corpus: Path, tmp_path: Path
) -> None:
    small = plan(run_command, config(module_lab, corpus, "40KB", f"file://{corpus}"))
    assert "warning: data.cache.size = 39.1 KiB, but a node uses" in small and "such a run is refused" in small
    reshuffled = config(module_lab, corpus, "800KB", f"file://{corpus}", reshuffle=["64 samples"])
    assert "warning: data.reshuffle: until the epoch ends" in plan(run_command, reshuffled) and "reshuffle" not in small
    here = Path(shutil.copytree(corpus, tmp_path / "moved"))
    shutil.rmtree(here / "shards")
    assert "cache       " in plan(run_command, config(module_lab, here, "800KB", f"file://{here}")), "no block is read"
    local = plan(run_command, config(module_lab, corpus, "800KB", str(corpus)))
    assert "cache       " not in local
