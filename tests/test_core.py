"""The core trains alone, and services only take part: with or without them the numbers are the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from processes import as_rank, free_port, python

from fsdp_pretrain.checkpoint.store import Store

SCRIPT = Path(__file__).with_name("core_alone.py")


@pytest.mark.promise("core-alone")
def test_the_core_trains_without_services_and_its_numbers_are_those_of_the_job(lab: Any, helpers: Any) -> None:
    job, alone = lab.config("job"), lab.config("alone")
    lab.train(job)
    said = json.loads(python(SCRIPT, alone, **as_rank(0, 1, 1, free_port())).stdout.splitlines()[-1])
    assert said["services"] == []
    assert said["losses"] == [[loss, norm] for _, loss, norm in helpers.losses(lab.path / "job")]
    digests = [
        [found.manifest().state_digest for found in Store(lab.path / name / "checkpoints").scan()]
        for name in ("job", "alone")
    ]
    assert digests[0] == digests[1] and len(digests[0]) == 2
