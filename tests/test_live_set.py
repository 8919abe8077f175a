"""`control set` on a live run: one more timeline entry, previewed, in force on all ranks at one step, and lasting."""

from __future__ import annotations

import json
import signal
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from processes import CLI, ROOT, scripted
from sight import steps, until
from traps import killed_at

from fsdp_pretrain.checkpoint.store import Store
from fsdp_pretrain.config.config import load
from fsdp_pretrain.config.live_set import preview, ramped, read_entry, steer, steerable
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.run import overrides
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.overrides import Overrides
from fsdp_pretrain.run.requests import send

STEPS = 60
PLAIN = load(ROOT / "configs/runs/llama-7b-hsdp.toml").schedule
SCHEDULE = {"lr": 1e-2, "min_lr": 1e-3, "warmup": "4 steps", "decay": f"{STEPS} steps"}


def timeline(run: Path) -> list[dict[str, Any]]:
    """The entries that last, as tables."""
    path = run / "overrides.toml"
    return tomllib.loads(path.read_text()).get("timeline", []) if path.exists() else []


def config_of(lab: Any, name: str = "run", **sections: dict[str, Any]) -> Path:
    train = {"duration": f"{STEPS} steps", "micro_batch": 2, **sections.pop("train", {})}
    config: Path = lab.config(name, train=train, optimizer=SCHEDULE, **{"parallel": {"shard": 2}, **sections})
    return config


def same_as_configured(lab: Any, helpers: Any, config: Path, run: Path, ranks: int, *, last: int = STEPS) -> None:
    """A run whose configuration has the lasting entries as its timeline has the same bits in every step."""
    twin = lab.path / f"{run.name}-configured"
    path = lab.path / f"{run.name}-configured.toml"
    path.write_text(tomli_w.dumps({**tomllib.loads(config.read_text()), "timeline": timeline(run)}))
    lab.train(path, f"run.dir={twin}", f"train.duration={last} steps", "checkpoint.every=1000 steps", ranks=ranks)
    assert helpers.losses(run) == helpers.losses(twin)
    assert [record["lr"] for record in helpers.metrics(run)] == [record["lr"] for record in helpers.metrics(twin)]


@pytest.mark.shows("A22", "A35")
def test_a_live_set_is_a_timeline_entry(
    lab: Any, helpers: Any, run_command: Any, start_command: Any, gates: Any
) -> None:
    """4 ranks: in force in the same step on all, as previewed to the bit, in journal, checkpoint and overrides.toml;
    and the run is that of a configuration with the entry. What cannot be is refused before and after it is sent."""
    config, run = config_of(lab, checkpoint={"every": "1000 steps"}), lab.path / "run"
    first, second = gates(20, 50)
    job = lab.start(config, ranks=4)
    until(lambda: steps(run) >= 17, what=job.output)

    def asked(*arguments: object) -> Any:
        return run_command(CLI, "control", run, "set", *arguments)

    change = ("optimizer.lr_scale=0.5", "optimizer.weight_decay=0.02", "--at", 30)
    unsure = asked(*change)
    assert unsure.returncode == 78 and "add --yes" in unsure.stderr and "optimizer.lr  " in unsure.stdout
    wrong = asked("optimizer.lr=abc", "data.seed=2", "--yes")
    assert wrong.returncode == 78 and "data.seed cannot be changed on a live run" in wrong.stderr
    past = asked("optimizer.lr_scale=0.5", "--at", 3, "--yes")
    assert past.returncode == 78 and "already" in past.stderr
    unheard = asked(*change, "--yes", "--wait", "0.2 s")
    assert unheard.returncode == 75 and "was taken back: nothing was changed" in unheard.stderr
    assert not list((run / "control").iterdir()) and not (run / "overrides.toml").exists()

    late = send(RunDir(run), "set", changes=["optimizer.lr_scale=0.1"], at=2, reason="")
    command = start_command(CLI, "control", run, "set", *change, "--reason", "less noise", "--yes", "--json")
    until(lambda: len(list((run / "control").iterdir())) == 2, what="the requests")
    other = start_command(CLI, "control", run, "set", "optimizer.lr_scale=2", "--at", 32, "--yes")
    until(lambda: len(list((run / "control").iterdir())) == 3, what="the request of somebody who sees the same")
    first.touch()
    assert command.wait() == 0, (command.output(), job.output())
    assert other.wait() == 78 and "no longer as in the preview: at 240 samples" in other.output()[1], other.output()
    found = json.loads(command.output()[0])
    second.touch()
    assert job.wait() == [0] * 4, job.output()

    records = {record["step"]: record for record in helpers.metrics(run)}
    shown = [each for each in found["preview"] if each["key"] == "optimizer.lr" and each["step"] <= STEPS]
    assert {30, 31} <= {each["step"] for each in shown}
    assert [each["after"] for each in shown] == [repr(records[each["step"]]["lr"]) for each in shown]
    answers = helpers.journal(run, "control")
    assert answers[0]["request"] == late.stem and "step 3 has begun" in answers[0]["refused"]
    answer = answers[1]
    assert answer == found["answer"] and answer["at"] == 30 and answer["reason"] == "less noise" and answer["by"]
    assert answer["after"]["optimizer.lr"] == records[31]["lr"] == answer["before"]["optimizer.lr"] / 2
    assert (answer["before"]["optimizer.weight_decay"], answer["after"]["optimizer.weight_decay"]) == (0.1, 0.02)
    assert "less noise" in (run / "CHRONICLE.md").read_text()
    kept = load(run / f"checkpoints/step-{STEPS:08d}/config.toml").timeline
    assert kept == list(overrides.read(RunDir(run)).timeline) == load(run / "config.toml").timeline and len(kept) == 1
    same_as_configured(lab, helpers, config, run, 4)
    longer = (f"train.duration={STEPS + 4} steps", "optimizer.weight_decay=0.05")
    allowed = ("--allow", "train.duration", "--allow", "optimizer.weight_decay")
    refused = lab.train(config, *longer, ranks=2, flags=allowed, expect=78)
    assert "optimizer.weight_decay would change nothing: the timeline has replaced its value" in refused


