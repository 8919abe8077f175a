"""Evaluations elsewhere: results of `eval.command` count once whoever is killed, and exported folders."""

from __future__ import annotations

import json
import random
import shlex
import signal
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import records
import tomli_w
from processes import Process, Run

from fsdp_pretrain.checkpoint.store import Store
from fsdp_pretrain.config.config import load
from fsdp_pretrain.eval import jobs
from fsdp_pretrain.run.files import RunDir

Start = Callable[..., Process]
TASKS = "heldout_bpb"
SCRIPT = """
echo "$EVAL_STEP" >> {folder}/counted
{before}
sed "s/STEP/$EVAL_STEP/" {folder}/canned.json > "$EVAL_RESULTS.part" && mv "$EVAL_RESULTS.part" "$EVAL_RESULTS"
"""


class Elsewhere:
    """A run whose due checkpoints a script evaluates: it counts its calls and copies results."""

    def __init__(self, lab: Any, start: Start, steps: int) -> None:
        self.path, self.folder, self._lab, self._start = lab.path / "run", lab.path, lab, start
        self.path.mkdir()
        canned = records.results(tasks=TASKS, scores={TASKS: {"bits_per_byte": 1.5}})
        (self.folder / "canned.json").write_text(json.dumps(canned).replace('"step": 1', '"step": STEP'))
        self.says()
        for step in range(1, steps + 1):
            records.commit(Store(self.path / "checkpoints"), step)

    def says(self, before: str = "", **settings: Any) -> None:
        """The script's lines between counting and writing results, and more of the section `eval`."""
        (self.folder / "script").write_text(SCRIPT.format(folder=self.folder, before=before))
        section = {
            "every": "1 steps",
            "tasks": [TASKS],
            "heldout": str(self._lab.heldout),
            "retry": "0.001 s",
            **settings,
        }
        section.setdefault("command", f"exec sh {self.folder}/script")
        self._lab.config(eval=section).rename(self.path / "config.toml")

    def worker(self) -> Process:
        return self._start("fsdp_pretrain.eval.cli", "watch", self.path, "--once", "--wait")

    @property
    def counted(self) -> dict[int, int]:
        """How often the script was called, by step."""
        path = self.folder / "counted"
        return dict(Counter(map(int, path.read_text().split()))) if path.exists() else {}

    def files(self, pattern: str) -> list[Path]:
        """Files in the folders of evaluations."""
        return sorted(self.path.glob(f"evals/step-*/*/{pattern}"))

    @property
    def unfinished(self) -> bool:
        run = RunDir(self.path)
        return bool(jobs.due_jobs(run, load(run.config)) or jobs.unannounced(run))


@pytest.fixture
def elsewhere(lab: Any, start_command: Start) -> Elsewhere:
    """One due checkpoint, of step 1."""
    return Elsewhere(lab, start_command, steps=1)


def assert_exactly_once(run: Path, helpers: Any, steps: int) -> None:
    """One result and one entry for each checkpoint, and nothing left of the work."""
    results = [json.loads(path.read_text())["step"] for path in run.glob("evals/step-*/*/results.json")]
    assert sorted(results) == list(range(1, steps + 1))
    assert sorted(entry["step"] for entry in helpers.journal(run, "eval")) == list(range(1, steps + 1))
    assert not helpers.journal(run, "eval-failed")
    assert not [*run.glob("evals/step-*/*/claim.json")]


def storm(start: Callable[[], Process], unfinished: Callable[[], bool], *, kills: int, apart: float) -> None:
    """Three workers, restarted until all is done, of which random ones are killed at random times."""
    rng, workers = random.Random(15), list[Process]()
    while unfinished() or kills > 0:
        workers = [worker for worker in workers if worker.poll() is None]
        workers += [start() for _ in range(3 - len(workers))]
        time.sleep(rng.uniform(0, apart))  # when it is killed; nothing is expected to have happened by then
        if kills > 0:
            rng.choice(workers).signal(signal.SIGKILL)
            kills -= 1
    for worker in [*workers, start()]:  # the last removes the claim of one that was killed when all was done
        worker.wait()


