"""Bundled tasks, options of generating answers, and what an evaluation says of itself, each against its definition."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

pytest.importorskip("lm_eval")
from fsdp_pretrain import models
from fsdp_pretrain.config.data_section import AnyObjective, CausalObjective, GLMObjective
from fsdp_pretrain.config.model import AnyModel
from fsdp_pretrain.config.sections import EvalSection
from fsdp_pretrain.data.packing.objectives import Specials
from fsdp_pretrain.data.text.tokenizer import Tokenizer
from fsdp_pretrain.eval import scorer
from fsdp_pretrain.eval.attempt import guarded
from fsdp_pretrain.eval.checkpoints import EvaluatedModel
from fsdp_pretrain.eval.evaluation import evaluate
from fsdp_pretrain.eval.harness import CheckpointLM, answer_limits
from fsdp_pretrain.eval.samples import SampleLoss
from fsdp_pretrain.eval.scorer import Prompt
from fsdp_pretrain.eval.tasks import choice_questions, load_tasks, read_heldout, scores
from fsdp_pretrain.models import Decoder
from fsdp_pretrain.parallel.fsdp import materialise

pytestmark = pytest.mark.quick
LENGTH = 40


def document(number: int, lines: int = 60) -> str:
    """Every line says where it is from."""
    return "".join(f"line {line} of document {number} has a few words here\n" for line in range(lines))


def test_questions_are_passages_of_their_documents() -> None:
    texts = [document(number) for number in range(6)]
    questions = choice_questions(texts)
    assert questions == choice_questions(texts) and 24 <= len(questions) <= 36  # six of a document, less equal choices
    assert len({question["context"] for question in questions}) == len(questions)
    for question in questions:
        choices, truth = question["choices"], question["choices"][question["answer"]]
        (own,) = [text for text in texts if question["context"] + truth in text]
        assert len(question["context"]) == 600 and len(set(choices)) == 4 == len(choices)
        assert question["context"].endswith("\n") and {len(choice) for choice in choices} == {120}
        others = [choice for choice in choices if choice != truth]
        assert all(any(choice in text for text in texts if text != own) for choice in others)
        assert len({choice.split()[4] for choice in choices if choice.startswith("line")}) == 4  # of four documents
    assert set(Counter(question["answer"] for question in questions)) == {0, 1, 2, 3}


@pytest.mark.parametrize("texts", [[document(number) for number in range(3)], ["short"] * 9, [document(0)] * 9])
def test_there_are_no_questions_without_four_different_passages(texts: list[str]) -> None:
    assert choice_questions(texts) == []


def test_scores_are_named_after_metric_and_filter() -> None:
    row: dict[str, Any] = {"acc,none": 1, "acc_stderr,none": "N/A", "f1,strict": 0.5, "alias": "t", "ok,none": True}
    row |= {"f1_stderr,strict": 0.25, "exact,none": 0.0, "exact_stderr,none": 0.125, "em_stderr,strict": math.nan}
    assert scores({"t": row, "empty": {"alias": "e"}}) == {
        "t": {"acc": 1.0, "f1/strict": 0.5, "f1/strict_stderr": 0.25, "exact": 0.0, "exact_stderr": 0.125}
    }


@pytest.mark.parametrize("content", [None, "", '{"text": "short"}\n', "no JSON\n"])
def test_a_heldout_file_that_cannot_be_used_is_no_failed_attempt(tmp_path: Path, content: str | None) -> None:
    """It is refused whatever the checkpoint, so that no checkpoint is given up for it."""
    path = tmp_path / "heldout.jsonl"
    if content is not None:
        path.write_text(content)
    section = EvalSection.model_validate({"heldout": str(path), "tasks": ["heldout_choice"]})

    failure = guarded(lambda: load_tasks(section), tmp_path, 600.0)  # type: ignore[arg-type, return-value]
    assert failure is not None and failure.refused


def test_a_sample_whose_loss_is_not_finite_is_shown_first() -> None:
    """And one without targets last."""
    means = [None, 1.0, 3.0, None, 2.0]
    place = {"length": 512, "rank": 0, "micro_batch": 0, "source": "text", "epoch": 0, "pieces": []}
    made = [
        SampleLoss(index=index, sum=mean, count=0 if index == 3 else 512, mean=mean, **place)
        for index, mean in enumerate(means)
    ]
    ordered = sorted(made, key=lambda sample: -sample.height)
    assert [sample.index for sample in ordered] == [0, 2, 4, 1, 3]


def test_a_task_of_ones_own_may_have_any_name() -> None:
    section = EvalSection.model_validate({"tasks": ["heldout_math", "heldout_bpb", "separator_probe"]})
    assert section.bundled_tasks == ["heldout_bpb", "separator_probe"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ((), 256)),
        ({"until": "x", "max_gen_toks": None}, (("x",), 256)),
        ({"until": ["x", "", "y"], "max_new_tokens": "7"}, (("x", "y"), 7)),
        ({"do_sample": False, "temperature": 0.5, "num_beams": 1, "repetition_penalty": 1.0}, ((), 256)),
        ({"do_sample": None, "seed": 7}, ((), 256)),
    ],
)
def test_options_of_answers(options: dict[str, Any], expected: tuple[tuple[str, ...], int]) -> None:
    assert answer_limits(options, 300) == expected


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_gen_toks": 300}, "answers of 300 tokens, but the model reads 300"),
        ({"max_gen_toks": 0}, "answers of 0 tokens"),
        ({"do_sample": True}, "do_sample=True"),
        ({"temperature": 1, "top_p": 0.5}, "temperature=1: not supported"),
        (
            {"do_sample": False, "num_beams": 4, "unheard_of": 0, "top_k": 9},
            "^num_beams=4, unheard_of=0: not supported$",
        ),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        answer_limits(options, 300)


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize(
    ("stops", "answer"),
    [
        ((), "the run = data ( ) loss"),
        (("data", "run"), "the "),  # the first that comes, in whatever order they are given
        (("un = da",), "the r"),  # of several tokens
        (("no such text",), "the run = data ( ) loss"),
        (("loss",), "the run = data ( ) "),
    ],
)
def test_an_answer_ends_before_the_first_stop(shared_corpus: Path, stops: tuple[str, ...], answer: str) -> None:
    """Of a model whose table and blocks make it say one text: each token has its own direction."""
    tokenizer = Tokenizer.load(shared_corpus / "tokenizer")
    judged, text = adapter(tokenizer), "the run = data ( ) loss"
    script = [*tokenizer.encode(["x" + text])[0], tokenizer.eod]
    assert len(set(script)) == len(script)
    model = judged.scorer._model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.zero_()
        assert model.head is not None
        for place, (token, following) in enumerate(pairwise(script)):
            model.embedding.weight[token, place] = 1.0
            model.head.weight[following, place] = 1.0
    first = tokenizer.encode(["x"])[0]
    assert script[: len(first)] == first
    assert judged.generate_until([request("x", {"until": list(stops), "max_gen_toks": 30})], True) == [answer]


def test_the_end_of_a_blank_ends_an_answer(shared_corpus: Path) -> None:
    """GLM: `eop` follows what fills a blank. Here it is likelier than one of the tokens of a greedy answer."""
    tokenizer = Tokenizer.load(shared_corpus / "tokenizer")
    objective = GLMObjective(kind="glm", row=LENGTH - 8)
    eop = Specials.behind(tokenizer.vocab_size).eop
    model = build("glm", eop + 1, layers=2)
    judged = CheckpointLM(model, tokenizer, length=LENGTH, batch=2, objective=objective)
    generator = torch.Generator().manual_seed(1)
    for parameter in (each for each in model.parameters() if each.ndim > 1):
        torch.nn.init.normal_(parameter, std=0.5, generator=generator)
    asked = request("a shard", {"max_gen_toks": 8, "until": []})
    (whole,) = judged.generate_until([asked], disable_tqdm=True)
    before, word, _ = whole.partition(" run")
    assert before and word
    table = model.embedding.weight if model.head is None else model.head.weight
    with torch.no_grad():
        table[eop] = 1.001 * table[tokenizer.encode([word])[0][0]]
    assert judged.generate_until([asked], disable_tqdm=True) == [before]


# ---------------------------------------------------------------- one evaluation


def request(*args: Any) -> Any:
    return SimpleNamespace(args=args)


def build(family: str = "llama", vocab: int = 512, layers: int = 1) -> Decoder:
    size = {"layers": layers, "hidden": 32, "heads": 4, "ffn": 64}
    values = {**size, "family": family, "vocab": vocab, **({"kv_heads": 4} if family == "llama" else {})}
    return materialise(models.build(TypeAdapter(AnyModel).validate_python(values)), 1, torch.device("cpu"))


def adapter(tokenizer: Tokenizer) -> CheckpointLM:
    return CheckpointLM(build(), tokenizer, length=LENGTH, batch=2)


def subject(tokenizer: Tokenizer, model: Decoder, objective: AnyObjective | None = None) -> EvaluatedModel:
    return EvaluatedModel(
        path=Path("/somewhere"),
        step=7,
        tokens=123,
        tokenizer=tokenizer,
        length=LENGTH,
        objective=objective or CausalObjective(),
        read=lambda device, world: model,
    )


def test_what_an_evaluation_says_of_itself(shared_corpus: Path, tmp_path: Path) -> None:
    tokenizer, heldout = Tokenizer.load(shared_corpus / "tokenizer"), shared_corpus / "heldout.jsonl"
    model, rows = build(), list[int]()
    model.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    section = EvalSection(tasks=["heldout_bpb", "separator_probe"], heldout=heldout, limit=3, batch=2)
    found = evaluate(subject(tokenizer, model), section, out=tmp_path / "results.json")
    assert (found.step, found.tokens, found.checkpoint, found.limit) == (7, 123, "/somewhere", 3)
    assert found.tasks == "heldout_bpb+separator_probe" and found.versions == {"heldout_bpb": 1.0}
    assert found.documents == {"heldout_bpb": 3, "separator_probe": 3} and found.num_fewshot == {"heldout_bpb": 0}
    assert found.higher_is_better["heldout_bpb"] == {"bits_per_byte": False} and found.gen_kwargs == {}
    assert max(rows) == 2 and found.seconds > 0
    (name,) = found.samples.values()
    lines = (tmp_path / name).read_text().splitlines()
    assert len(lines) == 3 and "doc_hash" in lines[0] and '"doc":' not in lines[0]
    texts = read_heldout(heldout)[:3]
    plain = CheckpointLM(model, tokenizer, length=LENGTH, batch=2)
    total = sum(plain.loglikelihood_rolling([request(text) for text in texts], True))
    bits = -total / math.log(2) / sum(len(text.encode()) for text in texts)
    assert found.scores["heldout_bpb"]["bits_per_byte"] == pytest.approx(bits)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_prompt_of_a_broken_model_is_answered(broken: float) -> None:
    """With its likeliest token: the scores of the same evaluation tell what is wrong."""
    logits = torch.tensor([[0.0, broken, 1.0], [0.0, 0.0, 90.0]])
    prompts = [Prompt([1], 1, temperature=0.8), Prompt([1], 1, temperature=1e-40)]
    drawn = scorer._draw(logits, prompts, [torch.Generator().manual_seed(1) for _ in prompts])
    assert drawn == [1, 2]
