"""Options of `fsdp-eval run`, and per-sample outputs beside the results."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import records
import tomli_w
from laboratory import moved
from processes import ROOT, Run

pytest.importorskip("lm_eval")

from fsdp_pretrain.checkpoint.store import Store
from fsdp_pretrain.config.config import load
from fsdp_pretrain.eval import jobs
from fsdp_pretrain.eval.attempt import Evaluated
from fsdp_pretrain.eval.results import Results
from fsdp_pretrain.run.files import RunDir

QUESTIONS = [
    {"text": "the run writes", "choices": ["every checkpoint", "loss"], "answer": 0},
    {"text": "gradients over", "choices": ["import", "replicas"], "answer": 1},
    {"text": "while the", "choices": ["mesh", "def"], "answer": 0},
    {"text": "return self", "choices": ["None", "its gradients"], "answer": 0},
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/questions.jsonl}}}}
test_split: test
fewshot_split: test
doc_to_text: "{{{{text}}}}"
metadata: {{version: 1.0}}
"""
CHOICE = """
output_type: multiple_choice
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
SAY = """
output_type: generate_until
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 9}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture(scope="module")
def run(module_lab: Any) -> Path:
    """A checkpoint at step 10, due for evaluation."""
    config = module_lab.config(
        train={"duration": "10 steps"}, eval={"every": "10 steps", "heldout": str(module_lab.heldout), "launch": False}
    )
    module_lab.train(config)
    path: Path = module_lab.path / "run"
    return path


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks `choose`, `say` and `bare` (never takes examples)."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    for name, rest in (("choose", CHOICE), ("say", SAY), ("bare", CHOICE + "num_fewshot: 0\n")):
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, folder=folder) + rest)
    return folder


def samples(results: Path, task: str) -> list[dict[str, Any]]:
    name = json.loads(results.read_text())["samples"][task]
    return [json.loads(line) for line in (results.parent / name).read_text().splitlines()]


def test_keys_of_the_configuration_can_be_replaced(run: Path, tasks: Path, tmp_path: Path, run_command: Run) -> None:
    """Few-shot prompts, answers of the length asked for, half of the documents."""
    out = tmp_path / "results.json"
    keys = "num_fewshot=2 gen_kwargs={max_gen_toks=3} batch=1 log_samples=true".split()
    done = run_command(
        *(
            "fsdp_pretrain.eval.cli",
            "run",
            run,
            "--include",
            tasks,
            "--tasks",
            "choose,say,bare",
            "--limit",
            "0.5",
            "--out",
            out,
        ),
        *(f"eval.{key}" for key in keys),
        expect=0,
    )
    found = json.loads(out.read_text())
    assert found["num_fewshot"] == {"choose": 2, "say": 2, "bare": 0}
    assert found["documents"] == {"choose": 2, "say": 2, "bare": 2} and found["limit"] == 0.5
    assert found["gen_kwargs"] == {"say": {"until": ["\n"], "max_gen_toks": 3}}
    (first, _), (bare, _) = samples(out, "say"), samples(out, "bare")
    prompt, asked = first["arguments"][0]
    shown = [f"{row['text']} {row['choices'][row['answer']]}" for row in QUESTIONS[1:]]  # never the question itself
    assert prompt.endswith("\n\nthe run writes") and sum(text in prompt for text in shown) == 2
    assert asked["max_gen_toks"] == 3 and first["doc"] == QUESTIONS[0]
    assert first["resps"][0][0] == first["filtered_resps"][0]
    assert bare["arguments"][0][0] == "the run writes"
    assert "(2 documents, 2-shot)" in done.stdout and " ± " in done.stdout


