"""The blocks that a node will read: named without reading, exactly for near steps and to a lane's stretch for far ones."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.fetch.replacement import BlockTrace, live_bytes, plan, simulate

from data.corpus.corpus import build_blocks, write_corpus
from data.corpus.shards import Shard, ShardWriter
from data.fetch import working_set
from data.fetch.forecast import NEVER, Forecast, NextUse
from data.packing import pieces, source
from data.packing.loader import Loader
from data.packing.mixture import MixtureWeight
from data.packing.packer import Packer
from data.packing.position import Position
from data.text.tokenizer import Tokenizer
from fsdp_pretrain.config.schedule import BatchSchedule, Ramp
from fsdp_pretrain.config.sequence_stages import SequenceStages
from fsdp_pretrain.config.skips import Skips

pytestmark = pytest.mark.quick
RAMP = BatchSchedule(24, Ramp(8, 8, 0, 100))


def corpus(path: Path, tokenizer: Tokenizer, *, seed: int, documents: int, block: int, pairs: bool = False) -> Path:
    """Random documents in two shards, in blocks of about `block` tokens; some are empty."""
    rng = random.Random(seed)
    (path / "shards").mkdir(parents=True)
    entries, shards = [], []
    for number in range(2):
        with ShardWriter(path / f"shards/s{number}", np.dtype("<u2")) as writer:
            for _ in range(documents // 4 * 2):
                writer.append(np.arange(rng.choice([2, 5, 17, 60] if pairs else [0, 2, 5, 17, 60]), dtype="<u2") + 1)
            entries.append(writer.finish())
        shards.append(Shard(path / f"shards/s{number}"))
    blocks = build_blocks(shards, block, pairs=pairs)
    write_corpus(path, tokenizer, entries, np.dtype("<u2"), {}, pairs=pairs, blocks=blocks)
    return path


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory, shared_corpus: Path) -> dict[str, Path]:
    folder, tokenizer = tmp_path_factory.mktemp("corpora"), Tokenizer.load(shared_corpus / "tokenizer")
    return {
        "a": corpus(folder / "a", tokenizer, seed=1, documents=600, block=700),
        "b": corpus(folder / "b", tokenizer, seed=2, documents=200, block=300),
        "pairs": corpus(folder / "pairs", tokenizer, seed=3, documents=160, block=250, pairs=True),
        "large": corpus(folder / "large", tokenizer, seed=4, documents=16_000, block=4_000),
        "middle": corpus(folder / "middle", tokenizer, seed=5, documents=6_000, block=3_000),
    }


def weights(**points: Any) -> dict[str, Any]:
    return {"a": MixtureWeight(((0, 1.0),)), "b": MixtureWeight(((0, 0.3),)), **points}


CASES: dict[str, dict[str, Any]] = {
    "one source": {"sources": {"a": 1.0}},
    "a mixture": {"sources": weights()},
    "a ramp of a weight": {"sources": weights(b=MixtureWeight(((0, 0.1), (300, 2.0))))},
    "a source that ends": {"sources": weights(), "max_epochs": {"b": 0.5}},
    "a source that begins and stops": {"sources": weights(b=MixtureWeight(((0, 1.0),), start=100, stop=400))},
    "skips": {"sources": weights(), "skips": Skips([(13, 40), (41, 200), (500, 501)])},
    "stages": {"sources": weights(), "stages": SequenceStages((0, 160, 320), (8, 16, 32))},
    "pairs": {"sources": weights(pairs=MixtureWeight(((0, 0.5),))), "slots": (4, 8)},
    "a reshuffle": {"sources": weights(), "reshuffle": [100, 333]},
    "skips, stages and a reshuffle": {
        "sources": weights(),
        "skips": Skips([(50, 60)]),
        "stages": SequenceStages((0, 160), (16, 32)),
        "reshuffle": [200],
    },
}


def make(corpora: dict[str, Path], case: dict[str, Any], *, length: int = 32, lanes: int = 4) -> Packer:
    options = {key: value for key, value in case.items() if key not in ("sources", "skips")}
    named = [(name, corpora[name], weight) for name, weight in case["sources"].items()]
    return Packer(named, length, seed=3, lanes=lanes, **options)


def opened(packer: Packer, rank: int, world: int, skips: Skips, start: Position, steps: int) -> list[set[Any]]:
    """The blocks that a real loader opens in each step: {(source, block)}."""
    found: set[tuple[int, int]] = set()
    for number, stream in enumerate(packer.streams):
        stream._block.cache_clear()
        inner = stream._block

        def recording(epoch: int, block: int, *, number: int = number, inner: Any = inner) -> Any:
            found.add((number, block))
            return inner(epoch, block)

        stream._block = recording  # type: ignore[assignment]
    loader = Loader(packer, RAMP, rank=rank, world=world, micro_batch=2, skips=skips, start=start, prefetch=0)
    each = []
    for _ in range(steps):
        found.clear()
        next(loader)
        each.append(set(found))
    return each


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", [range(1, 3)])
def test_the_forecast_is_what_a_loader_opens(
    corpora: dict[str, Path], case: str, ranks: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the start and from the middle, over several epochs: the same blocks in the same steps, none read for it."""
    monkeypatch.setattr(pieces, "GROUP", 6)
    skips, steps = CASES[case].get("skips", Skips()), 36
    starts = [Position(), Position(step=8, consumed=64, cursor=skips.after(0, 64), batch=8)]
    for start in starts:
        packer = make(corpora, CASES[case])
        forecast = Forecast(packer, RAMP, skips, start, world=4, ranks=ranks)
        uses = [forecast.advance() or [] for _ in range(steps)]
        assert not any(corpus._open for corpus in packer.corpora.values())
        each = [opened(make(corpora, CASES[case]), rank, 4, skips, start, steps) for rank in ranks]
        for number, step in enumerate(uses):
            assert {(use.source, use.block) for use in step} == set().union(*(blocks[number] for blocks in each))
            assert len({(use.source, use.block) for use in step}) == len(step)
            assert {use.step for use in step} == {start.step + number + 1}
        assert [step[0].cursor for step in uses] == sorted(step[0].cursor for step in uses)