@pytest.mark.promise("live-changes")
def test_what_is_asked_as_a_start_ends_is_answered(lab: Any, helpers: Any) -> None:
    config, run = config_of(lab, parallel={}), lab.path / "run"
    change = ("set", {"changes": ["optimizer.lr_scale=0.5"], "reason": ""})
    lab.train(config, expect=75, variables=scripted({12: [("stop", {}), change, ("pause", {})]}))
    answers = [
        (entry["asked"], entry.get("did"), entry.get("refused", "")) for entry in helpers.journal(run, "control")
    ]
    assert answers[0][:2] == ("stop", "stop") and not (run / "overrides.toml").exists()
    assert [(verb, "the start ended" in why) for verb, _, why in answers[1:]] == [("set", True), ("pause", True)]


@pytest.mark.promise("live-changes")
def test_what_is_asked_at_once_is_answered_and_done(lab: Any, helpers: Any) -> None:
    """A pause that is taken back before it begins; a save as the ranks pause; and while they are held, a pause behind
    the request to resume: they stay paused until the next one. A save after the last step is the final one."""
    config, run = config_of(lab, parallel={}, checkpoint={"every": "1000 steps"}), lab.path / "run"
    pause, resume = ("pause", {}), ("resume", {})
    script = {5: [pause, resume], 12: [pause], 13: [("save", {})], 16: [("save", {})], STEPS - 2: [("save", {})]}
    lab.train(config, variables=scripted(script, [[resume, pause]]))
    answers = [
        (entry["asked"], "did" if "did" in entry else "refused", entry["step"])
        for entry in helpers.journal(run, "control") if "asked" in entry
    ]  # fmt: skip
    held = next(step for verb, how, step in answers if (verb, how) == ("pause", "did"))
    before, behind = answers[:2], answers[2:]
    assert [answer[:2] for answer in before] == [("pause", "refused"), ("resume", "did")] and before[0][2] < held
    assert [(verb, how) for verb, how, step in behind if step == held] == [
        ("pause", "did"), ("save", "did"), ("resume", "refused"), ("pause", "did"), ("resume", "did"),
    ]  # fmt: skip
    assert held in [entry["step"] for entry in helpers.journal(run, "checkpoint")]
    later = [answer for answer in behind if answer[2] > held]
    assert [answer[:2] for answer in later] == [("save", "did")] * 2 and later[0][2] <= 18 and later[1][2] == STEPS
    assert Store(run / "checkpoints").find(STEPS).manifest().final


@pytest.mark.promise("live-changes")
def test_a_save_asked_for_as_another_one_begins_is_answered_with_it(lab: Any, helpers: Any) -> None:
    config, run = config_of(lab, parallel={}, checkpoint={"every": "1 steps"}), lab.path / "run"
    lab.train(config, "train.duration=12 steps", "optimizer.decay=60 steps", variables=scripted({5: [("save", {})]}))
    (answer,) = helpers.journal(run, "control")
    assert answer["did"] == "save" and 5 <= answer["step"] <= 7