def test_samples_make_up_the_scores(run: Path, tmp_path: Path, run_command: Run) -> None:
    """A short line per document. Results that replace others replace their samples, and nobody else's."""
    out, beside = tmp_path / "results.json", tmp_path / "others.json"
    for path, limit in ((beside, "3"), (out, "5"), (out, "6")):
        run_command("fsdp_pretrain.eval.cli", "run", run, "--limit", limit, "--out", path, expect=0)
    results = json.loads(out.read_text())
    named = {*results["samples"].values(), *json.loads(beside.read_text())["samples"].values()}
    assert {path.name for path in tmp_path.glob("samples_*")} == named and len(named) == 4
    lines = samples(out, "heldout_bpb")
    assert [line["doc_id"] for line in lines] == list(range(6)) and len({line["doc_hash"] for line in lines}) == 6
    total, size = (sum(line["bits_per_byte"][i] for line in lines) for i in (0, 1))
    assert results["scores"]["heldout_bpb"]["bits_per_byte"] == pytest.approx(-total / size / math.log(2))
    right = [line["acc"] for line in samples(out, "heldout_choice")]
    assert results["scores"]["heldout_choice"]["acc"] == pytest.approx(sum(right) / 6)
    assert max(len(json.dumps(line)) for line in lines) < 130
    assert results["scores"]["heldout_bpb"]["bits_per_byte_stderr"] > 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["eval.bach=3", "train.duration=5 steps", "eval.limit=1.5", "eval.num_fewshot=-1"],
            [
                "4 problems in",
                "unknown key; did you mean 'eval.batch'?",
                "'train.duration=5 steps': only keys of [eval] can be replaced",
                "eval.limit = 1.5",
                "eval.num_fewshot = -1",
            ],
        ),
        (["--limit", "1.5"], ["eval.limit = 1.5"]),
        (["--num_fewshot", "1"], ["unrecognized arguments: --num_fewshot"]),
        (["--tasks", ",,"], ["argument --tasks: ',,' names nothing"]),
        (["--tasks", "choose.yaml"], ["'choose.yaml': a task is given by its name", "--include DIRECTORY"]),
        (["eval.tasks=[]"], ["eval.tasks names no task"]),
        (["eval.log_samples=true"], ["eval.log_samples needs --out FILE"]),
        (["--out", "/proc/none/results.json"], ["/proc/none"]),
    ],
)
def test_mistakes(run: Path, run_command: Run, arguments: list[str], expected: list[str]) -> None:
    done = run_command("fsdp_pretrain.eval.cli", "run", run, *arguments)
    assert done.returncode == 78 and "Traceback" not in done.stderr and done.stdout == ""
    assert all(part in done.stderr for part in expected), done.stderr


@pytest.mark.quick
def test_sample_files_count_once_their_results_are_published(lab: Any) -> None:
    """Those of an attempt that lost its claim stay where they are; a name in results moves nothing else."""
    path = lab.path / "run"
    path.mkdir()
    lab.config(eval={"every": "10 steps", "heldout": str(lab.heldout)}).rename(path / "config.toml")
    records.commit(Store(path / "checkpoints"), 10)
    (job,) = jobs.due_jobs(RunDir(path), load(path / "config.toml"))
    place = job.folder / "attempt-1"
    place.mkdir(parents=True)
    found = Evaluated(Results(**records.results(samples={"a": "samples_a.jsonl", "b": "../claim.json"})), place)
    (place / "samples_a.jsonl").write_text("")
    with jobs.claim(job) as mine:
        assert mine is not None
        claim = (job.folder / "claim.json").read_text()
        (job.folder / "claim.json").write_text(json.dumps({"token": "other"}))
        assert not jobs.publish(mine, found) and (place / "samples_a.jsonl").exists()
        (job.folder / "claim.json").write_text(claim)
        assert jobs.publish(mine, found)
    assert {path.name for path in job.folder.iterdir()} == {"attempt-1", "results.json", "samples_a.jsonl"}


def test_an_answer_without_tokens_is_refused(run: Path, tasks: Path, tmp_path: Path, run_command: Run) -> None:
    """It would be the likeliest of all."""
    text = TASK.format(name="blank", folder=tasks)
    (tmp_path / "blank.yaml").write_text(text + 'output_type: loglikelihood\ndoc_to_target: ""\ntarget_delimiter: ""\n')
    done = run_command("fsdp_pretrain.eval.cli", "run", run, "--include", tmp_path, "--tasks", "blank")
    assert done.returncode == 78 and "'' after 'the run writes', but it has no token" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""


