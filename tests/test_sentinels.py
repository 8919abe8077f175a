"""Data sentinels on the records of real runs: no alarm for correct data, alarms for faults edited in."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from laboratory import seal
from processes import constants
from records import parsed, step_record

from fsdp_pretrain.config.config import load
from fsdp_pretrain.data.packing import unigrams
from fsdp_pretrain.data.packing.unigrams import Unigrams
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.step_record import StepRecord
from fsdp_pretrain.watchdog.detectors.data_invariants import DataInvariantDetector
from fsdp_pretrain.watchdog.hang.peers import PeerNodes
from fsdp_pretrain.watchdog.hang.rank_monitor import RankMonitor
from fsdp_pretrain.watchdog.notify.alarms import Alarms
from fsdp_pretrain.watchdog.registry import build_detectors

Records = list[dict[str, Any]]


@pytest.fixture(scope="module")
def records(module_lab: Any, helpers: Any) -> Records:
    """Of a run with two sources."""
    source = {"path": str(module_lab.corpus)}
    config = module_lab.config(
        data={"sources": [{"name": "a", "weight": 3, **source}, {"name": "b", "weight": 1, **source}]},
        train={"duration": "80 steps"},
        checkpoint={"every": "1000 steps"},
        watchdog={"enabled": True},
    )
    module_lab.train(config)
    found: Records = helpers.metrics(module_lab.path / "run")
    return found


def judge(records: Records, tmp_path: Path, **changes: Any) -> list[tuple[str, str, int | None]]:
    """Alarms as (key, severity, step), in order."""
    reported: list[tuple[str, str, int | None]] = []
    alarms = Alarms(
        tmp_path / "alarms.jsonl", lambda alarm: reported.append((alarm.key, alarm.severity.name, alarm.step))
    )
    values = {"causal": True, "max_quarantined": 1e-4, **changes}
    detector = DataInvariantDetector(alarms, **values)
    for record in records:
        detector.step(parsed(record))
    return reported


def edit(step: int, **changes: Any) -> Callable[[Records], None]:
    """Change one record; a function changes the existing value."""

    def apply(records: Records) -> None:
        for key, value in changes.items():
            old = records[step - 1][key]
            records[step - 1][key] = value(old) if callable(value) else value

    return apply


def double_separators(records: Records) -> None:
    for record in records[30:]:
        record["separators"] *= 2
        record["adjacent_specials"] = record["documents"]


def swap_sources(records: Records) -> None:
    for record in records[30:]:
        record["mixture"] = {"a": record["mixture"]["b"], "b": record["mixture"]["a"]}


def reset_cursor(records: Records) -> None:
    for number, record in enumerate(records[40:]):
        record["cursor"], record["data_digest"] = records[number]["cursor"], records[number]["data_digest"]


@pytest.mark.shows("C4", "F18", "F19", "F41")
@pytest.mark.parametrize(
    ("change", "said", "within"),
    [
        (double_separators, [("data-specials", "CRIT"), ("data-separators", "CRIT")], 1),
        (swap_sources, [("data-share/a", "WARN"), ("data-share/b", "WARN")], 100),
        (reset_cursor, [("data-cursor", "CRIT"), ("data-repeated", "CRIT")], 1),
        (edit(41, consumed=lambda old: old + 8), [("data-cursor", "CRIT")], 1),
        (edit(41, separators=0), [("data-separators", "CRIT")], 1),
        (edit(41, quarantined=3), [("data-quarantined", "WARN")], 1),
        (edit(41, adjacent_specials=0), [], 0),
    ],
)
def test_what_is_wrong_is_told(
    records: Records, tmp_path: Path, change: Callable[[Records], None], said: list[tuple[str, str]], within: int
) -> None:
    """Within the step, or the steps that a comparison needs."""
    wrong = copy.deepcopy(records)
    change(wrong)
    first = next((n for n, (a, b) in enumerate(zip(records, wrong, strict=True), 1) if a != b), 0)
    found = judge(wrong, tmp_path)
    assert [(key, severity) for key, severity, _ in found] == said
    assert all(step is not None and first <= step < first + within for _, _, step in found)


FAULTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "data-specials": lambda step: {"adjacent_specials": 8},
    "data-separators": lambda step: {"separators": 0},
    "data-cursor": lambda step: {"cursor": 0},
    "data-repeated": lambda step: {"data_digest": str(step - 1)},
    "data-quarantined": lambda step: {"quarantined": 3},
}


@pytest.mark.quick
@pytest.mark.parametrize("starts_again", [False, True])
@pytest.mark.parametrize("key", FAULTS)
def test_a_fault_that_is_over_ends_its_alarm_and_the_next_is_told(tmp_path: Path, key: str, starts_again: bool) -> None:
    """After 100 clean steps, of the next start too; though the first was acknowledged."""
    told = list[tuple[str, int | None]]()
    alarms = Alarms(
        tmp_path / "alarms.jsonl", lambda alarm: told.append((alarm.state, alarm.step)) if alarm.key == key else None
    )

    def train(steps: range, wrong: Collection[int]) -> None:
        detector = DataInvariantDetector(alarms, causal=False, max_quarantined=1e-4)
        for step in steps:
            counts = {"documents": 8, "separators": 8, "adjacent_specials": 0, "data_digest": str(step)}
            detector.step(step_record(step, **{**counts, **(FAULTS[key](step) if step in wrong else {})}))
            if step == 20:
                alarms.acknowledge(key)

    if starts_again:
        train(range(1, 21), [10])
        train(range(21, 501), range(401, 501))
    else:
        train(range(1, 501), [10, *range(401, 501)])
    over = 120 if starts_again else 110
    assert told == [("open", 10), ("acknowledged", 10), ("resolved", over), ("open", 401)]


@pytest.mark.quick
def test_tokens_unlike_those_of_the_first_steps_are_told_until_they_are_alike_again(tmp_path: Path) -> None:
    """One such step is not told."""
    told = list[tuple[str, str, int | None]]()
    alarms = Alarms(tmp_path / "alarms.jsonl", lambda alarm: told.append((alarm.key, alarm.state, alarm.step)))
    detector = DataInvariantDetector(alarms, causal=False, max_quarantined=1e-4)
    for step in range(1, 100):
        far = 1e6 if step == 10 or 40 <= step < 50 else None if step < 5 else 1.0
        counts = {"documents": 8, "separators": 8, "adjacent_specials": 0, "data_digest": str(step)}
        detector.step(step_record(step, **counts, data_distance=far))
    assert told == [("data-distance", "open", 41), ("data-distance", "resolved", 52)]


@pytest.mark.parametrize("excludes", [False, True])
def test_documents_left_out_are_no_other_mixture(
    records: Records, module_lab: Any, tmp_path: Path, excludes: bool
) -> None:
    """Most of source a is masked out of the loss, so most targets are of b."""
    run, changes, keys = module_lab.path / "run", ['data.exclude="bad.txt"'] if excludes else [], set[str]()
    alarms = Alarms(tmp_path / "alarms.jsonl", lambda alarm: keys.add(alarm.key))
    watched = build_detectors(
        load(run / "config.toml", changes), alarms, RankMonitor(range(0), tmp_path, 1), PeerNodes(tmp_path, 0, 1, ""), 1
    )
    for record in records:
        for detector in watched:
            detector.step(parsed({**record, "mixture": {"a": 0.4, "b": 0.6}}))
    assert {"data-share/a", "data-share/b"} & keys == (set() if excludes else {"data-share/a", "data-share/b"})


@pytest.mark.shows("F19")
@pytest.mark.parametrize("again", [0, 5])
def test_a_restart_goes_on_where_the_run_was(records: Records, tmp_path: Path, again: int) -> None:
    """The first step after a restart is compared with the record it continues."""

    def before(step: int) -> StepRecord:
        return parsed(records[step - 1])

    later = copy.deepcopy(records[40:])
    for place, record in enumerate(later):
        for key in ("cursor", "data_digest"):
            record[key] = records[40 + place - again][key]
    found = judge(later, tmp_path, before=before)
    assert [(key, step) for key, _, step in found][:1] == ([("data-cursor", 41)] if again else [])


@pytest.mark.shows("C5", "F42")
def test_shifted_ids_are_noticed_and_mixtures_are_learned_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an idealised vocabulary: Zipf's law, each document on one topic."""
    monkeypatch.setattr(unigrams, "LEARN", 30)
    rng = np.random.default_rng(1)
    zipf = 1 / np.arange(1, 20_001) ** 1.05

    def step(shift: int = 0) -> list[np.ndarray]:
        topics = [rng.permutation(20_000)[:2000] for _ in range(4)]
        common = rng.choice(20_000, 12_000, p=zipf / zipf.sum())
        return [np.concatenate([common, *(rng.choice(topic, 1500) for topic in topics)]) + shift]

    shares = {"a": 0.75, "b": 0.25}
    counted = Unigrams(tmp_path / "u.json")
    scores = [counted.score(step(), shares) for _ in range(160)]
    assert scores[:60] == [None] * 60
    sound = np.array(scores[60:], dtype=float)
    assert abs(np.median(sound)) < 1 and np.sum(sound > 5) == 0
    again = Unigrams(tmp_path / "u.json")
    shifted = again.score(step(1), shares)
    assert shifted is not None and shifted > 20
    assert again.score(step(1), {"a": 0.5, "b": 0.5}) is None