@pytest.mark.slow
@pytest.mark.promise("live-changes")
def test_a_rollback_takes_along_what_was_set_in_the_steps_it_leaves(lab: Any, helpers: Any, run_command: Any) -> None:
    """What was set before the checkpoint stays, what counted in steps behind it goes, what is ahead of the run stays."""
    config, run = config_of(lab, parallel={}, checkpoint={"every": "10 steps", "keep_last": 9}), lab.path / "run"
    asked = [("optimizer.lr_scale=0.5", 24), ("train.grad_clip=0.5", 50)]
    sets = [("set", {"changes": [change], "at": at, "reason": ""}) for change, at in asked]
    lab.train(config, expect=75, variables=scripted({12: sets, 37: [("stop", {})]}))
    assert [entry.get("did") for entry in helpers.journal(run, "control")] == ["set", "set", "stop"]

    for start, count in ((0, 10), (10, 8), (20, 6)):  # recorded before it was set, in part, and behind its place
        run_command(CLI, "replay", run, "--from", start, "--steps", count, expect=0)

    def dry(step: int) -> list[str]:
        done = run_command(CLI, "rollback", run, "--to", step, "--dry-run", "--json", expect=0)
        return [text for text in json.loads(done.stdout)["changes"] if text.startswith("timeline")]

    assert dry(30) == []
    assert dry(20) == ["timeline: at 192 samples: optimizer.lr_scale = 0.5 -> absent"]
    run_command(CLI, "rollback", run, "--to", 20, expect=0)
    assert [entry["at"] for entry in timeline(run)] == ["400 samples"]
    lab.train(config)
    same_as_configured(lab, helpers, config, run, 1)


@pytest.mark.promise("replay")
def test_steps_are_replayed_with_the_values_they_had(lab: Any, run_command: Any) -> None:
    """Before something was set, and across the border of two starts, of which the second was set something else, and
    has what the first was set in its file too, in another unit."""
    saves = {"every": "8 steps", "keep_last": 9}
    config, run = config_of(lab, parallel={}, train={"duration": "24 steps"}, checkpoint=saves), lab.path / "run"
    first = ("set", {"changes": ["optimizer.lr_scale=0.5"], "at": 6, "reason": ""})
    second = ("set", {"changes": [ramped("optimizer.weight_decay=0.02", "4 steps")], "reason": ""})
    lab.train(config, expect=75, variables=scripted({2: [first], 10: [("stop", {})]}))
    with config.open("a") as file:
        file.write('\n[[timeline]]\nat = "6 steps"\noptimizer.lr_scale = 0.5\n')
    lab.train(config, variables=scripted({16: [second]}))
    for start, count in ((0, 6), (8, 14)):
        run_command(CLI, "replay", run, "--from", start, "--steps", count, expect=0)


@pytest.mark.slow
def test_what_was_set_stays_where_it_was_set(lab: Any, helpers: Any, run_command: Any) -> None:
    """Though the run goes on with another batch: places and ramps are as many samples, whatever a step is."""
    sections: dict[str, Any] = {"parallel": {}, "train": {"duration": "320 samples"}, "checkpoint": {"keep_last": 9}}
    config, run = config_of(lab, **sections), lab.path / "run"
    flat = ("optimizer.curve=constant", "optimizer.warmup=0 steps", "optimizer.min_lr=0.0")
    halved = ("set", {"changes": [ramped("optimizer.lr_scale=0.5", "8 steps")], "at": 8, "reason": ""})
    lab.train(config, *flat, expect=75, variables=scripted({2: [halved], 9: [("stop", {})]}))
    stopped = helpers.metrics(run)[-1]["step"]
    third = ("set", {"changes": ["optimizer.lr_scale=0.25"], "at": 17, "reason": ""})
    resumed = (*flat, "train.global_batch=16 samples")
    lab.train(config, *resumed, flags=("--allow", "train.global_batch"), variables=scripted({stopped + 1: [third]}))

    place = 8 * stopped + 16 * (17 - stopped)
    assert timeline(run) == [
        {"at": "64 samples", "optimizer": {"lr_scale": {"to": 0.5, "over": "64 samples"}}},
        {"at": f"{place} samples", "optimizer": {"lr_scale": {"to": 0.25}}},
    ]
    records = helpers.metrics(run)
    scales = [1 - min(0.5, max(0.0, at - 64) / 128) if at <= place else 0.25 for at in (r["consumed"] for r in records)]
    assert [record["lr"] / 1e-2 for record in records] == pytest.approx(scales, rel=1e-12)
    steps_asked = f"{stopped},{stopped + 1},17,18 steps"
    shown = run_command(CLI, "plan", run / "config.toml", "--at", steps_asked, "--json", expect=0)
    for row in json.loads(shown.stdout):
        record = records[row["step"] - 1]
        assert [row[key] for key in ("consumed", "batch", "lr")] == [record[key] for key in ("consumed", "batch", "lr")]
    planned = run_command(CLI, "plan", run / "config.toml", "--json")
    assert [entry["step"] for entry in json.loads(planned.stdout)["timeline"]] == [8, 17]


