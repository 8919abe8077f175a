"""Evaluation by the ranks of a torchrun job: the scores of one process, with a part of the model in each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import Process, Run, as_rank, free_port
from records import flip

pytest.importorskip("lm_eval")

GENERATES = """
task: generates
custom_dataset: !function generates.load
process_results: !function generates.measure
output_type: generate_until
validation_split: validation
doc_to_text: "{{text}}"
doc_to_target: "{{text}}"
generation_kwargs: {max_gen_toks: 6, until: []}
metric_list: [{metric: letters, aggregation: mean, higher_is_better: true}]
"""
GENERATES_CODE = """
def load(**_):
    from datasets import Dataset
    return {"validation": Dataset.from_list([{"text": "the run " * n} for n in range(1, 8)])}


def measure(document, answers):
    return {"letters": float(sum(map(ord, answers[0])))}
"""
TASKS = ("--tasks", "heldout_bpb,heldout_choice,generates", "--limit", "5")


@pytest.fixture(scope="module")
def trained(module_lab: Any) -> Path:
    """Trained on two ranks."""
    scheduled = {"heldout": str(module_lab.heldout), "batch": 3}
    module_lab.train(module_lab.config("trained", train={"duration": "10 steps"}, eval=scheduled), ranks=2)
    run: Path = module_lab.path / "trained"
    return run


@pytest.fixture(scope="module")
def tasks(module_lab: Any) -> Path:
    folder: Path = module_lab.path / "tasks"
    folder.mkdir()
    (folder / "generates.yaml").write_text(GENERATES)
    (folder / "generates.py").write_text(GENERATES_CODE)
    return folder


def start(start_command: Callable[..., Process], ranks: int, *arguments: object) -> list[Process]:
    port = free_port()
    return [
        start_command("fsdp_pretrain.eval.cli", "run", *arguments, environment=as_rank(rank, ranks, ranks, port))
        for rank in range(ranks)
    ]


def test_scores_do_not_depend_on_the_number_of_ranks(
    trained: Path, tasks: Path, tmp_path: Path, run_command: Run, start_command: Callable[..., Process]
) -> None:
    """Uneven numbers of requests, likelihoods and answers; read on other meshes than the trained one."""
    ranks, files = 3, (tmp_path / "1.json", tmp_path / "n.json")
    run_command("fsdp_pretrain.eval.cli", "run", trained, "--include", tasks, *TASKS, "--out", files[0], expect=0)
    processes = start(start_command, ranks, trained, "--include", tasks, *TASKS, "--out", files[1])
    assert [process.wait() for process in processes] == [0] * ranks, [process.output() for process in processes]
    assert [bool(process.output()[0]) for process in processes] == [True] + [False] * (ranks - 1)  # one prints
    one, other = (json.loads(file.read_text()) for file in files)
    assert one["scores"] == other["scores"] and set(one["scores"]) == {"heldout_bpb", "heldout_choice", "generates"}
    assert one["scores"]["generates"]["letters"] > 0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--tasks", "heldout_bpb", "--heldout", "/nowhere"], "there is no held-out file /nowhere"),  # before the model
        (["--tasks", "heldout_bpb"], "__1_0.distcp: its bytes are not the ones"),  # while it is read
    ],
)
def test_an_error_is_told_once_and_ends_all_ranks(
    trained: Path, tmp_path: Path, start_command: Callable[..., Process], options: list[str], told: str
) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    flip(run / "checkpoints/step-00000010/__1_0.distcp", -100)
    processes = start(start_command, 2, run, *options)
    codes, errors = [process.wait() for process in processes], [process.output()[1] for process in processes]
    assert codes[0] == 78 and told in errors[0], errors
    assert "error" not in errors[1] and "Traceback" not in "".join(errors)