@pytest.mark.shows("F42")
@pytest.mark.slow
def test_a_corpus_whose_ids_moved(lab: Any, helpers: Any) -> None:
    """End to end: between two starts every id grows by one, and the sizes and the manifest's fingerprint stay."""
    corpus = lab.path / "corpus"
    shutil.copytree(lab.corpus, corpus)
    config = lab.config(
        data={"sources": [{"name": "text", "path": str(corpus)}]},
        train={"duration": "70 steps", "global_batch": "32 samples", "micro_batch": 8},
        checkpoint={"every": "60 steps"},
        optimizer={"decay": "70 steps"},
        watchdog={"enabled": True},
        health={"rollback": False},  # or the run would skip these samples before the detector reads them
    )
    with constants("fsdp_pretrain.data.packing.unigrams", LEARN=20):
        lab.train(config, "train.duration=60 steps")
    for path in (corpus / "shards").glob("*.bin"):
        ids = np.fromfile(path, dtype="<u2")
        np.where((ids > 10) & (ids < 500), ids + 1, ids).astype("<u2").tofile(path)
    seal(corpus)
    lab.train(config)
    run, reported = RunDir(lab.path / "run"), []
    alarms = Alarms(lab.path / "alarms.jsonl", lambda alarm: reported.append((alarm.key, alarm.step)))
    found = build_detectors(
        load(run.config), alarms, RankMonitor(range(0), lab.path, 1), PeerNodes(lab.path, 0, 1, ""), 2
    )
    for record in helpers.metrics(run.path)[60:]:
        for detector in found:
            detector.step(parsed(record))
    assert [(key, step) for key, step in reported if key.startswith("data-")] == [("data-distance", 62)]
