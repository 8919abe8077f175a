"""The adapter beside lm-eval's own adapter for transformers, on exported checkpoints: same figures, same answers."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("lm_eval")
pytest.importorskip("transformers")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
from laboratory import make_text
from lm_eval.models.huggingface import HFLM

from fsdp_pretrain.checkpoint.store import Store
from fsdp_pretrain.checkpoint.tokenizer import find_tokenizer
from fsdp_pretrain.eval.checkpoints import read_checkpoint
from fsdp_pretrain.eval.harness import CheckpointLM
from fsdp_pretrain.eval.results import RefusedError
from fsdp_pretrain.hf.export import export_checkpoint
from fsdp_pretrain.run.files import RunDir

LENGTH = 48
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt": {"family": "gpt", "positions": LENGTH, "kv_heads": None, "ffn": None, "tied_head": True},
}


class Pair:
    """Our adapter and theirs, on one checkpoint."""

    def __init__(self, ours: CheckpointLM, theirs: HFLM) -> None:
        self.ours, self.theirs = ours, theirs

    def both(self, method: str, requests: list[tuple[Any, ...]]) -> tuple[list[Any], list[Any]]:
        found = []
        for adapter in (self.ours, self.theirs):
            copies = [Request(*(dict(part) if isinstance(part, dict) else part for part in args)) for args in requests]
            found.append(getattr(adapter, method)(copies, disable_tqdm=True))
        return found[0], found[1]


class Request:
    def __init__(self, *args: Any) -> None:
        self.args = args


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, module_lab: Any) -> Pair:
    name = request.param
    data = {"sequence_length": LENGTH}
    module_lab.train(module_lab.config(name, model=MODELS[name], data=data, train={"duration": "30 steps"}))
    run = RunDir(module_lab.path / name)
    checkpoint = Store(run.checkpoints).find(30)
    model, config = read_checkpoint(checkpoint, "cpu")
    ours = CheckpointLM(model, find_tokenizer(checkpoint, config), length=LENGTH, batch=4)
    folder = module_lab.path / f"{name}-hf"
    export_checkpoint(run, 30, folder, dtype="fp32", shard_bytes=2**30)
    return Pair(ours, HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=4, max_length=LENGTH))


def texts(count: int, least: int, most: int) -> list[str]:
    rng = random.Random(5)
    return [make_text(number, rng.randint(least, most)).rstrip("\n") for number in range(count)]


def shots(count: int) -> Callable[[str], str]:
    """Puts examples before a question; with five, contexts are longer than the models read."""
    examples = "\n".join(
        f"{question} so {answer}" for question, answer in zip(texts(5, 2, 4), texts(5, 1, 2), strict=True)
    )
    return lambda question: f"{examples}\n{question}" if count else question


@pytest.mark.parametrize("count", [0, 5])
@pytest.mark.promise("lm-eval-parity")
def test_choices(pair: Pair, count: int) -> None:
    """Several continuations of each context, of one token and of many, one the beginning of another; no context."""
    questions, endings = texts(6, 3, 12), texts(9, 1, 6)
    requests: list[tuple[Any, ...]] = []
    for number, question in enumerate(questions):
        for ending in (endings[number], endings[number + 1], endings[number] + " the", "a", "b"):
            requests.append((shots(count)(question), " " + ending))
    requests += [("", ending) for ending in endings] + [("ends in spaces  ", "the run"), (questions[0], endings[0])]
    ours, theirs = pair.both("loglikelihood", requests)
    for (mine, greedy), (other, greedy_there), asked in zip(ours, theirs, requests, strict=True):
        assert mine == pytest.approx(other, abs=1e-4), asked
        assert greedy == greedy_there


def test_pairs_cut_anywhere(pair: Pair) -> None:
    """Also inside words, white space and characters that the tokenizer joins: the tokens are those of lm-eval. Where its
    adapter fails, because a continuation has no token of its own, ours refuses."""
    text = texts(1, 12, 12)[0] + "  \n the run  "
    cuts = [(text[max(0, at - 20) : at], text[at : at + size]) for at in range(len(text)) for size in (0, 1, 2, 5)]
    scored: list[tuple[Any, ...]] = []
    refused: list[tuple[Any, ...]] = [("", "")]
    for asked in cuts:
        own = pair.theirs._encode_pair(*asked)[1] if asked[0] else asked[1]
        (scored if own else refused).append(asked)
    ours = pair.ours.loglikelihood([Request(*asked) for asked in scored], disable_tqdm=True)
    for asked, (score, greedy) in zip(scored, ours, strict=True):  # alone: theirs mixes up pairs cut at several places
        ((other, greedy_there),) = pair.theirs.loglikelihood([Request(*asked)], disable_tqdm=True)
        assert score == pytest.approx(other, abs=1e-4) and greedy == greedy_there, asked
    assert len(scored) > 100 and any(asked[1] for asked in refused)
    for asked in refused:
        with pytest.raises((AssertionError, IndexError)):
            pair.theirs.loglikelihood([Request(*asked)], disable_tqdm=True)
        with pytest.raises(RefusedError, match="no token of its own"):
            pair.ours.loglikelihood([Request("the", " run"), Request(*asked)], disable_tqdm=True)


def test_a_context_of_white_space_is_scored_as_none(pair: Pair) -> None:
    """lm-eval's adapter fails unless its tokenizer begins texts with a token; that is the separator's part here."""
    ours = pair.ours.loglikelihood([Request("  ", "the"), Request("", "  the")], disable_tqdm=True)
    assert ours[0] == ours[1] and ours[0][0] < 0
    with pytest.raises(AssertionError):
        pair.theirs.loglikelihood([Request("  ", "the")], disable_tqdm=True)


@pytest.mark.promise("lm-eval-parity")
def test_whole_texts(pair: Pair) -> None:
    """Shorter than, as long as, and several times as long as what the models read."""
    requests = [(text,) for text in [*texts(4, 3, 20), *texts(3, 100, 200), "a", ""]]
    ours, theirs = pair.both("loglikelihood_rolling", requests)
    assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"until": [" loss", "s w"], "max_gen_toks": 12, "do_sample": False},
        {"until": "e", "max_gen_toks": 20},
        {"until": [], "max_gen_toks": 9, "temperature": 0.0},
    ],
)
@pytest.mark.promise("lm-eval-parity")
def test_answers(pair: Pair, options: dict[str, Any]) -> None:
    """Prompts of different lengths in a batch, some longer than the models read: these are cut once."""
    requests = [(text, options) for text in [*texts(6, 1, 15), *texts(3, 60, 90)]]
    ours, theirs = pair.both("generate_until", requests)
    assert ours == theirs and any(ours)
