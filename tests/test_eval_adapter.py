"""The adapter of lm-eval over models with random weights: what an answer ends at, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lm_eval")
import torch
from pydantic import TypeAdapter

from data.packing.objectives import Specials
from data.text.tokenizer import Tokenizer
from eval.harness import CheckpointLM
from fsdp_pretrain import models
from fsdp_pretrain.config.data_section import AnyObjective, GLMObjective
from fsdp_pretrain.config.model import AnyModel
from fsdp_pretrain.parallel.fsdp import materialise

LENGTH = 40
pytestmark = pytest.mark.quick


def adapter(tokenizer: Tokenizer, objective: AnyObjective | None = None, **model: Any) -> CheckpointLM:
    """Over a tiny model."""
    values = {"layers": 2, "hidden": 32, "heads": 4, "ffn": 64, **model}
    built = models.build(TypeAdapter(AnyModel).validate_python(values))
    whole = materialise(built, 1, torch.device("cpu"))
    return CheckpointLM(whole, tokenizer, length=LENGTH, batch=2, objective=objective)


def request(*args: Any) -> Any:
    return SimpleNamespace(args=args)


def test_the_end_of_a_blank_ends_an_answer(shared_corpus: Path) -> None:
    """GLM: `eop` follows what fills a blank. Here it is likelier than one of the tokens of a greedy answer."""
    tokenizer = Tokenizer.load(shared_corpus / "tokenizer")
    objective = GLMObjective(kind="glm", row=LENGTH - 8)
    eop = Specials.behind(tokenizer.vocab_size).eop
    judged = adapter(tokenizer, objective, family="glm", vocab=eop + 1)
    model = judged.scorer._model
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