def test_a_forecast_ends_with_the_run_and_with_the_data(corpora: dict[str, Path]) -> None:
    packer = make(corpora, {"sources": {"a": 1.0}, "max_epochs": {"a": 0.5}})
    forecast = Forecast(packer, BatchSchedule(8), Skips(), Position(), world=2, ranks=range(2), until=30)
    assert [forecast.advance() is None for _ in range(5)] == [False] * 4 + [True]
    forecast = Forecast(packer, BatchSchedule(8), Skips(), Position(), world=2, ranks=range(2))
    assert packer.capacity is not None
    count = sum(1 for _ in iter(forecast.advance, None))
    assert count == packer.capacity // 8 and forecast.advance() is None


FAR: dict[str, dict[str, Any]] = {
    "one source": {"sources": {"large": 1.0}},
    "a mixture with a ramp": {"sources": {"large": 1.0, "a": MixtureWeight(((0, 0.1), (20_000, 1.0)))}},
    "a source that ends": {"sources": {"large": 1.0, "a": 0.3}, "max_epochs": {"a": 2.5}},
    "reshuffles": {"sources": {"large": 1.0}, "reshuffle": [9_000]},
    "stages": {"sources": {"large": 1.0}, "stages": SequenceStages((0, 8_000), (8, 16))},
}


