"""Batches, padding and the cache of keys change nothing: against plain forward passes, one sequence each."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from sentencepiece import SentencePieceTrainer

from fsdp_pretrain import models
from fsdp_pretrain.config.model import AnyModel
from fsdp_pretrain.data.text.tokenizer import Tokenizer
from fsdp_pretrain.eval.scorer import Prompt, Query, Scorer
from fsdp_pretrain.models import Decoder
from fsdp_pretrain.models.masks import Slots
from fsdp_pretrain.parallel.fsdp import materialise

VOCABULARY, LENGTH = 512, 40
SIZE = {"layers": 2, "hidden": 32, "heads": 4, "vocab": VOCABULARY}
WINDOWS = {"sliding_window": 6, "sliding_window_pattern": 2}
YARN = {"kind": "yarn", "factor": 4.0, "original_length": 16}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**SIZE, "family": "llama", "kv_heads": 2, "ffn": 64, "init_std": 0.3},
    "qwen2": {**SIZE, "family": "qwen2", "kv_heads": 1, "ffn": 64, "tied_head": True, "init_std": 0.3},
    "qwen3": {**SIZE, "family": "qwen3", "kv_heads": 2, "head_size": 12, "ffn": 64, "init_std": 0.3},
    "mistral": {**SIZE, "family": "mistral", "ffn": 64, "init_std": 0.3, "sliding_window": 5},
    "olmo3": {**SIZE, "family": "olmo3", "kv_heads": 2, "ffn": 64, "init_std": 0.3, **WINDOWS, "rope_scaling": YARN},
    "gemma3_text": {**SIZE, "family": "gemma3_text", "head_size": 12, "ffn": 64, **WINDOWS, "rope_local_base": 100.0},
    "gpt": {**SIZE, "family": "gpt", "positions": LENGTH, "init_std": 0.3},
    "alibi": {
        **SIZE,
        "family": "gpt",
        "positions": "alibi",
        "embedding_norm": True,
        "scores": "layer_scaled",
        "init_std": 0.3,
    },
    "glm": {**SIZE, "family": "glm", "ffn": 64},
    "glm-2d": {**SIZE, "family": "glm", "ffn": 64, "positions": "rope-2d"},
}
CPU = torch.device("cpu")
pytestmark = pytest.mark.quick


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def model(name: str) -> Decoder:
    config: AnyModel = TypeAdapter(AnyModel).validate_python(MODELS[name])
    return materialise(models.build(config), 1, torch.device("cpu")).eval()


@pytest.fixture
def scorer(name: str, model: Decoder, shared_corpus: Path) -> Scorer:
    tokenizer = Tokenizer.load(shared_corpus / "tokenizer")
    return Scorer(model, tokenizer, batch=3)


@torch.no_grad()
def plain_logits(name: str, model: Decoder, inputs: list[int], prefix: int) -> torch.Tensor:
    """fp32 [S, V] of one sequence alone."""
    length = len(inputs)
    slots = Slots(torch.tensor([[length]]), torch.tensor([[prefix]])) if prefix else None
    positions = None
    if name == "glm-2d":
        line = torch.arange(length)
        place = line.clamp(max=max(prefix - 1, 0))
        positions = torch.stack((place, line - place))[None]
    logits: torch.Tensor = model(torch.tensor([inputs]), None, slots, positions)
    return logits[0]


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10, 60) for _ in range(count)]


def questions(name: str) -> list[Query]:
    """Beginnings shared wholly, partly and not at all; the same query twice; one that begins another."""
    rng, found = random.Random(7), []
    for _ in range(5):
        context = tokens(rng, rng.randint(1, 20))
        prefix = len(context) if name.startswith("glm") else 0
        for _ in range(4):
            rest = tokens(rng, rng.randint(1, 12))
            for targets in (rest, rest[:1], rest):
                found.append(Query([*context, *targets[:-1]], targets[-len([*context, *targets[:-1]]) :], prefix))
        found.append(Query([*context[:-1], 9, 11, 12], [13, 14], prefix and len(context)))
    found.append(Query(tokens(rng, LENGTH), tokens(rng, LENGTH), int(name.startswith("glm"))))
    rng.shuffle(found)
    return found


def test_scores(name: str, model: Decoder, scorer: Scorer) -> None:
    queries = questions(name)
    for query, score in zip(queries, scorer.scores(queries, quiet=True), strict=True):
        last = plain_logits(name, model, query.inputs, query.prefix)[-len(query.targets) :].double().log_softmax(1)
        expected = last.gather(1, torch.tensor(query.targets)[:, None]).sum()
        assert score.likelihood == pytest.approx(float(expected), abs=1e-4)
        assert score.greedy == (last.argmax(1).tolist() == query.targets)


def test_choices_of_one_token_are_one_row(shared_corpus: Path) -> None:
    """As in lm-eval's own adapter: four letters after a question cost one pass over it."""
    model = materialise(models.build(TypeAdapter(AnyModel).validate_python(MODELS["llama"])), 1, CPU)
    rows = list[int]()
    model.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    scorer = Scorer(model, Tokenizer.load(shared_corpus / "tokenizer"), batch=8)
    asked = [Query([10, 11, *[context] * 5], [letter]) for context in (20, 21) for letter in (30, 31, 32, 33)]
    found = scorer.scores([*asked, Query([10, 11], [12, 13])], quiet=True)
    assert rows == [3] and len({score.likelihood for score in found}) == 9


