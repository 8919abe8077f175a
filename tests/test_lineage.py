"""Rollback and fork: with real jobs, and killed between any two file operations."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from machines import Disk
from processes import CLI, Run
from records import flip
from sight import tree
from traps import killed_at

from fsdp_pretrain.checkpoint.store import Store
from fsdp_pretrain.config.config import load
from fsdp_pretrain.config.timeline import TimelineEntry
from fsdp_pretrain.errors import BusyError, UserError
from fsdp_pretrain.lineage.fork import fork
from fsdp_pretrain.lineage.rollback import rollback
from fsdp_pretrain.run import lineage, overrides
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.metrics import read_metrics


@pytest.fixture(scope="module")
def trained(module_lab: Any) -> Path:
    """24 steps of 8 samples, saved every 6."""
    config = module_lab.config(
        "trained",
        train={"duration": "24 steps", "micro_batch": 8},
        checkpoint={"every": "6 steps", "keep_last": 4},
        eval={"every": "6 steps", "launch": False, "heldout": str(module_lab.heldout)},
    )
    module_lab.train(config)
    return module_lab.path / "trained"  # type: ignore[no-any-return]


@pytest.fixture
def copy(module_lab: Any, trained: Path, tmp_path: Path) -> tuple[Path, Path]:
    """(configuration, run directory) of a copy of the run, with evaluation results."""
    run = tmp_path / "copy"
    shutil.copytree(trained, run)
    for step in (6, 12, 18):
        folder = run / f"evals/step-{step:08d}/tasks"
        folder.mkdir(parents=True)
        (folder / "results.json").write_text("{}")
    return module_lab.path / "trained.toml", run


def curve(run: Path, helpers: Any) -> list[Any]:
    return [(r["step"], r["loss"]["sum"], r["data_digest"], r["cursor"], r["lr"]) for r in helpers.metrics(run)]


# ---------------------------------------------------------------- rollback


@pytest.mark.shows("A22", "A29", "B2", "F5", "F20")
@pytest.mark.promise("rollback")
def test_after_a_rollback_the_curve_is_that_of_a_run_that_knew(
    lab: Any, copy: tuple[Path, Path], helpers: Any, run_command: Run
) -> None:
    """Skipped steps and a new learning rate from step 12 on, kept by restarts with the first command."""
    config, run = copy
    before = {r["step"]: r for r in helpers.metrics(run)}
    decided = ["--skip-steps", "15:17", "--set", "optimizer.lr=5e-3", "--reason", "spike"]
    done = run_command(CLI, "rollback", run.name, "--to", 12, *decided, cwd=run.parent, expect=0)
    assert "optimizer.lr: 0.01 -> 0.005" in done.stdout and "112:136" in done.stdout
    assert [c.step for c in Store(run / "checkpoints").scan()] == [6, 12]
    assert sorted(p.name[:13] for p in (run / "checkpoints/abandoned").iterdir()) == ["step-00000018", "step-00000024"]
    assert sorted(p.name[:13] for p in (run / "evals").rglob("step-*")) == [f"step-{n:08d}" for n in (6, 12, 18)]
    assert not (run / "evals/step-00000018").exists()
    assert [r["step"] for r in helpers.metrics(run)] == list(range(1, 13))  # at once, not at the next start
    (entry,) = helpers.journal(run, "rollback")
    assert entry["lost"] == {"steps": 12, "tokens": 12 * 8 * 32} and entry["reason"] == "spike" and entry["by"]
    assert "optimizer.lr: 0.01 -> 0.005" in entry["changes"]
    shown = run_command(CLI, "status", run)
    assert shown.returncode == 1 and "back to step 12" in shown.stdout and "optimizer.lr=0.005" in shown.stdout

    shorter = ("train.duration=18 steps", "optimizer.decay=24 steps")
    lab.train(config, f"run.dir={run}", *shorter, flags=("--allow", "train.duration"))
    lab.train(config, f"run.dir={run}")  # the run's first command
    kept = helpers.metrics(run)
    assert [r["step"] for r in kept] == list(range(1, 25))
    assert (kept[13]["cursor"], kept[14]["cursor"]) == (112, 144)  # steps 15 to 17 had samples 112 to 135
    assert not {r["data_digest"] for r in kept[12:]} & {before[step]["data_digest"] for step in (15, 16, 17)}
    assert len(helpers.journal(run, "overrides")) == 2

    knew = lab.path / "knew"
    lab.train(config, f"run.dir={knew}", "train.duration=12 steps", "optimizer.decay=24 steps")
    declared = ("--allow", "optimizer.lr", "--allow", "data.skip")
    lab.train(config, f"run.dir={knew}", "optimizer.lr=5e-3", 'data.skip=["112:136 samples"]', flags=declared)
    assert curve(run, helpers) == curve(knew, helpers)

    for segment, digest in ((None, kept[19]["data_digest"]), (1, before[20]["data_digest"])):  # both stay readable
        chosen = [] if segment is None else ["--segment", segment]
        found = run_command(CLI, "where", run, "--step", 20, "--json", *chosen, expect=0)
        assert json.loads(found.stdout)["data_digest"] == digest
    refused = lab.train(config, f"run.dir={run}", "optimizer.lr=2e-3", expect=78)
    assert "optimizer.lr: 0.005 is set, not 0.002" in refused

    run_command(CLI, "rollback", run, "--to", 18, "--skip-steps", "19:20", "--json", expect=0)
    assert overrides.read(RunDir(run)).to_toml().count("samples") == 2  # ranges of both; settings stay
    assert str(overrides.read(RunDir(run))) == "optimizer.lr=0.005; skip 112:136 samples; skip 168:184 samples"


@pytest.mark.shows("B2")
def test_a_dry_run_changes_nothing_and_says_the_same(copy: tuple[Path, Path], run_command: Run) -> None:
    _, run = copy
    before = tree(run)
    changes = ["--skip-steps", "13:14", "--set", "train.global_batch=16 samples"]
    arguments = ["rollback", run, "--to", 12, *changes, "--json"]
    dry = run_command(CLI, *arguments, "--dry-run")
    assert dry.returncode == 0 and tree(run) == before, dry.stderr
    decided = run / "rollback.json"  # of one that was killed: only a real rollback finishes it
    decided.write_text("{}")
    assert "is under way" in run_command(CLI, *arguments, "--dry-run", expect=78).stderr
    decided.unlink()
    wet = run_command(CLI, *arguments)
    assert json.loads((run / "status.json").read_text())["heldout"] is None
    planned, did = json.loads(dry.stdout), json.loads(wet.stdout)
    assert (planned.pop("done"), did.pop("done")) == ("dry run", "now") and planned == did
    assert did["skip"] == "96:112 samples" and did["abandoned"] == ["step-00000018", "step-00000024"]
    assert json.loads(run_command(CLI, *arguments).stdout)["done"] == "already"


@pytest.mark.parametrize(
    ("step", "options", "expected"),
    [
        (13, {}, "has no checkpoint of step 13 (there are: 6, 12, 18, 24)"),
        (12, {"changes": ["optimizer.learning_rate=1"]}, "unknown key"),
        (12, {"changes": ["optimizer.min_lr=1"]}, "is above optimizer.lr"),
        (12, {"changes": ["data.seed=7"]}, "data.seed: 1234 -> 7"),
        (12, {"changes": ["optimizer.kind=muon"]}, "no state for other kinds of optimisers"),
        (12, {"changes": ["optimizer.groups=[{match='blocks.*.query*', kind='muon'}]"]}, "no state for other kinds"),
        (12, {"changes": ["data.skip=[]"]}, "--skip-steps"),
        (12, {"changes": ["data.skip.0='1:2 samples'"]}, "--skip-steps"),
        (12, {"changes": ["train.duration=10 steps"]}, "ends the run at step 10"),
        (12, {"skip_steps": (10, 14)}, "must come after that"),
        (12, {"skip_steps": (20, 30)}, "no step 30 on the kept line"),
        (18, {}, "its bytes are not the ones that were written"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_changes(
    copy: tuple[Path, Path], step: int, options: dict[str, Any], expected: str
) -> None:
    _, run = copy
    flip(run / "checkpoints/step-00000018/__0_0.distcp")
    before = tree(run)
    with pytest.raises(UserError) as caught:
        rollback(RunDir(run), step, **options)
    assert expected in str(caught.value) and caught.value.exit == 78
    assert tree(run) == before


def test_checkpoints_elsewhere_are_left_with_their_evaluations(copy: tuple[Path, Path], run_command: Run) -> None:
    _, run = copy
    (run / "checkpoints").rename(run.parent / "elsewhere")
    (run / "checkpoints").symlink_to(run.parent / "elsewhere")
    assert "(there are: 6, 12, 18, 24)" in run_command(CLI, "rollback", run, "--to", 0, expect=78).stderr
    rollback(RunDir(run), 12)
    assert sorted(path.name for path in (run / "evals").glob("step-*")) == ["step-00000006", "step-00000012"]
    assert [path.name[:13] for path in (run / "evals/abandoned").iterdir()] == ["step-00000018"]


def test_a_change_stays_with_its_source_and_its_place(copy: tuple[Path, Path], tmp_path: Path) -> None:
    """Whatever the order of sources and the working directory of later starts."""
    _, run = copy
    stop, heldout = 'data.sources.0.stop="900 samples"', 'eval.loss_on=[{name="h", path="held"}]'
    rollback(RunDir(run), 12, changes=[stop, heldout])
    lasting = overrides.read(RunDir(run))
    assert f'"{Path.cwd() / "held"}"' in str(lasting)
    values = tomllib.loads((run / "config.toml").read_text())
    (source,) = values["data"]["sources"]
    del source["stop"]
    values["data"]["sources"] = [{**source, "name": "new"}, source]
    (tmp_path / "two.toml").write_text(tomli_w.dumps(values))
    new, old = overrides.apply(tmp_path / "two.toml", (), lasting).data.sources
    assert new.stop is None and old.name == source["name"] and str(old.stop) == "900 samples"
    again = lasting.add(["eval.loss_on.0.path=x", "eval.loss_on=[]"], []).set
    assert [text for text in again if text.startswith("eval")] == ["eval.loss_on=[]"]


def test_what_the_timeline_has_replaced_is_not_set_in_vain(copy: tuple[Path, Path]) -> None:
    run = RunDir(copy[1])
    overrides.add_entry(run, TimelineEntry.model_validate({"at": "56 samples", "optimizer": {"lr": 0.02}}))
    with pytest.raises(UserError, match=r"--set optimizer\.lr would change nothing"):
        rollback(run, 12, changes=["optimizer.lr=0.002"])
    with pytest.raises(UserError, match="this entry was added by `control set`, and is not in the configuration file"):
        rollback(run, 12, changes=["timeline.0.optimizer.lr=0.03"])
    rollback(run, 6, changes=["optimizer.lr=0.002"])  # which leaves the entry behind


# ---------------------------------------------------------------- killed anywhere


def check_loads(run: RunDir) -> None:
    """The run can be resumed, whatever was killed."""
    steps = [record.step for record in read_metrics(run)]
    assert steps == list(range(1, len(steps) + 1))
    newest = Store(run.checkpoints).newest()
    assert newest is not None and newest.step <= 24
    overrides.apply(run.config, (), overrides.read(run))


def outcome(run: Path) -> Any:
    """Everything about a run that must not depend on when it was killed."""
    where = RunDir(run)
    abandoned = sorted(p.name.rpartition("-")[0] for p in run.glob("*/abandoned/*"))
    journal = (run / "journal.jsonl").read_text().splitlines()
    entries = sum('"rollback"' in line or '"fork"' in line for line in journal)
    leftovers = [p.name for p in run.glob("*.json") if p.name != "status.json" and p.name[0] != "."]
    files = sorted(Path(name).name for name in tree(run) if name.endswith((".toml", ".distcp", "metrics.jsonl")))
    steps = [record.step for record in read_metrics(where)]
    parts = lineage.line(lineage.nodes(where))
    return abandoned, entries, parts, leftovers, files, steps, str(overrides.read(where))


@pytest.mark.shows("B2")
@pytest.mark.parametrize(
    ("verb", "stride"),
    [("rollback", 3), ("fork", 11), *(pytest.param(verb, 1, marks=pytest.mark.slow) for verb in ("rollback", "fork"))],
)
@pytest.mark.promise("rollback")
def test_killed_between_any_two_operations(copy: tuple[Path, Path], tmp_path: Path, verb: str, stride: int) -> None:
    """The run still loads, and the same command completes the operation."""
    _, origin = copy
    changes, place = ["optimizer.lr=0.005"], tmp_path / "place"

    def act() -> object:
        run = RunDir(place / "run")
        if verb == "rollback":
            return rollback(run, 12, changes=changes, skip_steps=(15, 17), reason="spike")
        return fork(run, 12, place / "new", changes=changes, skip_steps=(15, 17))

    def prepare() -> None:
        for name in ("new", "run") if verb == "rollback" or not place.exists() else ("new",):
            shutil.rmtree(place / name, ignore_errors=True)
        if not (place / "run").exists():
            shutil.copytree(origin, place / "run")

    prepare()
    act()
    result = place / ("run" if verb == "rollback" else "new")
    expected, parent = outcome(result), tree(origin)
    operation, unfinished = 1, 0
    while prepare() or killed_at(act, operation):
        check_loads(RunDir(place / "run"))
        unfinished += (place / "run/rollback.json").exists()
        if verb == "fork":
            assert tree(place / "run") == parent  # not even a lock
        if not result.joinpath("status.json").exists() or verb == "rollback":
            act()
        assert outcome(result) == expected, operation
        assert not (place / "new.forking").exists()
        operation += stride
    assert operation > 20 and (unfinished > 8 // stride or verb == "fork")


def test_a_start_finishes_an_interrupted_rollback(lab: Any, copy: tuple[Path, Path], helpers: Any) -> None:
    config, run = copy
    operation = 1
    while not (run / "rollback.json").exists():
        assert killed_at(lambda: rollback(RunDir(run), 12, changes=["optimizer.lr=0.005"]), operation)
        operation += 1
    with pytest.raises(BusyError, match="under way"):
        fork(RunDir(run), 6, lab.path / "new")
    output = lab.train(config, f"run.dir={run}")
    assert "finished the rollback" in output
    assert helpers.journal(run, "resume")[-1]["step"] == 12
    assert len(helpers.journal(run, "rollback")) == 1
    assert [r["lr"] for r in helpers.metrics(run)][12] < 0.005


@pytest.mark.parametrize(
    ("name", "also_refused"),
    [
        (
            "segments/0001/lineage.json",
            [("goodput",), ("where", "--step", 3), ("rollback", "--to", 6), ("fork", "--at", 6)],
        ),
        ("rollback.json", [("rollback", "--to", 6)]),
    ],
    ids=["lineage", "rollback"],
)
def test_what_decides_the_line_is_refused_when_it_is_damaged(
    lab: Any, copy: tuple[Path, Path], run_command: Run, name: str, also_refused: list[tuple[object, ...]]
) -> None:
    """By every start and every command that depends on it, with nothing changed; the others report it."""
    config, run = copy
    operation = 1
    while name == "rollback.json" and not (run / name).exists():
        assert killed_at(lambda: rollback(RunDir(run), 12, changes=["optimizer.lr=0.005"]), operation)
        operation += 1
    RunDir(run).lock.unlink(missing_ok=True)
    flip(run / name, bit=2)
    before = tree(run)
    output = lab.train(config, f"run.dir={run}", "train.micro_batch=4", ranks=2, expect=78)
    assert f"{run / name} is damaged" in output and "remedy" in output and output.count("error:") == 1
    assert tree(run) == before
    for verb, *more in also_refused:
        done = run_command(CLI, verb, run, *more, *([lab.path / "new"] if verb == "fork" else []))
        assert done.returncode == 78 and f"{run / name} is damaged" in done.stderr, done.stderr
    assert tree(run) == before and not (lab.path / "new").exists()
    shown = run_command(CLI, "status", run)
    assert shown.returncode and f"{run / name} is damaged" in shown.stdout, shown.stdout + shown.stderr
    run_command(CLI, "journal", run, expect=0)


# ---------------------------------------------------------------- fork


@pytest.mark.shows("A13", "D11")
@pytest.mark.promise("rollback")
def test_a_fork_lives_without_its_parent(
    lab: Any, copy: tuple[Path, Path], trained: Path, helpers: Any, run_command: Run
) -> None:
    _, run = copy
    before, new = tree(run), lab.path / "only text 🚀"
    run_command(CLI, "fork", run, "--at", 12, new, "--reason", "text only", expect=0)
    assert tree(run) == before and load(new / "config.toml").run.name == "only-text-"
    assert load(new / "config.toml").run.dir == new
    weights = "checkpoints/step-00000012/__0_0.distcp"
    assert (new / weights).stat().st_ino == (run / weights).stat().st_ino
    assert [r["step"] for r in helpers.metrics(new)] == list(range(1, 13))
    assert helpers.journal(new, "fork")[0]["parent"] == str(run) and (new / "tokenizer").is_dir()
    assert helpers.journal(new)[:-1] == helpers.journal(run)
    (link := lab.path / "link").symlink_to(lab.path / "nowhere")
    for taken in (new, link):
        assert "exists already" in run_command(CLI, "fork", run, "--at", 12, taken, expect=78).stderr
    shutil.rmtree(run)
    lab.train(new / "config.toml")
    assert curve(new, helpers) == curve(trained, helpers)
    assert [r["segment"] for r in helpers.metrics(new)] == [1] * 12 + [3] * 12
    found = run_command(CLI, "where", new, "--step", 5, "--json")
    assert found.returncode == 0 and json.loads(found.stdout)["segment"] == 1, found.stderr
    moved = new.rename(lab.path / "moved")
    assert f"append run.dir={moved}" in lab.train(moved / "config.toml", expect=78) and not new.exists()
    lab.train(moved / "config.toml", f"run.dir={moved}")


@pytest.mark.slow
def test_a_fork_to_another_file_system_is_a_verified_copy(
    lab: Any, copy: tuple[Path, Path], small_disk: Disk, helpers: Any, run_command: Run
) -> None:
    _, run = copy
    disk = small_disk("8m")
    done = run_command(
        CLI, "fork", run, "--at", 12, disk / "new", "--skip-steps", "13:14", "--set", "run.name=b", "--json", expect=0
    )
    assert not json.loads(done.stdout)["linked"]
    assert load(disk / "new/config.toml").run.name == "b"
    (disk / "hog").write_bytes(b"x" * (shutil.disk_usage(disk).free - 60_000))
    full = run_command(CLI, "fork", run, "--at", 12, disk / "other")
    assert full.returncode == 93 and "No space left" in full.stderr and not (disk / "other").exists()
    (disk / "hog").unlink()
    lab.train(disk / "new/config.toml")
    assert helpers.metrics(disk / "new")[12]["cursor"] == 120  # samples 96 to 111 of steps 13 and 14 are skipped
