"""Faults of data and GPUs, end to end, like those of storage in `test_faults_storage.py`."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from watch import CRIT_AND_RESOLVED, Watched

from fsdp_pretrain.data.text.tokenizer import Tokenizer

# ---------------------------------------------------------------------- data


@pytest.mark.shows("F18")
@pytest.mark.slow
def test_doubled_separators(watched: Watched, run_command: Any) -> None:
    """Refused by `validate` and training; without the packer's check an alarm in the first step."""
    tokenizer = Tokenizer.load(watched.lab.tokenizer)
    rng = np.random.default_rng(1)
    documents = [
        [*rng.integers(5, tokenizer.vocab_size, rng.integers(5, 60)).tolist(), tokenizer.eod] for _ in range(400)
    ]
    corpus = watched.helpers.corpus(watched.lab.path / "doubled", documents, tokenizer)  # declared to have none
    run_command("fsdp_pretrain.data.cli", "validate", corpus, expect=2)
    watched.configure(data={"sources": [{"name": "text", "path": str(corpus)}]})
    job = watched.start()
    watched.ends(job, 78)
    assert "failed the packer's checks" in job.output() and "data-specials" not in watched.warnings()
    watched.run = watched.lab.path / "blind"
    job = watched.start(fault={"rank": "all", "step": 0, "kind": "trust"})
    alarm = watched.until("data-specials")
    assert alarm["severity"] == "CRIT" and alarm["step"] == 1 and watched.until("data-separators")["step"] == 1
    watched.stop(job)


@pytest.mark.shows("F19")
def test_data_from_the_beginning_after_a_restart(watched: Watched) -> None:
    """An alarm at the first step that reads old data again."""
    watched.configure()
    job = watched.start()
    watched.reaches(30)
    watched.stop(job)
    at_ = watched.step
    job = watched.start(fault={"rank": "all", "step": 0, "kind": "rewind"})
    assert [watched.until(key)["step"] for key in ("data-cursor",)] == [at_ + 1]
    watched.stop(job)
    assert watched.transitions("data-cursor") == [("CRIT", "open")]


@pytest.mark.shows("F40")
@pytest.mark.slow
def test_a_shard_that_is_deleted(watched: Watched) -> None:
    """Reported by name at the next audit; open files work on; starts are refused until it is back."""
    corpus = watched.lab.path / "corpus"
    shutil.copytree(watched.lab.corpus, corpus)
    watched.configure(data={"sources": [{"name": "text", "path": str(corpus)}]})
    job = watched.start()
    watched.reaches(10)
    shard = min(corpus.glob("shards/*.bin"))
    shard.rename(watched.lab.path / "kept")
    alarm = watched.until("data-shard/text")
    assert alarm["severity"] == "CRIT" and str(shard) in alarm["summary"]
    watched.stop(job)
    again = watched.start()
    assert again.wait() == [78] and again.output().count("error:") == 1 and shard.name in again.output()
    shutil.copy(watched.lab.path / "kept", shard)
    job = watched.start()
    watched.until("data-shard/text", "resolved")
    watched.stop(job)
    assert watched.transitions("data-shard/text") == CRIT_AND_RESOLVED


# ---------------------------------------------------------------------- GPUs

GPUS = [{"index": index, "throttle": 0x4} for index in range(8)]


GPU = "fsdp_pretrain.watchdog.detectors.gpu"


def show(path: Path, devices: list[dict[str, Any]]) -> None:
    """Write the file as a provider does: by replacing it."""
    path.with_suffix(".new").write_text(json.dumps({"devices": devices}))
    path.with_suffix(".new").rename(path)


@pytest.mark.shows("A32", "F45")
def test_a_gpu_that_breaks(watched: Watched, constants: Any) -> None:
    """As the file provider reports it: saves, stops, exit 76, and names the host to avoid."""
    gpus = watched.lab.path / "gpus.json"
    show(gpus, GPUS)
    constants(GPU, _CHECK_SECONDS=0.2)
    watched.configure(checkpoint={"every": "10000 steps"}, watchdog={"gpus": f"file:{gpus}"})
    job = watched.start()
    watched.reaches(10)
    assert not watched.warnings()
    show(gpus, [*GPUS[:-1], {"index": 7, "xids": [79]}])
    watched.ends(job, 76)
    host = os.uname().nodename
    intent = watched.helpers.intent(watched.run)
    assert intent["code"] == 76 and intent["avoid_hosts"] == [host]
    assert watched.transitions(f"gpu/{host}") == [("CRIT", "open")] and watched.warnings() == {f"gpu/{host}"}
    assert watched.saved()[-1] == watched.step