def test_results_of_commands_count_once_though_workers_are_killed(lab: Any, start_command: Start, helpers: Any) -> None:
    """A command ends with its worker, and the next worker runs it again."""
    steps, kills = 4, 8
    elsewhere = Elsewhere(lab, start_command, steps)
    storm(elsewhere.worker, lambda: elsewhere.unfinished, kills=kills, apart=0.4)
    assert elsewhere.counted.keys() == {*range(1, steps + 1)} and sum(elsewhere.counted.values()) <= steps + kills
    assert_exactly_once(elsewhere.path, helpers, steps)


# ---------------------------------------------------------------- where a worker can die


def test_an_attempt_ends_with_its_worker_and_its_results_are_not_used(elsewhere: Elsewhere, helpers: Any) -> None:
    """A worker is killed while its command waits; then the step is trained and saved again."""
    elsewhere.says(
        f'[ "$(wc -l < {elsewhere.folder}/counted)" -gt 1 ] || {{ echo $$ > {elsewhere.folder}/pid; exec sleep 1000; }}'
    )
    first = elsewhere.worker()
    pid = elsewhere.folder / "pid"
    helpers.wait_for(lambda: pid.exists() and pid.read_text().endswith("\n"), what="the command")
    first.signal(signal.SIGKILL)
    first.wait()
    waiting = int(pid.read_text())
    helpers.wait_for(lambda: not psutil.pid_exists(waiting), what="the end of the command")
    (attempt,) = elsewhere.files("attempt-*")
    (attempt / "results.json").write_text(json.dumps(records.results(tasks=TASKS, scores={TASKS: {"x": 9.0}})))
    again = "2026-06-02T12:00:00.000Z"
    records.commit(Store(elsewhere.path / "checkpoints"), 1, committed=again)
    assert elsewhere.worker().wait() == 0
    assert elsewhere.counted == {1: 2}
    published = json.loads(elsewhere.files("results.json")[0].read_text())
    assert published["committed"] == again and published["scores"] == {TASKS: {"bits_per_byte": 1.5}}
    assert_exactly_once(elsewhere.path, helpers, 1)


def test_there_is_one_entry_whatever_was_lost(elsewhere: Elsewhere, helpers: Any) -> None:
    """The entry, with a worker that was killed between the results and the journal; or the results, by damage."""
    assert elsewhere.worker().wait() == 0
    (entry,) = helpers.journal(elsewhere.path, "eval")
    journal = elsewhere.path / "journal.jsonl"
    kept = [line for line in journal.read_text().splitlines(keepends=True) if '"eval"' not in line]
    journal.write_text("".join(kept))
    for worker in [elsewhere.worker() for _ in range(3)]:
        assert worker.wait() == 0
    (again,) = helpers.journal(elsewhere.path, "eval")
    own = {"time", "host", "pid"}
    assert {key: again[key] for key in again.keys() - own} == {key: entry[key] for key in entry.keys() - own}
    assert elsewhere.counted == {1: 1}
    elsewhere.files("results.json")[0].write_text("{")
    assert elsewhere.worker().wait() == 0
    assert elsewhere.counted == {1: 2}
    assert_exactly_once(elsewhere.path, helpers, 1)


# ---------------------------------------------------------------- attempts that fail

OTHERS = json.dumps(records.results(tasks="heldout_choice"))


@pytest.mark.parametrize(
    ("instead", "expected"),
    [
        ("echo starting; echo no such partition >&2; exit 3", "ended with 3: starting; no such partition"),
        ("echo submitted", "its command left no results: submitted"),
        ('echo "{" > "$EVAL_RESULTS"', "is damaged: it is not JSON"),
        ("EVAL_STEP=7; return", "its results are of step 7, not of 1"),
        (f"echo '{OTHERS}' > \"$EVAL_RESULTS\"", "of the tasks 'heldout_choice', not of 'heldout_bpb'"),
    ],
)
def test_a_failed_attempt_says_why_and_is_followed_by_a_new_one(
    elsewhere: Elsewhere, helpers: Any, instead: str, expected: str
) -> None:
    first = f'[ "$(wc -l < {elsewhere.folder}/counted)" -eq 1 ]'
    elsewhere.says(f"wrong() {{ {instead}; exit 0; }}; if {first}; then wrong; fi")
    worker = elsewhere.worker()
    assert worker.wait() == 1, worker.output()
    (failed,) = helpers.journal(elsewhere.path, "eval-failed")
    assert expected in failed["text"] and failed["failures"] == 1
    assert elsewhere.counted == {1: 2} and len(helpers.journal(elsewhere.path, "eval")) == 1
    assert len(elsewhere.files("results.json")) == 1


