"""The separator probe: its scores against explicit sums, and the verdict at every stage of training."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from laboratory import moved
from processes import ROOT, Run

pytest.importorskip("lm_eval")
import torch

from fsdp_pretrain.checkpoint.store import Store
from fsdp_pretrain.config.data_section import AnyObjective, CausalObjective, GLMObjective
from fsdp_pretrain.config.sections import EvalSection
from fsdp_pretrain.data.text.tokenizer import Tokenizer
from fsdp_pretrain.eval.checkpoints import open_checkpoint
from fsdp_pretrain.eval.evaluation import open_adapter
from fsdp_pretrain.eval.separators import Subject, evenly, separator_probe
from fsdp_pretrain.eval.tasks import read_heldout

FIRST = 70
"""Step of the first checkpoint, which is evaluated."""


@pytest.fixture(scope="module")
def clean(module_lab: Any) -> Path:
    """A run on a clean corpus, not evaluated."""
    return train(module_lab, "clean", module_lab.corpus)


def train(lab: Any, name: str, corpus: Path, vocab: int = 520) -> Path:
    evaluation = {"every": f"{FIRST} steps", "heldout": str(lab.heldout), "launch": False}
    config = lab.config(
        name,
        model={"vocab": vocab},
        data={"sources": [{"name": "text", "path": str(corpus)}], "sequence_length": 64},
        train={"duration": f"{FIRST} steps", "global_batch": "32 samples", "micro_batch": 32},
        optimizer={"lr": 3e-2},
        checkpoint={"every": f"{FIRST} steps"},
        eval={**evaluation, "tasks": ["separator_probe"]},
    )
    lab.train(config)
    return Path(lab.path / name)


# ---------------------------------------------------------------- the acceptance: doubled separators and their twin


def doubled(lab: Any, helpers: Any, run_command: Run, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Documents with a separator that the manifest denies, and a packer that believes it: each is followed by two."""
    tokenizer = Tokenizer.load(lab.tokenizer)
    texts = [json.loads(line)["text"] for line in (lab.corpus.parent / "train.jsonl").read_text().splitlines()]
    corpus = helpers.corpus(lab.path / "doubled", [[*ids, tokenizer.eod] for ids in tokenizer.encode(texts)], tokenizer)
    assert "separator-at-end" in run_command("fsdp_pretrain.data.cli", "validate", corpus, expect=2).stdout
    monkeypatch.setenv("EXECUTE_FIRST", str(ROOT / "tests/faults.py"))
    monkeypatch.setenv("FAULT", json.dumps({"rank": "all", "step": 0, "kind": "trust"}))
    return train(lab, "run", corpus)


