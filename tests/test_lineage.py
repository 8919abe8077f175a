"""Rollback, fork, and one writer per run: with real jobs, and killed between any two file operations."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import records
from sight import until
from skips import needs_aim
from traps import kill_before

from data.packing.opening import open_packer
from fsdp_pretrain.checkpoint.expected import missing
from fsdp_pretrain.checkpoint.state import TrainState, identity
from fsdp_pretrain.checkpoint.store import CONFIG, TRAIN_STATE, Store
from fsdp_pretrain.config.config import load
from fsdp_pretrain.errors import BusyError, UserError
from fsdp_pretrain.lineage.fork import fork
from fsdp_pretrain.lineage.rollback import finish, rollback
from fsdp_pretrain.record import lease, lineage, overrides, state_files
from fsdp_pretrain.record.files import RunDir, replace_file
from fsdp_pretrain.record.journal import Journal
from fsdp_pretrain.record.lock import RunLock, hold
from fsdp_pretrain.record.metrics import read_metrics

Run = Callable[..., subprocess.CompletedProcess[str]]
CLI = "fsdp_pretrain.cli"


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


def tree(path: Path) -> dict[str, bytes]:
    """Every file with its bytes."""
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def curve(run: Path, helpers: Any) -> list[Any]:
    return [(r["step"], r["loss"]["sum"], r["data_digest"], r["cursor"], r["lr"]) for r in helpers.metrics(run)]


# ---------------------------------------------------------------- rollback


def test_after_a_rollback_the_curve_is_that_of_a_run_that_knew(
    lab: Any, copy: tuple[Path, Path], helpers: Any, run_command: Run
) -> None:
    """Fault matrix 5 and 20: Skipped steps and a new learning rate from step 12 on, kept by restarts with the first command."""
    config, run = copy
    before = {r["step"]: r for r in helpers.metrics(run)}
    decided = ["--skip-steps", "15:17", "--set", "optimizer.lr=5e-3", "--reason", "spike"]
    done = run_command(CLI, "rollback", run.name, "--to", 12, *decided, cwd=run.parent)
    assert done.returncode == 0, done.stderr
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
        found = run_command(CLI, "where", run, "--step", 20, "--json", *chosen)
        assert found.returncode == 0, found.stderr
        assert json.loads(found.stdout)["data_digest"] == digest
    refused = lab.train(config, f"run.dir={run}", "optimizer.lr=2e-3", expect=78)
    assert "optimizer.lr: 0.005 is set, not 0.002" in refused

    again = run_command(CLI, "rollback", run, "--to", 18, "--skip-steps", "19:20", "--json")
    assert again.returncode == 0, again.stderr
    assert overrides.read(RunDir(run)).to_toml().count("samples") == 2  # ranges of both; settings stay
    assert str(overrides.read(RunDir(run))) == "optimizer.lr=0.005; skip 112:136 samples; skip 168:184 samples"


def test_a_dry_run_changes_nothing_and_says_the_same(copy: tuple[Path, Path], run_command: Run) -> None:
    _, run = copy
    before = tree(run)
    arguments = [
        "rollback",
        run,
        "--to",
        "12",
        "--skip-steps",
        "13:14",
        "--set",
        "train.global_batch=16 samples",
        "--json",
    ]
    dry = run_command(CLI, *arguments, "--dry-run")
    assert dry.returncode == 0 and tree(run) == before, dry.stderr
    wet = run_command(CLI, *arguments)
    said, did = json.loads(dry.stdout), json.loads(wet.stdout)
    assert (said.pop("done"), did.pop("done")) == ("dry run", "now") and said == did
    assert did["skip"] == "96:112 samples" and did["abandoned"] == ["step-00000018", "step-00000024"]
    rows = {name: [(r["step"], r["batch"], r["cursor"]) for r in rows] for name, rows in did["schedule"].items()}
    assert rows == {"before": [(13, 8, 104), (22, 8, 176)], "after": [(13, 16, 128), (22, 16, 272)]}
    assert json.loads(run_command(CLI, *arguments).stdout)["done"] == "already"


@pytest.mark.parametrize(
    ("step", "options", "expected"),
    [
        (13, {}, "has no checkpoint of step 13 (there are: 6, 12, 18, 24)"),
        (12, {"changes": ["optimizer.learning_rate=1"]}, "unknown key"),
        (12, {"changes": ["optimizer.min_lr=1"]}, "is above optimizer.lr"),
        (12, {"changes": ["data.seed=7"]}, "data.seed: 1234 -> 7"),
        (12, {"changes": ["data.skip=[]"]}, "--skip-steps"),
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
    damaged = run / "checkpoints/step-00000018/__0_0.distcp"
    raw = bytearray(damaged.read_bytes())
    raw[len(raw) // 2] ^= 1
    damaged.write_bytes(raw)
    before = tree(run)
    with pytest.raises(UserError) as caught:
        rollback(RunDir(run), step, **options)
    assert expected in str(caught.value) and caught.value.exit == 78
    assert tree(run) == before


# ---------------------------------------------------------------- killed anywhere


def killed_at(act: Callable[[], object], operation: int) -> bool:
    """Run `act` in a child that is killed before its n-th file system change; whether it was killed."""
    pid = os.fork()
    if pid == 0:
        kill_before(operation, "open|rename|mkdir|remove|rmdir|link|symlink")
        try:
            act()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(3)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL), code
    return code != 0


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
    names = sorted(p.name.rpartition("-")[0] for p in run.glob("*/abandoned/*"))
    journal = [
        line for line in (run / "journal.jsonl").read_text().splitlines() if '"rollback"' in line or '"fork"' in line
    ]
    parts = lineage.line(lineage.nodes(where))
    leftovers = [p.name for p in run.glob("*.json") if p.name != "status.json" and p.name[0] != "."]
    files = {
        name: content for name, content in tree(run).items() if name.endswith((".toml", ".distcp", "metrics.jsonl"))
    }
    steps = [record.step for record in read_metrics(where)]
    return (
        names,
        len(journal),
        parts,
        leftovers,
        sorted(Path(name).name for name in files),
        steps,
        str(overrides.read(where)),
    )


@pytest.mark.parametrize(
    ("verb", "stride"),
    [("rollback", 3), ("fork", 11), *(pytest.param(verb, 1, marks=pytest.mark.slow) for verb in ("rollback", "fork"))],
)
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
    assert "under way" in refused(lambda: fork(RunDir(run), 6, lab.path / "new"))
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
    raw = bytearray((run / name).read_bytes())
    raw[len(raw) // 2] ^= 4
    (run / name).write_bytes(raw)
    before = tree(run)
    output = lab.train(config, f"run.dir={run}", ranks=2, expect=78)
    assert f"{run / name} is damaged" in output and "remedy" in output and output.count("error:") == 1
    assert tree(run) == before
    for verb, *more in also_refused:
        done = run_command(CLI, verb, run, *more, *([lab.path / "new"] if verb == "fork" else []))
        assert done.returncode == 78 and f"{run / name} is damaged" in done.stderr, done.stderr
    assert tree(run) == before and not (lab.path / "new").exists()
    shown = run_command(CLI, "status", run)
    assert shown.returncode and f"{run / name} is damaged" in shown.stdout, shown.stdout + shown.stderr
    assert run_command(CLI, "journal", run).returncode == 0


def test_a_flipped_override_is_no_declared_change(lab: Any, copy: tuple[Path, Path]) -> None:
    """overrides.toml must match the rollback's result, unless a change is declared."""
    config, run = copy
    rollback(RunDir(run), 12, changes=["optimizer.lr=0.005"])
    text = (run / "overrides.toml").read_text()
    (run / "overrides.toml").write_text(text.replace("optimizer.lr=0.005", "optimizer.lr=0.007"))
    output = lab.train(config, f"run.dir={run}", expect=78)
    assert "optimizer.lr: 0.005 -> 0.007" in output and "--allow optimizer.lr" in output
    lab.train(config, f"run.dir={run}", flags=("--allow", "optimizer.lr"))