@pytest.mark.quick
def test_a_preview_counts_steps_from_where_the_run_is(lab: Any) -> None:
    """Step 100 after 800 samples, though its batch is 16 now."""
    config = load(config_of(lab, train={"duration": "6400 samples", "global_batch": "16 samples"}))
    entry = read_entry([ramped("optimizer.lr_scale=0.5", "10 steps")], config.schedule, at=800 + 20 * 16)
    assert entry.optimizer.lr_scale is not None and str(entry.optimizer.lr_scale.over) == "160 samples"
    rows = preview(config, steer(config, entry), entry, step=100, consumed=800)
    shown = {row.step: row for row in rows if row.key == "optimizer.lr"}
    assert {119, 120, 121, 129, 130, 131} <= {*shown} and min(shown) == 119
    for step, row in shown.items():
        lr = config.schedule.lr_at(800 + 16 * (step - 100))
        scale = 1 - 0.05 * min(10, max(0, step - 120))
        assert float(row.before) == lr and float(row.after) == pytest.approx(lr * scale, rel=1e-12)


@pytest.mark.quick
def test_a_preview_of_a_change_at_once_begins_with_the_step_that_is_over(lab: Any) -> None:
    """Which it does not change."""
    config = load(config_of(lab, train={"duration": "6400 samples", "global_batch": "16 samples"}))
    entry = read_entry(["optimizer.lr_scale=0.5"], config.schedule, at=800)
    rows = preview(config, steer(config, entry), entry, step=50, consumed=800)
    shown = [(row.step, float(row.after) / float(row.before)) for row in rows if row.key == "optimizer.lr"]
    assert shown == [(50, 1.0), (51, 0.5)]


@pytest.mark.quick
def test_lasting_changes_have_their_places_in_samples(tmp_path: Path) -> None:
    for table in ('at = "8 steps"\noptimizer.lr = 1', 'at = "8 samples"\noptimizer.lr = {to = 1, over = "2 steps"}'):
        text = f"set = []\nskip = []\n[[timeline]]\n{table}\n"
        with pytest.raises(ConfigError, match="must be in samples"):
            Overrides.from_toml(text, tmp_path / "overrides.toml")


