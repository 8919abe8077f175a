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
import torch
from laboratory import make_text
from lm_eval.models.huggingface import HFLM
from transformers.generation import logits_process

from eval.attempt import RefusedError
from eval.checkpoints import read_checkpoint
from eval.generation import Sampling
from eval.harness import CheckpointLM
from eval.scorer import sample
from fsdp_pretrain.checkpoint.hf import export_checkpoint
from fsdp_pretrain.checkpoint.store import Store
from fsdp_pretrain.checkpoint.tokenizer import find_tokenizer
from fsdp_pretrain.record.files import RunDir

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


def test_an_answer_that_does_not_fit_is_refused(pair: Pair) -> None:
    """As in lm-eval's adapter, which fails an assertion."""
    request = ("the run", {"max_gen_toks": LENGTH})
    with pytest.raises(RefusedError, match=f"answers of {LENGTH} tokens, but the model reads {LENGTH}"):
        pair.ours.generate_until([Request(*request)])
    with pytest.raises(AssertionError):
        pair.theirs.generate_until([Request(*request)])


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.7),
        Sampling(1.3, top_p=0.8, top_k=0),
        Sampling(0.2, top_p=0.95, top_k=7),
        Sampling(1.0, top_p=1e-6),
        Sampling(2.0, top_k=1),
    ],
)
def test_samples_are_distributed_as_in_transformers(sampling: Sampling) -> None:
    """At evenly spaced quantiles, against the probabilities after transformers' own processors."""
    logits = torch.randn(300, generator=torch.Generator().manual_seed(1)) * 3
    scores = logits_process.TemperatureLogitsWarper(sampling.temperature)(None, logits[None] + 0)
    if sampling.top_k:
        scores = logits_process.TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = logits_process.TopPLogitsWarper(sampling.top_p)(None, scores)
    expected, count = scores[0].double().softmax(0), 4000
    drawn = [sample(logits, sampling, (n + 0.5) / count) for n in range(count)]
    frequencies = torch.bincount(torch.tensor(drawn), minlength=len(logits)) / count
    assert (frequencies - expected).abs().max() <= 1 / count


def test_sampled_answers_depend_on_seed_and_place_alone(pair: Pair) -> None:
    options = {"do_sample": True, "temperature": 0.9, "max_gen_toks": 8, "until": []}
    requests = [("the run", options)] * 3 + [("gradients over", options)]
    once = pair.ours.generate_until([Request(*args) for args in requests], disable_tqdm=True)
    again = pair.ours.generate_until([Request(*args) for args in requests], disable_tqdm=True)
    assert once == again and len(set(once[:3])) == 3  # repeated questions get different answers
    (first,) = pair.ours.generate_until([Request(*requests[0])], disable_tqdm=True)
    assert first == once[0]
    other = pair.ours.generate_until([Request("the run", {**options, "seed": 1})] * 3, disable_tqdm=True)
    assert set(other).isdisjoint(once[:3])
