"""Curves, timelines and intervals as pure functions, against closed forms and the logs of published runs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import Run

from fsdp_pretrain.config.config import Config, load, schema_keys
from fsdp_pretrain.config.data_section import DataSection
from fsdp_pretrain.config.resume_rules import DECLARED, changes, undeclared
from fsdp_pretrain.config.schedule import BatchSchedule, Ramp, Schedule
from fsdp_pretrain.config.sections import CheckpointSection, OptimizerSection, TrainSection
from fsdp_pretrain.config.step_settings import ROUNDING, SCHEDULED, rounding_differences, value_differences
from fsdp_pretrain.config.timeline import TimelineEntry
from fsdp_pretrain.data.packing.position import Position
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.plan import plan

pytestmark = pytest.mark.quick
RECIPES = Path(__file__).resolve().parent.parent / "configs/runs"


def recipe(name: str, *overrides: str) -> Config:
    return load(RECIPES / f"{name}.toml", overrides)


def schedule(*entries: dict[str, Any], steps: int = 100, **options: Any) -> Schedule:
    """Steps of 4 samples of 10 tokens."""
    optimizer = {"curve": "constant", "lr": 1.0, **options}
    return Schedule(
        DataSection.model_validate({"sequence_length": 10, "sources": [{"name": "a", "path": "a"}]}),
        TrainSection.model_validate({"duration": f"{steps} steps", "global_batch": "4 samples", "micro_batch": 4}),
        OptimizerSection.model_validate(optimizer),
        CheckpointSection.model_validate({"every": "9 steps"}),
        [TimelineEntry.model_validate(entry) for entry in entries],
    )


def rewarm(at: int, over: int) -> dict[str, Any]:
    """A new warm-up."""
    return {"at": f"{at} steps", "optimizer": {"lr_scale": {"from": 0.0, "to": 1.0, "over": f"{over} steps"}}}


def lrs(found: Schedule, *steps: int) -> list[float]:
    return [found.lr_at(4 * step) for step in steps]


# ---------------------------------------------------------------- curves


@pytest.mark.parametrize(
    ("options", "closed", "steps"),
    [
        ({"warmup": "20 steps", "warmup_shape": "parabolic"}, lambda n: 1 - (1 - n / 20) ** 2, (1, 7, 19, 20)),
        (
            {"curve": "wsd", "warmup": "10 steps", "decay_length": "20 steps", "min_lr": 0.1},
            lambda n: n / 10 if n < 10 else 1.0 if n <= 80 else 0.1 + 0.9 * (1 - math.sqrt((n - 80) / 20)),
            (5, 10, 50, 80, 81, 85, 99, 100, 120),
        ),
        (
            {"curve": "wsd", "decay_length": "80 samples", "decay": "90 steps"},
            lambda n: 1.0 if n <= 70 else 1 - math.sqrt((min(n, 90) - 70) / 20),
            (1, 70, 71, 80, 90),
        ),
        ({"curve": "wsd", "decay_length": "400 tokens"}, lambda n: 1.0 if n <= 90 else 1 - math.sqrt((n - 90) / 10), (90, 95)),
    ],
)  # fmt: skip
@pytest.mark.promise("schedules")
def test_curves_are_their_closed_forms(
    options: dict[str, Any], closed: Callable[[int], float], steps: tuple[int, ...]
) -> None:
    assert lrs(schedule(**options), *steps) == pytest.approx([max(0.0, closed(min(n, 100))) for n in steps], abs=1e-15)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("optimizer.curve='wsd'", "`decay_length` is needed for curve = wsd"),
        ("optimizer.decay_length='5 steps'", "belongs to no other"),
        ("optimizer={lr=1e-3,curve='wsd',warmup='1900B tokens',decay_length='200B tokens'}", "within the warm-up"),
        ("timeline=[{at='9 steps',reason='none'}]", "the entry changes nothing"),
        ("timeline=[{at='9 steps',optimizer={lr={from=1e-4,to=1e-5}}}]", "give its length as `over`"),
        ("timeline=[{at='9 steps',optimizer={beta=1}}]", "unknown key"),
        ("timeline=[{at='9 steps',optimizer={min_lr=1.0}}]", "min_lr = 1 is above optimizer.lr"),
        ("timeline=[{at='9 steps',checkpoint={every='0 steps'}}]", "0 steps is no length"),
    ],
)
def test_what_cannot_be_is_refused_before_work_starts(override: str, text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        recipe("llama-7b-hsdp", override)


# ---------------------------------------------------------------- entries


@pytest.mark.shows("A12")
def test_a_new_warm_up_is_absolute_and_then_inert() -> None:
    plain, found = schedule(curve="cosine"), schedule(rewarm(20, 10), curve="cosine")
    factors = [found.lr_at(4 * n) / plain.lr_at(4 * n) for n in range(1, 100)]
    assert factors == pytest.approx([1.0 if n <= 20 else min(1.0, (n - 20) / 10) for n in range(1, 100)], rel=1e-12)
    assert lrs(found, 20, 30, 31, 99) == lrs(plain, 20, 30, 31, 99)
    both = schedule(rewarm(2, 4), warmup="8 steps")  # also inside the first warm-up
    assert lrs(both, 2, 3, 4, 6) == [2 / 8, 3 / 8 / 4, 4 / 8 / 2, 6 / 8]
    again = schedule(rewarm(20, 10), rewarm(25, 4), curve="cosine")
    factors = [again.lr_at(4 * n) / plain.lr_at(4 * n) for n in range(20, 31)]  # the later takes the earlier's place
    assert factors == pytest.approx([1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.25, 0.5, 0.75, 1, 1], rel=1e-12)


@pytest.mark.parametrize("at", ["25 steps", "100 samples", "1000 tokens", "97 samples"])
def test_every_clock_means_the_same_place(at: str) -> None:
    """Also inside a step: 97 samples are passed by step 25, 100 by step 26."""
    first = 25 if at == "97 samples" else 26
    for over in ("10 steps", "40 samples", "400 tokens"):
        found = schedule({"at": at, "train": {"z_loss": {"from": 1.0, "to": 2.0, "over": over}}})
        place = found.timeline[0].at
        values = [found.values_at(4 * n).z_loss for n in range(first - 1, first + 12)]
        assert values[0] == 0.0
        if over != "10 steps" or at != "97 samples":  # steps are counted from the end of the step
            assert values[1:] == pytest.approx([min(2.0, 1 + (4 * n - place) / 40) for n in range(first, first + 12)])


@pytest.mark.parametrize("over", ["1 steps", "1 tokens", "4 samples"])
def test_a_ramp_that_ends_with_the_next_step_is_none(over: str) -> None:
    found = schedule({"at": "9 steps", "train": {"grad_clip": {"from": 0.7, "to": 0.1, "over": over}}})
    assert [found.values_at(4 * n).grad_clip for n in (9, 10)] == [1.0, 0.1]


def test_ramps_go_on_from_where_they_are() -> None:
    found = schedule(
        {"at": "60 steps", "optimizer": {"weight_decay": 0.0}},  # the order in the file means nothing
        {"at": "10 steps", "optimizer": {"weight_decay": {"to": 0.3, "over": "20 steps"}}},
        {"at": "20 steps", "optimizer": {"weight_decay": {"to": 0.1, "over": "10 steps"}}},  # cuts the first short
        {"at": "40 steps", "optimizer": {"weight_decay": {"from": 0.5, "to": 0.4, "over": "2 steps"}}},
    )
    values = {n: found.values_at(4 * n).weight_decay for n in (10, 15, 20, 25, 30, 40, 41, 42, 60, 61)}
    assert values == pytest.approx(
        {10: 0.1, 15: 0.15, 20: 0.2, 25: 0.15, 30: 0.1, 40: 0.1, 41: 0.45, 42: 0.4, 60: 0.4, 61: 0.0}
    )
    plain, found = ({row["step"] for row in schedule(*entries).preview()} for entries in ([], [rewarm(90, 1)]))
    assert found - plain == {89, 90, 91} - plain


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 99), st.floats(0.1, 1.0)), max_size=6), st.integers(1, 100))
@pytest.mark.promise("schedules")
def test_values_are_those_of_restarts(entries: list[tuple[int, float]], step: int) -> None:
    """A run that restarts at every place with the new value has the same value in every step."""
    found = schedule(*({"at": f"{at} steps", "optimizer": {"lr_scale": scale}} for at, scale in entries))
    past = [scale for at, scale in sorted(entries, key=lambda entry: entry[0]) if at < step]
    assert found.lr_at(4 * step) == (past[-1] if past else 1.0)


@pytest.mark.shows("A31")
@pytest.mark.parametrize("curve", ["cosine", "linear", "wsd"])
def test_another_floor(curve: str) -> None:
    options = {"curve": curve, "warmup": "10 steps", "decay_length": "60 steps" if curve == "wsd" else None}
    ramp = {"to": 0.05, "over": "20 steps"}
    entry = {"at": "70 steps", "optimizer": {"min_lr": ramp}}
    before, after = schedule(min_lr=0.2, **options), schedule(entry, min_lr=0.2, **options)
    assert lrs(after, *range(1, 71)) == lrs(before, *range(1, 71))
    assert lrs(after, *range(90, 101)) == lrs(schedule(min_lr=0.05, **options), *range(90, 101))


# ---------------------------------------------------------------- published runs


def cosine(step: int, peak: float, floor: float) -> float:
    """GLM-130B's learning rate after the batch ramp, from its script's numbers alone."""
    warm, end, consumed = 1_098_632, 197_753_905, 12_692_280 + (step - 6000) * 4224
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * (consumed - warm) / (end - warm)))


@pytest.mark.shows("A3", "A15", "A22")
def test_glm_130b_as_it_ran(run_command: Run) -> None:
    """Its log: rates 4.53e-5 -> 2.46e-5 at 26,000 and 9.8e-6 -> 6.0e-6 at 42,700; shrink; re-warm-up; two skips."""
    steps = "4000,6000,6250,6500,22_799,22_800,22_801,23_200,23_800,26_000,26_001,28_850,33_601,35_201"
    steps += ",40_700,40_701,40_901,42_400,42_401,42_600,42_700,42_701"
    done = run_command("fsdp_pretrain.cli", "plan", RECIPES / "glm-130b.toml", "--at", f"{steps} steps", "--json")
    rows = {row["step"]: row for row in json.loads(done.stdout)}
    lr = {step: row["lr"] for step, row in rows.items()}
    assert {step: lr[step] for step in (22_799, 22_800, 26_000, 26_001, 42_700, 42_701)} == pytest.approx(
        {
            **{step: cosine(step, 8e-5, 8e-6) for step in (22_799, 22_800, 26_000)},
            **{step: cosine(step, 4e-5, 8e-6) for step in (26_001, 42_700)},
            42_701: cosine(42_701, 4e-5, 4e-6),
        },
        rel=1e-9,
    )
    assert [f"{lr[step]:.2e}" for step in (26_000, 26_001)] == ["4.53e-05", "2.46e-05"]
    assert [f"{lr[step]:.1e}" for step in (42_700, 42_701)] == ["9.8e-06", "6.0e-06"]
    assert lr[22_801] == pytest.approx(cosine(22_801, 8e-5, 8e-6) / 2000)
    assert lr[23_800] == pytest.approx(cosine(23_800, 8e-5, 8e-6) / 2)
    shrink = {4000: 0.1, 6000: 0.1, 6250: 0.55, 6500: 1.0, 22_801: 1.0, 23_200: 0.2104, 28_850: 1.0, 33_601: 0.5,
              35_201: 0.1, 42_701: 0.1}  # fmt: skip
    assert {step: rows[step]["embedding_shrink"] for step in shrink} == pytest.approx(shrink, abs=5e-5)
    assert [rows[step]["shrink_paths"] for step in (22_800, 22_801)] == ["input", "both"]
    skipped = {step: row["cursor"] - row["consumed"] for step, row in rows.items()}
    assert [skipped[step] // 4224 for step in (40_700, 40_701, 40_901, 42_400, 42_401, 42_701)] == [
        0, 200, 200, 200, 400, 400,
    ]  # fmt: skip
    assert rows[22_800]["shares"]["multitask"] == 0 and rows[22_800]["shares"]["multitask-first"] == pytest.approx(0.05)
    assert rows[23_800]["shares"]["multitask"] == pytest.approx(0.025, abs=1e-3)
    assert rows[26_000]["shares"]["multitask-first"] == 0
    shown = run_command("fsdp_pretrain.cli", "plan", RECIPES / "glm-130b.toml", "--at", "40_700,40_701 steps")
    header, last, first = shown.stdout.splitlines()
    assert header.split()[:3] == ["step", "consumed", "cursor"] and "lr_scale" in header
    assert last.split()[:3] == ["40_700", "159_265_080", "159_265_080"] and first.split()[2] == "160_114_104"


def test_plan_shows_the_steps_around_every_entry(lab: Any) -> None:
    timeline = [
        {**rewarm(7, 4), "reason": "tired"},
        {"at": "0 steps", "optimizer": {"weight_decay": 0.2}},
        {"at": "90 steps", "train": {"grad_clip": 0.95}},
    ]
    found = plan.plan(load(lab.config(timeline=timeline)))
    rows = {row["step"]: row["lr_scale"] for row in found.schedule}
    assert {step: rows[step] for step in (6, 7, 8, 10, 11, 12)} == {6: 1, 7: 1, 8: 0.25, 10: 0.75, 11: 1, 12: 1}
    shown = "after step 7, 56 samples: optimizer.lr_scale = 0.0 to 1.0 over 4 steps (tired)"
    assert sum(shown in line for line in plan.render(found).splitlines()) == 1
    assert any("at 90 steps: train.grad_clip = 0.95: the run has ended by then" in text for text in found.warnings)
    assert [entry["step"] for entry in found.to_json()["timeline"]] == [0, 7, 90]


@pytest.mark.parametrize(
    ("name", "step", "consumed", "batch", "lr"),
    [
        ("tr1-13b", 33_240, 15_019_344, 1024, None),
        ("tr1-13b", 8_641, 216_320, None, 1.0e-4),
        ("tr8-104b", 7_000, 260_912, 96, None),
        ("tr8-104b", 12_000, 1_519_744, 528, None),
        ("tr8-104b", 6_494, 216_320, 80, 6.0e-5),
        ("tr11-176b", 31_214, 47_768_496, 2048, 5.279e-5),
        ("tr11-176b", 12_658, 9_765_625, None, None),
        ("glm-130b", 2_318, 1_098_632, None, 8.0e-5),
        ("llama-7b-hsdp", 1_000, 256_000, 256, 2.25e-4),  # 1 - (1 - 1/2)^2
        ("llama-7b-hsdp", 1_907_349, 488_281_344, 256, 3e-5),
    ],
)
def test_recipes_reproduce_the_logs(name: str, step: int, consumed: int, batch: int | None, lr: float | None) -> None:
    row = recipe(name).schedule.at(step)
    assert 0 <= row["consumed"] - consumed < (1 if batch else row["batch"]) and batch in (None, row["batch"])
    assert lr is None or row["lr"] == pytest.approx(lr, rel=1e-4)


# ---------------------------------------------------------------- intervals, thresholds, record


def saves(config: Config, last: int) -> list[int]:
    found, batch = config.schedule, config.schedule.batch
    due = []
    for step in range(1, last + 1):
        before, after = batch.consumed_at(step - 1), batch.consumed_at(step)
        if found.due(config.schedule.save_every(after), step=step, before=before, after=after):
            due.append(step)
    return due


@pytest.mark.shows("D23")
def test_three_rounds_of_saves_are_one_run() -> None:
    """tr1-13B needed three runs from scratch for 10, 18 and 1,500."""
    expected = [*range(10, 101, 10), *range(108, 1001, 18), *range(1500, 5000, 1500)]
    assert saves(recipe("tr1-13b"), 5000) == expected and len(range(108, 1001, 18)) == 50


@pytest.mark.shows("A2")
def test_another_interval_from_a_place_on() -> None:
    """GLM-130B: 500 until 4,000, then 100; places and intervals in any unit."""
    assert saves(recipe("glm-130b"), 4250) == [*range(500, 4001, 500), 4100, 4200]
    entries = "{at='20 steps',checkpoint={every='7 steps'}},{at='30 steps',checkpoint={every='15 steps'}}"
    found = recipe("tr1-13b", f"timeline=[{entries}]")
    assert saves(found, 120) == [10, 20, 21, 28, 45, 60, 75, 90, 105, 120]
    entry = "timeline=[{at='400_000 tokens',checkpoint={every='1M tokens'}}]"
    tokens = recipe("tr1-13b", "checkpoint.every=100_000 tokens", entry)
    every = [tokens.schedule.batch.consumed_at(step) * 2048 for step in saves(tokens, 100)]
    assert every[:4] == [131_072, 229_376, 327_680, 1_015_808]


# ---------------------------------------------------------------- resume rules


REWARM = "{{at='{} steps',optimizer={{lr_scale={{from=0.0,to=1.0,over='{} steps'}}}}}}"
EARLY, AHEAD, OTHER = REWARM.format(9, 5), REWARM.format(90, 5), REWARM.format(90, 6)


@pytest.mark.parametrize(
    ("before", "after", "declared"),
    [
        ("", REWARM.format(20, 5), False),  # where the run is: the next step is the first of it
        ("", REWARM.format(19, 5), True),
        ("", "{at='19 steps',checkpoint={every='5 steps'}}", False),  # nothing that is learned
        (AHEAD, "", True),  # an old file
        (AHEAD, OTHER, True),
        (EARLY, f"{AHEAD},{EARLY}", False),
    ],
)
def test_an_entry_ahead_is_free_and_one_behind_is_declared(before: str, after: str, declared: bool) -> None:
    """Of a run that is at step 20."""
    old, new = (recipe("llama-7b-hsdp", f"timeline=[{entries}]") for entries in (before, after))
    found = changes(old, new)
    assert found and all(change.key == "timeline" for change in found)
    needed = undeclared(found, (), old.schedule.batch.consumed_at(20))
    assert bool(needed) is declared and not undeclared(needed, {"timeline"})


def test_a_stable_run_may_become_longer_before_it_decays() -> None:
    """What `wsd` is for: the same steps, and the decay later."""
    wsd = ("optimizer.curve=wsd", "optimizer.decay_length=100B tokens")
    old, new = recipe("llama-7b-hsdp", *wsd), recipe("llama-7b-hsdp", *wsd, "train.duration=3T tokens")
    (change,) = [each for each in changes(old, new) if each.kind == DECLARED]
    assert change.key == "optimizer.decay" and change.at == old.schedule.decay_start
    assert not undeclared([change], (), old.schedule.decay_start) and undeclared(
        [change], (), old.schedule.decay_start + 1
    )


# ---------------------------------------------------------------- were steps trained with the same settings?


@pytest.mark.quick
def test_every_key_of_a_step_is_one_of_the_schema() -> None:
    assert {*schema_keys()} >= SCHEDULED | ROUNDING and not SCHEDULED & ROUNDING


SCALED = "timeline=[{{at='{}',optimizer={{lr_scale=0.5}}}}]"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("before", "after", "settings", "rounding"),
    [
        ("timeline=[]", SCALED.format("24 steps"), "", ""),  # behind steps 21 to 24
        ("timeline=[]", SCALED.format("23 steps"), "lr_scale: 1.0 -> 0.5", ""),
        (SCALED.format("9 steps"), SCALED.format(f"{9 * 256} samples"), "", ""),
        (SCALED.format("9 steps"), "optimizer.lr_scale=0.5", "", ""),
        ("optimizer.decay=1M samples", "optimizer.decay=2M samples", "", ""),  # in the warm-up
        ("optimizer.warmup=10 steps", "optimizer.warmup=20 steps", "lr: ", ""),
        ("train.global_batch=256 samples", "train.global_batch=512 samples", "batch: 256 -> 512", ""),
        ("train.global_batch=256 samples", f"train.global_batch={256 * 4096} tokens", "", ""),
        (  # of step 21 alone, which starts at 5,120
            "timeline=[]",
            "train.batch_ramp={first='128 samples',by='128 samples',start='0 samples',duration='5200 samples'}",
            "batch: 256 -> 128",
            "",
        ),
        ("data.skip=[]", f"data.skip=['{24 * 256}:{25 * 256} samples']", "", ""),
        ("data.skip=[]", f"data.skip=['{23 * 256}:{24 * 256} samples']", "samples: ", ""),
        ("optimizer.eps=1e-8", "optimizer.eps=1e-7", "optimizer.eps", ""),
        ("run.seed=1", "run.seed=2", "run.seed", ""),
        ("parallel.recompute=0", "parallel.recompute=1", "", "parallel.recompute"),
        ("parallel.timeout=60 s", "parallel.timeout=90 s", "", ""),
        ("checkpoint.every=5 steps", "timeline=[{at='9 steps',checkpoint={every='7 steps'}}]", "", ""),
    ],
)
def test_settings_differ_where_a_value_of_a_step_does(before: str, after: str, settings: str, rounding: str) -> None:
    steps = [Position(step, 256 * step, 256 * step, 256) for step in range(21, 25)]
    pair = recipe("llama-7b-hsdp", before), recipe("llama-7b-hsdp", after)
    for texts, said in ((value_differences(*pair, steps), settings), (rounding_differences(*pair), rounding)):
        assert any(said in text for text in texts) if said else not texts


@pytest.mark.quick
@settings(deadline=None)
@given(st.integers(0, 10**4), st.integers(0, 500), st.booleans())
def test_steps_are_counted_from_anywhere(consumed: int, steps: int, ramped: bool) -> None:
    """As by taking them one by one."""
    batch = BatchSchedule(64, Ramp(16, 16, 1000, 5000) if ramped else None)
    places = [consumed]
    for _ in range(steps):
        places.append(places[-1] + batch.batch_at(places[-1]))
    assert batch.ahead(consumed, steps) == places[-1] and batch.steps_between(consumed, places[-1]) == steps
    assert batch.steps_between(consumed, places[-1] + 1) == steps + 1
