"""Real runs and a real S3 server: a run that continues from its mirror to the bit, and storage that fails."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomli_w
from object_store import Faults, ObjectStore
from processes import LAUNCH, python_path, spawn
from sight import PATIENCE, PATIENT, agents, alarms, rank_of, until
from test_launch import HASTE
from test_mirror import Carried
from watch import Watch

from fsdp_pretrain.checkpoint.store import step_of
from fsdp_pretrain.config.config import load
from fsdp_pretrain.helper_process import start_helper
from fsdp_pretrain.mirror import restore
from fsdp_pretrain.mirror.layout import RunMirror
from fsdp_pretrain.mirror.uploader import UploaderSettings
from fsdp_pretrain.remote import RemoteError
from fsdp_pretrain.run import mirror_status, run_id
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.requests import send
from fsdp_pretrain.watchdog.detectors.mirror import MirrorDetector
from fsdp_pretrain.watchdog.notify.metrics import snapshot_file

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def stored(tmp_path: Path, object_store: ObjectStore) -> Iterator[Carried]:
    """A run directory whose mirror is in an S3 server."""
    made = Carried(tmp_path, mirror=f"{object_store.url}/runs").begin()
    yield made
    run_id.unbind(made.run.path)


def whole(carried: Carried) -> list[int]:
    """Steps that look whole in the mirror; each is read back."""
    mirror = RunMirror(carried.config, patience=10)
    state = mirror.look()
    items = [item for item in state.checkpoints if item.problem is None]
    for item in items:
        for entry in item.manifest().files:
            assert not mirror.fetch(f"{item.name}/{entry.name}", entry)
    damaged = [mirror.fetch(f"record/{record.entry.name}", record.entry) for record in state.records]
    assert len(damaged) < 2 or not all(damaged)  # an uploader killed before it read its copy back may leave a bad one
    return [item.step for item in items]


def uploader(carried: Carried) -> subprocess.Popen[bytes]:
    """An uploader that nobody starts again."""
    settings = UploaderSettings(str(carried.run.path), run_id.read(carried.run.path) or "", 1)
    log, text = carried.path / "log", json.dumps(settings._asdict()) + "\n"
    return start_helper("fsdp_pretrain.mirror.uploader", log=log, text=text.encode())


def whole_now(store: ObjectStore, step: int) -> bool:
    return f"runs/run/checkpoints/step-{step:08d}/manifest.json" in store.names("runs/run/checkpoints/")


@pytest.mark.slow
@pytest.mark.shows("F53")
@pytest.mark.parametrize(
    ("faults", "severity", "cause"),
    [
        (Faults(expired=403), "CRIT", "no access"),
        (Faults(corrupt=1.0, objects="runs/run/checkpoints/.*distcp"), "WARN", r"__._0.distcp.*checksum"),
    ],
    ids=["denied", "corrupt"],
)
def test_storage_that_fails_is_told_and_heals(
    stored: Carried, object_store: ObjectStore, watch: Watch, faults: Faults, severity: str, cause: str
) -> None:
    stored.save(10)
    process = stored.process()

    def report() -> mirror_status.MirrorReport:
        empty = mirror_status.MirrorReport(segment=0)
        return mirror_status.read(stored.run) or empty

    until(lambda: report().newest == 10, what=lambda: str(report()))
    object_store.faults = faults
    stored.save(20)
    until(lambda: report().problem, what=lambda: str(report()))
    watch.detectors = [MirrorDetector(watch.alarms, stored.run, 1)]
    watch.advance(1)
    assert watch.transitions() == [("mirror", severity, "open")], watch.changes
    assert re.search(cause, watch.changes[0].summary) and "step 10" in watch.changes[0].summary, watch.changes[
        0
    ].summary
    object_store.faults = Faults()
    until(lambda: whole_now(object_store, 20) and not report().problem, what=lambda: str(report()))
    watch.advance(61)
    assert watch.transitions()[-1] == ("mirror", severity, "resolved")
    process.finish()
    until(lambda: process.ended)
    assert whole(stored) == [10, 20]


@pytest.mark.shows("F53")
def test_a_complete_run_waits_for_its_mirror_as_long_as_is_said(
    lab: Any, object_store: ObjectStore, constants: Callable[..., None]
) -> None:
    """Not as long as one that was asked to stop."""
    constants("fsdp_pretrain.job.mirroring", _COMPLETE_SECONDS=1.5, _STOP_SECONDS=100_000.0)
    object_store.faults = Faults(corrupt=1.0, objects="runs/run/checkpoints/.*distcp")
    policy = {"every": "2 steps", "mirror": f"{object_store.url}/runs"}
    output = lab.train(lab.config("run", train={"duration": "4 steps"}, checkpoint=policy))
    assert "waiting up to 1.5s for the mirror" in output and "the mirror lacks the end of this start" in output


def test_a_mirror_that_does_not_answer_at_a_start(
    stored: Carried, object_store: ObjectStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """75 with an empty directory; a directory that holds the run goes on, and says so."""
    for name in ("PATIENCE", "_NO_HURRY"):
        monkeypatch.setattr(restore, name, 0.5)
    stored.save(10)
    stored.copy()
    object_store.faults = Faults(refuse=True)
    assert stored.look(restore=True) is None
    assert "may lack what the mirror has" in capsys.readouterr().out
    stored.lose()
    with pytest.raises(RemoteError) as refused:
        stored.look(restore=True)
    assert int(refused.value.exit) == 75 and "nothing was started" in str(refused.value)


def dies_once_restored(folder: Path) -> Path:
    """A folder for PYTHONPATH: rank 1 dies, once, after a restoration and before there is a segment."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if os.environ.get('RANK') == '1':\n"
        "    from fsdp_pretrain.job import joining\n"
        "    real = joining.open_directory\n"
        "    def fail(*arguments):\n"
        f"        if not os.path.exists('{folder}/died'):\n"
        f"            os.mkdir('{folder}/died')\n"
        "            os._exit(1)\n"
        "        return real(*arguments)\n"
        "    joining.open_directory = fail\n"
    )
    return folder


