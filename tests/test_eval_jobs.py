"""Evaluation without a model: its held-out texts, the claims of its workers, its deadline."""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import records

from data.corpus.corpus import Corpus
from eval import jobs
from eval.attempt import EvaluationLimits, Results, limits
from eval.tasks import choice_questions, read_heldout, unigram_bits_per_byte
from fsdp_pretrain.checkpoint.store import Store
from fsdp_pretrain.config.config import load
from fsdp_pretrain.record.files import RunDir
from fsdp_pretrain.record.lease import this_process


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


def test_questions_are_real_and_fair(shared_corpus: Path) -> None:
    texts = read_heldout(shared_corpus / "heldout.jsonl")
    questions = choice_questions(texts)
    assert questions == choice_questions(texts) and len(questions) >= 10
    for question in questions:
        choices = question["choices"]
        assert len(set(choices)) == 4 and len({len(choice) for choice in choices}) == 1
        source = next(text for text in texts if question["context"] + choices[question["answer"]] in text)
        for n, choice in enumerate(choices):
            if n != question["answer"]:  # a real passage of another document
                assert any(choice in text for text in texts if text != source)
    answers = [question["answer"] for question in questions]
    assert {answers.count(n) > 0 for n in range(4)} == {True}


def test_unigram_baseline_is_the_entropy_of_token_counts(shared_corpus: Path) -> None:
    corpus = Corpus(shared_corpus / "corpus")
    tokenizer = corpus.tokenizer()
    counts = Counter(t for s in range(len(corpus.manifest.shards)) for t in corpus.shard(s).tokens.tolist())
    total = sum(counts.values()) + tokenizer.vocab_size
    texts = read_heldout(shared_corpus / "heldout.jsonl")
    bits = -sum(math.log2((counts[t] + 1) / total) for ids in tokenizer.encode(texts) for t in ids)
    expected = bits / sum(len(text.encode()) for text in texts)
    found = unigram_bits_per_byte([shared_corpus / "corpus"], tokenizer, shared_corpus / "heldout.jsonl")
    assert found == pytest.approx(expected)


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
        assert mine.publish(Results(**records.results()))
    with jobs.claim(first) as done:  # done: not claimed again
        assert done is None
    assert [job.checkpoint.step for job in jobs.due_jobs(RunDir(run), config)] == [20, 30]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("changes", "age", "free"),
    [
        ({}, 0, False),
        ({"pid": 2**22 + 5}, 0, True),
        ({"process_started": 1.0}, 0, True),  # the process id was reused
        ({"host": "elsewhere", "pid": 2**22 + 5}, 30, False),
        ({"host": "elsewhere"}, 300, True),
    ],
)
def test_stale_claims(run: Path, changes: dict[str, Any], age: float, free: bool) -> None:
    job = jobs.due_jobs(RunDir(run), load(run / "config.toml"))[0]
    path = make_claim(job, **changes)
    os.utime(path, (time.time() - age,) * 2)
    with jobs.claim(job) as mine:
        assert (mine is not None) == free


@pytest.mark.quick
def test_a_frozen_worker_that_wakes_up_does_not_publish(run: Path) -> None:
    job = jobs.due_jobs(RunDir(run), load(run / "config.toml"))[0]
    with jobs.claim(job) as mine:
        assert mine is not None
        make_claim(job)  # taken over meanwhile
        assert not mine.publish(Results(**records.results()))
    assert not job.results.exists() and (job.folder / "claim.json").exists()


@pytest.mark.quick
def test_deadlines_grow_with_what_evaluations_take(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert limits(run, "a", 100.0) == EvaluationLimits(100.0, 300.0)
    for step, seconds in enumerate((10, 50, 2000)):
        folder = run.evals / f"step-{step:08d}/a"
        folder.mkdir(parents=True)
        (folder / "results.json").write_text(json.dumps(records.results(seconds=float(seconds))))
    assert limits(run, "a", 100.0) == EvaluationLimits(150.0, 450.0)  # three times the median
    assert limits(run, "b", 100.0) == EvaluationLimits(100.0, 300.0)
