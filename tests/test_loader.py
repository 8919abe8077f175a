"""The loader: the same global batches for any number of ranks, micro-batch, prefetch and restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_pretrain.config.schedule import BatchSchedule, Ramp
from fsdp_pretrain.data.packing.loader import IGNORE, Loader, StepBatch, check_batches
from fsdp_pretrain.data.packing.packer import Packer
from fsdp_pretrain.errors import ConfigError, DataError

pytestmark = pytest.mark.quick
BATCHES = BatchSchedule(24, Ramp(12, 12, 0, 100))


@pytest.fixture
def packer(shared_corpus: Path) -> Packer:
    return Packer([("text", shared_corpus / "corpus", 1.0)], 32, seed=5, lanes=8)


def steps(packer: Packer, rank: int, world: int, count: int, **options: Any) -> list[StepBatch]:
    loader = Loader(packer, BATCHES, rank=rank, world=world, **{"micro_batch": 2, **options})
    return [next(loader) for _ in range(count)]


def global_batches(packer: Packer, world: int, count: int, **options: Any) -> list[torch.Tensor]:
    ranks = [steps(packer, rank, world, count, **options) for rank in range(world)]
    return [torch.cat([m.tokens for rank in ranks for m in rank[i].micro]) for i in range(count)]


@pytest.mark.parametrize(("world", "prefetch"), [(2, 3), (3, 0), (4, 3), (6, 0)])
@pytest.mark.promise("data-order")
def test_global_batches_do_not_depend_on_the_ranks(packer: Packer, world: int, prefetch: int) -> None:
    expected = global_batches(packer, 1, 14, micro_batch=1, prefetch=0)
    micro = 1 if world == 4 else 2
    for ours, theirs in zip(
        global_batches(packer, world, 14, micro_batch=micro, prefetch=prefetch), expected, strict=True
    ):
        assert torch.equal(ours, theirs)
    assert [len(batch) for batch in expected] == [12] * 9 + [24] * 5  # the ramp


@pytest.mark.parametrize("world", [2, 6])
def test_digests_add_up_to_the_same_whatever_the_ranks(packer: Packer, world: int) -> None:
    ranks = [steps(packer, rank, world, 8) for rank in range(world)]
    alone = steps(packer, 0, 1, 8, micro_batch=3)
    for i in range(8):
        assert (sum(rank[i].digest for rank in ranks) - alone[i].digest) % 2**64 == 0
        assert sum(rank[i].targets for rank in ranks) == alone[i].targets == alone[i].position.batch * 32
        assert sum(rank[i].documents for rank in ranks) == alone[i].documents
    assert len({step.digest for step in alone}) == 8


def test_quarantined_stretches_are_not_learned(packer: Packer) -> None:
    spelt = int(packer.pack(0, 1).tokens[0, 5])
    packer._special[spelt] = True  # from now on this is a special token
    quarantined = 0
    for step in steps(packer, 0, 1, 3, micro_batch=4):
        learned = 0
        for micro in step.micro:
            labels = micro.tokens[:, 1:] if micro.labels is None else micro.labels
            assert not (labels == spelt).any() and not (micro.tokens == spelt).any()
            learned += int((labels != IGNORE).sum())
        assert learned == step.targets
        assert (step.targets < step.position.batch * 32) == bool(step.quarantined)
        assert (step.separators, step.adjacent_specials) == (step.documents, 0)
        quarantined += len(step.quarantined)
    assert quarantined > 0


@pytest.mark.shows("D3")
@pytest.mark.parametrize("prefetch", [0, 2])
def test_errors_of_the_background_thread_arrive_whole(tmp_path: Path, shared_corpus: Path, prefetch: int) -> None:
    import shutil

    shutil.copytree(shared_corpus / "corpus", tmp_path / "c")
    packer = Packer([("text", tmp_path / "c", 1.0)], 32, seed=5, lanes=8)
    next(iter((tmp_path / "c/shards").glob("*.bin"))).unlink()
    loader = Loader(packer, BATCHES, rank=0, world=1, micro_batch=2, prefetch=prefetch)
    with pytest.raises(DataError, match=r"cannot open .*\.bin") as caught:
        for _ in range(50):
            next(loader)
    assert caught.value.remedy


def test_batches_that_do_not_split_are_refused() -> None:
    check_batches([12, 24], 6, 2)
    with pytest.raises(ConfigError, match="12 samples does not split over 8 ranks"):
        check_batches([12, 24], 8, 2)
