"""Evaluation without a model: its held-out texts, the claims of its workers, its deadline."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import records
import tomli_w
from processes import Run

from fsdp_pretrain.checkpoint.evaluations import failed_evaluations, given_up_jobs
from fsdp_pretrain.checkpoint.store import CONFIG, MANIFEST, Store
from fsdp_pretrain.config.config import load
from fsdp_pretrain.errors import CheckpointError
from fsdp_pretrain.eval import jobs
from fsdp_pretrain.eval.attempt import Evaluated, Work
from fsdp_pretrain.eval.cli import table
from fsdp_pretrain.eval.results import EvaluationError, Results
from fsdp_pretrain.eval.tasks import read_heldout
from fsdp_pretrain.run import lock, state_files
from fsdp_pretrain.run.files import RunDir, seconds_of, stamp
from fsdp_pretrain.run.lock import this_process


@pytest.fixture
def run(lab: Any) -> Path:
    """Due for evaluation at 10, 20 and 30."""
    path: Path = lab.path / "run"
    path.mkdir()
    lab.config(eval={"every": "10 steps", "heldout": str(lab.heldout)}).rename(path / "config.toml")
    for step in (10, 20, 30):
        records.commit(Store(path / "checkpoints"), step)
    return path


def test_held_out_documents_may_be_parquet(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["one", " ", "two", "three"]}), tmp_path / "heldout.parquet", row_group_size=2)
    assert read_heldout(tmp_path / "heldout.parquet") == ["one", "two", "three"]


def due(run: Path) -> list[jobs.Job]:
    return jobs.due_jobs(RunDir(run), load(run / "config.toml"))


def make_claim(job: jobs.Job, **changes: Any) -> Path:
    job.folder.mkdir(parents=True, exist_ok=True)
    content = {"token": "other", **this_process()}
    path = job.folder / "claim.json"
    path.write_text(json.dumps({**content, **changes}))
    return path


@pytest.mark.quick
def test_claims(run: Path) -> None:
    config = load(run / "config.toml")
    first, second, _ = jobs.due_jobs(RunDir(run), config)
    with jobs.claim(first) as mine:
        assert mine is not None and mine.claim.still_mine()
        with jobs.claim(first) as other:  # held: no other worker gets it
            assert other is None
        with jobs.claim(second) as other:  # another job is free
            assert other is not None
        assert jobs.publish(mine, evaluated(mine))
    with jobs.claim(first) as done:  # done: not claimed again
        assert done is None
    assert [job.checkpoint.step for job in jobs.due_jobs(RunDir(run), config)] == [20, 30]


@pytest.mark.quick
@pytest.mark.parametrize("skew", [-600, 600])
@pytest.mark.parametrize(
    ("changes", "free"),
    [
        ({}, False),
        ({"pid": 2**22 + 5}, True),
        ({"process_started": 1.0}, True),  # the process id was reused
        ({"host": "elsewhere", "pid": 2**22 + 5}, False),  # not known at the first look
    ],
)
def test_claims_of_the_dead_are_free_whatever_time_it_is_on_the_server(
    run: Path, changes: dict[str, Any], free: bool, skew: float
) -> None:
    job = due(run)[0]
    path = make_claim(job, **changes)
    os.utime(path, (time.time() + skew,) * 2)
    with jobs.claim(job) as mine:
        assert (mine is not None) == free


@pytest.mark.quick
@pytest.mark.parametrize("beats", [True, False])
def test_a_worker_elsewhere_is_dead_once_it_was_seen_to_be_silent(
    run: Path, monkeypatch: pytest.MonkeyPatch, beats: bool
) -> None:
    """By the clock of who asks. The server's is ten minutes behind."""
    monkeypatch.setattr(lock, "SILENT_SECONDS", 0.0)  # any time between two looks
    path = make_claim(job := due(run)[0], host="elsewhere")
    free = []
    for number in range(4):
        if beats or not number:
            os.utime(path, (time.time() - 600 + number,) * 2)
        with jobs.claim(job) as mine:
            free.append(mine is not None)
    assert free == [False, not beats, not beats, not beats]