@pytest.mark.parametrize(
    "case", ["reshuffles", "stages", *(pytest.param(case, marks=pytest.mark.slow) for case in list(FAR)[:3])]
)
def test_the_next_use_is_known_to_a_stretch(
    corpora: dict[str, Path], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every block, at places of two epochs: never later than the real one, and earlier by one stretch at most."""
    monkeypatch.setattr(source, "STRETCH", 256)
    monkeypatch.setattr("data.fetch.forecast.STRETCH", 256)
    monkeypatch.setattr(pieces, "GROUP", 300)
    packer = make(corpora, FAR[case], length=16, lanes=3)
    forecast = Forecast(packer, BatchSchedule(32), Skips(), Position(), world=1, ranks=range(1))
    real: dict[tuple[int, int], list[int]] = {}
    while (uses := forecast.advance()) is not None and uses[0].cursor < 50_000:
        for use in uses:
            real.setdefault((use.source, use.block), []).append(use.cursor)
    shares = [min(packer.shares(cursor)[name] for cursor in (0, 50_000)) for name in packer.mixture.names]
    for number, stream in enumerate(packer.streams):
        next_use = NextUse(packer, number)
        around = 2 * 256 * 3 / max(shares[number], 1e-9)
        for cursor in (0, 5_000, 11_111, 16_500, 20_000):
            found, early = next_use.after(cursor), list[int]()
            for block in range(len(stream.block_lengths)):
                later = [at for at in real.get((number, block), []) if at >= cursor]
                if later:
                    assert cursor <= found[block] <= later[0] + 32
                    early.append(later[0] - int(found[block]))
            assert not early or np.quantile(early, 0.9) <= around


# ------------------------------------------------------------------ replacement


def fewest(blocks: list[int], capacity: int) -> int:
    """Fetches of the best of all policies, by trying all."""
    states = {frozenset[int](): 0}
    for block in blocks:
        following: dict[frozenset[int], int] = {}
        for state, cost in states.items():
            if block in state:
                choices = [(state, cost)]
            elif len(state) < capacity:
                choices = [(state | {block}, cost + 1)]
            else:
                choices = [((state - {victim}) | {block}, cost + 1) for victim in state]
            for found, price in choices:
                following[found] = min(following.get(found, price), price)
        states = following
    return min(states.values())


def prefetched(blocks: list[int], capacity: int, ahead: int) -> int:
    """Fetches by the plan of the fetcher, which is made anew after every use and carried out as early as it may be."""
    present, fetched = dict[int, int](), 0
    for now in range(len(blocks)):
        order = [(at, blocks[at]) for at in range(now, min(now + ahead, len(blocks)))]
        uses = {block: [at for at, one in order if one == block] for _, block in order}

        def later(block: int, end: int = now + len(order)) -> int:
            return next((at for at in range(end, len(blocks)) if blocks[at] == block), NEVER)

        room = capacity - len(present)
        for fetch in [*plan(order, uses, present, room, size_of=lambda _: 1, later=later)]:
            if fetch.after >= now or len(present) - len(fetch.victims) >= capacity:
                continue
            if any(victim not in present for victim in fetch.victims):
                continue  # fetched by an entry of the plan that has to wait
            for victim in fetch.victims:
                del present[victim]
            present[fetch.key] = 1
            fetched += 1
        assert blocks[now] in present
    return fetched


@pytest.mark.parametrize("seed", range(12))
def test_replacement_fetches_as_little_as_any_policy_can(seed: int) -> None:
    """On random orders: the simulation, and the rule of the fetcher however far it looks ahead."""
    rng = random.Random(seed)
    blocks = [rng.randrange(6) for _ in range(40)]
    trace = BlockTrace(np.arange(40), np.array(blocks), np.full(6, 1))
    for capacity in (1, 2, 3, 5):
        best = fewest(blocks, capacity)
        assert simulate(trace, capacity, "belady") == best <= simulate(trace, capacity, "lru") == lru(blocks, capacity)
        assert [prefetched(blocks, capacity, ahead) for ahead in (1, 3, 40)] == [best] * 3


def lru(blocks: list[int], capacity: int) -> int:
    present, fetched = OrderedDict[int, None](), 0
    for block in blocks:
        if block not in present:
            fetched += 1
            if len(present) == capacity:
                present.popitem(last=False)
        present[block] = None
        present.move_to_end(block)
    return fetched


def test_what_others_need_sooner_stays() -> None:
    """Their next use counts like one's own; a block that they need before the fetched one goes after that."""
    present, nexts = {"mine": 10, "theirs": 10, "soon": 10}, {"mine": 50, "theirs": 99}
    order, uses = [(20, "new"), (30, "soon")], {"new": [20], "soon": [30]}

    def fetch(size: int, room: int, others: dict[str, int]) -> tuple[list[str], int]:
        sizes, later = {"new": size, "soon": 10}.__getitem__, {**nexts, "new": 70, "soon": 80}.__getitem__
        found = next(plan(order, uses, present, room, size_of=sizes, later=later, others=others))
        return found.victims, found.after

    assert fetch(10, 0, {}) == (["theirs"], -1) and fetch(20, 0, {}) == (["theirs", "mine"], -1)
    assert fetch(10, 10, {}) == ([], -1) and fetch(20, 10, {}) == (["theirs"], -1)
    assert fetch(10, 0, {"theirs": 25}) == (["mine"], -1) and fetch(20, 0, {"theirs": 25}) == (["mine", "soon"], -1)
    assert fetch(30, 0, {"theirs": 15}) == (["mine", "soon", "theirs"], 15)


def test_what_others_need_no_more_goes() -> None:
    """From their last use on, their needs do not count; the fetch waits for that use."""
    for last, expected in ((15, ("theirs", 15)), (25, ("mine", -1))):
        (found,) = plan(
            [(20, "new")], {"new": [20]}, {"mine": 10, "theirs": 10}, 0, size_of=lambda _: 10,
            later={"mine": 50, "theirs": 99, "new": 70}.__getitem__, others={"theirs": 5}, others_last={"theirs": last},
        )  # fmt: skip
        assert (found.victims, found.after) == ([expected[0]], expected[1])


@pytest.mark.parametrize("seed", range(20))
def test_no_block_goes_before_its_last_use_ahead_of_the_fetched_one(seed: int) -> None:
    """With steps that read several blocks; those of a step fit into the cache."""
    rng = random.Random(seed)
    steps = [rng.sample(range(12), rng.randrange(1, 4)) for _ in range(30)]
    order = [(at, block) for at, blocks in enumerate(steps) for block in blocks]
    uses = {block: [at for at, one in order if one == block] for _, block in order}
    present = dict.fromkeys(range(3, 9), 1)
    for fetch in plan(order, uses, present, 0, size_of=lambda _: 1, later=lambda _: NEVER):
        assert fetch.victims and not [
            (victim, use) for victim in fetch.victims for use in uses.get(victim, ()) if fetch.after < use <= fetch.at
        ]


def test_a_fetch_waits_for_the_last_use_of_its_victim() -> None:
    (found,) = plan(
        [(0, "a"), (8, "b"), (16, "c")], {"a": [0], "b": [8], "c": [16]}, {"a": 1, "b": 1}, 0,
        size_of=lambda _: 1, later={"a": 100, "b": 50, "c": 90}.__getitem__,
    )  # fmt: skip
    assert (found.key, found.at, found.victims, found.after) == ("c", 16, ["a"], 0)


def test_live_bytes_are_those_between_first_and_last_use() -> None:
    blocks = [0, 1, 0, 2, 1, 2, 0]
    trace = BlockTrace(np.arange(0, 700, 100), np.array(blocks), np.array([1, 10, 100]))
    assert live_bytes(trace, np.full(3, 10_000)) == 111  # all three around 300
    assert live_bytes(trace, np.full(3, 300)) == 110  # block 0 is not worth keeping from 200 to 600
    for pause in itertools.product((50, 250, 10_000), repeat=3):
        assert live_bytes(trace, np.array(pause)) <= 111


# ------------------------------------------------------------------ the working set


WORKING_SETS: dict[str, dict[str, Any]] = {
    "all": {},
    "a quarter": {"world": 4},
    "a mixture": {"sources": {"large": 1.0, "middle": 0.4}},
    "a quarter of a mixture": {"sources": {"large": 1.0, "middle": 0.4}, "world": 4},
    "three sources": {"sources": {"large": 1.0, "middle": 0.3, "a": 0.05}, "world": 2},
    "little of each batch": {"world": 32, "batch": 256, "lanes": 16},
    "little of a mixture": {"sources": {"large": 1.0, "middle": 0.4}, "world": 32, "batch": 256, "lanes": 4},
    "steps of half a stretch": {"batch": 768},
    "steps of a stretch": {"batch": 1536, "world": 2},
    "steps of a stretch, a mixture": {"batch": 1536, "world": 8, "sources": {"large": 1.0, "middle": 0.4}},
    "steps of three stretches": {"batch": 1536, "lanes": 2},
    "an eighth of large steps": {"batch": 4096, "world": 8},
    "one lane": {"lanes": 1},
    "many lanes": {"lanes": 16},
    "less than an epoch": {"epochs": 0.4, "world": 2},
    "epochs": {"epochs": 2.6, "sources": {"middle": 1.0}, "lanes": 4},
    "epochs of one source": {"sources": {"large": 1.0, "b": 0.3}},
    "unequal blocks": {"unequal": True, "world": 2},
    "unequal blocks, large steps": {"unequal": True, "batch": 1536, "world": 4},
}


@pytest.mark.parametrize("case", WORKING_SETS)
def test_the_predicted_working_set_is_the_measured_one(
    corpora: dict[str, Path], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("data.packing.source", "data.fetch.forecast", "data.fetch.working_set"):
        monkeypatch.setattr(f"{module}.STRETCH", 256)
    chosen = {"sources": {"large": 1.0}, "world": 1, "batch": 32, "lanes": 6, "epochs": 1.6} | WORKING_SETS[case]
    first, batch, world = next(iter(chosen["sources"])), chosen["batch"], chosen["world"]
    packer = make(corpora, {"sources": chosen["sources"]}, length=16, lanes=chosen["lanes"])
    rng = np.random.default_rng(1)
    sizes = {
        name: (stream.block_lengths * (rng.lognormal(1, 0.8, len(stream.block_lengths)) if "unequal" in chosen else 2))
        .astype(np.int64)
        for name, stream in zip(packer.mixture.names, packer.streams, strict=True)
    }  # fmt: skip
    samples, ranks = int(chosen["epochs"] * packer.epoch_samples[first]), range(world // 3, world // 3 + 1)
    forecast = Forecast(packer, BatchSchedule(batch), Skips(), Position(), world=world, ranks=ranks, until=samples)
    trace = working_set.record(packer, forecast, sizes, samples)
    measured = working_set.measure(packer, trace)
    predicted = working_set.predict(packer, sizes, world=world, ranks=ranks, batch=batch, samples=samples)
    assert 0.9 * measured < predicted < 1.1 * measured
    if case in ("all", "a quarter"):  # every block once per epoch, and a few at the borders of lanes once more
        whole = int(trace.sizes.sum())
        read = chosen["epochs"] * whole
        assert measured < 0.5 * whole
        assert simulate(trace, int(1.1 * measured), "belady") < 1.1 * read
        assert simulate(trace, int(1.1 * measured), "lru") > 1.1 * read
