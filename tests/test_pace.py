"""Drift of the step time: no incident in a million noisy steps, real changes detected as fast as published."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fsdp_pretrain.watchdog.detectors.cusum import PaceChange, PaceCusum


def noise(seed: int, steps: int, sd: float = 0.01) -> np.ndarray:
    """Step times of a healthy run, seconds: log-normal AR(1), outliers, stalls, slow wander.

    Calibrated on 134 published runs of 8 GPUs: 0.6% of steps longer by Exp(20%), 0.02% stalls of 2 to 5 times, wander
    of 0.25% over 2,000 steps.
    """
    rng = np.random.default_rng(seed)
    ar = np.empty(steps)
    wander = np.empty(steps)
    shocks, slow = rng.normal(0, sd * math.sqrt(1 - 0.15**2), steps), rng.normal(0, 1, steps)
    a = w = 0.0
    keep = math.exp(-1 / 2000)
    for n in range(steps):
        ar[n] = a = 0.15 * a + shocks[n]
        wander[n] = w = keep * w + 0.0025 * math.sqrt(1 - keep**2) * slow[n]
    outlier = np.where(rng.random(steps) < 0.006, rng.exponential(0.2, steps), 0.0)
    stall = np.where(rng.random(steps) < 0.0002, np.log(rng.uniform(2, 5, steps)), 0.0)
    return 1.6 * np.exp(ar + wander + outlier + stall)


def changes(times: np.ndarray, phases: list[int] | None = None) -> list[PaceChange]:
    pace = PaceCusum()
    found = [pace.add(n, float(t), phases[n] if phases else None) for n, t in enumerate(times)]
    return [change for change in found if change]


@pytest.mark.slow
@pytest.mark.promise("pace")
def test_no_incident_in_a_million_steps() -> None:
    for seed in range(5):
        assert [c for c in changes(noise(seed, 200_000)) if c.kind != "faster"] == []


@pytest.mark.quick
@pytest.mark.promise("pace")
def test_no_incident_in_fifty_thousand_steps() -> None:
    assert changes(noise(7, 50_000)) == []


@pytest.mark.quick
@pytest.mark.parametrize(("slower", "p90"), [(0.03, 81), (0.05, 40), (0.10, 23)])
@pytest.mark.promise("pace")
def test_slowdowns_are_found_in_time(slower: float, p90: int) -> None:
    """Delays at the ninth decile of runs are the published ones; the size of the change is reported within a point."""
    delays, ratios = [], []
    for seed in range(40):
        times = noise(seed, 1200)
        begin = 800 + seed
        times[begin:] *= 1 + slower
        found = changes(times)
        assert [c.kind for c in found[:1]] == ["slower"] and found[0].step >= begin
        delays.append(found[0].step - begin)
        ratios.append(found[0].ratio)
        assert begin - 32 <= found[0].since
    assert np.quantile(delays, 0.9) <= p90
    assert np.median(ratios) == pytest.approx(1 + slower, abs=0.01)


@pytest.mark.quick
def test_an_incident_ends_and_is_told_once() -> None:
    times = noise(3, 6000)
    times[1000:2000] *= 1.06
    times[3000:] *= 1.06
    times[4000:] *= 1.06
    found = changes(times)
    assert [c.kind for c in found] == ["slower", "back", "slower"]
    assert 2000 < found[1].step < 2000 + 16 * 6


@pytest.mark.quick
def test_planned_changes_and_bursts_are_no_incident() -> None:
    """Another phase of the schedule has its own baseline; a burst of a few steps adds little."""
    times = noise(4, 5000)
    times[2500:] *= 1.4
    assert changes(times, [0] * 2500 + [1] * 2500) == []
    assert [c.kind for c in changes(times)][:1] == ["slower"]
    bursts = noise(5, 20_000)
    for start in range(0, 20_000, 500):
        bursts[start : start + 3] *= 1.06
    assert changes(bursts) == []


@pytest.mark.quick
def test_a_faster_run_is_a_new_baseline() -> None:
    times = noise(6, 4000)
    times[1500:] *= 0.95
    times[3000:] *= 1.04
    found = changes(times)
    assert [c.kind for c in found] == ["faster", "slower"] and found[1].step < 3000 + 81


@pytest.mark.shows("A7", "D14")
@pytest.mark.quick
@pytest.mark.parametrize(
    ("before", "after", "sd", "minutes"),
    [(105.2, 111.1, 0.004, 23), (88.0, 88.0 * 134 / 127, 0.004, 19), (88.0, 88.0 * 134 / 127, 0.01, 19)],
    ids=["BLOOM", "GLM", "GLM, noisy"],
)
def test_slowdowns_that_took_people_days_are_found_in_minutes(
    before: float, after: float, sd: float, minutes: float
) -> None:
    """One GPU of BLOOM's 384 made steps of 105.2 s last 111.1 s; GLM-130B fell from 134 to 127 TFLOP/s on new nodes."""
    waits, ratios = [], []
    for seed in range(40):
        times = noise(seed, 1100, sd) * before / 1.6
        times[1000:] *= after / before
        found = changes(times)[0]
        assert found.kind == "slower"
        ratios.append(found.ratio)
        waits.append((found.step - 999) * after / 60)
    assert np.quantile(waits, 0.9) <= minutes and np.median(ratios) == pytest.approx(after / before, abs=0.003)
