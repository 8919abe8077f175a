"""GLM from end to end: the real trainer on blanks, endings and answers, the tools that read such a run, lm-eval's scores.

The reference is a model called slot by slot with masks and positions written out here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import Run
from torch import Tensor

from fsdp_pretrain.checkpoint.store import Store
from fsdp_pretrain.checkpoint.tokenizer import find_tokenizer
from fsdp_pretrain.config.config import load
from fsdp_pretrain.data.packing.objectives import IGNORE, Infilling
from fsdp_pretrain.data.packing.opening import open_objective, open_packer
from fsdp_pretrain.data.text.tokenizer import Tokenizer
from fsdp_pretrain.eval.checkpoints import read_checkpoint
from fsdp_pretrain.eval.samples import sample_losses
from fsdp_pretrain.lineage import provenance as where
from fsdp_pretrain.models import Decoder
from fsdp_pretrain.run.files import RunDir

Following = Callable[[list[int], list[int]], Tensor]
SLOTS, SLOT = 2, 32
TWO_DIMENSIONS = ["model.positions=rope-2d"]
RUNS: dict[str, tuple[int, list[str]]] = {
    # name: (ranks, overrides)
    "one": (1, ["parallel.shard=1", "train.micro_batch=8"]),
    "hsdp2x2-accumulating": (4, ["parallel.shard=2", "train.micro_batch=1"]),
    "two-dimensions": (2, ["parallel.shard=2", "train.micro_batch=4", *TWO_DIMENSIONS]),
}


@pytest.fixture(scope="module")
def config(module_lab: Any, run_command: Run, helpers: Any) -> Path:
    """Text and prompts with answers, 3 to 1; ten steps saved at 5 and 10."""
    records = [{"q": helpers.text(n, 1 + n % 9), "a": helpers.text(n + 99, 1 + n % 5)} for n in range(60)]
    prompts, answers = module_lab.path / "prompts.jsonl", module_lab.path / "answers"
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
    options = ["--text-field", "q", "--answer-field", "a", "--workers", "1", "--quiet"]
    where = ["--tokenizer", module_lab.tokenizer, "--out", answers]
    run_command("fsdp_pretrain.data.cli", "prepare", prompts, *options, *where, expect=0)
    path: Path = module_lab.config(
        "glm",
        model={"family": "glm", "hidden": 48, "vocab": 518, "kv_heads": None, "ffn": None},
        data={
            "sequence_length": SLOTS * SLOT,
            "objective": {"kind": "glm", "row": 56, "slots": SLOTS, "mask_share": 0.5},
            "sources": [
                {"name": "text", "path": str(module_lab.corpus), "weight": 3.0},
                {"name": "answers", "path": str(answers)},
            ],
        },
        train={"duration": "10 steps", "global_batch": "8 samples"},
        checkpoint={"every": "5 steps"},
    )
    return path


@pytest.fixture(scope="module")
def trained(module_lab: Any, config: Path) -> Callable[[str], Path]:
    """`trained("one")`: the directory of one of `RUNS`, trained when first asked for."""

    def train(name: str) -> Path:
        run: Path = module_lab.path / name
        if not run.exists():
            ranks, overrides = RUNS[name]
            module_lab.train(config, f"run.dir={run}", *overrides, ranks=ranks)
        return run

    return train


# ------------------------------------------------------------------------ training


@pytest.mark.promise("exact-loss")
def test_two_by_two_ranks_give_the_curve_of_one_process(trained: Callable[[str], Path], helpers: Any) -> None:
    expected = helpers.metrics(trained("one"))
    records = helpers.metrics(trained("hsdp2x2-accumulating"))
    assert len(expected) == 10
    for ours, one in zip(records, expected, strict=True):
        for key in ("step", "data_digest", "cursor", "tokens"):
            assert ours[key] == one[key]
        assert ours["tokens"] == ours["step"] * 8 * SLOTS * SLOT
        assert ours["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
        for key in ("loss", "loss_sequence"):
            assert ours[key]["count"] == one[key]["count"] < 8 * SLOTS * SLOT
            assert ours[key]["sum"] == pytest.approx(one[key]["sum"], rel=1e-5)
    mean = [record["loss"]["sum"] / record["loss"]["count"] for record in records]
    assert mean[-1] < 0.95 * mean[0]  # and it learns


# ------------------------------------------------------------------------ a model independent of the trainer


def logits_of(model: Decoder, row: list[int], prefix: int, places: Tensor) -> Tensor:
    """One slot alone: every token sees the prefix and what precedes it. fp32 [tokens, V]."""
    size = len(row)
    visible = torch.tensor([[key <= query or key < prefix for key in range(size)] for query in range(size)])
    hidden = model.embedding.weight[torch.tensor(row)].unsqueeze(0)
    for block in model.blocks:
        hidden = block(hidden, visible.view(1, 1, size, size), *model.context(places.unsqueeze(0)))
    out: Tensor = model.norm(hidden)[0] @ model.embedding.weight.T
    return out


def model_of(run: Path, step: int) -> Decoder:
    return read_checkpoint(Store(run / "checkpoints").find(step), "cpu")[0].eval()


@pytest.mark.shows("A21")
@pytest.mark.parametrize("name", ["one", "two-dimensions"])
def test_a_recorded_step_is_its_slots_one_by_one(trained: Callable[[str], Path], helpers: Any, name: str) -> None:
    """Losses by sample, their sums under both norms, and the gradient of the one by sample."""
    run, model = trained(name), model_of(trained(name), 5)
    shown = where.describe_step(where.trained_step(RunDir(run), 6), ids=True)
    found = sample_losses(RunDir(run), 6)
    settings = load(run / "segments/0001/config.toml")
    packer = open_packer(settings)
    infilling = open_objective(settings, packer)
    assert isinstance(infilling, Infilling)
    losses: dict[int, Tensor] = {}  # of each target, by sample
    kinds: set[str] = set()
    ids = infilling._ids
    for sample in shown.samples:
        packed = packer.pack(sample.index, 1)
        assert packed.tokens[0].tolist() == sample.ids
        made, start, parts = infilling.apply(packed), 0, []
        for length, prefix in zip(made.lengths[0].tolist(), made.prefix[0].tolist(), strict=True):
            row, label = (
                made.inputs[0, start : start + length],
                torch.from_numpy(made.labels[0, start : start + length]),
            )
            if length:
                places = torch.from_numpy(made.positions[0, ..., start : start + length])
                parts.append(F.cross_entropy(logits_of(model, row.tolist(), prefix, places), label, reduction="none"))
                parts[-1] = parts[-1][label != IGNORE]
                answered = sample.source == "answers"
                kinds.add("answer" if answered else "ending" if ids.gmask in row[:prefix] else "blanks")
            start += length
        losses[sample.index] = torch.cat(parts)
    assert kinds == {"answer", "ending", "blanks"}

    record = helpers.metrics(run)[5]
    assert shown.data_digest == record["data_digest"]
    assert [sample.index for sample in shown.samples] == list(range(record["cursor"] - 8, record["cursor"]))
    assert found.checkpoint == 5 and len(found.samples) == 8
    for sample in found.samples:
        mine = losses[sample.index]
        assert (sample.count, sample.sum) == (len(mine), pytest.approx(mine.sum().item(), rel=1e-5))
    count = sum(map(len, losses.values()))
    total, means = sum(part.sum() for part in losses.values()), sum(part.mean() for part in losses.values())
    assert isinstance(total, Tensor) and isinstance(means, Tensor)
    assert record["loss"] == {"sum": pytest.approx(total.item(), rel=1e-5), "count": count}
    assert record["loss_sequence"] == {"sum": pytest.approx(means.item(), rel=1e-5), "count": 8}
    assert found.loss.sum == pytest.approx(record["loss"]["sum"], rel=1e-5)
    assert sum(sample.mean for sample in found.samples) == pytest.approx(means.item(), rel=1e-5)
    objectives = {"sequence": means / 8, "tokens": total / count}
    norms = {}
    for kind, objective in objectives.items():
        gradients = torch.autograd.grad(objective, list(model.parameters()), retain_graph=True)
        norms[kind] = float(torch.stack([gradient.norm() for gradient in gradients]).norm())
    assert record["grad_norm"] == pytest.approx(norms["sequence"], rel=1e-5) != pytest.approx(norms["tokens"], rel=1e-3)


# ------------------------------------------------------------------------ evaluation


class Request:
    def __init__(self, *args: Any) -> None:
        self.args = args


@pytest.fixture(params=["one", "two-dimensions"])
def judged(trained: Callable[[str], Path], request: pytest.FixtureRequest) -> tuple[Any, Following]:
    """The adapter, which reads contexts as a whole, and the next token's logits of a plain model."""
    harness = pytest.importorskip("fsdp_pretrain.eval.harness", exc_type=ImportError)
    name = request.param
    run = trained(name)
    checkpoint = Store(run / "checkpoints").find(10)
    model, settings = read_checkpoint(checkpoint, "cpu")
    tokenizer: Tokenizer = find_tokenizer(checkpoint, settings)
    adapter = harness.CheckpointLM(
        model,
        tokenizer,
        length=SLOTS * SLOT,
        batch=3,
        objective=settings.data.objective,
    )
    gmask, sop = tokenizer.vocab_size + 1, tokenizer.vocab_size + 4

    def following(context: list[int], rest: list[int]) -> Tensor:
        """fp64 [V], logits of the token after `rest`."""
        row, prefix = [*context, gmask, sop, *rest], len(context) + 1
        places = torch.arange(len(row))
        if name == "two-dimensions":  # the context counts on; what follows stays at [gMASK] and counts 1, 2, ...
            inside = [0] * prefix + list(range(1, len(row) - prefix + 1))
            places = torch.tensor([[min(place, prefix - 1) for place in range(len(row))], inside])
        with torch.no_grad():
            return logits_of(model, row, prefix, places)[-1].double()

    return adapter, following


