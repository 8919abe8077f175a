"""The sums of a step are returned under their names, for any fields."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_pretrain.train.step_sums import StepCounts, StepSums

pytestmark = pytest.mark.quick


class Two:
    """Two ranks with the same values, of which this one is number 3."""

    device, rank, replicas = torch.device("cpu"), 3, 2

    def sum_(self, values: Tensor) -> Tensor:
        return values.mul_(2)


TWO: Any = Two()


def test_counts_keep_their_names_with_and_without_checksums() -> None:
    numbers = {field.name: 10 + at for at, field in enumerate(fields(StepCounts)) if field.name != "checksums"}
    counts = StepCounts(**numbers)
    for checksums in ([], [7, -(2**62)]):
        summed = counts.sum_over(TWO, torch.tensor(checksums) if checksums else None)
        doubled = {name: 2 * number for name, number in numbers.items()}
        assert asdict(StepCounts.read(summed)) == {**doubled, "checksums": [2 * value for value in checksums]}
        assert {name: int(StepCounts.element(summed, name)) for name in doubled} == doubled


def test_sums_are_summed_but_for_what_the_optimiser_did() -> None:
    sums, norm = StepSums.zeros(3, TWO.device), torch.tensor(2.5)
    sums.losses.add_(torch.tensor([1.0, 2.0, 3.0]))
    sums.targets.add_(torch.tensor([4.0, 5.0, 6.0]))
    sums.sample_losses.add_(7.0)
    sums.penalties.add_(8.0)
    sums.sum_over(TWO, norm)
    sums.add_update(norm, torch.tensor(256.0), torch.tensor(1.0))
    read = {field.name: getattr(StepSums.of(sums.packed.clone()), field.name).tolist() for field in fields(StepSums)}
    del read["packed"]
    assert read == {
        "losses": [2, 4, 6],
        "targets": [8, 10, 12],
        "sample_losses": 14,
        "penalties": 16,
        **dict.fromkeys(("bad_losses", "bad_ranks", "bad_norms"), 0),
        "squared_norms": 12.5,
        "norm": 2.5,
        "loss_scale": 256,
        "skipped": 1,
    }
    assert sums.not_finite() == 0
    assert sums.total_norm(TWO) == 2.5


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_told_with_its_rank(bad: float) -> None:
    loss, gradients = StepSums.zeros(1, TWO.device), StepSums.zeros(1, TWO.device)
    loss.losses.add_(bad)
    loss.sum_over(TWO, torch.tensor(1.0))
    gradients.sum_over(TWO, torch.tensor(bad))
    assert [sums.bad_losses.item() for sums in (loss, gradients)] == [2, 0]
    assert [sums.bad_ranks.item() for sums in (loss, gradients)] == [6, 0]
    assert [sums.bad_norms.item() for sums in (loss, gradients)] == [0, 2]
    for sums in (loss, gradients):
        assert sums.not_finite() == 1 and sums.not_finite().dtype == torch.float32
