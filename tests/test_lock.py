"""One writer per run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from machines import tmpfs
from processes import CLI, Run
from sight import until

from fsdp_pretrain.checkpoint.store import Store
from fsdp_pretrain.errors import BusyError, StorageError
from fsdp_pretrain.run import lock as locks
from fsdp_pretrain.run import state_files
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.lock import RunLock, hold


def refused(act: Callable[[], object]) -> str:
    with pytest.raises(BusyError) as caught:
        act()
    return str(caught.value)


@pytest.mark.shows("B19")
def test_the_second_launcher_is_refused_and_names_the_first(lab: Any, helpers: Any, run_command: Run) -> None:
    config, run = lab.config(train={"duration": "9000 steps"}, checkpoint={"every": "5 steps"}), lab.path / "run"
    first = lab.start(config, ranks=2)
    helpers.wait_for(lambda: helpers.journal(run, "checkpoint"), what="a checkpoint")
    output = lab.train(config, ranks=2, expect=78)
    assert f"held by training on host {os.uname().nodename}, pid {first.ranks[0].pid}, since 20" in output
    assert "(segment 1, step " in output and output.count("error:") == 1
    assert f"pid {first.ranks[0].pid}" in run_command(CLI, "rollback", run, "--to", 5, expect=78).stderr
    step = Store(run / "checkpoints").scan()[-1].step
    forked = run_command(CLI, "fork", run, "--at", step, lab.path / "new")  # a live run may be forked
    assert forked.returncode in (0, 78) and (forked.returncode == 0 or "checkpoint" in forked.stderr), forked.stderr
    assert [p.name for p in (run / "segments").iterdir()] == ["0001"]
    first.kill()
    first.wait()
    second = lab.start(config, ranks=2)
    helpers.wait_for(lambda: helpers.journal(run, "resume"), what="a start after kill -9")
    held = locks.read(run / "lock.json")
    assert held is not None
    state_files.write(run / "lock.json", {**held.model_dump(), "token": "x"})  # frozen, taken
    assert second.wait() == [78, 78] and "lost the lock" in second.output()
    assert (run / "lock.json").exists()  # it belongs to the other


@pytest.mark.quick
def test_locks_of_other_hosts_are_watched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    run.lock.write_text(
        state_files.seal({"token": "t", "host": "elsewhere", "pid": 5, "purpose": "training", "time": "then"})
    )
    os.utime(run.lock, (1, 1))  # its clock may be wrong: only changes count
    lock = RunLock(run, "rollback")
    assert not lock.attempt() and not lock.attempt()
    assert "waiting up to 90s" in capsys.readouterr().out
    os.utime(run.lock, (2, 2))
    assert "held by training on host elsewhere, pid 5, since then" in refused(lock.attempt)
    monkeypatch.setattr(locks, "SILENT_SECONDS", 0.2)
    with hold(run, "rollback") as held:  # silent: taken over
        held.check()
        assert "held by rollback" in refused(RunLock(run, "fork").attempt)
    assert not run.lock.exists()


@pytest.mark.quick
@pytest.mark.parametrize("how", ["gone", "zombie", "another process"])
def test_a_dead_holder_on_this_host_is_taken_over_at_once(tmp_path: Path, how: str) -> None:
    run = RunDir(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    holder = f"""
from fsdp_pretrain.run import files, lock, state_files
import json, os, pathlib
os.getpid = lambda: {child.pid}
pathlib.Path({str(run.lock)!r}).write_text(state_files.seal({{"token": "t", **lock.this_process()}}))
"""
    root = Path(__file__).resolve().parent.parent
    subprocess.run([sys.executable, "-c", holder], check=True, cwd=root)
    assert "pid" in refused(RunLock(run, "rollback").attempt)
    content = json.loads(run.lock.read_text())
    assert content["pid"] == child.pid
    if how == "another process":
        run.lock.write_text(state_files.seal({**content, "process_started": content["process_started"] - 500}))
    else:
        child.kill()
        until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE, what="a zombie")
        if how == "gone":
            child.wait()
    with hold(run, "rollback"):
        pass
    child.kill()
    child.wait()


def test_the_lock_of_a_dead_holder_on_a_read_only_file_system_is_an_error(tmp_path: Path) -> None:
    """It cannot be taken away, and was waited for without end."""
    with tmpfs(tmp_path) as place:
        run = RunDir(place)
        state_files.write(run.lock, {"token": "t", **locks.this_process(), "process_started": 1.0})
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        with pytest.raises(StorageError, match="Read-only file system"):
            RunLock(run, "rollback").attempt()