@pytest.mark.slow
@pytest.mark.shows("F52")
def test_a_launcher_restores_once_and_restarts_as_ever(
    lab: Any, helpers: Any, gates: Any, object_store: ObjectStore
) -> None:
    """A run with overrides, by hand and live, is asked to stop, and its directory is emptied. `--from-mirror` restores
    it once. The launcher starts it again when a rank dies before there is a segment, whatever the end of the last start
    in the record, and when one is killed later: to the bit, with the overrides in ranks and agent, without an alarm."""
    policy = {"every": "4 steps", "keep_last": 2, "mirror": f"{object_store.url}/runs"}
    sections = {"checkpoint": policy, "parallel": {"shard": 2}, "optimizer": {"decay": "40 steps"}}
    sections |= {"train": {"duration": "50000 steps"}, "launch": HASTE, "watchdog": PATIENT}
    config, run = lab.config("run", **sections), lab.path / "run"
    run.mkdir()
    (run / "overrides.toml").write_text("set = [\"train.duration='100000 steps'\"]\n")
    (gate,) = gates(3)
    job = lab.start(config, ranks=2)
    until(lambda: run_id.read(run) and helpers.journal(run, "ready"), what=job.output)
    send(RunDir(run), "set", changes=["optimizer.lr_scale=0.5"], reason="")
    gate.touch()
    until(lambda: helpers.journal(run, "control") and mirrored(object_store), what=job.output)
    job.kill(number=signal.SIGTERM)
    assert job.wait() == [75, 75], job.output()
    steered, newest = load(run / "config.toml").timeline, max(mirrored(object_store))
    gates()
    until(lambda: not agents(run), what="the end of the watchdog, which writes there")
    until(lambda: shutil.rmtree(run, ignore_errors=True) or not run.exists(), what="its removal")
    run.mkdir()

    log, segment = lab.path / "log", RunDir(run).segment
    more = {"PYTHONPATH": python_path(dies_once_restored(lab.path / "dies"))}
    process = spawn([*LAUNCH, "--nproc-per-node", 2, config, "--from-mirror"], log, **more)
    try:
        until(lambda: len(steps_of(segment(2))) > 12, what=log.read_text)
        found = json.loads(
            until(lambda: snapshot_file(RunDir(run)).exists() and snapshot_file(RunDir(run)).read_text())
        )
        assert found["total_steps"] == 100_000
        assert not any(alarms(run, key) for key in ("run-directory", "hang", "mirror"))
        next(each for each in psutil.Process(process.pid).children(recursive=True) if rank_of(each.pid) == 1).kill()
        until(lambda: len(steps_of(segment(3))) > 8, what=log.read_text)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 75, log.read_text()
    finally:
        process.kill()
    out = log.read_text()
    assert out.count("mirror: restored") == len(helpers.journal(run, "mirror-restored")) == 1, out
    ended = [entry["ended_segment"] for entry in helpers.journal(run, "restart")]
    assert ended == [None, 2]
    first, second = (entry["step"] for entry in helpers.journal(run, "resume"))
    assert first == newest < second and len(RunDir(run).segments) == 3
    assert load(run / "config.toml").timeline == steered != []

    entries = [entry.model_dump(mode="json", exclude_defaults=True) for entry in steered]
    (lab.path / "twin.toml").write_text(tomli_w.dumps({**tomllib.loads(config.read_text()), "timeline": entries}))
    changes = (f"run.dir={lab.path / 'twin'}", "run.name=twin", f"train.duration={second + 4} steps")
    lab.train(lab.path / "twin.toml", *changes, "checkpoint.every=100000 steps", ranks=2)
    assert [row for row in helpers.losses(run) if newest < row[0] <= second + 4] == helpers.losses(lab.path / "twin")[
        newest:
    ]


