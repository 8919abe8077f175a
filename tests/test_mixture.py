"""Mixtures, skips and reshuffles: arithmetic on the sample index, checked against closed forms and brute force."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_pretrain.config.config import load
from fsdp_pretrain.config.schedule import BatchSchedule
from fsdp_pretrain.config.skips import Skips
from fsdp_pretrain.data.packing.loader import Loader, micro_batch
from fsdp_pretrain.data.packing.mixture import CHUNK, GRID, Mixture, MixtureWeight
from fsdp_pretrain.data.packing.objectives import IGNORE
from fsdp_pretrain.data.packing.opening import open_packer
from fsdp_pretrain.data.packing.packer import Packer
from fsdp_pretrain.data.packing.position import Position
from fsdp_pretrain.errors import ConfigError, DataError

pytestmark = pytest.mark.quick


def sequence(mixture: Mixture, first: int, stop: int) -> list[tuple[str, int]]:
    """(source, source index) of samples [first, stop)."""
    return [(mixture.names[source], index) for source, index in map(mixture.source_of, range(first, stop))]


def constant(*weights: float) -> Mixture:
    return Mixture({f"source-{number}": MixtureWeight(((0, weight),)) for number, weight in enumerate(weights)})


@pytest.mark.parametrize(
    "weights", [[1.0], [3, 1], [0.5, 0.3, 0.15, 0.05], [1, 1, 1], [0.999, 0.001], [1.0, 1e-6], [2.0, 0.0, 1.0]]
)
@pytest.mark.promise("mixture-shares")
def test_constant_shares_are_exact(weights: list[float]) -> None:
    mixture, shares = constant(*weights), [weight / sum(weights) for weight in weights]
    next_of = [0] * len(weights)
    for index in range(3 * CHUNK + 100):
        if index % 97 == 0:
            assert mixture.counts(index) == next_of
            assert all(abs(n - share * index) <= 1 + len(weights) / 2 for n, share in zip(next_of, shares, strict=True))
        source, number = mixture.source_of(index)
        assert number == next_of[source]  # every source is read in its own order, none skipped
        next_of[source] += 1
    far = 10**9
    counts = mixture.counts(far)
    assert sum(counts) == far
    assert all(abs(n - share * far) < 2 + far * 1e-8 for n, share in zip(counts, shares, strict=True))
    assert mixture.source_of(far) == constant(*weights).source_of(far)  # whatever was asked before


weight_strategy = st.builds(
    lambda points, start, length, limit: MixtureWeight(
        tuple(sorted(points, key=lambda point: point[0])), start, None if length is None else start + length, limit
    ),
    st.lists(st.tuples(st.integers(0, 9000), st.sampled_from([0.0, 0.1, 1.0, 3.0])), min_size=1, max_size=4),
    st.sampled_from([0, 0, 1, 2500]),
    st.sampled_from([None, None, 1, 3000]),
    st.sampled_from([None, None, 1, 700, 2500]),
)


@settings(max_examples=60, deadline=None)
@given(weights=st.lists(weight_strategy, max_size=3), base=st.sampled_from([0.01, 1.0]), seed=st.integers(0, 99))
def test_any_mixture_deals_every_source_in_order(weights: list[MixtureWeight], base: float, seed: int) -> None:
    """Random access equals sequential access; numbers count up per source; limits, starts and stops hold."""
    named = {f"s{number}": weight for number, weight in enumerate(weights)} | {"base": MixtureWeight(((0, base),))}
    mixture = Mixture(named)
    dealt, next_of = sequence(mixture, 0, 7000), Counter[str]()
    for index, (name, number) in enumerate(dealt):
        assert number == next_of[name]
        next_of[name] += 1
        weight = named[name]
        assert index >= weight.start - 1 and (weight.stop is None or index <= weight.stop + len(named))
        assert weight.limit is None or number < weight.limit
    for index in random.Random(seed).sample(range(7000), 40):
        assert mixture.source_of(index) == Mixture(named).source_of(index)
        name, number = dealt[index]
        assert mixture.counts(index)[mixture.names.index(name)] == number


@pytest.mark.shows("A14")
@pytest.mark.promise("mixture-shares")
def test_ramped_shares_follow_the_schedule() -> None:
    """Within 0.5 points over any 10,000 samples, 0.01 points over a million."""
    total = 3_000_000
    named = {
        "web": MixtureWeight(((0, 8.0), (1_000_000, 8.0), (2_000_000, 2.0))),
        "code": MixtureWeight(((0, 1.0), (500_000, 1.0), (2_500_000, 5.0))),
        "books": MixtureWeight(((0, 1.0), (700_000, 1.0), (700_000, 2.0))),
    }
    mixture = Mixture(named)
    positions = np.arange(0, total, 100)
    weights = np.stack([weight.at(positions) for weight in named.values()])
    exact = [np.interp(positions, *np.array(weight.points, dtype=float).T) for weight in list(named.values())[:2]]
    assert np.abs(weights[:2] - exact).max() < 0.02
    weights[:2] = exact
    planned = np.concatenate([np.zeros((3, 1)), np.cumsum(100 * weights / weights.sum(axis=0), axis=1)], axis=1)
    for span, tolerance in ((10_000, 0.005), (1_000_000, 0.0001)):
        for first in [*range(0, total - span + 1, max(span // 3, 200_000)), total - span]:
            realised = np.subtract(mixture.counts(first + span), mixture.counts(first)) / span
            expected = (planned[:, (first + span) // 100] - planned[:, first // 100]) / span
            assert np.abs(realised - expected).max() < tolerance, (first, span)
    assert mixture.shares(2_600_000) == pytest.approx({"web": 2 / 9, "code": 5 / 9, "books": 2 / 9}, abs=1e-6)


@pytest.mark.shows("A18")
def test_what_happens_later_does_not_touch_what_was_before() -> None:
    """Adding C at S, and dropping A at T, leaves everything before unchanged and the order of the others as it was."""
    added, dropped = 5000, 9001
    named = {"a": MixtureWeight(((0, 3.0), (8000, 1.0))), "b": MixtureWeight(((0, 2.0),))}
    before = Mixture(named)
    after = Mixture(
        {"0": MixtureWeight(((0, 1.0),), start=added), **named, "a": MixtureWeight(named["a"].points, stop=dropped)}
    )
    assert sequence(before, 0, added) == sequence(after, 0, added)
    assert after.past(added) == before.past(added) and after.past(added + 1) != before.past(added + 1)
    for name in ("a", "b"):
        numbers = [number for source, number in sequence(after, 0, 16_000) if source == name]
        assert numbers == list(range(len(numbers)))
    late = Counter(source for source, _ in sequence(after, dropped + 3, 20_000))
    assert late["a"] == 0 and abs(late["b"] - 2 * late["0"]) <= 2


def test_a_source_that_is_used_up_leaves_its_share_to_the_others() -> None:
    mixture = Mixture({"small": MixtureWeight(limit=777), "large": MixtureWeight()})
    assert mixture.counts(100_000) == [777, 99_223] and mixture.capacity is None
    both = Mixture({"small": MixtureWeight(limit=777), "large": MixtureWeight(limit=1000)})
    assert both.capacity == 1777 and both.counts(1777) == [777, 1000]
    with pytest.raises(DataError, match="ends after 1_777 samples"):
        both.source_of(1777)


def test_nothing_to_read_is_refused() -> None:
    with pytest.raises(DataError, match="have weight 0 at its start"):
        constant(0.0, 0.0)
    with pytest.raises(DataError, match="check the units"):
        Mixture({"a": MixtureWeight(((0, 1.0), (10**13 * GRID, 2.0)))})


@pytest.mark.shows("A30")
@settings(max_examples=200, deadline=None)
@given(
    ranges=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), max_size=5),
    cursor=st.integers(0, 70),
    count=st.integers(1, 20),
)
def test_skips_against_brute_force(ranges: list[tuple[int, int]], cursor: int, count: int) -> None:
    skips = Skips((first, first + length) for first, length in ranges)
    bad = {sample for first, length in ranges for sample in range(first, first + length)}
    kept = [sample for sample in range(300) if sample not in bad]
    following = [sample for sample in kept if sample >= cursor][:count]
    assert skips.take(cursor, count) == following
    assert skips.take_back(cursor, count) == [sample for sample in kept if sample < cursor][-count:]
    assert following[-1] < skips.after(cursor, count)
    assert not set(range(following[-1] + 1, skips.after(cursor, count))) - bad
    assert all(a[1] < b[0] for a, b in pairwise(skips.ranges))  # merged


# ---------------------------------------------------------------- on real corpora


def packer(shared_corpus: Path, **options: Any) -> Packer:
    sources = options.pop("sources", [("text", shared_corpus / "corpus", 1.0)])
    return Packer(sources, 32, seed=options.pop("seed", 5), lanes=options.pop("lanes", 4), **options)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (
            {"weight": [{"at": "9 samples", "value": 1.0}, {"at": "64 tokens", "value": 5.0}]},
            "`weight` are not in order",
        ),
        ({"start": "5 samples", "stop": "64 tokens"}, "`stop` = 64 tokens is not after `start` = 5 samples"),
        ({"start": "2 samples", "stop": "64 tokens"}, "`stop` = 64 tokens is not after `start` = 2 samples"),
        ({"start": "1 sample", "stop": "64 tokens", "weight": [{"at": "32 tokens", "value": 1.0}]}, ""),
    ],
)
def test_places_in_other_units_are_in_order(lab: Any, source: dict[str, Any], problem: str) -> None:
    """Of 32 tokens a sample."""
    corpus = str(lab.corpus)
    sources = [{"name": "a", "path": corpus, **source}, {"name": "b", "path": corpus}]
    config = load(lab.config(data={"sequence_length": 32, "sources": sources}))
    with pytest.raises(ConfigError, match=re.escape(problem)) if problem else nullcontext():
        open_packer(config)


@pytest.mark.shows("B4")
def test_a_reshuffle_permutes_the_rest_of_the_epoch(shared_corpus: Path) -> None:
    plain, at = packer(shared_corpus), 300
    samples = math.ceil(plain.epoch_samples["text"])
    assert samples > 2 * 4 * 64 + at  # more than two chunks are left
    shuffled = packer(shared_corpus, reshuffle=[at])
    twice = packer(shared_corpus, reshuffle=[at, at + 200])

    def rows(packer: Packer, first: int, stop: int) -> list[tuple[int, ...]]:
        return [tuple(row) for row in packer.pack(first, stop - first).tokens.tolist()]

    assert rows(shuffled, 0, at) == rows(plain, 0, at)
    rest = rows(plain, at, samples)
    for other in (rows(shuffled, at, samples), rows(twice, at, samples)):
        assert sorted(other) == sorted(rest)  # every token of the epoch is still trained exactly once
        assert sum(a == b for a, b in zip(other, rest, strict=True)) < 0.05 * len(rest)
    assert rows(twice, at, at + 200) == rows(shuffled, at, at + 200)
    assert rows(twice, at + 200, at + 400) != rows(shuffled, at + 200, at + 400)
    for other in (shuffled, twice):  # the next epoch has its own order
        assert rows(other, samples, 2 * samples) == rows(plain, samples, 2 * samples)


@pytest.mark.shows("A19")
@pytest.mark.parametrize("piece", [0, 1])
def test_an_excluded_document_keeps_its_place_and_is_not_learned(shared_corpus: Path, piece: int) -> None:
    """Each of its tokens is no target, the first one too; all others are."""
    plain = packer(shared_corpus)
    target = plain.provenance(next(at for at in range(17, 30) if len(plain.provenance(at)) > 1))[piece]
    without = packer(shared_corpus, exclude=[(target.source, target.shard, target.document)])
    ours, theirs = without.pack(10, 20), plain.pack(10, 20)
    labels = micro_batch(ours, with_lengths=False, across_documents=True).labels
    assert np.array_equal(ours.tokens, theirs.tokens) and not theirs.ignore
    expected = set()
    for row in range(20):
        position = 0
        for part in plain.provenance(10 + row):
            while position < 33 and theirs.tokens[row, position] == plain.eod:
                position += 1
            stop = position + part.stop - part.start
            if (part.shard, part.document) == (target.shard, target.document):
                expected.add((row, position, stop))
            position = stop
    assert set(ours.ignore) == expected and expected and labels is not None
    ignored = {(row, column) for row, column in (labels == IGNORE).nonzero().tolist()}
    assert ignored == {(row, at - 1) for row, start, stop in expected for at in range(max(1, start), stop)}


def test_a_sample_that_opens_with_the_separator_of_an_excluded_document_is_learned(shared_corpus: Path) -> None:
    """Nothing of that document is in it."""
    plain = packer(shared_corpus)
    at, piece = next((at, part) for at in range(1000) if (part := plain.provenance(at)[0]).start == part.stop)
    without = packer(shared_corpus, exclude=[(piece.source, piece.shard, piece.document)])
    packed = without.pack(at, 1)
    labels = micro_batch(packed, with_lengths=False, across_documents=True).labels
    assert packed.tokens[0, 0] == plain.eod and not packed.ignore
    assert labels is None or not (labels == IGNORE).any()


@pytest.mark.parametrize("weight", [1.0, MixtureWeight(((0, 1.0), (5000, 0.0))), MixtureWeight(start=100, stop=200)])
def test_a_source_that_may_be_read_for_less_than_one_sample_is_refused(shared_corpus: Path, weight: Any) -> None:
    """It was read on and on, if its weight ends, or made all sources count as unused."""
    corpus = shared_corpus / "corpus"
    with pytest.raises(DataError, match="max_epochs = 1e-06 of the source 'small' is less than one sample of 32 tok"):
        packer(shared_corpus, sources=[("large", corpus, 1.0), ("small", corpus, weight)], max_epochs={"small": 1e-6})


@pytest.mark.shows("A14", "A30")
@pytest.mark.parametrize(("world", "prefetch"), [(1, 0), (2, 4), (8, 1)])
@pytest.mark.promise("data-order")
def test_the_same_ids_for_every_world_and_prefetch_and_across_resumes(
    shared_corpus: Path, world: int, prefetch: int
) -> None:
    """A ramped mixture with skips: global batches do not depend on ranks, threads or restarts."""
    corpus = shared_corpus / "corpus"
    sources = [
        ("a", corpus, MixtureWeight(((0, 1.0), (400, 3.0)))),
        ("b", corpus, MixtureWeight(((0, 2.0),), start=100)),
    ]
    reference, skips = packer(shared_corpus, sources=sources), Skips([(40, 77), (203, 204)])
    cursor = consumed = 0
    position = Position()
    for part in (3, 8, 2):  # three starts
        loaders = [
            Loader(
                packer(shared_corpus, sources=sources), BatchSchedule(16), rank=rank, world=world, micro_batch=2,
                start=position, skips=skips, prefetch=prefetch,
            )
            for rank in range(world)
        ]  # fmt: skip
        for _ in range(part):
            steps = [next(loader) for loader in loaders]
            indices = skips.take(cursor, 16)
            expected = reference.pack_samples(indices).tokens.tolist()
            assert [row for step in steps for micro in step.micro for row in micro.tokens.tolist()] == expected
            cursor, consumed = indices[-1] + 1, consumed + 16
            (position,) = {step.position for step in steps}
            assert (position.cursor, position.consumed) == (cursor, consumed)
