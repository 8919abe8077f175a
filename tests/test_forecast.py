"""The blocks that a node will read, named without reading, and what a fetcher that knows them brings and drops."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import random_corpus

from fsdp_pretrain.config.schedule import BatchSchedule, Ramp
from fsdp_pretrain.config.sequence_stages import SequenceStages
from fsdp_pretrain.config.skips import Skips
from fsdp_pretrain.data.fetch.forecast import Forecast
from fsdp_pretrain.data.fetch.room import RECOMMENDED, bytes_in_use
from fsdp_pretrain.data.fetch.window import Window
from fsdp_pretrain.data.packing import pieces
from fsdp_pretrain.data.packing.loader import Loader
from fsdp_pretrain.data.packing.mixture import MixtureWeight
from fsdp_pretrain.data.packing.packer import Packer
from fsdp_pretrain.data.packing.position import Position
from fsdp_pretrain.data.text.tokenizer import Tokenizer

pytestmark = pytest.mark.quick
RAMP = BatchSchedule(24, Ramp(8, 8, 0, 100))


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory, shared_corpus: Path) -> dict[str, Path]:
    """Random documents in two shards, in small blocks; some are empty."""
    folder, tokenizer = tmp_path_factory.mktemp("corpora"), Tokenizer.load(shared_corpus / "tokenizer")

    def make(name: str, seed: int, documents: int, block: int, pairs: bool = False) -> Path:
        sizes, rng = [2, 5, 17, 60] if pairs else [0, 2, 5, 17, 60], random.Random(seed)
        lengths = [[rng.choice(sizes) for _ in range(documents)] for _ in range(2)]
        return random_corpus(folder / name, tokenizer, lengths, pairs=pairs, block_tokens=block)

    return {
        "a": make("a", 1, 300, 700),
        "b": make("b", 2, 100, 300),
        "pairs": make("pairs", 3, 80, 250, pairs=True),
        "large": make("large", 4, 8_000, 4_000),
        "middle": make("middle", 5, 3_000, 3_000),
    }


def weights(**points: Any) -> dict[str, Any]:
    return {"a": MixtureWeight(((0, 1.0),)), "b": MixtureWeight(((0, 0.3),)), **points}


CASES: dict[str, dict[str, Any]] = {
    "one source": {"sources": {"a": 1.0}},
    "a ramp of a weight": {"sources": weights(b=MixtureWeight(((0, 0.1), (300, 2.0))))},
    "a source that begins and stops": {"sources": weights(b=MixtureWeight(((0, 1.0),), start=100, stop=400))},
    "pairs": {"sources": weights(pairs=MixtureWeight(((0, 0.5),))), "slots": (4, 8)},
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
def test_the_forecast_is_what_a_loader_opens(
    corpora: dict[str, Path], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the start and from the middle, over several epochs: the same blocks in the same steps, none read for it."""
    monkeypatch.setattr(pieces, "GROUP", 6)
    skips, steps, ranks = CASES[case].get("skips", Skips()), 36, range(1, 3)
    starts = [Position(), Position(step=8, consumed=64, cursor=skips.after(0, 64), batch=8)]
    for start in starts:
        packer = make(corpora, CASES[case])
        forecast = Forecast(packer, RAMP, skips, start, world=4, ranks=ranks)
        uses = [(forecast.advance() or [], forecast.position.step) for _ in range(steps)]
        assert not any(corpus._blocks for corpus in packer.corpora.values())
        each = [opened(make(corpora, CASES[case]), rank, 4, skips, start, steps) for rank in ranks]
        for number, (step, at) in enumerate(uses):
            assert set(step) == set().union(*(blocks[number] for blocks in each))
            assert len(set(step)) == len(step) and at == start.step + number + 1