def refused(act: Callable[[], object]) -> str:
    with pytest.raises(BusyError) as caught:
        act()
    return str(caught.value)


# ---------------------------------------------------------------- fork


def test_a_fork_lives_without_its_parent(
    lab: Any, copy: tuple[Path, Path], trained: Path, helpers: Any, run_command: Run
) -> None:
    _, run = copy
    before, new = tree(run), lab.path / "text"
    done = run_command(CLI, "fork", run, "--at", 12, new, "--reason", "text only")
    assert done.returncode == 0, done.stderr
    assert tree(run) == before and load(new / "config.toml").run.name == "text"
    weights = "checkpoints/step-00000012/__0_0.distcp"
    assert (new / weights).stat().st_ino == (run / weights).stat().st_ino
    assert [r["step"] for r in helpers.metrics(new)] == list(range(1, 13))
    assert helpers.journal(new, "fork")[0]["parent"] == str(run) and (new / "tokenizer").is_dir()
    assert run_command(CLI, "fork", run, "--at", 12, new).returncode == 78  # it exists
    shutil.rmtree(run)
    lab.train(new / "config.toml")
    assert curve(new, helpers) == curve(trained, helpers)
    assert [r["segment"] for r in helpers.metrics(new)] == [1] * 12 + [3] * 12
    found = run_command(CLI, "where", new, "--step", 5, "--json")
    assert found.returncode == 0 and json.loads(found.stdout)["segment"] == 1, found.stderr


