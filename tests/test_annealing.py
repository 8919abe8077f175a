"""`fork --anneal`: one command for a decay from where a run is, perhaps on another mixture."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w
from processes import CLI, Run
from sight import tree

from fsdp_pretrain.checkpoint.state import identity
from fsdp_pretrain.config.config import load
from fsdp_pretrain.data.packing.opening import open_packer
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.lineage import annealing
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.metrics import read_metrics
from fsdp_pretrain.run.overrides import load_run


@pytest.fixture(scope="module")
def sources(module_lab: Any) -> list[dict[str, Any]]:
    return [
        {"name": "text", "path": str(module_lab.corpus), "weight": 3.0},
        {"name": "old", "path": str(module_lab.corpus), "weight": 1.0},
    ]


@pytest.fixture(scope="module")
def parent(module_lab: Any, sources: list[dict[str, Any]]) -> Path:
    """Thirty steps of a cosine decay, saved at 10, 20 and 30."""
    config = module_lab.config(
        "parent", train={"duration": "30 steps"}, data={"sources": sources}, optimizer={"lr": 8e-3, "min_lr": 0.0}
    )
    module_lab.train(config, ranks=2)
    run: Path = module_lab.path / "parent"
    return run


@pytest.mark.promise("anneal")
def test_a_branch_decays_from_where_the_run_is_on_another_mixture(
    parent: Path, sources: list[dict[str, Any]], lab: Any, run_command: Run, helpers: Any
) -> None:
    new, mix, before = lab.path / "new", lab.path / "mix.toml", tree(parent)
    mix.write_text(
        f'[[sources]]\nname = "text"\npath = "{sources[0]["path"]}"\nweight = 1\n'
        f'[[sources]]\nname = "best"\npath = "{sources[0]["path"]}"\nweight = 3\n'
    )
    command = (CLI, "fork", parent, "--at", 20, new, "--anneal", "12 steps", "--to", "0.25", "--mix", mix)
    planned = run_command(*command, "--dry-run", "--json")
    assert planned.returncode == 0 and not new.exists(), planned.stderr
    done = run_command(*command)
    assert done.returncode == 0 and "half-way" in done.stdout, done.stderr
    lab.train(new / "config.toml", ranks=2)
    trained = list(read_metrics(RunDir(new)))
    rates = {record.step: record.lr for record in trained}
    first, half, last = json.loads(planned.stdout)["rates"]
    assert first == pytest.approx(rates[20]) and half == pytest.approx(rates[26]) and last == pytest.approx(rates[32])
    assert max(rates) == 32 and last == pytest.approx(rates[20] / 4)
    assert rates[20] > rates[21] > rates[31] > rates[32]
    shares = {record.step: record.ramps.shares for record in trained}
    assert shares[20] == {"text": 0.75, "old": 0.25} or shares[20] == {"text": 0.75, "old": 0.25, "best": 0.0}
    assert shares[32] == {"text": 0.25, "old": 0.0, "best": 0.75}
    assert tree(parent) == before
    again = run_command(CLI, "fork", new, "--at", 30, lab.path / "again", "--anneal", "4 steps", "--mix", mix)
    assert again.returncode == 0, again.stderr  # `old` has ended
    shares = open_packer(load(lab.path / "again" / "config.toml")).mixture.shares
    assert shares(159) == pytest.approx({"text": 0.75, "old": 0.25, "best": 0}) and shares(239) == shares(240)


def test_the_mixture_of_the_file_lasts_to_the_end(
    parent: Path, sources: list[dict[str, Any]], lab: Any, run_command: Run
) -> None:
    """Whatever the run, or a later start of it, has planned behind the fork."""
    run, new, mix = lab.path / "run", lab.path / "new", lab.path / "mix.toml"
    shutil.copytree(parent, run)
    config = tomllib.loads((run / "config.toml").read_text())
    text, old = config["data"]["sources"]
    later = [{**old, "name": name, "start": "200 samples"} for name in ("late", "never")]
    config["data"]["sources"] = [text, {**old, "stop": "200 samples"}, *later]
    (run / "config.toml").write_text(tomli_w.dumps(config))
    mix.write_text(tomli_w.dumps({"sources": [{**old, "weight": 3}, {**old, "name": "late", "weight": 1}]}))
    done = run_command(CLI, "fork", run, "--at", 20, new, "--anneal", "9 steps", "--mix", mix)
    assert done.returncode == 0, done.stderr
    packer = open_packer(load(new / "config.toml"))
    assert packer.mixture.shares(159) == pytest.approx({"text": 0.75, "old": 0.25, "late": 0})
    for place in (160, 200, 231):
        assert packer.mixture.shares(place) == pytest.approx({"text": 0, "old": 0.75, "late": 0.25})


@pytest.mark.parametrize(("first", "is_refused"), [(200, False), (100, True)])
def test_a_weight_that_was_planned_does_not_count_and_a_ramp_under_way_is_refused(
    lab: Any, run_command: Run, first: int, is_refused: bool
) -> None:
    text, mix = {"name": "text", "path": str(lab.corpus)}, lab.path / "mix.toml"
    ramp = [{"at": f"{place} samples", "value": value} for place, value in ((0, 1), (first, 1), (240, 3))]
    lab.train(lab.config(data={"sources": [{**text, "weight": ramp}, {**text, "name": "old"}]}))
    mix.write_text(tomli_w.dumps({"sources": [{**text, "weight": 3}, {**text, "name": "old", "weight": 1}]}))
    command = (CLI, "fork", lab.path / "run", "--at", 20, lab.path / "new", "--anneal", "5 steps", "--mix", mix)
    done = run_command(*command, expect=78 if is_refused else 0)
    if is_refused:
        assert "the weight of text changes" in done.stderr
    else:
        shares = open_packer(load(lab.path / "new" / "config.toml")).mixture.shares
        assert shares(159)["text"] == 0.5 and shares(160)["text"] == shares(199)["text"] == 0.75


def test_steps_of_a_decay_are_those_of_the_fork(parent: Path, lab: Any, run_command: Run) -> None:
    new, batch = lab.path / "new", ["--set", "train.global_batch=16 samples", "--set", "optimizer.warmup=0 steps"]
    run_command(CLI, "fork", parent, "--at", 20, new, "--anneal", "4 steps", *batch, expect=0)
    assert load(new / "config.toml").schedule.total == 20 * 8 + 4 * 16


def test_the_mixture_of_the_file_begins_at_the_fork_of_a_run_in_stages(lab: Any, run_command: Run) -> None:
    """A sample is not a window there: a jump that is past stays where it was, a stop and a start ahead do not count."""
    mix, text = lab.path / "mix.toml", {"name": "text", "path": str(lab.corpus)}
    jump = [{"at": f"{place} samples", "value": value} for place, value in ((0, 1), (60, 1), (60, 3))]
    ends, late = ({**text, "name": name, key: "100 samples"} for name, key in (("ends", "stop"), ("late", "start")))
    data = {"sources": [{**text, "weight": jump}, ends, late], "stages": [{"length": 8, "until": "40 samples"}]}
    lab.train(lab.config(data=data, train={"duration": "10 steps"}))
    mix.write_text(tomli_w.dumps({"sources": [text, {**text, "name": "new", "weight": 3.0}]}))
    command = (CLI, "fork", lab.path / "run", "--at", 10, lab.path / "new", "--anneal", "8 steps", "--mix", mix)
    run_command(*command, expect=0)
    shares = open_packer(load(lab.path / "new" / "config.toml")).shares
    for places, parts in (((39, 59), (1, 1, 0)), ((60, 79), (3, 1, 0)), ((80, 100, 143), (1, 0, 3))):
        expected = {name: part / sum(parts) for name, part in zip(("text", "ends", "new"), parts, strict=True)}
        assert [shares(place) for place in places] == [pytest.approx(expected)] * len(places)


def test_the_steps_to_come_are_counted_from_where_the_run_is(lab: Any, run_command: Run, helpers: Any) -> None:
    """After ten steps of four samples and five of six: every end is the first step that reaches it."""
    run, new = lab.path / "run", lab.path / "new"
    small = {"train": {"duration": "10 steps", "global_batch": "4 samples"}, "checkpoint": {"every": "15 steps"}}
    config = lab.config(optimizer={"curve": "constant"}, **small)
    lab.train(config)
    other = ("train.global_batch=6 samples", "train.micro_batch=6")
    lab.train(config, *other, "train.duration=70 samples", flags=("--allow", "train.global_batch"))
    run_command(CLI, "fork", run, "--at", 15, new, "--anneal", "5 steps", "--to", "0.5", expect=0)
    assert "15 of 20," in run_command(CLI, "status", new).stdout
    lab.train(new / "config.toml")
    lab.train(config, *other, "train.duration=106 samples")
    for trained, last in ((new, (20, 100)), (run, (21, 106))):
        records = helpers.metrics(trained)
        assert (records[-1]["step"], records[-1]["consumed"]) == last
        assert f"{last[0]} of {last[0]}," in run_command(CLI, "status", trained).stdout
    rates = [record["lr"] for record in helpers.metrics(new)][-6:]
    assert rates == sorted(rates, reverse=True) and len({*rates}) == 6 and rates[-1] == pytest.approx(rates[0] / 2)


def test_the_rate_is_that_of_the_checkpoint_whatever_the_run_has_declared_since(
    lab: Any, run_command: Run, helpers: Any
) -> None:
    run, new = lab.path / "run", lab.path / "new"
    optimizer = {"lr": 1e-2, "curve": "constant", "warmup": "1 steps"}
    saves = {"every": "2 steps", "keep_last": 4}
    config = lab.config(optimizer=optimizer, train={"duration": "4 steps"}, checkpoint=saves)
    lab.train(config)
    lab.train(config, "optimizer.lr=2e-3", "train.duration=6 steps", flags=("--allow", "optimizer.lr"))
    trained = {record["step"]: record["lr"] for record in helpers.metrics(run)}
    assert trained[2] == 1e-2 and trained[6] == 2e-3
    for step in (2, 6):
        command = (CLI, "fork", run, "--at", step, new, "--anneal", "4 steps", "--to", "0.1", "--dry-run", "--json")
        first, _, last = json.loads(run_command(*command, expect=0).stdout)["rates"]
        assert first == pytest.approx(trained[step]) and last == pytest.approx(trained[step] / 10)


def test_a_branch_decays_from_a_rate_that_the_timeline_has_set(lab: Any, run_command: Run, helpers: Any) -> None:
    """Also from a rate that its scale does not divide exactly, and again after a rollback to its beginning. What the
    timeline has planned behind the fork is refused."""
    run, new = lab.path / "run", lab.path / "new"
    optimizer = {"lr": 1e-2, "min_lr": 0.0, "curve": "constant", "warmup": "1 steps"}
    early = [{"at": "1 steps", "optimizer": {"lr": 5e-5}}, {"at": "2 steps", "optimizer": {"lr": 2e-4}}]
    entries = [*early, {"at": "3 steps", "optimizer": {"lr_scale": 0.7}}]
    lab.train(lab.config(optimizer=optimizer, train={"duration": "4 steps"}, timeline=entries))
    rate = helpers.metrics(run)[-1]["lr"]
    assert rate == pytest.approx(1.4e-4) and rate / 0.7 != 2e-4
    asked = ("--anneal", "3 steps", "--to", "0.5", "--json")
    first, half, last = json.loads(run_command(CLI, "fork", run, "--at", 4, new, *asked, expect=0).stdout)["rates"]
    assert (first, last) == (pytest.approx(rate), pytest.approx(rate / 2))
    lab.train(new / "config.toml")
    rates = [record["lr"] for record in helpers.metrics(new)][3:]
    assert rates == sorted(rates, reverse=True) and [rates[0], rates[-1]] == [first, last] and first > half > last
    run_command(CLI, "rollback", new, "--to", 4, expect=0)
    schedule = load_run(new / "config.toml")[0].schedule
    assert [schedule.lr_at(samples) for samples in (40, 48, 56)] == rates[1:]
    config = tomllib.loads((run / "config.toml").read_text())
    config["timeline"].append({"at": "6 steps", "optimizer": {"lr_scale": 1.0}})
    (run / "config.toml").write_text(tomli_w.dumps(config))
    ahead = run_command(CLI, "fork", run, "--at", 4, lab.path / "other", *asked, expect=78)
    assert "the timeline steers it" in ahead.stderr


def test_a_mixture_that_would_never_begin_is_refused(lab: Any, tmp_path: Path) -> None:
    """Inside a stage of shorter samples it can change only where a group of windows ends."""
    train, data = {"duration": "100_000 samples"}, {"stages": [{"length": 8, "until": "64_000 samples"}]}
    config = load(lab.config(train=train, data=data))
    saved: Any = SimpleNamespace(cursor=1000, identity=identity(config, open_packer(config)))
    (tmp_path / "mix.toml").write_text(f'[[sources]]\nname = "new"\npath = "{lab.corpus}"\n')
    with pytest.raises(ConfigError, match="the mixture can change at sample 64_000, not before"):
        annealing._sources(config, saved, tmp_path / "mix.toml", 63_000)
    assert annealing._sources(config, saved, tmp_path / "mix.toml", 63_001)[-1]["name"] == "new"


@pytest.mark.parametrize(
    ("options", "mix", "reason"),
    [
        (["--anneal", "12"], None, "not a quantity with a unit"),
        (["--mix", "mix.toml"], "", "--mix: only with --anneal"),
        (["--to", "0.5"], None, "--to: only with --anneal"),
        (["--anneal", "9 steps"], "sources = 3", "is not a mixture"),
        (["--anneal", "9 steps"], '[[sources]]\nname = "text"\npath = "elsewhere"', "rename it"),
        (["--anneal", "9 steps"], '[[sources]]\nname = "a"\npath = "b"\nstop = "200 samples"', "to the end of the run"),
        (["--anneal", "9 steps", "--set", "optimizer.lr=1e-2"], None, "the rate would go from"),
        (["--anneal", "9 steps", "--to", "-1"], None, "is not a number of 0 or more"),
        (["--anneal", "9 steps", "--to", "2"], None, "optimizer.min_lr"),
    ],
)
def test_what_cannot_be_annealed_is_refused(
    parent: Path, lab: Any, run_command: Run, options: list[str], mix: str | None, reason: str
) -> None:
    if mix is not None:
        (lab.path / "mix.toml").write_text(mix)
        options = [*(text for text in options if text not in ("--mix", "mix.toml")), "--mix", lab.path / "mix.toml"]
    done = run_command(CLI, "fork", parent, "--at", 20, lab.path / "new", *options)
    assert done.returncode == 78 and reason in done.stderr, done.stderr
    assert not (lab.path / "new").exists()
