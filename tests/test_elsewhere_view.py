"""A run that is elsewhere, seen through its mirror: the same answers as in its directory, their age, and no write."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from object_store import Faults, ObjectStore
from processes import CLI
from records import step_record
from sight import contents
from test_mirror import Carried

from fsdp_pretrain.mirror import record_copy
from fsdp_pretrain.mirror.record_copy import FetchedRun
from fsdp_pretrain.remote import Url
from fsdp_pretrain.run import lineage, run_id, state_files
from fsdp_pretrain.run.files import stamp
from fsdp_pretrain.run.recorder import Recorder
from fsdp_pretrain.views.status import inspect
from fsdp_pretrain.views.watch import page
from fsdp_pretrain.views.watch.following import RunFollower


class Elsewhere(Carried):
    """A run that trains steps, without training, and looks alive."""

    def __init__(self, path: Path, **checkpoint: Any) -> None:
        super().__init__(path, **checkpoint)
        self.begin()
        facts = {"time": stamp(time.time()), "host": "h", "world": {"size": 2, "replicas": 1, "shards": 2}}
        (self.run.segment(1) / "environment.json").write_text(json.dumps(facts))
        self.recorder = Recorder(self.run, self.run.segment(1), name="run", console_every=10**6, total_steps=400)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.recorder.step(step_record(step), target=400)
        self.recorder.status(force=True)

    def stop(self, code: int, state: str) -> None:
        self.recorder.status(force=True, state=state, exit_intent={"code": code, "reason": "so it was"})


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Elsewhere]:
    """Fifteen steps of 400, and a checkpoint of step 10, in a mirror beside the run directory."""
    made = Elsewhere(tmp_path)
    made.train(1, 15)
    made.save(10)
    made.copy()
    yield made
    run_id.unbind(made.run.path)


@pytest.mark.quick
@pytest.mark.promise("seen-elsewhere")
def test_verbs_say_of_a_mirror_what_they_say_of_the_run(
    elsewhere: Elsewhere, run_command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And how old it is; nothing is written to the mirror, and no copy stays behind."""
    scratch = elsewhere.path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    url, before = f"file://{elsewhere.place}", contents(elsewhere.place)

    def shown(verb: str, *options: Any) -> str:
        done = run_command(CLI, verb, url, *options)
        assert done.returncode == 0 and re.fullmatch(rf"as of 20.* UTC, .* ago, from {url}/run\n", done.stderr), (
            done.stderr
        )
        return str(done.stdout)

    here, there = inspect(elsewhere.run).as_dict(), json.loads(shown("status", "--json"))
    for key in ("run", "state", "step", "total_steps", "loss", "host", "running", "level", "problems", "alarms"):
        assert there[key] == here[key], key
    assert (there["step"], there["level"], there["running"]) == (15, 0, True)
    assert there["fetched"]["url"] == f"{url}/run"
    saved = there["verified_checkpoint"]
    assert (saved["step"], saved["path"]) == (10, f"{url}/run/checkpoints/step-00000010")
    assert saved["bytes"] == here["verified_checkpoint"]["bytes"] and "disk_free_bytes" not in there
    assert shown("journal", "--json") == elsewhere.run.journal.read_text()
    assert json.loads(shown("goodput", "--json"))["tokens"] == 15 * 8 * 32
    assert shown("alarms") == "no open alarm\n"
    watched = shown("watch", "--once")
    assert (
        re.search(r"as of 20.* UTC, .* ago, from file:", watched)
        and "15 of 400" in watched
        and "10 verified" in watched
    )
    out = elsewhere.path / "page.html"
    shown("report", "--out", out)
    assert f"{url}/run</code>" in out.read_text() and str(scratch) not in out.read_text()
    assert contents(elsewhere.place) == before and not list(scratch.glob("fsdp-pretrain-*"))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("state", "code", "level"), [("complete", 0, 0), ("stopped", 75, 1), ("failed", 93, 2)], ids=["0", "75", "93"]
)
def test_exit_codes_are_those_of_a_directory(elsewhere: Elsewhere, state: str, code: int, level: int) -> None:
    elsewhere.stop(code, state)
    elsewhere.copy()
    assert inspect(FetchedRun(Url(f"file://{elsewhere.mirror}"))).level == inspect(elsewhere.run).level == level


@pytest.mark.quick
def test_a_restored_run_has_no_status_of_another_job(elsewhere: Elsewhere) -> None:
    elsewhere.recorder.close()
    elsewhere.lose()
    elsewhere.restore()
    assert elsewhere.run.journal.exists() and not elsewhere.run.status.exists()