@pytest.mark.slow
def test_a_fork_to_another_file_system_is_a_verified_copy(
    lab: Any, copy: tuple[Path, Path], small_disk: Callable[[str], Path], helpers: Any, run_command: Run
) -> None:
    _, run = copy
    disk = small_disk("8m")
    done = run_command(
        CLI, "fork", run, "--at", 12, disk / "new", "--skip-steps", "13:14", "--set", "run.name=b", "--json"
    )
    assert done.returncode == 0, done.stderr
    assert not json.loads(done.stdout)["linked"]
    assert load(disk / "new/config.toml").run.name == "b"
    (disk / "hog").write_bytes(b"x" * (shutil.disk_usage(disk).free - 60_000))
    full = run_command(CLI, "fork", run, "--at", 12, disk / "other")
    assert full.returncode == 93 and "No space left" in full.stderr and not (disk / "other").exists()
    (disk / "hog").unlink()
    lab.train(disk / "new/config.toml")
    assert helpers.metrics(disk / "new")[12]["cursor"] == 120  # samples 96 to 111 of steps 13 and 14 are skipped


# ---------------------------------------------------------------- any order, with kills


class Simulation:
    """A run directory in which training is written instead of done, and its expected kept line."""

    def __init__(self, trained: Path, path: Path, seed: int) -> None:
        self.rng, self.path, self.run, self.forks, self.marks = random.Random(seed), path, RunDir(path / "run-0"), 0, 0
        self.run.path.mkdir(parents=True)
        config = load(trained / "config.toml", [f"run.dir={json.dumps(str(self.run.path))}"])
        replace_file(self.run.config, config.to_toml())
        self._identity = identity(config, open_packer(config))
        self.kept: list[tuple[int, int]] = []

    def train(self) -> None:
        """A start: continues from the newest checkpoint, saves at multiples of 5, dies somewhere after."""
        store = Store(self.run.checkpoints)
        with hold(self.run, "training"):
            finish(self.run)
            newest, segment = store.newest(), self.run.new_segment()
            step = newest.step if newest else 0
            if self.rng.random() < 0.2:
                return  # before it had a state
            parent = newest.manifest().segment if newest else None
            lineage.record(segment, parent=parent, step=step, kind="start")
            del self.kept[step:]
            lines = []
            for _ in range(self.rng.randrange(1, 13)):
                step, self.marks = step + 1, self.marks + 1
                self.kept.append((step, self.marks))
                lines.append(json.dumps(records.metric(step, documents=self.marks, segment=int(segment.name))) + "\n")
                if step % 5 == 0:
                    self._save(store, step, int(segment.name))
            (segment / "metrics.jsonl").write_text("".join(lines))

    def _save(self, store: Store, step: int, segment: int) -> None:
        state = TrainState(step, step * 8, step * 8, 8)
        text = state.to_json(identity=self._identity, tokens=step * 256, world=records.WORLD)
        files = {TRAIN_STATE: text.encode(), CONFIG: self.run.config.read_bytes()}
        records.commit(store, step, files, verified=False, segment=segment)
        journal = Journal(self.run, segment)
        journal.write("checkpoint", "", step=step)
        journal.close()

    def branch(self, verb: str) -> None:
        """A rollback or fork to any checkpoint, killed somewhere or not, then repeated."""
        steps = [checkpoint.step for checkpoint in Store(self.run.checkpoints).scan()]
        if not steps:
            return
        step, last = self.rng.choice(steps), len(self.kept)
        skip = (step + 1, last) if last > step and self.rng.random() < 0.5 else None
        lr = [f"optimizer.lr={self.rng.randrange(20, 90) / 10000}"]
        self.forks += verb == "fork"
        target = self.path / f"run-{self.forks}"

        def act() -> object:
            if verb == "rollback":
                return rollback(self.run, step, changes=lr, skip_steps=skip)
            return fork(self.run, step, target, changes=lr, skip_steps=skip)

        before = tree(self.run.path)
        if killed_at(act, self.rng.randrange(1, 50)) and not target.exists() * (verb == "fork"):
            if verb == "rollback" and self.run.rollback.exists() and self.rng.random() < 0.5:
                with hold(self.run, "training"):
                    finish(self.run)
            else:
                act()
        if verb == "fork":
            assert tree(self.run.path) == before
            self.run = RunDir(target)
        del self.kept[step:]
        settled = overrides.read(self.run)
        assert lr[0] in settled.set, settled
        assert skip is None or any(s.first <= step * 8 and last * 8 <= s.stop for s in settled.skip), settled

    def check(self) -> None:
        """One consistent lineage."""
        assert [(record.step, record.documents) for record in read_metrics(self.run)] == self.kept
        checkpoints = Store(self.run.checkpoints).scan()
        assert all(c.problem is None and c.step <= len(self.kept) for c in checkpoints)
        parts = lineage.line(lineage.nodes(self.run))
        assert all(lineage.holds(parts, c.manifest().segment, c.step) for c in checkpoints)
        assert missing(self.run) is None  # what the record says was saved on the kept line is there
        assert not self.run.rollback.exists() and not self.run.lock.exists()
        assert not list(self.path.glob("*.forking"))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 30))])
