"""Views of a record in Aim, TensorBoard and W&B: the same numbers, rebuilt at any time; each may break alone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import records
from processes import CLI, ROOT, SET_CONSTANTS, Run, clean_environment, python_path
from sight import until
from skips import needs_aim
from views import BEGIN, Recorded, aim_runs, shown, wandb_view

from fsdp_pretrain.config.config import load
from fsdp_pretrain.eval import jobs
from fsdp_pretrain.run import state_files
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.journal import read
from fsdp_pretrain.watchdog.notify.metrics import METRICS

FOLLOW = "fsdp_pretrain.views.trackers.follow"
ALL = {"aim": True, "tensorboard": True, "wandb": True}
WRITTEN = {"aim": ".aim/seqs/chunks/*/*.log", "tensorboard": "kept/*", "wandb": "*"}
"""Files of a view that is written to: one that is still being made would be made again, where somebody deleted it."""


@pytest.fixture(autouse=True)
def _installed() -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("wandb")


def recorded(path: Path, **record: Any) -> Recorded:
    """A run that was killed after step 13, resumed from step 10, and is complete: evaluations included."""
    made = Recorded(path, **record)
    made.start()
    made.steps(1, 13)
    made.start(parent=1, step=10)
    made.steps(11, 20)
    made.evaluated(10, 0.25)
    made.evaluated(20, 0.5)
    made.state("complete", 20)
    return made


def follow(path: Path, name: str, *flags: str, **variables: str) -> subprocess.Popen[bytes]:
    """A follower, as training starts it."""
    return subprocess.Popen(
        [sys.executable, "-m", FOLLOW, str(path), name, *flags],
        stdin=subprocess.PIPE,
        stderr=(path / "follower.log").open("ab"),
        env=clean_environment(**variables),
        cwd="/",
        start_new_session=True,
    )


def finish(follower: subprocess.Popen[bytes], code: int = 0) -> None:
    assert follower.stdin is not None
    follower.stdin.close()
    assert follower.wait(120) == code


def check(name: str, made: Recorded) -> None:
    curves = shown(name, made.run.path / name)
    assert set(curves) == set(made.expected)
    for curve, values in made.expected.items():
        assert curves[curve] == pytest.approx(values, rel=1e-6), curve


def stops(path: Path) -> list[str]:
    """Names of the trackers that the journal says have stopped."""
    return [entry["tracker"] for entry in read(RunDir(path)) if entry["kind"] == "tracker-stopped"]


# ---------------------------------------------------------------- the numbers of the record


@pytest.mark.parametrize("name", [pytest.param("aim", marks=[needs_aim, pytest.mark.slow]), "tensorboard", "wandb"])
@pytest.mark.promise("views")
def test_a_view_has_the_numbers_of_the_record(tmp_path: Path, run_command: Run, name: str) -> None:
    """Of the kept line, once each; the run is named as a person would, from where they are. After a rollback, another
    view."""
    made = recorded(tmp_path / "run", tags=["seven"], details=name != "tensorboard")
    done = run_command(CLI, name, "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "22 records" in done.stdout
    assert run_command(CLI, name, made.run.path).returncode == 0  # the same run by another name: the same view
    check(name, made)
    if name == "wandb":
        run, *_, ended = wandb_view(tmp_path / "run/wandb")[1]
        assert run["name"] == "demo" and {"seven", "complete"} <= {*run["tags"]} and ended == {"exit": 0}
    elif name == "aim":
        (run,) = aim_runs(tmp_path / "run/aim").values()
        assert (run["name"], run["archived"], run["active"]) == ("demo", False, False)
        assert set(run["tags"]) == {"llama", "seven", "complete"}
        assert (run["creation_time"], run["end_time"]) == (BEGIN, BEGIN + 200)
        assert run["times"]["loss/training"] == {step: BEGIN + 10 * step for step in range(1, 21)}
    made.start(parent=2, step=15, kind="rollback")
    made.tell("rollback", BEGIN + 200, "to step 15", step=15)
    made.steps(16, 18)
    assert run_command(CLI, name, made.run.path).returncode == 0
    left(name, made.run.path / name)
    check(name, made)


def left(name: str, place: Path) -> None:
    """The view from before a rollback to step 15 is kept beside the new one, in Aim and W&B (where it is removed
    here)."""
    if name == "aim":
        (old,) = [run for run in aim_runs(place).values() if run["archived"]]
        assert set(old["curves"].get("loss/training", range(1, 21))) == set(range(1, 21)) and not old["active"]
    elif name == "wandb":
        old, new = sorted(place.glob("offline-run-*"), key=lambda path: path.stat().st_mtime_ns)
        assert old.name.rpartition("-")[2] != new.name.rpartition("-")[2]
        shutil.rmtree(old)


# ---------------------------------------------------------------- the follower


@pytest.mark.slow
def test_followers_share_a_run(tmp_path: Path) -> None:
    """A live run is followed as it grows, by one follower at a time. What comes after its end, as evaluations do, is
    added by `--once`; and no point is ever there twice."""
    made = Recorded(tmp_path / "run", tensorboard=True)
    made.start()
    made.steps(1, 5)
    first = follow(made.run.path, "tensorboard")
    kept = tmp_path / "run/tensorboard/kept"
    until(lambda: kept.exists() and "loss/training" in shown("tensorboard", kept.parent), what="the first steps")
    (before,) = kept.iterdir()
    second = follow(made.run.path, "tensorboard", "--once")
    made.steps(6, 20)
    made.evaluated(10, 0.25)
    until(lambda: shown("tensorboard", kept.parent).get("score/acc/qa"), what="the evaluation")
    assert list(kept.iterdir()) == [before]  # the other one waits
    finish(first)
    assert second.wait(120) == 0
    check("tensorboard", made)
    made.evaluated(12, 0.5)
    assert follow(made.run.path, "tensorboard", "--once").wait(60) == 0
    check("tensorboard", made)
    made.start(parent=1, step=15)  # it was killed, and trains five steps again
    made.steps(16, 18)
    assert follow(made.run.path, "tensorboard", "--once").wait(60) == 0
    check("tensorboard", made)
    assert stops(made.run.path) == []


@pytest.mark.promise("views")
def test_an_evaluation_after_the_end_is_in_the_view(lab: Any, tmp_path: Path) -> None:
    """Nothing follows a complete run; the worker that publishes results adds them."""
    made = recorded(tmp_path / "run", tensorboard=True)
    published = made.run.evals / "step-00000015/core/results.json"
    published.parent.mkdir(parents=True)
    scores = {"qa": {"acc": 0.75, "acc_stderr": 0.125}}
    state_files.write(published, records.results(step=15, committed="then", scores=scores))
    assert jobs.watch_once(made.run, load(lab.config()), pytest.fail) == (0, 0)
    made.expected["score/acc/qa"][15] = 0.75
    check("tensorboard", made)


# ---------------------------------------------------------------- a view that breaks


def writers(run: Path) -> list[psutil.Process]:
    """Followers of a run and what they started."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if FOLLOW in (process.info["cmdline"] or []) and str(run) in process.info["cmdline"]:
            found.append(process)
    return found