def test_data_that_is_not_in_the_cache_is_not_asked_for_offline(run: Path, tmp_path: Path, run_command: Run) -> None:
    """Refused at once; a machine without a network would wait long for one."""
    text = TASK.format(name="public", folder=tmp_path).replace("dataset_path: json", "dataset_path: some/questions")
    text = "".join(line for line in text.splitlines(keepends=True) if "dataset_kwargs" not in line)
    (tmp_path / "public.yaml").write_text(text + CHOICE)
    asked = ("--include", tmp_path, "--tasks", "public", "eval.offline=true")
    done = run_command("fsdp_pretrain.eval.cli", "run", run, *asked)
    assert done.returncode == 78 and "lm-eval cannot load public" in done.stderr, done.stderr
    assert "offline" in done.stderr.lower() and "with the same cache (HF_HOME)" in done.stderr


def test_the_slurm_scripts_evaluate_what_the_run_says_now(
    run: Path, tasks: Path, tmp_path: Path, run_command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `srun` of one task. The checkpoint was saved when `[eval]` named other tasks and no folder of them."""
    commands = {
        "srun": 'exec "$@"',
        "fsdp-eval": f'exec {sys.executable} -m fsdp_pretrain.eval.cli "$@"',
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    }
    for name, line in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    again = moved(run, tmp_path / "run")
    config = tomllib.loads((again / "config.toml").read_text())
    config["eval"] |= {"tasks": ["choose"], "include": [str(tasks)], "attempts": 1}
    config["eval"]["command"] = f"exec bash {ROOT}/scripts/slurm/eval_checkpoint.sbatch"
    (again / "config.toml").write_text(tomli_w.dumps(config))
    for name, value in {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "FSDP_PRETRAIN": str(ROOT),
        "DEVICE": "cpu",
    }.items():
        monkeypatch.setenv(name, value)
    done = subprocess.run(["bash", ROOT / "scripts/slurm/eval.sbatch", again], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (results,) = again.glob("evals/step-*/choose/results.json")
    assert json.loads(results.read_text())["documents"] == {"choose": 4}
    refused = run_command("fsdp_pretrain.eval.cli", "run", again)  # of files that are programs, by hand
    assert refused.returncode == 78 and f"add: --include {tasks}" in refused.stderr


@pytest.mark.slow
def test_patterns_of_task_names(run: Path, tasks: Path, run_command: Run) -> None:
    """As lm-eval matches them; all its own tasks are among the candidates."""
    common = ["fsdp_pretrain.eval.cli", "run", run, "--include", tasks, "--json", "--limit", "2"]
    done = run_command(*common, "--tasks", "cho?s[a-f],say")
    assert done.returncode == 0 and set(json.loads(done.stdout)["scores"]) == {"choose", "say"}, done.stderr
    assert "lm-eval has no task 'no_such_*'" in run_command(*common, "--tasks", "choose,no_such_*", expect=78).stderr


def test_texts_of_tasks_are_written(tasks: Path, lab: Any, tmp_path: Path, run_command: Run) -> None:
    """All strings of every document; the bundled tasks have none, and tasks that are not there are refused."""
    out = tmp_path / "new/texts.jsonl"
    for named, expected in (
        (["choose", "heldout_bpb"], [("choose", "\n".join([q["text"], *q["choices"]])) for q in QUESTIONS]),
        (["heldout_bpb", "separator_probe"], []),
    ):
        config = lab.config(eval={"tasks": named, "heldout": str(lab.heldout), "include": [str(tasks)]})
        done = run_command("fsdp_pretrain.eval.cli", "texts", config, "--out", out)
        assert done.returncode == 0 and f"{len(expected)} documents" in done.stdout, done.stderr
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        assert [(row["task"], row["text"]) for row in rows] == expected
    config = lab.config(eval={"tasks": ["choose"], "include": [str(tmp_path / "gone")]})
    done = run_command("fsdp_pretrain.eval.cli", "texts", config, "--out", tmp_path / "none.jsonl")
    assert done.returncode == 78 and "there is no directory" in done.stderr and not (tmp_path / "none.jsonl").exists()