def test_rollbacks_and_forks_in_any_order_leave_one_lineage(trained: Path, tmp_path: Path, seed: int) -> None:
    simulation = Simulation(trained, tmp_path, seed)
    branches = 0
    while branches < 20:
        simulation.train()
        simulation.check()
        if simulation.rng.random() < 0.6 and Store(simulation.run.checkpoints).scan():
            simulation.branch(simulation.rng.choice(["rollback", "rollback", "fork"]))
            simulation.check()
            branches += 1


# ---------------------------------------------------------------- one writer


def test_the_second_launcher_is_refused_and_names_the_first(lab: Any, helpers: Any, run_command: Run) -> None:
    config, run = lab.config(train={"duration": "9000 steps"}, checkpoint={"every": "5 steps"}), lab.path / "run"
    first = lab.start(config, ranks=2)
    helpers.wait_for(lambda: helpers.journal(run, "checkpoint"), what="a checkpoint")
    output = lab.train(config, ranks=2, expect=78)
    assert f"held by training on host {os.uname().nodename}, pid {first.ranks[0].pid}, since 20" in output
    assert "(segment 1, step " in output and output.count("error:") == 1
    refused = run_command(CLI, "rollback", run, "--to", 5)
    assert refused.returncode == 78 and f"pid {first.ranks[0].pid}" in refused.stderr
    step = Store(run / "checkpoints").scan()[-1].step
    forked = run_command(CLI, "fork", run, "--at", step, lab.path / "new")  # a live run may be forked
    assert forked.returncode in (0, 78) and (forked.returncode == 0 or "checkpoint" in forked.stderr), forked.stderr
    assert [p.name for p in (run / "segments").iterdir()] == ["0001"]
    first.kill()
    first.wait()
    second = lab.start(config, ranks=2)
    helpers.wait_for(lambda: helpers.journal(run, "resume"), what="a start after kill -9")
    held = lease.read(run / "lock.json")
    assert held is not None
    state_files.write(run / "lock.json", {**held.model_dump(), "token": "x"})  # frozen, taken
    assert second.wait() == [78, 78] and "lost the lock" in second.output()
    assert (run / "lock.json").exists()  # it belongs to the other


