"""Units and schedules against golden values from published training logs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_pretrain.config.config import load
from fsdp_pretrain.config.piecewise import Piecewise
from fsdp_pretrain.config.schedule import BatchSchedule, Ramp
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.units import BatchSize, Progress, Seconds, human_bytes, human_count, human_time

pytestmark = pytest.mark.quick
RECIPE = Path(__file__).resolve().parent.parent / "configs/runs/llama-7b-hsdp.toml"


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("2000 steps", 2000, "step"),
        ("1 step", 1, "step"),
        ("1_098_632 samples", 1_098_632, "sample"),
        ("2T tokens", 2 * 10**12, "token"),
        ("4.2B tokens", 4_200_000_000, "token"),
        ("0.5K steps", 500, "step"),
    ],
)
def test_progress_is_read_exactly(text: str, value: int, unit: str) -> None:
    assert Progress.parse(text) == Progress(value, unit)
    assert Progress.parse(str(Progress.parse(text))) == Progress.parse(text)


@pytest.mark.shows("A16")
@pytest.mark.parametrize(
    "bad", [100, 1.5, True, "100", "steps", "ten steps", "1.5 steps", "3 epochs", "-1 steps", "", None]
)
@pytest.mark.promise("units")
def test_progress_without_a_clear_unit_is_rejected(bad: object) -> None:
    with pytest.raises(ValueError, match=r"unit|whole number|quantity"):
        Progress.parse(bad)


def test_other_quantities() -> None:
    assert BatchSize.parse("4M tokens").value == 4_000_000
    for bad in ("4 steps", "0 samples"):
        with pytest.raises(ValueError):
            BatchSize.parse(bad)
    assert Seconds.parse("30 minutes").value == 1800
    assert Seconds.parse("1.5 h").value == 5400
    assert (human_count(1.26e9), human_bytes(61.3 * 2**30), human_time(11520)) == ("1.26B", "61.3 GiB", "3h12m")
    assert [human_time(value) for value in (0, 0.0412, 59.9, 60, 86_400, float("inf"))] == [
        "0s", "0.0412s", "59s", "1m00s", "1d00h", "an unknown time",
    ]  # fmt: skip
    assert [human_count(value) for value in (0, 12.345, 999, 999.6, 999_999, 123_456, 5e15)] == [
        "0", "12.3", "999", "1K", "1M", "123K", "5000T",
    ]  # fmt: skip
    assert [human_bytes(value) for value in (0, 1023, 1010 * 2**20, 2**30 - 1, 3 * 2**50)] == [
        "0 B", "1023 B", "1010 MiB", "1 GiB", "3 PiB",
    ]  # fmt: skip


TR11 = BatchSchedule(2048, Ramp(192, 16, 0, 9_765_625))


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 30), st.integers(0, 5000), st.integers(1, 20_000))
def test_stages_agree_with_walking_step_by_step(first: int, by: int, increments: int, start: int, length: int) -> None:
    schedule = BatchSchedule(first + by * increments, Ramp(first, by, start, start + length))
    consumed = 0
    for step in range(1, 400):
        consumed += schedule.batch_at(consumed)
        assert schedule.consumed_at(step) == consumed
        assert schedule.step_at(consumed) == step


@pytest.mark.parametrize("curve", ["cosine", "linear", "constant"])
@pytest.mark.promise("schedules")
def test_curves_begin_and_end_where_they_should(curve: str) -> None:
    shape = "train.duration=100 steps", "train.global_batch=4 samples"
    values = "optimizer.lr=1.0", "optimizer.min_lr=0.1", "optimizer.warmup_shape=linear"
    schedule = load(RECIPE, [*shape, *values, f"optimizer.curve={curve}", "optimizer.warmup=10 steps"]).schedule
    assert schedule.lr_at(4) == pytest.approx(0.1)  # the first of ten warm-up steps already moves
    assert schedule.lr_at(40) == 1.0
    assert schedule.lr_at(400) == (1.0 if curve == "constant" else 0.1)
    if curve == "linear":
        assert schedule.lr_at(220) == pytest.approx(0.55)
    if curve == "cosine":
        assert schedule.lr_at(130) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.25)))


@pytest.mark.parametrize(
    ("whole", "more"), [("100 steps", "101 steps"), ("400 samples", "401 samples"), ("6400 tokens", "6401 tokens")]
)
def test_a_decay_may_last_as_long_as_the_run_but_not_longer(whole: str, more: str) -> None:
    shape = "train.duration=100 steps", "train.global_batch=4 samples", "data.sequence_length=16"
    values = *shape, "optimizer.warmup=0 steps", "optimizer.curve=wsd"
    assert load(RECIPE, [*values, f"optimizer.decay_length={whole}"]).schedule.decay_start == 0
    with pytest.raises(ConfigError, match=r"decay_length = .* begins within the warm-up"):
        load(RECIPE, [*values, f"optimizer.decay_length={more}"])


def test_intervals_fire_once_in_every_unit() -> None:
    ramp = "{first='192 samples',by='16 samples',duration='9_765_625 samples'}"
    sizes = "train.global_batch=2048 samples", f"train.batch_ramp={ramp}", "data.sequence_length=2048"
    schedule = load(RECIPE, [*sizes, "train.duration=9999 steps", "optimizer.warmup=0 steps"]).schedule
    for every, size in (("300 samples", 300), ("1M tokens", 10**6 / 2048), ("7 steps", None)):
        interval = Progress.parse(every)
        fired = []
        for step in range(1, 200):
            before, after = TR11.consumed_at(step - 1), TR11.consumed_at(step)
            if schedule.due(interval, step=step, before=before, after=after):
                fired.append(step)
        assert fired == (
            list(range(7, 200, 7))
            if size is None
            else [s for s in range(1, 200) if TR11.consumed_at(s) // size > TR11.consumed_at(s - 1) // size]
        )
    assert not schedule.due(None, step=1, before=0, after=10**9)


@pytest.mark.parametrize(
    ("ramp", "text"),
    [(Ramp(16, 10, 0, 100), "whole increments"), (Ramp(16, 16, 50, 50), "ends"), (Ramp(64, 16, 0, 9), "reach")],
)
def test_impossible_ramps_are_refused(ramp: Ramp, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        BatchSchedule(64, ramp)


@pytest.mark.shows("A3")
def test_a_value_along_a_run() -> None:
    """GLM-130B's shrink: a ramp, one that replaces it before its end, a jump."""
    shrink = Piecewise(0.1)
    shrink.change(6000, 1.0, length=500)
    shrink.change(22850, 1.0, 0.2, 26850)
    shrink.change(23200, 1.0, 0.2137, 5650)
    shrink.change(33600, 0.5)
    values = {1: 0.1, 6000: 0.1, 6250: 0.55, 6500: 1.0, 22850: 1.0, 23200: 0.2104, 28850: 1.0, 33600: 1.0, 33601: 0.5}
    assert {at: pytest.approx(shrink.at(at), abs=5e-5) for at in values} == values
    assert shrink.at(33600, behind=True) == 0.5 and shrink.at(6000, behind=True) == 0.1
    assert shrink.marks == [6000, 6500, 22850, 23200, 28850, 33600]
    shrink.change(23300, 0.0)  # what was to come later goes
    assert shrink.at(40000) == 0.0 and shrink.marks[-1] == 23300
    steps = Piecewise.steps([0, 8, 8, 20], [4, 6, 8, 12])
    assert [steps.at(at) for at in (0, 7, 8, 19, 20)] == [4, 4, 8, 8, 12]