def likelihood(following: Following, context: list[int], rest: list[int]) -> float:
    """Log-likelihood of `rest`, token by token."""
    return sum(float(following(context, rest[:at]).log_softmax(-1)[token]) for at, token in enumerate(rest))


def test_likelihoods_are_sums_over_tokens(judged: Any) -> None:
    """A prefix that ends in [gMASK], then sop and the continuation; the batch's other contexts change nothing."""
    adapter, following = judged
    pairs = [
        ("the run writes", " every checkpoint"),
        ("", "the mesh"),
        ("a", " b c d e f g"),
        ("loss falls" * 3, " é 文"),
    ]
    for (context, rest), score in zip(pairs, adapter.loglikelihood([Request(*p) for p in pairs], True), strict=True):
        ids = adapter.tok_encode(context) or [adapter.eot_token_id]
        whole = adapter.tok_encode(context + rest)
        rest_ids = whole[len(ids) :] if context else whole
        assert not context or whole[: len(ids)] == ids
        assert score[0] == pytest.approx(likelihood(following, ids, rest_ids), rel=1e-5)
        best: list[int] = []
        while len(best) < 3:
            best.append(int(following(ids, best).argmax()))
        requests = [(("", ""), ids, best), (("", ""), ids, [*best[:2], (best[2] + 1) % 512])]
        assert [same for _, same in adapter._loglikelihood_tokens(requests)] == [True, False]
        (text,) = adapter.generate_until([Request(context, {"max_gen_toks": 3})], True)
        stop = best.index(adapter.eot_token_id) if adapter.eot_token_id in best else 3
        assert text == adapter.tokenizer.decode(best[:stop])


def test_a_long_text_is_scored_in_windows(judged: Any) -> None:
    """62 tokens and the two special ones fill the model: 62 after the separator, then each after one token."""
    adapter, following = judged
    room = SLOTS * SLOT - 2
    text = "gradients over replicas and the loss falls " * 20
    line = [adapter.eot_token_id, *adapter.tok_encode(text)]
    assert 2 * room < len(line) - 1
    starts = list(range(1, len(line), room))
    windows = [(line[first - 1 : first], line[first : first + room]) for first in starts[:-1]]
    last = starts[-1]
    windows.append((line[len(line) - 1 - room : last], line[last:]))
    expected = sum(likelihood(following, context, rest) for context, rest in windows)
    ((score), (short)) = adapter.loglikelihood_rolling([Request(text), Request("the mesh")], True)
    assert score == pytest.approx(expected, rel=1e-5)
    assert short == pytest.approx(
        likelihood(following, [adapter.eot_token_id], adapter.tok_encode("the mesh")), rel=1e-5
    )