@pytest.mark.quick
def test_locks_of_other_hosts_are_watched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir(tmp_path)
    run.lock.write_text(
        json.dumps({"token": "t", "host": "elsewhere", "pid": 5, "purpose": "training", "time": "then"})
    )
    os.utime(run.lock, (1, 1))  # its clock may be wrong: only changes count
    lock = RunLock(run, "rollback", silent=50)
    assert not lock.attempt() and not lock.attempt()
    assert "waiting up to 50s" in capsys.readouterr().out
    os.utime(run.lock, (2, 2))
    assert "held by training on host elsewhere, pid 5, since then" in refused(lock.attempt)
    with hold(run, "rollback", silent=0.2) as held:  # silent: taken over
        held.check()
        assert "held by rollback" in refused(RunLock(run, "fork").attempt)
    assert not run.lock.exists()


@pytest.mark.quick
@pytest.mark.parametrize("how", ["gone", "zombie", "another process"])
def test_a_dead_holder_on_this_host_is_taken_over_at_once(tmp_path: Path, how: str) -> None:
    run = RunDir(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    holder = f"""
from fsdp_pretrain.record import files, lease
import json, os, pathlib
os.getpid = lambda: {child.pid}
pathlib.Path({str(run.lock)!r}).write_text(json.dumps({{"token": "t", **lease.this_process()}}))
"""
    root = Path(__file__).resolve().parent.parent
    subprocess.run([sys.executable, "-c", holder], check=True, cwd=root)
    assert "pid" in refused(RunLock(run, "rollback").attempt)
    content = json.loads(run.lock.read_text())
    assert content["pid"] == child.pid
    if how == "another process":
        run.lock.write_text(json.dumps({**content, "process_started": content["process_started"] - 500}))
    else:
        child.kill()
        until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE, what="a zombie")
        if how == "gone":
            child.wait()
    with hold(run, "rollback"):
        pass
    child.kill()
    child.wait()


@pytest.mark.slow
@needs_aim
def test_aim_shows_the_kept_line(lab: Any, copy: tuple[Path, Path], helpers: Any, run_command: Run) -> None:
    config, run = copy
    assert run_command(CLI, "aim", run).returncode == 0
    first = json.loads((run / "aim.json").read_text())["hash"]
    assert run_command(CLI, "rollback", run, "--to", 12, "--skip-steps", "13:14").returncode == 0
    done = run_command(CLI, "aim", run)
    assert done.returncode == 0 and "12 records" in done.stdout, done.stderr
    lab.train(config, f"run.dir={run}")
    assert run_command(CLI, "aim", run).returncode == 0
    code = f"""
import json
from aim.sdk.repo import Repo
out = {{}}
for run in Repo({str(run / "aim")!r}).iter_runs():
    out[run.hash] = [run.archived, [list(map(int, m.data.items_list()[0])) for m in run.metrics() if m.name == "consumed"]]
print("RESULT" + json.dumps(out))
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert "RESULT" in shown.stdout, shown.stderr
    second = json.loads((run / "aim.json").read_text())["hash"]
    found = json.loads(shown.stdout.partition("RESULT")[2])
    assert found == {first: [True, []], second: [False, [list(range(1, 25))]]}  # Aim hides what is archived