@pytest.mark.shows("C4")
def test_a_second_separator_is_told_at_the_first_evaluated_checkpoint(
    lab: Any, helpers: Any, run_command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, said = doubled(lab, helpers, run_command, monkeypatch), "separators are doubled in the training data"
    monkeypatch.delenv("EXECUTE_FIRST", raising=False)
    done = run_command("fsdp_pretrain.eval.cli", "watch", run, "--once", expect=0)
    assert f"ALARM: separator_probe of step {FIRST}: " in done.stderr and said in done.stderr
    entries = helpers.journal(run, "eval-verdict")
    assert [entry["step"] for entry in entries] == [FIRST] and all(said in entry["text"] for entry in entries)
    report = run_command("fsdp_pretrain.eval.cli", "report", run)
    assert report.stdout.count("ALARM: ") == 1 and report.returncode == 0


def test_its_clean_twin_is_not(clean: Path, tmp_path: Path, helpers: Any, run_command: Run) -> None:
    run = moved(clean, tmp_path / "run")
    assert "ALARM" not in run_command("fsdp_pretrain.eval.cli", "watch", run, "--once", expect=0).stderr
    assert not helpers.journal(run, "eval-verdict") and len(helpers.journal(run, "eval")) == 1


# ---------------------------------------------------------------- scores


@pytest.fixture(scope="module")
def subject(clean: Path, module_lab: Any) -> Subject:
    checkpoint = Store(clean / "checkpoints").find(FIRST)
    judged = replace(open_checkpoint(checkpoint), tokens=1000)
    adapter = open_adapter(judged, EvalSection())
    documents = judged.tokenizer.encode(read_heldout(module_lab.heldout)[:3])
    return Subject(adapter, judged, [documents[0][:20], documents[1][:5], documents[2]])


def probabilities(subject: Subject, context: list[int]) -> torch.Tensor:
    """Of every next token."""
    logits = subject.model.scorer._model(torch.tensor([context]))[0, -1].double()  # type: ignore[attr-defined]
    return logits.softmax(-1).detach()


def test_separator_scores_are_probabilities_of_the_model(subject: Subject) -> None:
    found = separator_probe(subject)
    eod, ends, seconds, insides, repeats = subject.source.tokenizer.eod, [], [], [], []
    for document in subject.documents:
        context = [eod, *document][-61:]  # two less than the length of training, and room for the separator
        ends.append(probabilities(subject, context)[eod])
        seconds.append(probabilities(subject, [*context, eod])[eod])
        for at in evenly(4, 2, len(context)):
            insides.append(probabilities(subject, context[:at])[eod])
            repeats.append(probabilities(subject, context[:at])[context[at - 1]])
    for name, values in (("end", ends), ("second", seconds), ("inside", insides), ("repeat", repeats)):
        assert found.scores[name] == pytest.approx(float(torch.stack(values).mean()), rel=1e-4), name
        error = float(torch.stack(values).std() / math.sqrt(len(values)))
        assert found.scores[f"{name}_stderr"] == pytest.approx(error, rel=1e-3)
    assert found.documents == 3


@dataclass
class Table:
    """A model that knows only the last token: P(separator) after a separator, after the last token of documents, and
    after any other; and that a sequence repeats, and sums."""

    eod: int
    last: int
    second: float
    end: float
    inside: float
    vocabulary: int = 520

    def score_tokens(self, jobs: Sequence[tuple[list[int], int]], *, quiet: bool = True) -> list[tuple[float, bool]]:
        return [
            (sum(self._log(tokens[:at], tokens[at]) for at in range(first, len(tokens))), False)
            for tokens, first in jobs
        ]

    def _log(self, context: list[int], token: int) -> float:
        separator = {self.eod: self.second, self.last: self.end}.get(context[-1], self.inside)
        return math.log(separator if token == self.eod else (1 - separator) / (self.vocabulary - 1))


RATE = 0.01
"""Of the shared corpus, about."""


@pytest.mark.parametrize(
    ("stage", "second", "end", "inside", "trained", "ok"),
    [
        ("nothing learned", 1 / 520, 1 / 520, 1 / 520, 1e3, None),
        ("token frequencies", RATE, RATE, RATE, 1e3, None),
        ("separators are followed by something", 0.15, 0.4, RATE, 1e3, True),
        ("clean", 1e-4, 0.4, RATE, 1e6, True),
        ("ends cannot be foreseen", 1e-4, RATE, RATE, 1e6, True),
        ("doubled, early", 0.5, 0.3, RATE, 1e3, False),
        ("doubled in some documents, late", 0.3, 0.3, RATE, 1e6, False),
        ("inside text", 1e-4, 0.4, 0.3, 1e3, False),
        ("never seen", 1e-6, 1e-6, 1e-6, 1e6, None),  # and no better than token frequencies
        ("never seen, text learned, early", 1e-6, 1e-6, 1e-6, 1e3, None),
        ("never seen, text learned", 1e-6, 1e-6, 1e-6, 1e6, False),
    ],
)
def test_verdicts(
    subject: Subject,
    stage: str,
    second: float,
    end: float,
    inside: float,
    trained: float,
    ok: bool | None,
) -> None:
    held = [[*document[:-1], 7] for document in subject.documents if 7 not in document[:-1]]
    vocabulary = 20 if "text learned" in stage else 520  # as if it knew which twenty tokens may come
    model = Table(subject.source.tokenizer.eod, 7, second, end, inside, vocabulary)
    judged = replace(subject.source, tokens=int(trained / RATE))
    given = replace(subject, model=model, documents=held, source=judged)
    verdict = separator_probe(given).verdict
    assert verdict is not None and verdict.ok is ok, verdict


def test_doubled_separators_are_told_from_a_single_document(subject: Subject) -> None:
    """Which gives no standard error."""
    model = Table(subject.source.tokenizer.eod, 7, second=0.5, end=0.3, inside=RATE)
    probed = separator_probe(replace(subject, model=model, documents=[[*subject.documents[0][:-1], 7]]))
    assert "second_stderr" not in probed.scores and probed.verdict.ok is False


@pytest.mark.parametrize("objective", [CausalObjective(), GLMObjective(kind="glm", row=64)])
def test_a_model_that_computes_nan_has_scores_that_are_none_and_no_verdict(
    subject: Subject, objective: AnyObjective
) -> None:
    model = Table(subject.source.tokenizer.eod, 7, math.nan, math.nan, math.nan)
    probed = separator_probe(replace(subject, model=model, source=replace(subject.source, objective=objective)))
    assert all(math.isnan(probed.scores[name]) for name in ("end", "second", "inside", "repeat"))
    assert probed.verdict.ok is None
