"""Standard errors and paired comparisons against the jackknife and counts by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records
from processes import Run

from fsdp_pretrain.eval import compare, sample_files
from fsdp_pretrain.eval.results import Results
from fsdp_pretrain.eval.uncertainty import as_array, influence, interval, score_of, standard_error
from fsdp_pretrain.run import state_files

pytestmark = pytest.mark.quick
DOCUMENTS = 400


def bits(values: Any) -> float:
    """Bits per byte, as lm-eval computes them."""
    a, b = zip(*values, strict=True)
    return float(-sum(a) / sum(b) / math.log(2))


def mean(values: Any) -> float:
    return sum(values) / len(values)


def jackknife(score: Callable[[Any], float], values: list[Any]) -> float:
    """Standard error from the scores that leave one document out: for any score, without its formula."""
    n = len(values)
    left = [score(values[:i] + values[i + 1 :]) for i in range(n)]
    return math.sqrt((n - 1) / n * sum((value - mean(left)) ** 2 for value in left))


def texts(seed: int, level: float) -> list[tuple[float, float]]:
    """(log-likelihood, bytes) of documents of very different lengths; the lengths do not depend on `level`."""
    lengths = np.random.default_rng(1).integers(50, 3000, DOCUMENTS)
    noise = np.random.default_rng(2).normal(0, 0.1, DOCUMENTS) + np.random.default_rng(seed).normal(0, 0.02, DOCUMENTS)
    return [(-float(n * (level + e)), float(n)) for n, e in zip(lengths, noise, strict=True)]


def answers(seed: int, right: float) -> list[float]:
    return np.random.default_rng(seed).binomial(1, right, DOCUMENTS).astype(float).tolist()


@pytest.mark.parametrize(
    ("score", "values"),
    [
        (bits, texts(3, 0.8)),
        (mean, np.random.default_rng(4).normal(0.3, 2, DOCUMENTS).tolist()),
        (mean, answers(6, 0.3)),
    ],
)
def test_standard_errors_are_those_of_the_jackknife(score: Any, values: list[Any]) -> None:
    x = as_array(values, score(values))
    assert x is not None and score_of(x) == pytest.approx(score(values))
    assert standard_error(influence(x)) == pytest.approx(jackknife(score, values), rel=0.01)
    assert as_array(values, score(values) + 1e-3) is None  # of another metric: nothing is known


# ---------------------------------------------------------------- the command

UP = {"choice": {"acc": True}, "texts": {"bits_per_byte": False}}


def publish(
    path: Path,
    *,
    tasks: dict[str, tuple[str, list[Any]]],
    first: int = 0,
    keep: bool = True,
    full: bool = False,
    **changes: Any,
) -> Path:
    """Results of (metric, values of documents) by task, with samples; the documents are numbered from `first` on."""
    scores, kept = {}, {}
    for task, (metric, values) in tasks.items():
        score: Any = {"acc": mean, "bits_per_byte": bits}[metric]
        scores[task] = {metric: score(values), f"{metric}_stderr": 0.01}
        kept[task] = [
            {
                "doc_id": i,
                "doc_hash": f"{i % 350:016x}".ljust(64, "0"),
                "filter": "none",
                "metrics": [metric],
                metric: value,
                "doc": {},
            }
            for i, value in enumerate(values, first)
        ]  # some documents are there twice
    names = sample_files.write(path, kept, full=full) if keep else {}
    given = {"scores": scores, "samples": names, "higher_is_better": UP, "versions": dict.fromkeys(tasks, 1.0)}
    state_files.write(path, Results(**records.results(**{**given, **changes})))
    return path


@pytest.mark.parametrize(("right", "documents"), [(1, 8), (3, 8), (40, 64), (0, 20), (20, 20)])
def test_the_interval_of_a_share_is_wilsons(right: int, documents: int) -> None:
    values = np.array([1.0] * right + [0.0] * (documents - right))
    error = standard_error(values - values.mean())
    assert error is not None
    expected = pytest.importorskip("scipy.stats").binomtest(right, documents).proportion_ci(0.95, method="wilson")
    assert interval("acc", values.mean(), error, documents) == pytest.approx(tuple(expected), abs=2e-5)
    assert interval("bits_per_byte", 0.02, 0.1, documents) == pytest.approx((0.02 - 0.196, 0.02 + 0.196))


def test_paired_differences(tmp_path: Path, run_command: Run) -> None:
    """The jackknife of the difference, counts of documents, and far less uncertainty than of the scores."""
    values = {10: (texts(3, 0.8), answers(6, 0.3)), 20: (texts(4, 0.79), answers(7, 0.32))}
    for step, (documents, right) in values.items():
        tasks: Any = {"texts": ("bits_per_byte", documents), "choice": ("acc", right)}
        path = tmp_path / f"step-{step}/set/results.json"
        path.parent.mkdir(parents=True)
        publish(path, tasks=tasks, full=step == 10, step=step)
    done = run_command(
        "fsdp_pretrain.eval.cli", "compare", tmp_path / "step-10", tmp_path / "step-20", "--json", expect=0
    )
    rows = {row["task"]: row for row in json.loads(done.stdout)["differences"]}
    for task, at, score in (("texts", 0, bits), ("choice", 1, mean)):
        pairs = list(zip(values[10][at], values[20][at], strict=True))
        row = rows[task]

        def gain(of: list[Any], score: Callable[[Any], float] = score) -> float:
            return score([b for _, b in of]) - score([a for a, _ in of])

        assert row["unpaired"] == "" and row["documents"] == DOCUMENTS
        assert row["difference"] == pytest.approx(gain(pairs), rel=1e-6)
        assert row["stderr"] == pytest.approx(jackknife(gain, pairs), rel=0.01)
    text = rows["texts"]
    lower = sum(b[0] > a[0] for a, b in zip(values[10][0], values[20][0], strict=True))  # of the same length
    assert (text["better"], text["worse"], text["equal"]) == (lower, DOCUMENTS - lower, 0)
    assert text["verdict"] == "better" and text["stderr"] < 0.3 * jackknife(bits, values[10][0])
    choice = rows["choice"]
    changed = [b - a for a, b in zip(values[10][1], values[20][1], strict=True)]
    assert (choice["better"], choice["worse"]) == (changed.count(1), changed.count(-1))
    assert choice["verdict"] == "no difference"
    back = run_command(
        "fsdp_pretrain.eval.cli", "compare", tmp_path / "step-20", tmp_path / "step-10", "--tasks", "texts"
    )
    assert "  worse\n" in back.stdout and f"{lower} worse" in back.stdout and "choice" not in back.stdout


def test_documents_of_only_one_side_are_left_out(tmp_path: Path, run_command: Run) -> None:
    right = [1.0, 0.0, 1.0, 1.0]
    a = publish(tmp_path / "a.json", tasks={"choice": ("acc", right), "texts": ("bits_per_byte", texts(3, 1.0))})
    b = publish(tmp_path / "b.json", tasks={"choice": ("acc", right[1:])}, first=1)
    found = json.loads(run_command("fsdp_pretrain.eval.cli", "compare", a, b, "--json").stdout)
    (row,) = found["differences"]
    assert (row["documents"], row["a"], row["b"], row["equal"]) == (3, 2 / 3, 2 / 3, 3) and row["unpaired"] == ""


def test_a_score_that_is_no_number_is_null_in_json(tmp_path: Path, run_command: Run) -> None:
    a, b = (
        publish(tmp_path / name, tasks={"choice": ("acc", [1.0, 0.0])}, scores={"choice": {"acc": score}})
        for name, score in (("a.json", 0.5), ("b.json", float("nan")))
    )
    (row,) = json.loads(
        run_command("fsdp_pretrain.eval.cli", "compare", a, b, "--json", expect=0).stdout, parse_constant=pytest.fail
    )["differences"]
    assert (row["a"], row["b"]) == (0.5, None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_fewshot": {"choice": 5}}, "other few-shot examples: None and 5"),
        ({"versions": {"choice": 2.0}}, "other versions of the task: 1.0 and 2.0"),
        ({"gen_kwargs": {"choice": {"temperature": 1}}}, "other options of generating answers"),
        ({"keep": False}, "no values of single documents were kept for choice of step 1"),
        ({"samples": {"choice": "samples_gone.jsonl"}}, "samples_gone.jsonl: No such file"),
        ({"first": 200}, "they have no document in common"),
        ({"scores": {"choice": {"acc": 0.9, "acc_stderr": 0.01}}}, "no mean or ratio"),
    ],
)
def test_what_cannot_be_paired_is_not_judged(
    tmp_path: Path, run_command: Run, changes: dict[str, Any], reason: str
) -> None:
    right = answers(6, 0.5)[:100]
    a = publish(tmp_path / "a.json", tasks={"choice": ("acc", right)})
    b = publish(tmp_path / "b.json", tasks={"choice": ("acc", [1.0] * 70 + [0.0] * 30)}, **changes)
    shown = run_command("fsdp_pretrain.eval.cli", "compare", a, b).stdout
    assert (
        "unknown\n    not comparable document by document: " in shown and reason in shown and "paired over" not in shown
    )


@pytest.mark.parametrize(
    ("up", "count", "verdict"),
    [(True, 40, "better"), (False, 40, "worse"), (None, 40, "better"), (True, 9, "unknown")],
)
def test_verdicts(tmp_path: Path, up: bool | None, count: int, verdict: str) -> None:
    """Nine documents that all improve are no proof."""
    ways: Any = {} if up is None else {"t": {"acc": up}}
    paths = [
        publish(tmp_path / f"{score}.json", tasks={"t": ("acc", [score] * count)}, higher_is_better=ways)
        for score in (0.0, 1.0)
    ]
    found = compare.compare(*(compare.read_side(path) for path in paths))
    assert [row.verdict for row in found.differences] == [verdict]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["{a}", "/nowhere"], "there are no results in /nowhere"),
        (["{a}", "{a}", "--tasks", "choice,other"], "do not both have task other (A: choice; B: choice)"),
    ],
)
def test_mistakes(tmp_path: Path, run_command: Run, words: list[str], expected: str) -> None:
    a = publish(tmp_path / "a.json", tasks={"choice": ("acc", [1.0, 0.0])})
    done = run_command("fsdp_pretrain.eval.cli", "compare", *(word.format(a=a) for word in words))
    assert done.returncode == 78 and expected in done.stderr and "Traceback" not in done.stderr