@pytest.mark.quick
@pytest.mark.promise("exactly-once")
def test_a_frozen_worker_that_wakes_up_does_not_publish(run: Path) -> None:
    job = due(run)[0]
    with jobs.claim(job) as mine:
        assert mine is not None
        make_claim(job)  # taken over meanwhile
        assert not jobs.publish(mine, evaluated(mine))
    assert not job.results.exists() and (job.folder / "claim.json").exists()


@pytest.mark.quick
@pytest.mark.parametrize("failing", [9, 10])
def test_finished_results_are_published_though_reads_of_the_claim_fail(
    run: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """As on a network file system that is away for a moment; if it stays away, they are not."""
    job, left, read = due(run)[0], failing, Path.read_bytes

    def flaky(path: Path) -> bytes:
        nonlocal left
        if path.name == "claim.json" and left:
            left -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(path)

    with jobs.claim(job) as mine:
        assert mine is not None
        monkeypatch.setattr(lock, "_RETRY_SECONDS", 0.0)
        monkeypatch.setattr(Path, "read_bytes", flaky)
        assert jobs.publish(mine, evaluated(mine)) == (failing < 10) == job.done


@pytest.mark.quick
def test_a_claim_that_could_not_be_removed_is_free_once_its_storage_is_back(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker lives on, but has released it."""
    job, read = due(run)[0], Path.read_bytes

    def away(path: Path) -> bytes:
        if path.name == "claim.json":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return read(path)

    monkeypatch.setattr(lock, "_RETRY_SECONDS", 0.0)
    with monkeypatch.context() as storage, jobs.claim(job) as mine:
        assert mine is not None
        storage.setattr(Path, "read_bytes", away)
    assert (job.folder / "claim.json").exists()
    with jobs.claim(job) as again:
        assert again is not None


@pytest.mark.quick
@pytest.mark.parametrize("gone", [True, False])
def test_a_checkpoint_that_retention_deletes_during_a_look_is_not_due(run: Path, gone: bool) -> None:
    """A damaged one is told."""
    first, _, last = (path / MANIFEST for path in sorted((run / "checkpoints").iterdir()))
    content = last.read_bytes()
    last.unlink()
    os.mkfifo(last)

    def delete() -> None:
        with last.open("wb") as pipe:  # opens once the look has come to the last one
            shutil.rmtree(first.parent) if gone else first.unlink()
            last.unlink()
            last.write_bytes(content)
            pipe.write(content)

    with ThreadPoolExecutor() as pool:
        deleted = pool.submit(delete)
        if gone:
            assert [job.checkpoint.step for job in due(run)] == [20, 30]
        else:
            with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
                due(run)
        deleted.result()


# ---------------------------------------------------------------- attempts that fail


def fails(work: Work) -> Evaluated:
    raise EvaluationError("no such partition")


def evaluated(work: Work, **values: Any) -> Evaluated:
    step = work.job.checkpoint.step
    return Evaluated(Results(**records.results(step=step, **values)), work.job.folder)


def works(work: Work) -> Evaluated:
    return evaluated(work)


def watch(run: Path, evaluate: Any) -> tuple[int, int]:
    return jobs.watch_once(RunDir(run), load(run / "config.toml"), evaluate)


def wait_out(run: Path, seconds: float) -> None:
    """As if so much time had passed since the last attempts."""
    for path in run.glob("evals/step-*/*/failed-*.json"):
        found = json.loads(path.read_text())
        state_files.write(path, {**found, "time": stamp((seconds_of(found["time"]) or 0.0) - seconds)})


def give_up(run: Path) -> None:
    while due(run):
        watch(run, fails)
        wait_out(run, 1e6)


def protected(run: Path) -> set[int]:
    return jobs.protected_steps(RunDir(run), load(run / "config.toml"))


@pytest.mark.quick
def test_pauses_between_attempts_grow(run: Path, helpers: Any) -> None:
    """Five minutes, then twenty, whichever worker made the attempts."""
    assert watch(run, fails) == (0, 3)
    assert watch(run, fails) == (0, 0) and all(0 < job.pause <= 300 for job in due(run))
    with jobs.claim(due(run)[0]) as mine:  # also for a worker that looked before the failure
        assert mine is None
    wait_out(run, 301)
    assert watch(run, fails) == (0, 3)
    assert watch(run, fails) == (0, 0) and all(300 < job.pause <= 1200 for job in due(run))
    wait_out(run, 900)
    assert watch(run, fails) == (0, 0)
    wait_out(run, 301)
    assert watch(run, fails) == (0, 3) and due(run) == []
    wait_out(run, 1e6)
    assert watch(run, works) == (0, 0)
    texts = [entry["text"] for entry in helpers.journal(run, "eval-failed") if entry["step"] == 20]
    endings = ["1 of 3 (tried again in 5m00s)", "2 of 3 (tried again in 20m00s)", "3 of 3 (given up)"]
    assert [ending in text for ending, text in zip(endings, texts, strict=True)] == [True] * 3, texts


@pytest.mark.quick
def test_a_failure_that_a_wrong_clock_has_dated_holds_nobody_up(run: Path) -> None:
    watch(run, fails)
    wait_out(run, -86400)
    assert watch(run, works) == (3, 0)


@pytest.mark.quick
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.promise("no-wrong-scores")
def test_a_score_that_is_no_number_is_a_result(run: Path, helpers: Any, value: float) -> None:
    """Published, in the journal and told, in JSON that any program reads."""

    def broken(work: Work) -> Evaluated:
        return evaluated(work, scores={"heldout_bpb": {"bits_per_byte": value, "byte_perplexity": 2.0}})

    assert watch(run, broken) == (3, 0) and due(run) == []
    texts = [path.read_text() for path in run.glob("evals/step-*/*/results.json")]
    texts += (run / "journal.jsonl").read_text().splitlines()
    found = [json.loads(text, parse_constant=pytest.fail) for text in texts]
    scores = [each["scores"] for each in found if "scores" in each]
    assert scores == [{"heldout_bpb": {"bits_per_byte": None, "byte_perplexity": 2.0}}] * 6
    told = [entry["text"] for entry in helpers.journal(run, "eval-verdict")]
    assert told == ["heldout_bpb: bits_per_byte is no finite number"] * 3
    results = state_files.read(next(run.glob("evals/step-*/*/results.json")), Results)
    assert results is not None and "bits_per_byte    nan" in table(results)


def test_a_checkpoint_given_up_is_told_and_kept_until_somebody_decides(
    run: Path, helpers: Any, run_command: Run
) -> None:
    give_up(run)
    assert protected(run) == {10, 20, 30}
    for done in (run_command("fsdp_pretrain.eval.cli", "report", run), run_command("fsdp_pretrain.cli", "status", run)):
        lines = [line for line in done.stdout.splitlines() if "given up after 3 failed attempts" in line]
        assert len(lines) == 3 and f"(no such partition); then: fsdp-eval retry {run} " in lines[0], done.stdout
    watched = run_command("fsdp_pretrain.eval.cli", "watch", run, "--once")
    assert watched.returncode == 0 and "3 given up (see fsdp-eval retry)" in watched.stdout, watched.stderr
    again = run_command("fsdp_pretrain.eval.cli", "retry", run, 10)
    assert again.returncode == 0 and "step 10: will be evaluated again; 3 failed attempts" in again.stdout
    assert f"if no worker runs: fsdp-eval watch {run} --once" in again.stdout
    assert [(job.checkpoint.step, job.pause) for job in due(run)] == [(10, 0)]
    assert watch(run, works) == (1, 0)
    unknown = run_command("fsdp_pretrain.eval.cli", "retry", run, 10)
    assert unknown.returncode == 78 and "no evaluation of step 10 has failed" in unknown.stderr
    run_command("fsdp_pretrain.eval.cli", "retry", run, expect=0)
    assert watch(run, works) == (2, 0) and failed_evaluations(RunDir(run), load(run / "config.toml")) == []
    decided = [(entry["step"], bool(entry["by"])) for entry in helpers.journal(run, "eval-retry")]
    assert decided == [(10, True), (20, True), (30, True)]


@pytest.mark.quick
def test_protection_has_a_bound(run: Path) -> None:
    """Evaluations that never run, and those that always fail, must not fill the disk."""
    config = tomllib.loads((run / "config.toml").read_text())
    config["checkpoint"]["keep_last"] = 2
    (run / "config.toml").write_text(tomli_w.dumps(config))
    assert protected(run) == {10, 20}
    give_up(run)
    for step in (40, 50, 60):
        records.commit(Store(run / "checkpoints"), step)
    assert protected(run) == {10, 20, 40, 50}
    make_claim(due(run)[2])
    assert protected(run) == {10, 20, 40, 50, 60}


@pytest.mark.quick
def test_the_parents_of_a_merge_stay_until_it_was_evaluated(run: Path) -> None:
    """Else the scores of a merge would depend on when it is evaluated."""
    config = tomllib.loads((run / "config.toml").read_text())
    config["eval"]["merge"] = {"last": "20 steps"}
    (run / "config.toml").write_text(tomli_w.dumps(config))
    files = {**records.CHECKPOINT, CONFIG: (run / "config.toml").read_bytes()}
    for step in (25, 30, 35):
        records.commit(Store(run / "checkpoints"), step, files)

    def merged() -> set[int]:
        return jobs.merged_steps(RunDir(run), load(run / "config.toml"))

    assert watch(run, works) == (3, 0) and merged() == {20, 25, 30, 35}  # of what is due next, so far
    records.commit(Store(run / "checkpoints"), 40, files)
    assert merged() == {25, 30, 35, 40} and protected(run) == {40}
    records.commit(Store(run / "checkpoints"), 55, files)
    assert merged() == {25, 30, 35, 40, 55}
    give_up(run)
    assert merged() == {40, 55} and protected(run) == {40}
    (run / "checkpoints/step-00000040" / MANIFEST).unlink()  # damaged: those after it are merged later
    assert merged() == {55}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("merge", "parents"),
    [
        ({"last": "20 steps"}, {24, 26, 28, 30, 32, 34, 36, 38, 40, 42}),
        ({"last": "20 steps", "every": "10 steps"}, {30, 40}),  # of which there is only one at times
    ],
)
def test_the_parents_of_a_merge_stay_until_it_is_due(run: Path, merge: dict[str, str], parents: set[int]) -> None:
    """Retention after each save, as a trainer applies it, deletes none before."""
    config = tomllib.loads((run / "config.toml").read_text())
    config["eval"] |= {"every": "42 steps", "merge": merge}
    (run / "config.toml").write_text(tomli_w.dumps(config))
    store = Store(run / "checkpoints")
    shutil.rmtree(store.directory)
    for step in range(2, 43, 2):
        records.commit(store, step, {**records.CHECKPOINT, CONFIG: (run / "config.toml").read_bytes()})
        store.retain(1, lambda _: False, jobs.merged_steps(RunDir(run), load(run / "config.toml")))
    assert {checkpoint.step for checkpoint in store.scan()} == {*parents, 42}


@pytest.mark.quick
def test_nothing_of_an_abandoned_commit_counts_for_another_of_its_step(run: Path, helpers: Any) -> None:
    """A checkpoint was rejected, and its step trained and saved again: results and failures are not its."""
    old = due(run)
    with jobs.claim(old[0]) as mine:
        assert mine is not None and jobs.publish(mine, evaluated(mine))
    give_up(run)
    assert [job.checkpoint.step for job in given_up_jobs(RunDir(run), load(run / "config.toml"))] == [20, 30]
    for step in (10, 20, 30):
        records.commit(Store(run / "checkpoints"), step, committed="2026-06-02T12:00:00.000Z")
    assert [job.checkpoint.step for job in due(run)] == [10, 20, 30]
    assert watch(run, works) == (3, 0)
    for step in (10, 20, 30):
        (path,) = run.glob(f"evals/step-{step:08d}/*/results.json")
        assert json.loads(path.read_text())["committed"] == "2026-06-02T12:00:00.000Z"
    assert [entry["committed"][8:10] for entry in helpers.journal(run, "eval")] == ["01", "02", "02", "02"]
    assert watch(run, works) == (0, 0)
