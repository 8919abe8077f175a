"""Runs that get slower, as a whole or by one rank: real ranks, slowed by sleeps, and the watchdog's reports."""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from records import step_record

from fsdp_pretrain.watchdog.detectors.slowdown import SlowdownDetector, StragglerDetector, Windows
from fsdp_pretrain.watchdog.hang import page, rank_client
from fsdp_pretrain.watchdog.notify.alarms import Alarms

FAULTS = Path(__file__).resolve().parent / "faults.py"
HOST = os.uname().nodename
Slow = Callable[..., Path]


@pytest.fixture
def slow(lab: Any, monkeypatch: pytest.MonkeyPatch, constants: Any) -> Slow:
    """A watched run whose ranks are slowed down by faults; its configuration."""

    def make(steps: int, faults: list[dict[str, Any]], window: int = 50, **sections: dict[str, Any]) -> Path:
        constants("fsdp_pretrain.train.straggler_timing", WINDOW=window)
        monkeypatch.setenv("EXECUTE_FIRST", str(FAULTS))
        monkeypatch.setenv("FAULT", json.dumps(faults))
        values: dict[str, Any] = {
            "train": {"duration": f"{steps} steps", "micro_batch": 2},
            "checkpoint": {"every": "100_000 steps"},
            "watchdog": {"enabled": True},
        }
        config: Path = lab.config(**{**values, **sections})
        return config

    return make


def alarms_of(lab: Any, helpers: Any, detector: str) -> list[dict[str, Any]]:
    """Transitions of the alarms of a detector, once the agent of a run that ended has read all of it."""
    run = lab.path / "run"
    helpers.wait_for(lambda: not helpers.agents(run), what="the end of the agent")
    return [alarm for alarm in helpers.alarms(run) if alarm["key"].partition("/")[0] == detector]


def own_times(pids: list[int]) -> dict[int, float]:
    """The own times in the pages of some processes, by rank; other processes' pages come and go."""
    beats = []
    for folder in rank_client.root().iterdir():
        with contextlib.suppress(FileNotFoundError):
            beats += [page.read(path) for path in folder.glob("rank-*.page")]
    return {beat.rank: beat.own for beat in beats if beat is not None and beat.pid in pids and beat.window}