def mirrored(store: ObjectStore) -> list[int]:
    """Steps with a manifest in the mirror."""
    names = [name.split("/") for name in store.names("runs/run/checkpoints/")]
    return [step_of(name[-2]) or 0 for name in names if name[-1] == "manifest.json"]


def steps_of(segment: Path) -> list[str]:
    """The recorded steps of a start."""
    return (segment / "metrics.jsonl").read_text().splitlines() if (segment / "metrics.jsonl").exists() else []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.shows("F53")
def test_every_whole_copy_of_a_run_continues_to_the_bit(
    lab: Any, helpers: Any, gates: Any, object_store: ObjectStore
) -> None:
    """A tenth of all answers and uploads is wrong, cut or refused, and training is killed in an upload. Then each whole
    checkpoint of the mirror is restored through the same storage; the oldest without any record, run id included."""
    policy = {"every": "4 steps", "keep_last": 3, "mirror": f"{object_store.url}/runs"}
    config, run = lab.config("run", checkpoint=policy), lab.path / "run"
    lab.train(config, f"run.dir={lab.path / 'whole'}", "run.name=whole", ranks=2)
    reference = helpers.losses(lab.path / "whole")
    object_store.faults = lying = Faults(failing=0.1, cut=0.1, corrupt=0.1, spoiled=0.1, unanswered=0.1)
    (gate,) = gates(11)
    job = lab.start(config, ranks=2)
    until(lambda: object_store.requests("runs/run/checkpoints/step-00000008", "PUT"), what=job.output)
    job.kill()
    job.wait()
    gate.touch()
    gates()
    lab.train(config, ranks=2)
    found, bucket = (
        sorted(mirrored(object_store)),
        {name: object_store.get(name) for name in object_store.names("runs/run/")},
    )
    assert len(found) == 3 and found[-1] == len(reference)
    assert {name.split("/")[3] for name in bucket if "/checkpoints/" in name} == {f"step-{step:08d}" for step in found}
    command = [*LAUNCH, "--nproc-per-node", 2, config, "--from-mirror"]
    for step in reversed(found):
        shutil.rmtree(run)
        object_store.faults = Faults()
        for name in object_store.names("runs/run/"):
            object_store.delete(name)
        for name, content in bucket.items():
            later = step_of(name.split("/")[3]) or 0 if "/checkpoints/" in name else 0
            if later <= step and ("/checkpoints/" in name or step != found[0]):
                object_store.put(name, content)
        object_store.faults = lying
        process = spawn(command, lab.path / f"log-{step}")
        assert process.wait(600) == 0, (lab.path / f"log-{step}").read_text()
        out = (lab.path / f"log-{step}").read_text()
        assert f"restored step-{step:08d}" in out and ("the record is lost" in out) == (step == found[0]), out
        losses = helpers.losses(run)
        assert [row for row in losses if row[0] > step] == [row for row in reference if row[0] > step]
