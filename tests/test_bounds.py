"""What bounds memory and nothing else: rows of a pass, logits at a time, logits kept. No result tells if it is broken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_pretrain import models
from fsdp_pretrain.config.model import AnyModel
from fsdp_pretrain.data.text.tokenizer import Tokenizer
from fsdp_pretrain.eval import scorer
from fsdp_pretrain.eval.scorer import Prompt, Query, Scorer
from fsdp_pretrain.models import Decoder, loss
from fsdp_pretrain.parallel.fsdp import materialise

pytestmark = pytest.mark.quick
VOCABULARY, BATCH = 512, 3


class Largest(TorchDispatchMode):
    """Sees the elements of the largest tensor that an operation makes, among those with a dimension of `width`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width, self.elements = width, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor) and self._width in each.shape:
                self.elements = max(self.elements, each.numel())
        return out


@contextmanager
def kept_logits(rows: int) -> Iterator[list[int]]:
    """Bytes of tensors with so many rows, and more columns than 8, that are saved for the backward pass."""
    found: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == 2 and tensor.shape[0] == rows and tensor.shape[1] > 8:
            found.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


@pytest.mark.parametrize(("rows", "vocab"), [(512, 2**17), (4096, 150_000)])
def test_the_loss_holds_as_many_logits_as_it_may(rows: int, vocab: int) -> None:
    """Forward and backward, without data; 2^25 logits, and with these many rows no fewer."""
    with FakeTensorMode(), Largest(rows) as seen:
        hidden = torch.empty(1, rows, 8, requires_grad=True)
        weight = torch.empty(vocab, 8, requires_grad=True)
        labels = torch.empty(1, rows, dtype=torch.int64)
        loss.token_losses(hidden, weight, labels)[0].sum().backward()
    assert seen.elements == 2**25


@pytest.mark.parametrize(("rows", "dtype", "kept"), [
    (2048, torch.float32, 2**30), (2049, torch.float32, 0), (4096, torch.bfloat16, 2**30), (4097, torch.bfloat16, 0)
])  # fmt: skip
def test_the_loss_keeps_a_gibibyte_of_logits_or_none(rows: int, dtype: torch.dtype, kept: int) -> None:
    with FakeTensorMode(), kept_logits(rows) as found:
        hidden = torch.empty(1, rows, 8, requires_grad=True, dtype=dtype)
        weight = torch.empty(2**17, 8, requires_grad=True, dtype=dtype)
        loss.token_losses(hidden, weight, torch.empty(1, rows, dtype=torch.int64))
    assert sum(found) == kept


@pytest.fixture(scope="module")
def model() -> Decoder:
    values = {"family": "llama", "layers": 1, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "vocab": VOCABULARY}
    built = models.build(TypeAdapter(AnyModel).validate_python(values))
    return materialise(built, 1, torch.device("cpu"))


@pytest.fixture
def passes(model: Decoder) -> Iterator[list[tuple[int, ...]]]:
    """Rows and columns of the tokens of every pass."""
    found: list[tuple[int, ...]] = []
    with_hook = model.register_forward_pre_hook(lambda _, inputs: found.append(tuple(inputs[0].shape)))
    yield found
    with_hook.remove()


@pytest.fixture
def judged(model: Decoder, shared_corpus: Path) -> Scorer:
    return Scorer(model, Tokenizer.load(shared_corpus / "tokenizer"), batch=BATCH)


def test_a_pass_has_as_many_rows_as_it_may(judged: Scorer, passes: list[tuple[int, ...]]) -> None:
    """Neither more, which may not fit, nor fewer, which takes longer; rows of similar length together."""
    queries = [Query([10 + n, *[7] * n], [5]) for n in range(8)]
    judged.scores(queries, quiet=True)
    assert passes == [(3, 8), (3, 5), (2, 2)]
    passes.clear()
    judged.answers([Prompt([10 + n, *[7] * n], 1) for n in range(8)], quiet=True)
    assert passes == [(3, 8), (3, 5), (2, 2)]


@pytest.mark.parametrize("at_once", [1, 5])
def test_scores_hold_as_many_logits_as_they_may(judged: Scorer, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """Of targets only, a few at a time."""
    queries = [Query([10 + n, *range(20, 40)], [*range(21, 41)]) for n in range(BATCH)]
    expected = judged.scores(queries, quiet=True)
    monkeypatch.setattr(scorer, "_LOGITS_AT_ONCE", at_once * VOCABULARY + 1)
    with Largest(VOCABULARY) as seen:
        found = judged.scores(queries, quiet=True)
    assert seen.elements == max(at_once, 32) * VOCABULARY  # the tables have 32 columns
    assert [score.greedy for score in found] == [score.greedy for score in expected]
    assert [score.likelihood for score in found] == pytest.approx([score.likelihood for score in expected])