def test_a_forecast_ends_with_the_run_and_with_the_data(corpora: dict[str, Path]) -> None:
    packer = make(corpora, {"sources": {"a": 1.0}, "max_epochs": {"a": 0.5}})
    forecast = Forecast(packer, BatchSchedule(8), Skips(), Position(), world=2, ranks=range(2), until=30)
    assert [forecast.advance() is None for _ in range(5)] == [False] * 4 + [True]
    forecast = Forecast(packer, BatchSchedule(8), Skips(), Position(), world=2, ranks=range(2))
    assert packer.capacity is not None
    count = sum(1 for _ in iter(forecast.advance, None))
    assert count == packer.capacity // 8 and forecast.advance() is None


# ------------------------------------------------------------------ what is fetched and dropped


CACHES: dict[str, dict[str, Any]] = {
    "all": {},
    "a quarter of a mixture": {"sources": {"large": 1.0, "middle": 0.4}, "world": 4},
    "little of each batch": {"world": 32, "batch": 256, "lanes": 8},
    "steps of a stretch, a mixture": {"batch": 1536, "world": 8, "sources": {"large": 1.0, "middle": 0.4}},
    "one lane": {"lanes": 1},
    "epochs": {"epochs": 2.6, "sources": {"middle": 1.0}, "lanes": 4},
    "unequal blocks": {"unequal": True, "world": 2},
}


@pytest.mark.parametrize("share", [1.0, RECOMMENDED])
@pytest.mark.parametrize("case", CACHES)
def test_a_cache_fetches_each_block_once_an_epoch(
    corpora: dict[str, Path], case: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 1.1 bytes for each byte and epoch with the recommended size, 1.5 with the least."""
    for module in ("fsdp_pretrain.data.packing.source", "fsdp_pretrain.data.fetch.room"):
        monkeypatch.setattr(f"{module}.STRETCH", 256)
    chosen = {"sources": {"large": 1.0}, "world": 1, "batch": 32, "lanes": 6, "epochs": 1.6} | CACHES[case]
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
    window = Window(forecast, dict(enumerate(packer.mixture.names)), sizes)
    fetched = fetch_all(window, int(share * bytes_in_use(packer, sizes, batch)))
    epochs = packer.epochs_read(samples)
    read = sum(max(epochs[name], 1.0) * int(own.sum()) for name, own in sizes.items())
    assert fetched < (1.1 if share > 1 else 1.5) * read


def fetch_all(window: Window, limit: int) -> int:
    """Bytes that are fetched for a whole run. What a step reads is there before it, and is not dropped for others."""
    fetched, step = 0, 0
    while True:
        while window.extend(limit):
            pass
        if not window.uses:
            return fetched
        for key in window.missing():
            forgotten = window.excess(limit - window.size_of(key))
            assert not set(forgotten) & set(window.uses)
            if sum(window.held.values()) + window.size_of(key) > limit and not window.is_urgent(key):
                break
            window.held[key] = window.size_of(key)
            fetched += window.held[key]
        step += 1
        assert {key for key, steps in window.uses.items() if steps[0] == step} <= window.held.keys()
        assert sum(window.held.values()) <= limit
        window.drop(step)


def test_the_next_step_gets_the_room_of_what_is_used_last(corpora: dict[str, Path]) -> None:
    """As when others fill the disk after the window was chosen: or the step would wait for ever."""
    packer = make(corpora, {"sources": {"large": 1.0}}, length=16, lanes=4)
    (stream,) = packer.streams
    sizes = {"large": 2 * stream.block_lengths}
    forecast = Forecast(packer, BatchSchedule(8), Skips(), Position(), world=1, ranks=range(1), until=10_000)
    window = Window(forecast, {0: "large"}, sizes)
    while window.extend(int(sizes["large"].sum())):
        pass
    first, *others = window.missing()
    assert window.is_urgent(first) and len(others) > 8
    later = [key for key in others if not window.is_urgent(key)]
    window.held = {key: window.size_of(key) for key in later}
    room = sum(window.held.values()) - window.size_of(first)
    assert window.excess(room) == []
    in_flight, last = later[-1], later[-2]  # in the order of their next use
    assert window.excess(room, spare=[in_flight])[0] == last
    assert sum(window.held.values()) <= room and in_flight in window.held