@pytest.mark.quick
def test_every_problem_of_a_set_is_said_at_once() -> None:
    changes = ["optimizer.lr=0", "data.seed=2", "optimizer.lr_scale=2", "optimizer.lr_scale=3", "checkpoint.every"]
    with pytest.raises(ConfigError) as caught:
        read_entry(changes, PLAIN, at=3)
    for words in (
        "data.seed cannot be changed",
        "optimizer.lr_scale is given twice",
        "'checkpoint.every' is not of the form",
    ):
        assert words in caught.value.cause
    assert caught.value.exit == 78 and "optimizer.betas" in caught.value.remedy
    for change, over, words in (
        ("optimizer.lr=0", "", "greater than 0"),
        ("checkpoint.every=20", "", "no unit"),
        ("checkpoint.every=20 steps", "10 steps", "checkpoint.every"),
        ("optimizer.lr={to=1e-4, over='3 steps'}", "10 steps", "optimizer.lr"),
        ("optimizer.lr=1e-3", "10", "not a quantity"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_entry([ramped(change, over)], PLAIN, at=3)
    assert {"optimizer.lr_scale", "optimizer.betas", "train.z_loss", "checkpoint.every"} <= {*steerable()}


@pytest.mark.quick
def test_an_entry_is_added_wholly_or_not_at_all(tmp_path: Path) -> None:
    """Killed before any of the changes to the file system that adding makes."""
    run = RunDir(tmp_path)
    one, two = (
        read_entry([change], PLAIN, at=at) for change, at in (("optimizer.lr_scale=0.5", 3), ("train.z_loss=1e-4", 5))
    )
    overrides.add_entry(run, one)
    states, operation = set(), 0
    while killed_at(lambda: overrides.add_entry(run, two), operation := operation + 1):
        states.add(overrides.read(run).timeline)
        run.overrides.write_text(Overrides(timeline=(one,)).to_toml())
    assert operation > 2 and states <= {(one,), (one, two)} and (one,) in states
    assert overrides.read(run).timeline == (one, two)


@pytest.mark.quick
def test_lasting_entries_are_part_of_the_configuration_once(lab: Any) -> None:
    """Also where the file, such as the run's own config.toml, has them already; one more entry is seen in the values."""
    config, entry = load(config_of(lab)), read_entry(["optimizer.lr_scale=0.5"], PLAIN, at=240)
    after = steer(config, entry)
    path = lab.path / "written.toml"
    path.write_text(after.to_toml())
    for file in (lab.path / "run.toml", path):
        assert overrides.apply(file, (), Overrides(timeline=(entry,))) == after
    assert overrides.apply(path, (), Overrides(), [entry]) == config
    consumed = config.schedule.batch.consumed_at
    assert [after.schedule.lr_at(consumed(n)) / config.schedule.lr_at(consumed(n)) for n in (30, 31)] == [1.0, 0.5]


POINTS = {  # verb and path of the change before which rank 0 is killed -> the change lasts
    "taken": ("remove", r"/control/\d+-\w+\.json$", None),
    "named": ("rename", r"/overrides\.toml$", False),
    "of the start": ("rename", r"/run/segments/\d+/config\.toml$", True),
    "in force": ("open", r"/run/\.config\.toml\.", True),
}


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.promise("live-changes")
def test_a_live_set_survives_kill_9_at_any_point(
    lab: Any, helpers: Any, start_command: Any, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """The run has it wholly or not at all, and the next start says which."""
    verb, path, lasts = POINTS[point]
    config, run = config_of(lab, checkpoint={"every": "7 steps"}, train={"duration": "100_000 steps"}), lab.path / "run"
    trap = {"rank": 0, "verb": verb, "path": path, "after": r"\.writing-" if lasts else ""}
    monkeypatch.setenv("EXECUTE_FIRST", str(ROOT / "tests/traps.py"))
    monkeypatch.setenv("TRAP", json.dumps(trap))
    job = lab.start(config, ranks=2)
    monkeypatch.delenv("TRAP")
    monkeypatch.delenv("EXECUTE_FIRST")
    until(lambda: steps(run) >= 10, what=job.output)
    command = start_command(CLI, "control", run, "set", "optimizer.lr_scale=0.5", "--yes", "--reason", "why")
    assert -signal.SIGKILL in job.wait()
    assert command.wait() == 75, command.output()
    said = "taken back: nothing was changed" if lasts is None else "has taken the request: "
    assert said in command.output()[1]
    assert bool(timeline(run)) is bool(lasts)
    last = max(record["step"] for record in helpers.metrics(run)) + 20
    lab.train(config, f"train.duration={last} steps", ranks=2, flags=("--allow", "train.duration"))
    told = [entry["text"] for entry in helpers.journal(run, "overrides")]
    assert bool(told) is bool(lasts) and all("optimizer.lr_scale = 0.5" in text for text in told)
    same_as_configured(lab, helpers, config, run, 2, last=last)


@pytest.mark.slow
def test_back_to_a_save_of_a_pause_in_which_something_was_set(lab: Any, helpers: Any, run_command: Any) -> None:
    """What was set goes, so the steps behind it are others than were recorded: that is no fault."""
    config, run = config_of(lab, parallel={}, train={"duration": "24 steps"}), lab.path / "run"
    change = ("set", {"changes": ["optimizer.lr=0.1"], "reason": ""})
    lab.train(config, expect=75, variables=scripted({12: [("pause", {})], 18: [("stop", {})]}, [("save", {}), change]))
    (saved,) = [entry["step"] for entry in helpers.journal(run, "control") if entry.get("did") == "pause"]
    run_command(CLI, "rollback", run, "--to", saved, expect=0)
    lab.train(config)
    assert not [entry for entry in helpers.journal(run, "health") if "replay/step" in entry["text"]]
    same_as_configured(lab, helpers, config, run, 1, last=24)
    assert not timeline(run)