def test_own_time_is_that_of_the_own_blocks(lab: Any, helpers: Any, slow: Slow) -> None:
    """Two blocks by two micro-batches sleep 40 ms each on rank 1: counted once in its own time, not in the other's."""
    dragged = [{"rank": 1, "step": 0, "kind": "drag", "seconds": 0.040}]
    config = slow(4000, dragged, 8, parallel={"timeout": "60 s", "recompute": 1})
    job = lab.start(config, ranks=2)
    pids = [rank.pid for rank in job.ranks]
    own = helpers.wait_for(lambda: len(found := own_times(pids)) == 2 and found, what="own times")
    typical = sorted(record["seconds"]["iteration"] for record in helpers.metrics(lab.path / "run"))
    assert 0.120 < own[1] - own[0] < 0.300, own  # it would be 0.320 if recomputing counted, and noise is milliseconds
    assert own[0] < 0.080 and typical[len(typical) // 2] > 0.160  # waiting for rank 1 is not its own time


@pytest.mark.shows("A7", "D14", "F12")
@pytest.mark.slow
def test_the_rank_that_is_slow_is_named(lab: Any, helpers: Any, slow: Slow) -> None:
    """All ranks slower: no alarm; then one more than the others: it alone, within four windows."""
    window, ranks, guilty = 12, 4, 3
    faults = [
        {"rank": "all", "step": 0, "kind": "drag", "seconds": 0.080},
        {"rank": "all", "step": 0, "kind": "drag", "seconds": 0.016, "from": 49},
        {"rank": guilty, "step": 0, "kind": "drag", "seconds": 0.036, "from": 97, "until": 181},
    ]  # windows of two seconds: the watchdog misses none, and what a busy machine adds is small beside them
    lab.train(slow(249, faults, window, model={"layers": 1}), ranks=ranks)
    reported = alarms_of(lab, helpers, "straggler")
    assert [(alarm["key"], alarm["state"]) for alarm in reported] == [
        (f"straggler/rank-{guilty}", "open"),
        (f"straggler/rank-{guilty}", "resolved"),
    ]
    assert 8 < reported[0]["facts"]["window"] <= 12
    # 36 ms on top of 96 ms, and of what the machine adds to all
    assert 0.10 <= reported[0]["facts"]["ratio"] < 36 / 96 + 0.03
    assert f"rank {guilty} ({HOST}) needs" in reported[0]["summary"] and reported[0]["severity"] == "CRIT"


@pytest.mark.quick
@pytest.mark.shows("A7", "F30")
@pytest.mark.parametrize(
    ("times", "hosts", "ratio", "told"),
    [
        (1.2, ["a", "new"], 0.2, "new since then: new"),
        (1.2, ["a", "gone"], 0.2, "on the same hosts"),
        (1.0, ["a", "new"], None, ""),
        (0.9, ["a", "new"], None, ""),
    ],
    ids=["slower, new host", "slower, same hosts", "as fast", "faster"],
)
def test_a_start_is_compared_with_the_best_before(
    tmp_path: Path, times: float, hosts: list[str], ratio: float | None, told: str
) -> None:
    """The median of its first 64 clean steps with the best of a start before, which a slower one does not replace; one
    that is as fast again ends the alarm."""
    changes = list[tuple[str, str]]()
    alarms = Alarms(tmp_path / "alarms.jsonl", lambda alarm: changes.append((alarm.key, alarm.state)))
    best, settle = tmp_path / "pace.json", 20

    def start(seconds: float, hosts: list[str], steps: int = 300) -> None:
        drift, noise = SlowdownDetector(alarms, best, hosts), random.Random(5)
        for step in range(1, steps + 1):
            took = seconds * noise.lognormvariate(0, 0.001)
            parts = {"iteration": took, "data": 0.0, "forward_backward": took, "checkpoint": 0.0}
            drift.step(step_record(step, world=2, seconds=parts))

    start(0.1, ["a", "gone"])
    assert not changes and json.loads(best.read_text())["2 ranks, 8 x 32"]["hosts"] == ["a", "gone"]
    start(0.1 * times, hosts, settle + 63)
    assert not changes
    start(0.1 * times, hosts)
    known = json.loads(best.read_text())["2 ranks, 8 x 32"]
    assert known["seconds"] == pytest.approx(0.1 * min(times, 1), rel=0.001)
    if ratio is None:
        assert not changes and known["hosts"] == (["a", "new"] if times < 1 else ["a", "gone"])
        return
    (alarm,) = alarms
    assert (alarm.key, alarm.severity.name, alarm.step) == ("pace/restart", "WARN", settle + 64)
    assert alarm.facts["ratio"] == pytest.approx(1 + ratio, rel=0.001) and told in alarm.summary
    assert alarm.facts["gone"] == sorted({"a", "gone"} - set(hosts))
    start(0.1, hosts)
    assert changes == [("pace/restart", "open"), ("pace/restart", "resolved")]


# ---------------------------------------------------------------- records of longer runs


def transitions_of(tmp_path: Path, changes: Callable[[int], dict[str, Any]], steps: int) -> list[tuple[str, int]]:
    """(state, step) of the alarms of a run with steps around 100 ms; `changes` may slow, tag or reshape a step."""
    reported = list[tuple[str, int]]()
    alarms = Alarms(tmp_path / "alarms.jsonl", lambda alarm: reported.append((alarm.state, alarm.step or 0)))
    drift = SlowdownDetector(alarms, tmp_path / "pace.json", [HOST])
    noise = random.Random(5)
    for step in range(1, steps + 1):
        change = dict(changes(step))
        iteration = 0.1 * noise.lognormvariate(0, 0.01) * change.pop("times", 1.0)
        checkpoint = change.pop("checkpoint", 0.0)
        seconds = {"iteration": iteration, "data": 0.0, "forward_backward": iteration, "checkpoint": checkpoint}
        drift.step(step_record(step, world=2, seconds=seconds, **change))
    return reported


def bumps(step: int, tagged: bool) -> dict[str, Any]:
    """Every 25 steps a save makes 5 steps 60% longer, every 400 steps an evaluation 40."""
    if step % 400 < 40:
        return {"times": 1.6, "beside": ["eval"] if tagged else []}
    return {"times": 1.6, **({"checkpoint": 0.02} if tagged else {})} if step % 25 < 5 else {}


CASES: dict[str, tuple[Callable[[int], dict[str, Any]], bool]] = {
    "saves and evaluations": (lambda step: bumps(step, tagged=True), False),
    "the same, untagged": (lambda step: bumps(step, tagged=False), True),
    "batch ramp": (lambda step: {"times": 1 + step // 800, "batch": 8 * (1 + step // 800)}, False),
    "sequence length": (lambda step: {"times": 2.2, "length": 64} if step > 1000 else {}, False),
    "the same slowdown, unplanned": (lambda step: {"times": 2.2} if step > 1000 else {}, True),
}


@pytest.mark.shows("F10")
@pytest.mark.quick
@pytest.mark.parametrize("case", CASES)
def test_what_is_planned_is_no_incident(tmp_path: Path, case: str) -> None:
    """Negative controls, each compared with the same slowdown unplanned."""
    changes, unplanned = CASES[case]
    reported = transitions_of(tmp_path, changes, 3000)
    assert bool(reported) == unplanned, reported


@pytest.mark.shows("C1", "F29")
@pytest.mark.quick
def test_a_slow_decline_is_told_before_it_is_large(tmp_path: Path) -> None:
    """+5% over 5,000 steps: one incident, before the run is 2.75% slower."""
    reported = transitions_of(tmp_path, lambda step: {"times": 1 + 0.05 * min(1.0, max(0, step - 1000) / 5000)}, 7000)
    opened = [step for state, step in reported if state == "open"]
    assert len(opened) == 1 and (opened[0] - 1000) / 5000 * 0.05 < 0.0275


@pytest.mark.shows("C1")
@pytest.mark.quick
@pytest.mark.parametrize(
    ("part", "named"), [("data", "waiting for data"), ("forward_backward", "computing"), ("optimizer", "the optimiser")]
)
def test_the_part_of_a_step_that_grows_is_named(tmp_path: Path, part: str, named: str) -> None:
    """By 1 ms every ten steps, while the others stay as they are."""
    alarms = Alarms(tmp_path / "alarms.jsonl", lambda alarm: None)
    drift, noise = SlowdownDetector(alarms, tmp_path / "pace.json", [HOST]), random.Random(5)
    for step in range(1, 1_201):
        usual = {"data": 0.01, "forward_backward": 0.08, "optimizer": 0.01, "checkpoint": 0.0}
        seconds = {name: value * noise.lognormvariate(0, 0.01) for name, value in usual.items()}
        seconds[part] += max(0, step - 1_000) * 1e-4
        drift.step(step_record(step, world=2, seconds={"iteration": sum(seconds.values()), **seconds}))
    (alarm,) = [alarm for alarm in alarms if alarm.key == "pace"]
    assert alarm.facts["part"] == named and f"what grew most is {named}: 0.0" in alarm.summary


def stragglers_of(
    tmp_path: Path, ranks: int, noise: float, slow: dict[int, float], windows: int
) -> list[tuple[str, int]]:
    """(key, window) of opened alarms with noisy own times, where from window 20 on some ranks are slower."""
    reported = list[tuple[str, int]]()
    alarms = Alarms(
        tmp_path / "alarms.jsonl",
        lambda alarm: reported.append((alarm.key, alarm.facts["window"])) if alarm.state == "open" else None,
    )
    seen: Windows = {}
    stragglers, random_ = StragglerDetector(alarms, lambda: seen), random.Random(ranks)
    for window in range(1, windows + 1):
        own = {rank: 1 + slow.get(rank, 0.0) * (window > 20) for rank in range(ranks)}
        seen |= {r: (HOST, window, each * random_.lognormvariate(0, noise)) for r, each in own.items()}
        stragglers.tick(window)
    return reported


@pytest.mark.shows("A7", "F12")
@pytest.mark.quick
@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 64])
@pytest.mark.parametrize("noise", [0.002, 0.01, 0.05])
def test_ranks_that_vary_are_no_stragglers_and_those_that_are_slow_are(
    tmp_path: Path, ranks: int, noise: float
) -> None:
    """No alarm in many windows of noise; a rank slower by more than that in the third window."""
    assert stragglers_of(tmp_path, ranks, noise, {}, 3000 if ranks < 8 else 12000 // ranks) == []
    slower = max(0.06, 10 * noise)
    assert stragglers_of(tmp_path, ranks, noise, {1: slower}, 40)[0] in [("straggler/rank-1", n) for n in (23, 24)]


@pytest.mark.quick
@pytest.mark.parametrize("fast_first", [False, True])
def test_a_host_whose_ranks_come_and_go_is_told_once(tmp_path: Path, fast_first: bool) -> None:
    """Three ranks of its eight are always slow and one in turns, so that it is half of them in turns. Ranks that were
    reported before become their host's once, and not "as fast as the others"."""
    told = list[tuple[str, str, str]]()
    alarms = Alarms(tmp_path / "alarms.jsonl", lambda alarm: told.append((alarm.key, alarm.state, alarm.summary)))
    seen: Windows = {}
    stragglers, random_ = StragglerDetector(alarms, lambda: seen), random.Random(3)
    for window in range(1, 121):
        turn = (window - 21) // 4 % 2 == int(fast_first)
        slow = {8: 1.05, 9: 1.05, 10: 1.05, 11: 1.03 if turn else 1.0} if 20 < window <= 100 else {}
        for rank in range(16):
            own = slow.get(rank, 1.0) * random_.lognormvariate(0, 0.001)
            seen[rank] = ("n5" if rank >= 8 else "n4", window, own)
        stragglers.tick(window)
    ranks = [f"straggler/rank-{rank}" for rank in (8, 9, 10)] if fast_first else []
    assert [(key, state) for key, state, _ in told] == [
        *((key, "open") for key in ranks),
        ("straggler/n5", "open"),
        *((key, "resolved") for key in ranks),
        ("straggler/n5", "resolved"),
    ]
    ends = [text for _, state, text in told if state == "resolved"]
    assert ends == ["its host is reported instead: straggler/n5"] * len(ranks) + ["as fast as the others again"]