def test_a_given_up_attempt_is_ended_and_its_late_results_are_not_used(elsewhere: Elsewhere, helpers: Any) -> None:
    """The first hangs, with a process of its own; both are ended. Results of its id change nothing afterwards."""
    hang = f'[ "$(wc -l < {elsewhere.folder}/counted)" -gt 1 ] || {{ echo hangs; sleep 1000 & echo $! > {elsewhere.folder}/pid; wait; }}'
    elsewhere.says(hang, deadline="3 s", attempts=2)  # on a busy machine the shell takes a second to get there
    assert elsewhere.worker().wait() == 1
    (failed,) = helpers.journal(elsewhere.path, "eval-failed")
    assert "no results after 3s" in failed["text"] and "its output is in" in failed["text"]
    assert not psutil.pid_exists(int((elsewhere.folder / "pid").read_text()))
    attempts = {*elsewhere.files("attempt-*")}
    (given_up,) = attempts - {path.parent for path in elsewhere.files("attempt-*/results.json")}
    published = elsewhere.files("results.json")[0].read_bytes()
    (given_up / "results.json").write_text(json.dumps(records.results(tasks=TASKS, scores={TASKS: {"x": 9.0}})))
    assert elsewhere.worker().wait() == 0
    assert elsewhere.files("results.json")[0].read_bytes() == published
    assert len(helpers.journal(elsewhere.path, "eval")) == 1 and elsewhere.counted == {1: 2}


# ---------------------------------------------------------------- exported folders


def train(lab: Any) -> RunDir:
    """Two steps, saved at the end and due for evaluation, which is left to others."""
    section = {"every": "1 steps", "tasks": [TASKS, "heldout_choice"], "heldout": str(lab.heldout)}
    section |= {"limit": 2, "launch": False}
    lab.train(
        lab.config("llama", model={"vocab": 520, "vocab_multiple": 64}, train={"duration": "2 steps"}, optimizer={"warmup": "1 steps"},
                   checkpoint={"every": "2 steps"}, eval=section)
    )  # fmt: skip
    return RunDir(lab.path / "llama")


def scores(path: Path) -> dict[str, float]:
    found = json.loads(path.read_text())["scores"]
    return {f"{task}/{metric}": value for task, row in found.items() for metric, value in row.items()}


@pytest.mark.slow
def test_a_pool_without_the_run_gets_an_exported_folder(lab: Any, helpers: Any, run_command: Run) -> None:
    """The whole way: export, a command that evaluates the folder, results as of the checkpoint itself."""
    pytest.importorskip("lm_eval")
    run, pool = train(lab), lab.path / "pool"
    evaluate = shlex.join([sys.executable, "-m", "fsdp_pretrain.eval.cli", "run"])
    heldout = shlex.quote(str(lab.heldout))
    export = shlex.join([sys.executable, "-m", "fsdp_pretrain.cli", "checkpoints"])
    command = (
        f'set -e; rm -rf {pool}; {export} "$EVAL_RUN" export "$EVAL_STEP" {pool} --dtype fp32; '
        f"[ -e {pool}-down ] || {{ touch {pool}-down; exit 1; }}; {evaluate} {pool} "
        f'--tasks "$EVAL_TASKS" --heldout {heldout} --limit 2 --out "$EVAL_RESULTS"'
    )
    config = tomllib.loads(run.config.read_text())
    config["eval"] |= {"command": command, "every": "2 steps", "retry": "0.001 s"}
    run.config.write_text(tomli_w.dumps(config))
    run_command("fsdp_pretrain.eval.cli", "watch", run.path, "--once", "--wait", expect=1)  # one attempt failed
    (published,) = run.path.glob("evals/step-*/*/results.json")
    run_command("fsdp_pretrain.eval.cli", "run", run.path, "--out", lab.path / "direct.json", expect=0)
    assert scores(published) == pytest.approx(scores(lab.path / "direct.json"), rel=1e-6)
    (entry,) = helpers.journal(run.path, "eval")
    assert entry["step"] == 2 and entry["tasks"] == f"{TASKS}+heldout_choice"
    (pool / "fsdp_pretrain.json").unlink()  # like a folder of transformers
    done = run_command("fsdp_pretrain.eval.cli", "run", pool, "--tasks", TASKS, "--heldout", lab.heldout, "--json")
    assert done.returncode == 78 and "has no fsdp_pretrain.json" in done.stderr
