"""What the commands and the trainer import: a verb waits only for what it uses."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import python
from released import unpack

SLOW = set(
    "aim datasets jinja2 lm_eval numpy prometheus_client psutil pyarrow pydantic rich safetensors sentencepiece smtplib "
    "plotly ssl tensorboard tokenizers tomli_w torch torchdata tqdm transformers wandb xxhash".split()
)
"""What takes milliseconds to import."""
STATE = {"pydantic", "xxhash"}  # any small file of a run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with starts, checkpoints, alarms and evaluations."""
    return unpack(tmp_path_factory.mktemp("release"))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("command", "needed"),
    [
        ("fsdp_pretrain.data.cli prepare --help", set()),
        ("fsdp_pretrain.eval.cli --help", set()),
        ("fsdp_pretrain.cli journal RUN", set()),
        ("fsdp_pretrain.cli checkpoints RUN list", STATE | {"tomli_w"}),
        ("fsdp_pretrain.cli status RUN", STATE | {"tomli_w", "numpy"}),
        ("fsdp_pretrain.cli watch RUN --once", STATE | {"tomli_w", "numpy", "rich"}),
    ],
)
def test_a_verb_imports_what_it_needs(run: Path, command: str, needed: set[str]) -> None:
    done = python("-X", "importtime", "-m", *command.replace("RUN", str(run)).split(), expect=None)
    assert done.stdout and "Traceback" not in done.stderr, done.stderr
    names = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")]
    assert {name.partition(".")[0] for name in names} & SLOW == needed
    assert not [name for name in names if name.startswith("data.") and not command.startswith("data.")]
