"""Blank infilling: layouts against worked vectors, draws against closed forms, samples the same for any ranks."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laboratory import tiny

from fsdp_pretrain.checkpoint.state import identity
from fsdp_pretrain.config.config import load
from fsdp_pretrain.config.data_section import GLMObjective
from fsdp_pretrain.config.resume_rules import differences
from fsdp_pretrain.config.schedule import BatchSchedule
from fsdp_pretrain.data.corpus.hashing import hashes, uniforms
from fsdp_pretrain.data.packing.loader import Loader, StepBatch
from fsdp_pretrain.data.packing.objectives import (
    IGNORE,
    Infilled,
    Infilling,
    Slot,
    SpanSampler,
    Specials,
    continue_text,
    fill_blanks,
)
from fsdp_pretrain.data.packing.opening import open_objective, open_packer
from fsdp_pretrain.data.packing.packer import Packed, Packer
from fsdp_pretrain.data.packing.position import Position
from fsdp_pretrain.data.text.tokenizer import Tokenizer
from fsdp_pretrain.data.validate.against import check_against
from fsdp_pretrain.data.validate.validate import validate
from fsdp_pretrain.errors import ConfigError, DataError

pytestmark = pytest.mark.quick
IDS = Specials(600, 601, 602, 603, 604, 605)
M, G, SOP, EOP, NONE = IDS.mask, IDS.gmask, IDS.sop, IDS.eop, IGNORE
TEXT = np.arange(10, 20)
Prepare = Callable[..., Any]


def objective(row: int, **changes: Any) -> GLMObjective:
    return GLMObjective(kind="glm", row=row, **changes)


def infilling(packer: Packer, length: int, *, two_dimensions: bool = False, **changes: Any) -> Infilling:
    options = objective(packer.length, **changes)
    its: dict[str, Any] = {"names": packer.mixture.names, "pairs": packer.pairs, "separator": packer.eod}
    ids = Specials(*range(512, 518))
    return Infilling(options, length, seed=5, ids=ids, two_dimensions=two_dimensions, **its)


# Layouts


def test_blanks_are_the_worked_vector() -> None:
    slot = fill_blanks(TEXT, TEXT, np.array([2, 6]), np.array([2, 3]), np.array([1, 0]), IDS)
    assert slot.inputs.tolist() == [10, 11, M, 14, 15, M, 19, SOP, 16, 17, 18, SOP, 12, 13]
    assert slot.labels.tolist() == [NONE] * 7 + [16, 17, 18, EOP, 12, 13, EOP]
    assert slot.prefix == 7
    assert slot.line("mask").tolist() == [0, 1, 2, 3, 4, 5, 6, 5, 5, 5, 5, 2, 2, 2]
    assert slot.place.tolist() == slot.line("mask").tolist()
    assert slot.inside.tolist() == [0] * 7 + [1, 2, 3, 4, 1, 2, 3]


@pytest.mark.parametrize(
    ("scheme", "positions"),
    [
        ("arange", [0, 1, 2, 3, 4, 5, 6]),
        ("mask", [0, 1, 2, 3, 3, 3, 3]),
    ],
)
def test_answers_end_with_eop_in_every_scheme(scheme: Any, positions: list[int]) -> None:
    slot = continue_text(TEXT[:3], TEXT[8:], TEXT[8:], M, SOP, EOP)
    assert slot.inputs.tolist() == [10, 11, 12, M, SOP, 18, 19]
    assert slot.labels.tolist() == [NONE] * 4 + [18, 19, EOP]
    assert (slot.prefix, slot.line(scheme).tolist()) == (4, positions)
    assert slot.inside.tolist() == [0, 0, 0, 0, 1, 2, 3]


def rebuilt(slot: Slot) -> list[int]:
    """The text of a slot: its prefix with each mask replaced by its blank."""
    blanks: dict[int, list[int]] = {}
    for at in range(slot.prefix, len(slot.inputs)):
        if slot.inside[at] == 1:
            assert slot.inputs[at] == SOP and int(slot.place[at]) not in blanks
            blanks[int(slot.place[at])] = []
        else:
            assert slot.inputs[at] == slot.labels[at - 1]
        blanks[int(slot.place[at])].append(int(slot.labels[at]))
    assert all(blank[-1] == EOP and EOP not in blank[:-1] and len(blank) > 1 for blank in blanks.values())
    prefix = slot.inputs[: slot.prefix].tolist()
    masks = [at for at, token in enumerate(prefix) if token == M]
    assert masks == sorted(blanks) and all(b - a > 1 for a, b in pairwise(masks))
    return [token for at, t in enumerate(prefix) for token in (blanks[at][:-1] if t == M else [t])]


@settings(max_examples=80, deadline=None)
@given(
    key=st.integers(0, 2**64 - 1),
    piece=st.integers(1, 300),
    overflow=st.sampled_from(["truncate", "shrink"]),
)
def test_every_draw_rebuilds_the_text(key: int, piece: int, overflow: str) -> None:
    slot, budget, options = max(8, piece + piece // 20), 0.15, objective(piece, overflow=overflow)
    size, starts, lengths, order = SpanSampler(options, piece, slot).draw(key)
    assert 1 <= size <= piece
    assert lengths.min() >= 1 and lengths.max() <= 39 and sorted(order.tolist()) == list(range(len(starts)))
    assert len(starts) == 1 or lengths.sum() >= int(budget * size) or lengths.sum() >= size - len(starts)
    assert len(starts) == 1 or lengths[:-1].sum() < int(budget * size)  # no span more than the budget needs
    text = np.arange(1000, 1000 + size)
    made = fill_blanks(text, text, starts, lengths, order, IDS)
    assert len(made.inputs) == size + 2 * len(starts)
    assert overflow == "truncate" or len(made.inputs) <= slot
    assert rebuilt(made) == text.tolist()


# Draws


def test_chance_is_the_one_of_every_other_version() -> None:
    # Golden values: blanks are part of a run's identity and must never change silently.
    assert hashes(7, 3).tolist() == [7191089600892374487, 309689372594955804, 16616101746815609346]
    assert uniforms(7, 3).tolist() == [0.3898297483912715, 0.01678829452815611, 0.9007606806068834]
    size, starts, lengths, order = SpanSampler(objective(160, slots=4), 40, 48).draw(2**63 + 1)
    assert (size, starts.tolist(), lengths.tolist(), order.tolist()) == (40, [22, 28], [3, 3], [0, 1])


@pytest.fixture(scope="module")
def drawn() -> list[tuple[int, Any, Any, Any]]:
    """2,000 pieces of the published size: 500 tokens for slots of 512."""
    return [SpanSampler(objective(2000, overflow="truncate"), 500, 512).draw(n * 2**32 + 1) for n in range(2000)]


def test_spans_follow_poisson_and_the_budget(drawn: list[tuple[int, Any, Any, Any]]) -> None:
    usual = [piece for piece in drawn if piece[0] == 500 and len(piece[1]) > 1]
    counts = Counter(int(length) for piece in usual for length in piece[2][:-1])
    weights = np.cumprod([3 / length for length in range(1, 40)])
    assert abs((weights * np.arange(1, 40)).sum() / weights.sum() - 3.157) < 5e-4
    total, expected = sum(counts.values()), weights / weights.sum()
    for length in range(1, 8):  # all but the last span of a piece, whose size the budget decides
        assert abs(counts[length] / total - expected[length - 1]) < 0.012
    assert abs(np.mean([len(piece[1]) for piece in usual]) - 24.2) < 0.15
    assert abs(np.mean([piece[2].sum() for piece in usual]) - 76.5) < 0.2
    assert min(piece[2].sum() for piece in usual) >= 75
    assert abs(sum(len(p[1]) == 1 for p in drawn) / 2000 - 0.02) < 0.008
    shorter = [piece[0] for piece in drawn if piece[0] < 500]
    assert abs(len(shorter) / 2000 - 0.02) < 0.008 and min(shorter) >= 32


def packed_rows(samples: int, row: int) -> Packed:
    tokens = np.tile(np.arange(1, row + 2) % 499 + 1, (samples, 1))
    indices = np.arange(samples)
    return Packed(tokens, range(samples), indices * 0, indices, np.zeros(0, np.int64))


@pytest.mark.parametrize("two", [False, True])
def test_samples_have_the_declared_shares_and_shapes(two: bool) -> None:
    given: dict[str, Any] = {"names": ["a"], "pairs": [], "separator": 0, "ids": IDS, "two_dimensions": two}
    made = Infilling(objective(60, slots=2), 64, seed=1, **given).apply(packed_rows(3000, 60))
    blanks = made.prefix[:, 1] > 0
    assert abs(blanks.mean() - 0.3) < 0.03
    assert (made.lengths[blanks] == 32).all() and (made.lengths[~blanks] == [64, 0]).all()
    endings = 61 - made.prefix[~blanks, 0]
    assert endings.min() == 12 and endings.max() == 60  # both ends of the range occur
    counts = np.bincount(endings - 12, minlength=49)
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 97  # 48 degrees of freedom: 1 in 30,000
    assert ((made.labels != IGNORE).sum(axis=1)[~blanks] == endings).all()
    place = made.positions[:, 0] if two else made.positions
    assert made.positions.shape == ((3000, 2, 64) if two else (3000, 64))
    assert (made.inputs[~blanks, 61:] == 0).all() and (place[~blanks, 61:] == 0).all()
    assert (made.labels[~blanks, 61:] == IGNORE).all()
    assert (place[blanks, 32] == 0).all()  # positions restart in every slot
    if not two:
        assert (made.positions[~blanks, :61] == np.arange(61)).all()


# The loader


@pytest.fixture(scope="module")
def packer(shared_corpus: Path) -> Packer:
    return Packer([("text", shared_corpus / "corpus", 1.0)], 56, seed=5, lanes=8)


def steps(packer: Packer, rank: int, world: int, count: int, **options: Any) -> list[StepBatch]:
    loader = Loader(packer, BatchSchedule(12), rank=rank, world=world, micro_batch=3, prefetch=0, **options)
    return [next(loader) for _ in range(count)]


def joined(batches: list[StepBatch]) -> list[torch.Tensor]:
    micros = [micro for batch in batches for micro in batch.micro]
    names = ("tokens", "labels", "lengths", "prefix", "positions", "sources")
    return [torch.cat([getattr(micro, name) for micro in micros]) for name in names]


@pytest.mark.parametrize("two", [False, True])
def test_samples_do_not_depend_on_ranks_or_restarts(packer: Packer, two: bool) -> None:
    maker = infilling(packer, 64, two_dimensions=two)
    expected = steps(packer, 0, 1, 4, objective=maker)
    for world in (2, 4):
        ranks = [steps(packer, rank, world, 4, objective=maker) for rank in range(world)]
        for step in range(4):
            same = zip(joined([own[step] for own in ranks]), joined([expected[step]]), strict=True)
            assert all(torch.equal(a, b) for a, b in same)
            assert sum(own[step].targets for own in ranks) == expected[step].targets
    resumed = steps(packer, 0, 1, 2, objective=maker, start=Position(2, 24, 24, 12))
    assert all(torch.equal(a, b) for a, b in zip(joined(resumed), joined(expected[2:]), strict=True))
    tokens, labels, lengths, prefix, places, _ = joined(expected)
    assert tokens.shape == (48, 65) and labels.shape == (48, 64) and (tokens[:, 64] == 0).all()
    assert lengths.dtype == prefix.dtype == torch.int32 and (lengths.sum(dim=1) == 64).all()
    assert sum(step.targets for step in expected) == int((labels != IGNORE).sum())
    assert len(places) == 48


def test_an_empty_share_has_the_shapes_of_a_full_one(packer: Packer) -> None:
    loader = Loader(
        packer, BatchSchedule(12), rank=0, world=1, micro_batch=3, prefetch=0, objective=infilling(packer, 64)
    )
    blank, full = loader.blank(Position()), loader.build(Position())
    assert [t.shape for t in joined([blank])] == [t.shape for t in joined([full])]
    assert (joined([blank])[1] == IGNORE).all() and blank.position == full.position


@pytest.mark.promise("every-token-once")
def test_every_token_is_in_one_row_of_an_epoch(packer: Packer) -> None:
    """The rows of the first epoch, put in the order of their places, are the line of the epoch without gaps."""
    total = packer._sources[0].epoch_length
    samples = -(-total // 56)
    places = [packer._sources[0].start_of(number) for number in range(samples)]
    assert sorted(places) == [(0, offset) for offset in range(0, total, 56)]
    whole = Packer([("text", packer.corpora["text"].directory, 1.0)], total, seed=5, lanes=1).pack(0, 1).tokens[0]
    maker = infilling(packer, 64, mask_share=0.0)
    for first in range(0, samples, 100):
        packed = packer.pack(first, min(100, samples - first))
        made = maker.apply(packed)
        for number, (_, offset) in enumerate(places[first : first + 100]):
            labels, rest = made.labels[number], min(56, total - offset)  # the last row continues into the next epoch
            row = np.concatenate((made.inputs[number, : made.prefix[number, 0] - 1], labels[labels != IGNORE]))
            assert len(row) == 56 and np.array_equal(row[:rest], whole[offset : offset + rest])


# Prompts with answers


@pytest.fixture(scope="module")
def tasks(shared_corpus: Path, tmp_path_factory: pytest.TempPathFactory, run_command: Prepare, helpers: Any) -> Path:
    """A corpus of 101 prompts with answers, of which every 10th prompt or answer is long."""
    path, rng = tmp_path_factory.mktemp("tasks"), random.Random(3)
    sizes = [(rng.choice([1, 4, 9, 200]), rng.choice([1, 3, 150])) for _ in range(101)]
    records = [
        {"question": f"{n}: " + helpers.text(n, a), "answer": f"{n} is " + helpers.text(n + 999, b)}
        for n, (a, b) in enumerate(sizes)
    ]
    records.insert(7, {"question": "nobody knows", "answer": ""})
    (path / "tasks.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    options = ["--text-field", "question", "--answer-field", "answer", "--workers", "1", "--shard-size", "20KB"]
    where = ["--tokenizer", shared_corpus / "tokenizer", "--out", path / "corpus", "--quiet"]
    run_command("fsdp_pretrain.data.cli", "prepare", path / "tasks.jsonl", *options, *where, expect=0)
    return path


@pytest.fixture(scope="module")
def pairs(tasks: Path, shared_corpus: Path) -> list[tuple[list[int], list[int]]]:
    """The pairs of the corpus as token lists."""
    tokenizer = Tokenizer.load(shared_corpus / "tokenizer")
    records = [json.loads(line) for line in (tasks / "tasks.jsonl").read_text().splitlines()]
    texts = [record[key] for record in records if record["answer"] for key in ("question", "answer")]
    encoded = tokenizer.encode(texts)
    return list(zip(encoded[::2], encoded[1::2], strict=True))


def expected_slot(prompt: list[int], answer: list[int], ids: Specials, size: int) -> tuple[list[int], list[int]]:
    """Inputs and labels as published: the prompt cut first, down to a quarter of the slot, then the answer."""
    prompt = prompt[: max(size // 4, size - len(answer) - 2)]
    answer = answer[: size - len(prompt) - 2]
    inputs = [*prompt, ids.mask, ids.sop, *answer]
    labels = [IGNORE] * (len(prompt) + 1) + [*answer, ids.eop]
    pad = size - len(inputs)
    return inputs + [0] * pad, labels + [IGNORE] * pad


def slots_of(made: Infilled) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    inputs, labels = (part.reshape(-1, 32).tolist() for part in (made.inputs, made.labels))
    return [(tuple(a), tuple(b)) for a, b in zip(inputs, labels, strict=True)]


def test_every_prompt_is_learned_once_per_epoch(tasks: Path, pairs: list[tuple[list[int], list[int]]]) -> None:
    packer = Packer([("tasks", tasks / "corpus", 1.0)], 120, seed=5, lanes=4, slots=(4, 32))
    assert packer.epoch_samples == {"tasks": 101 / 4}
    packed = packer.pack(0, 101)  # four epochs
    made = infilling(packer, 128).apply(packed)
    ids = Specials(*range(512, 518))
    expected = Counter((tuple(a), tuple(b)) for a, b in (expected_slot(p, y, ids, 32) for p, y in pairs))
    found = slots_of(made)
    assert Counter(found) == Counter({slot: 4 * count for slot, count in expected.items()})
    assert found[:101] != found[101:202]  # another order
    assert (made.lengths == 32).all() and made.positions[0, 32] == 0
    assert (packer.measure(packed), packed.documents) == ((101 * 8, 0), 101 * 8)
    assert packer.epochs_read(101) == {"tasks": 4.0}


def test_prompts_mix_with_text_and_are_found_again(tasks: Path, shared_corpus: Path) -> None:
    sources: list[Any] = [("text", shared_corpus / "corpus", 3.0), ("tasks", tasks / "corpus", 1.0)]
    packer = Packer(sources, 120, seed=5, lanes=4, slots=(4, 32))
    packed = packer.pack(0, 40)
    assert np.bincount(packed.sources).tolist() == [30, 10]
    alone = Packer(sources[1:], 120, seed=5, lanes=4, slots=(4, 32)).pack(0, 10)
    assert np.array_equal(packed.tokens[packed.sources == 1], alone.tokens)
    sample = int(np.flatnonzero(packed.sources == 1)[0])
    pieces = packer.provenance(sample)
    assert len(pieces) == 8 and [piece.document % 2 for piece in pieces] == [0, 1] * 4
    assert all(b.document == a.document + 1 for a, b in zip(pieces[::2], pieces[1::2], strict=True))
    for piece in pieces:
        shard = next(n for n, s in enumerate(packer.corpora["tasks"].manifest.shards) if s.name == piece.shard)
        document = packer.corpora["tasks"].shard(shard).document(piece.document)[piece.start : piece.stop]
        assert packed.tokens[sample, piece.position :][: len(document)].tolist() == document.tolist()
    first = ("tasks", pieces[0].shard, pieces[0].document)
    without = Packer(sources, 120, seed=5, lanes=4, slots=(4, 32), exclude=[first]).pack(sample, 1)
    labels = infilling(packer, 128).apply(without).labels[0]
    kept = infilling(packer, 128).apply(packer.pack(sample, 1)).labels[0]
    assert np.array_equal(labels[32:], kept[32:])
    assert (labels[:32] != IGNORE).sum() == 1 and (kept[:32] != IGNORE).sum() > 1  # only eop is left


def test_prompts_are_clean_for_validate_and_refused_as_texts(tasks: Path) -> None:
    assert validate(tasks / "corpus", quiet=True).findings.exit_code == 0
    with pytest.raises(DataError, match="prompts with answers"):
        Packer([("tasks", tasks / "corpus", 1.0)], 120, seed=5, lanes=4)


# Configuration


@pytest.fixture
def glm(tmp_path: Path, shared_corpus: Path) -> Path:
    model = {"family": "glm", "hidden": 48, "vocab": 518, "kv_heads": None, "ffn": None}
    data = {"sequence_length": 64, "lanes": None, "objective": {"kind": "glm", "row": 56}}
    values = tiny("x", tmp_path / "run", shared_corpus / "corpus", model=model, data=data)
    (tmp_path / "glm.toml").write_text(tomli_w.dumps(values))
    return tmp_path / "glm.toml"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.objective.row=64"], "leaves no room for special tokens"),
        (["data.objective.slots=3"], "slots = 3 must divide"),
        (["data.objective.row=54"], "slots = 4 must divide"),
        (["data.sequence_length=24", "data.objective.row=20"], "8 is the least"),
        (["model.positions=rope-2d", "data.objective={kind='causal'}"], "rope-2d needs data.objective.kind = glm"),
        (["data.attention=document"], "data.attention belongs to the causal objective"),
        (["data.loss_across_documents=false"], "data.loss_across_documents belongs to the causal objective"),
        (["model.family=llama", "model.ffn=96"], "needs model.family = glm"),
    ],
)
def test_contradictions_are_refused(glm: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(glm, overrides)
    assert message in str(caught.value)


def test_special_tokens_need_ids_of_their_own(glm: Path, packer: Packer) -> None:
    begin = packer.tokenizer.vocab_size
    with pytest.raises(ConfigError, match=f"ids {begin} to {begin + 5}.*\n.*\n.*at least {begin + 6}"):
        open_packer(load(glm, [f"model.vocab={begin + 5}"]))
    assert open_packer(load(glm, [f"model.vocab={begin + 6}"])).length == 56
    report = validate(packer.corpora["text"].directory, quiet=True)
    for vocab, codes in ((begin + 5, {"vocabulary-too-small"}), (begin + 6, set())):
        assert set(check_against(report, load(glm, [f"model.vocab={vocab}"])).by_code) == codes


@pytest.mark.shows("A33")
def test_the_objective_is_identity(glm: Path) -> None:
    config = load(glm)
    packer = open_packer(config)
    assert packer.length == 56
    assert open_objective(config, packer) is not None
    before = identity(config, packer).model_dump()
    assert before["data"]["objective"]["version"] == 1
    changed = load(glm, ["data.objective.mask_share=0.5"])
    assert differences(before, identity(changed, packer).model_dump()) == ["data.objective.mask_share: 0.3 -> 0.5"]