def test_answers(name: str, model: Decoder, scorer: Scorer) -> None:
    """Greedy, prompts and answers of different lengths: sequences leave the batch while others go on."""
    rng, prompts, texts = random.Random(11), [], scorer._tokenizer.vocab_size
    for number, size in enumerate((3, 17, 9, 1, 12, 5, 20)):
        inputs = tokens(rng, size)
        prefix = size - 1 if name.startswith("glm") else 0
        prompts.append(Prompt(inputs, 2 + 3 * number, prefix=prefix))
    for prompt, answer in zip(prompts, scorer.answers(prompts, quiet=True), strict=True):
        made: list[int] = []
        while len(made) < prompt.tokens:
            following = int(plain_logits(name, model, prompt.inputs + made, prompt.prefix)[-1][:texts].argmax())
            if following == scorer._tokenizer.eod:
                break
            made.append(following)
        assert answer == scorer._tokenizer.decode(made)


def test_answers_that_are_done_stay_within_the_positions(shared_corpus: Path) -> None:
    """A long prompt with a short answer beside short prompts with long ones: each fits, but not the longest of both."""
    model = materialise(models.build(TypeAdapter(AnyModel).validate_python(MODELS["gpt"])), 1, CPU).eval()
    prompts = [Prompt([10 + n for n in range(LENGTH - 2)], 2), *(Prompt([20 + n], LENGTH - 1) for n in range(3))]
    tokenizer = Tokenizer.load(shared_corpus / "tokenizer")
    together, alone = (Scorer(model, tokenizer, batch=batch).answers(prompts, quiet=True) for batch in (4, 1))
    assert together == alone and all(alone)


def test_rows_that_pad_the_table_are_never_chosen(shared_corpus: Path, tmp_path: Path) -> None:
    """sentencepiece cannot decode their ids. Answers are those of the same model without them."""
    SentencePieceTrainer.Train(
        input=str(shared_corpus / "train.jsonl"),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=150,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    tokenizer = Tokenizer.load(tmp_path)
    padded, exact = (
        materialise(models.build(TypeAdapter(AnyModel).validate_python({**MODELS["llama"], "vocab": vocab})), 1, CPU)
        for vocab in (VOCABULARY, tokenizer.vocab_size)
    )
    exact.load_state_dict({name: part[: len(exact.state_dict()[name])] for name, part in padded.state_dict().items()})
    prompts = [Prompt([10 + n, 20], 12) for n in range(8)]
    found = [Scorer(each, tokenizer, batch=3).answers(prompts, quiet=True) for each in (padded, exact)]
    assert found[0] == found[1] and any(found[0])