def writer(run: Path, name: str) -> psutil.Process:
    """The process of one tracker."""
    return psutil.Process(json.loads((run / f"trackers/{name}.lease.json").read_text())["pid"])


def is_written(run: Path, name: str) -> bool:
    """Whether a view is made, and written to."""
    try:
        return any(path.stat().st_size for path in (run / name).glob(WRITTEN[name]))
    except FileNotFoundError:  # a file that the tracker has just replaced
        return False


def delete(run: Path, name: str) -> None:
    """Whatever its process writes there meanwhile."""
    until(lambda: shutil.rmtree(run / name, ignore_errors=True) or not (run / name).exists(), what="its end")


def replace_by_a_file(run: Path, name: str) -> None:
    delete(run, name)
    (run / name).write_text("not a directory")


def kill(run: Path, name: str) -> None:
    writer(run, name).kill()


@pytest.fixture
def stuck(tmp_path: Path) -> str:
    """PYTHONPATH with which trackers never answer once they have begun; their followers wait five seconds for them."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(
        SET_CONSTANTS + f"import sys, time\nif {FOLLOW!r} in sys.orig_argv:\n"
        "    from fsdp_pretrain.views.trackers import points\n"
        "    points.RecordStream.read = lambda self: time.sleep(3600)\n"
        "    import threading\n"
        "    def hurry():\n"
        "        while not hasattr(main := sys.modules['__main__'], 'STUCK_SECONDS'):\n"
        "            time.sleep(0.01)\n"
        "        main.STUCK_SECONDS = 5.0\n"
        "    threading.Thread(target=hurry, daemon=True).start()\n"
    )
    return python_path(tmp_path / "site")


@pytest.mark.shows("B18")
@needs_aim
@pytest.mark.parametrize(
    "harms",
    [
        pytest.param((delete, replace_by_a_file, kill), id="deleted-a-file-killed"),
        pytest.param(None, id="hanging", marks=pytest.mark.slow),
    ],
)
@pytest.mark.promise("views")
def test_three_broken_views_leave_training_as_it_is(
    lab: Any,
    helpers: Any,
    gates: Any,
    constants: Any,
    request: pytest.FixtureRequest,
    harms: tuple[Any, ...] | None,
) -> None:
    """The same curve, bit for bit, exit 0, and one line each."""
    constants("fsdp_pretrain.views.trackers.follow", _NICENESS=0)  # on a full machine they would hardly get a turn
    lab.train(lab.config("plain"))
    run = lab.path / "run"
    variables = {"PYTHONPATH": request.getfixturevalue("stuck")} if harms is None else {}
    (gate,) = gates(15)
    job = lab.start(lab.config(record=ALL), variables=variables)
    if harms:
        until(lambda: all(is_written(run, name) for name in ALL), what="the three views")
    for name, harm in zip(ALL, harms or (), strict=False):
        harm(run, name)
    until(lambda: len(stops(run)) == 3 - len(harms or ()) // 3, what="the end of those that broke")
    gate.touch()
    assert job.wait() == [0], job.output()
    until(lambda: not writers(run), what="the end of the followers")
    assert helpers.losses(run) == helpers.losses(lab.path / "plain")
    assert sorted(stops(run)) == sorted(ALL)


def test_asking_for_a_tracker_without_having_it_is_refused(lab: Any) -> None:
    """Refused before training starts, not at its end."""
    hidden = lab.path / "hidden.py"
    hidden.write_text(
        "import importlib.util\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'wandb' else real(name, *a)\n"
    )
    config = lab.config(record={"wandb": True})
    output = lab.train(config, expect=78, variables={"EXECUTE_FIRST": str(hidden)})
    assert "wandb is not installed" in output and "fsdp-pretrain track RUN --to wandb" in output


@pytest.mark.quick
def test_the_dashboard_shows_what_is_exported() -> None:
    """Every metric in it is exported, and every exported one is in it."""
    board = json.loads((ROOT / "configs/alerts/grafana-dashboard.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    queries += [each["expr"] for each in board["annotations"]["list"]]
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]", "", " ".join(queries))
    functions = set(re.findall(r"[a-z_]+(?=\()", bare))
    assert functions <= {"quantile_over_time", "rate", "increase", "deriv", "topk", "changes"}
    named = set(re.findall(r"\b[a-z][a-z_]+\b", bare)) - functions
    exported = {metric.name for metric in METRICS.values()}
    assert named == exported
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids) and all('run=~"$run"' in query for query in queries)