@pytest.mark.quick
@pytest.mark.parametrize(("minutes", "level", "running"), [(10, 0, True), (20, 1, True), (90, 2, False)])
def test_a_copy_may_be_some_minutes_old(elsewhere: Elsewhere, minutes: int, level: int, running: bool) -> None:
    """Older than that, the run no longer sends any. A checkpoint that is still on its way, processes and disks are not
    judged from here."""
    before = time.time() - 60 * minutes
    changes = {"host": socket.gethostname(), "pid": 2**22 + 1, "heartbeat": stamp(before), "started": stamp(before)}
    state_files.write(elsewhere.run.status, {**json.loads(elsewhere.run.status.read_text()), **changes})
    elsewhere.recorder.event("checkpoint", "step-00000015", step=15, seconds=0.5, bytes=7)
    elsewhere.copy()
    report = inspect(FetchedRun(Url(f"file://{elsewhere.place}")))
    assert (report.level, report.running) == (level, running), report.problems


@pytest.mark.quick
def test_what_cannot_be_shown(elsewhere: Elsewhere, run_command: Any) -> None:
    """An empty URL, several runs, a URL that is none or holds a secret, and records without a whole copy."""

    def refused(url: str, *words: str) -> None:
        done = run_command(CLI, "status", url)
        assert done.returncode == 78 and "Traceback" not in done.stderr, done.stderr
        assert all(word in done.stderr for word in words), done.stderr

    three = ("effect: nothing is shown", "remedy: ")
    refused(f"file://{elsewhere.path}/nothing", "holds no run's record", *three)
    other = elsewhere.place / "another"
    (elsewhere.mirror / "record").rename(elsewhere.path / "aside")
    refused(f"file://{elsewhere.place}", "holds no run's record", *three)
    for place in (elsewhere.mirror, other):
        (place / "record").mkdir(parents=True)
        for path in (elsewhere.path / "aside").iterdir():
            (place / "record" / path.name).write_bytes(path.read_bytes()[:-1])
    refused(f"file://{elsewhere.place}", "holds 2 runs: another/, run/", *three)
    refused(f"file://{other}", "no record in ", "is whole", *three)
    refused("ftp://somewhere/run", "is not a URL of remote storage")
    done = run_command(CLI, "status", "s3://me:hunter2@bucket/run")
    assert done.returncode == 78 and "must not hold credentials" in done.stderr and "hunter2" not in done.stderr


@pytest.mark.promise("seen-elsewhere")
def test_a_mirror_that_is_watched(
    tmp_path: Path,
    object_store: ObjectStore,
    run_command: Any,
    monkeypatch: pytest.MonkeyPatch,
    constants: Callable[..., None],
) -> None:
    """From S3: read only when something has changed, abandoned checkpoints left out; storage that goes away is told
    beside what was seen last."""
    made = Elsewhere(tmp_path, mirror=f"{object_store.url}/runs")
    made.train(1, 15)
    for step in (10, 20):
        made.save(step)
    made.recorder.status(force=True, overrides="seen once")
    made.run.overrides.write_text("set = []\n")
    made.copy()
    object_store.log.clear()
    monkeypatch.setattr(record_copy, "_EVERY", 0.0)
    monkeypatch.setattr(record_copy, "_PATIENCE", 0.0)
    follower = RunFollower(FetchedRun(Url(f"{object_store.url}/runs/run")))
    view = follower.poll()
    assert view.status.step == 15 and [row.step for row in view.checkpoints] == [20, 10]
    read = [request.name for request in object_store.log if request.name]
    assert len([name for name in read if "/record/" in name]) == 1 and not any("distcp" in name for name in read)
    object_store.log.clear()
    for _ in range(3):
        follower.poll()
    assert {request.name for request in object_store.log} == {""}  # listings

    made.segment(2, "rollback", 10)
    made.run.overrides.unlink()
    made.train(16, 17)
    made.recorder.event("note", "it went back")
    made.copy()
    view = follower.poll()
    assert [row.step for row in view.checkpoints] == [10]
    assert view.record is not None and view.record.entries[-1]["text"] == "it went back"
    assert not follower.run.overrides.exists() and len(lineage.nodes(follower.run)) == 2
    assert {request.method for request in object_store.log} >= {"GET"}
    drawn = page.render(view, 100, 40)
    assert any(f"ago, from {object_store.url}/runs/run" in str(part) for part in drawn.renderables)

    object_store.faults = Faults(refuse=True)
    lost = follower.poll()
    assert lost.problem and lost.checkpoints == view.checkpoints
    run_id.unbind(made.run.path)
    constants("fsdp_pretrain.mirror.record_copy", _PATIENCE=0.0)
    done = run_command(CLI, "status", f"{object_store.url}/runs/run")
    assert done.returncode == 75 and "effect: nothing is shown" in done.stderr and "remedy: " in done.stderr
    object_store.faults = Faults()
    assert not follower.poll().problem
