"""The record: lines that survive crashes and full disks, one curve from many starts, a status that is always valid."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import records
from machines import tmpfs
from records import step_record
from released import unpack
from torch import distributed as dist

from fsdp_pretrain.checkpoint.store import Store
from fsdp_pretrain.cli.control import running_job
from fsdp_pretrain.errors import Exit, PeerLostError, RunGoneError, StorageError, UserError
from fsdp_pretrain.job.exit_status import record_end
from fsdp_pretrain.run import exit_intent, journal, lineage, lock, run_id, state_files
from fsdp_pretrain.run.exit_intent import EXIT_INTENT
from fsdp_pretrain.run.files import AppendFile, RunDir, json_object, now, read_lines, replace_file, stamp
from fsdp_pretrain.run.journal import Journal, entries
from fsdp_pretrain.run.lock import Lease
from fsdp_pretrain.run.metrics import find_step, left_behind, read_metrics
from fsdp_pretrain.run.recorder import Recorder
from fsdp_pretrain.run.requests import send
from fsdp_pretrain.run.run_id import LauncherMemory
from fsdp_pretrain.run.status import ended
from fsdp_pretrain.run.step_record import LossSum
from fsdp_pretrain.views.status import ALERT, OK, WARN, inspect, render

pytestmark = pytest.mark.quick


@pytest.mark.promise("record")
def test_lines_survive_a_full_disk_in_order(small_disk: Any) -> None:
    disk = small_disk("1m")
    file = AppendFile(disk / "lines.jsonl")
    hog = disk / "hog"
    assert file.write(json.dumps({"n": 0}))
    hog.write_bytes(b"x" * 1_040_000)
    with (disk / "hog2").open("wb", buffering=0) as rest:  # the last byte
        try:
            while rest.write(b"x" * 512):
                pass
        except OSError:
            pass
    results = [file.write(json.dumps({"n": n, "fill": "y" * 3000})) for n in range(1, 50)]
    assert not all(results)
    hog.unlink()
    assert file.flush()
    assert [record["n"] for record, _ in read_lines(disk / "lines.jsonl", json_object)] == list(range(50))


@pytest.mark.promise("record")
def test_torn_and_damaged_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"a": 1}\n\x00\x00garbage\n[1]\n{"a": 2}\n{"a": 3')
    found = list(read_lines(path, json_object))
    assert [record for record, _ in found] == [{"a": 1}, {"a": 2}]
    with path.open("ab") as file:
        file.write(b"}\n")
    assert [record for record, _ in read_lines(path, json_object, found[-1][1])] == [
        {"a": 3}
    ]  # continues where it stopped
    assert list(read_lines(tmp_path / "absent", json_object)) == []


def test_a_torn_last_line_costs_no_other(tmp_path: Path, run_command: Any) -> None:
    """A partial line of a killed process never joins the next entry, by any writer, also in a file long open."""
    run = RunDir(tmp_path)
    (tmp_path / "segments").mkdir()
    journal = Journal(run, 1)
    for number in range(3):
        journal.write("start", f"entry {number}")
        for path in (run.journal, run.chronicle):
            with path.open("ab") as torn:
                torn.write(b'{"time": "2026-11-2')
        run_command("fsdp_pretrain.cli", "note", tmp_path, f"note {number}", expect=0)
        with run.journal.open("ab") as torn:
            torn.write(b'{"kind": "no')
    assert journal.close()
    texts = [text for number in range(3) for text in (f"entry {number}", f"note {number}")]
    assert [entry["text"] for entry, _ in entries(run.journal)] == texts
    lines = run.chronicle.read_text().splitlines()
    assert [line.rpartition("** ")[2].partition(" (")[0] for line in lines if line.startswith("- ")] == texts


@pytest.mark.shows("B17")
def test_replaced_files_are_never_seen_half_written(tmp_path: Path) -> None:
    path, stop = tmp_path / "status.json", threading.Event()
    replace_file(path, json.dumps({"n": -1, "fill": "x" * 5000}))

    def rewrite() -> None:
        for n in range(300):
            replace_file(path, json.dumps({"n": n, "fill": "x" * 5000}))
        stop.set()

    writer = threading.Thread(target=rewrite)
    writer.start()
    while not stop.is_set():
        assert json.loads(path.read_text())["fill"]
    writer.join()
    assert [p.name for p in tmp_path.iterdir()] == ["status.json"]


def recorder(run: RunDir) -> Recorder:
    return Recorder(run, run.new_segment(), name="x", console_every=2, total_steps=10)


WRITERS: dict[str, Callable[[RunDir], object]] = {
    "status": lambda run: replace_file(run.status, "{}"),
    "segment": lambda run: run.new_segment(),
    "lineage": lambda run: lineage.record(run.segment(1), parent=None, step=0, kind="start"),
    "journal": lambda run: Journal(run).write("note", "not lost: it waits"),
    "lock": lambda run: Lease.take(run.lock),
    "request": lambda run: send(run, "stop"),
    "checkpoint": lambda run: Store(run.checkpoints).begin(5),
}


@pytest.mark.shows("F51")
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("left", ["nothing", "empty", "another run"])
def test_nothing_is_written_in_the_place_of_a_run_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str, left: str
) -> None:
    """A mount point that lost its mount stays empty, whatever this process writes."""
    monkeypatch.setattr(run_id, "_bound", {})
    run = RunDir(tmp_path / "run")
    known = run_id.assign(run.path)
    assert run_id.assign(run.path) == known
    run_id.bind(run.path, known)
    run.new_segment()
    WRITERS[writer](run)  # while it exists
    run.path.rename(tmp_path / "away")
    if left != "nothing":
        run.path.mkdir()
    if left == "another run":
        run_id.assign(run.path)
    before = sorted(tmp_path.rglob("*"))
    if writer == "journal":
        WRITERS[writer](run)
    else:
        with pytest.raises((OSError, StorageError)):
            WRITERS[writer](run)
    assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(RunGoneError, match="mounted") as refused:
        run_id.check()
    assert str(run.path) in str(refused.value) and refused.value.exit == 93


def test_what_was_seen_of_a_run_is_known_to_the_next_start(tmp_path: Path) -> None:
    """A run directory that went back to an earlier state, as by a snapshot, is as bad as a missing one."""
    run, note = RunDir(tmp_path / "run"), tmp_path / "notes/seen.json"
    first = LauncherMemory(note)
    first.check(run.path, lambda: 0)  # nothing was seen
    first.remember(run_id=run_id.assign(run.path))
    first.remember(segment=3, checkpoint=40)
    LauncherMemory(note, active=False).remember(segment=9)
    second = LauncherMemory(note)
    assert second.seen == first.seen
    second.check(run.path, lambda: 3)
    with pytest.raises(RunGoneError, match="its newest segment is 2, but segment 3 existed"):
        second.check(run.path, lambda: 2)
    (run.path / "run_id").unlink()
    with pytest.raises(RunGoneError, match="the directory is empty"):
        second.check(run.path, lambda: 3)
    note.write_text("{")
    with pytest.raises(StorageError, match="cannot read"):
        LauncherMemory(note)


@pytest.mark.shows("A34", "D20")
def test_restarts_make_one_curve(tmp_path: Path) -> None:
    """A segment resumed from step r replaces the steps after r; one without a state replaces nothing."""
    run = RunDir(tmp_path)
    starts: list[tuple[int | None, int | None, range]] = [
        (None, 0, range(1, 8)), (1, 4, range(5, 7)), (None, None, range(0)), (2, 5, range(6, 11)),
    ]  # fmt: skip
    for parent, start, steps in starts:
        record = recorder(run)
        if start is not None:
            lineage.record(record.segment, parent=parent, step=start, kind="start")
        for step in steps:
            record.step(step_record(step), target=10)
        record.close()
    kept = list(read_metrics(run))
    assert [record.step for record in kept] == list(range(1, 11))
    assert [record.segment for record in kept] == [1] * 4 + [2] + [4] * 5
    assert [(record.segment, left_by) for record, left_by in find_step(run, 6)] == [(1, 2), (2, 4), (4, None)]
    lineage.record(recorder(run).segment, parent=1, step=6, kind="start")  # step 6 of segment 1 was restored
    assert [(record.step, record.segment) for record in read_metrics(run)] == [(step, 1) for step in range(1, 7)]
    assert [(record.segment, left_by) for record, left_by in find_step(run, 6)] == [(1, None), (2, 4), (4, 5)]


def test_console_line_has_a_fixed_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Within 100 columns: what is long drops what the record also has; the held-out losses get a line of their own. Times and
    rates are those of all steps since the last line."""
    record = recorder(RunDir(tmp_path))
    record.step(step_record(2), target=10)
    record.step(step_record(3, mfu=0.1), target=10)
    slow = {"mfu": 0.3, "tokens_per_second": 2e4, "seconds": {"iteration": 1.5, "data": 0.002, "checkpoint": 0.0}}
    record.step(step_record(4, grad_norm=None, loss={"sum": None, "count": 4}, **slow), target=10)
    heldout = {f"source-{number}": LossSum(sum=9.0, count=4) for number in range(2)}
    seconds = {"iteration": 12.3456, "data": 0.001, "checkpoint": 0.0}
    big = {"batch": 1024, "length": 4096, "mfu": 0.4123, "tokens_per_second": 1.23e6, "loss_scale": 65536.0}
    record.step(step_record(43680, seconds=seconds, heldout=heldout, **big), target=300_000)
    told = capsys.readouterr().out.splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in told)
    lines = [line[9:] for line in told]
    assert lines == [
        "step=2/10  loss=2.0000 gnorm=0.500 lr=1.00e-03 tok/s=10K   mem=1GiB   iter=0.500s eta=4s",
        "step=4/10  loss=nan    gnorm=nan   lr=1.00e-03 tok/s=17.5K mfu=25.0% mem=1GiB   iter=1.000s eta=6s",
        "step=43680/300000 loss=2.0000 gnorm=0.500 scale=65536 lr=1.00e-03 tok/s=1.23M iter=12.3s eta=14d04h",
        "step=43680/300000  heldout/source-0=2.2500 heldout/source-1=2.2500",
    ]
    assert max(map(len, lines)) <= 100
    record.status(force=True)
    # The first step of a start is slower: the time left is that of the mean of the others, once there are any.
    left = (300_000 - 43_680) * (0.5 + 1.5 + 12.3456) / 3
    shown = json.loads((tmp_path / "status.json").read_text())
    assert shown["seconds_left"] == pytest.approx(left)
    assert shown["iteration_seconds"] == pytest.approx((0.5 + 1.5 + 12.3456) / 3)
    assert all(f"Z {line}\n" in (tmp_path / "segments/0001/log").read_text() for line in lines)


@pytest.mark.parametrize(
    ("code", "state"), [(0, "complete"), (75, "stopped"), (76, "stopped"), (78, "failed"), (1, "failed")]
)
@pytest.mark.promise("exit-codes")
def test_an_exit_code_means_one_state(tmp_path: Path, code: int, state: str) -> None:
    """By any writer: the watchdog and launcher through the intent, the trainer through its recorder."""
    run = RunDir(tmp_path)
    record = recorder(run)
    record.status(force=True, state="running")
    exit_intent.write(run, record.segment, code, "so it was")
    written = json.loads(run.status.read_text())
    assert (written["state"], written["exit_intent"]) == (state, {"code": code, "reason": "so it was"})
    record.status(force=True, **ended(code, "so it was"))
    assert json.loads(run.status.read_text())["state"] == state


def test_the_cause_of_an_end_replaces_what_it_led_to(tmp_path: Path) -> None:
    """A rank that lost its peer may write at any time between two of the watchdog's passes."""
    run = RunDir(tmp_path)
    segment = recorder(run).segment
    exit_intent.write(run, segment, 1, "RuntimeError: connection closed by peer", rank=0)
    exit_intent.write(run, segment, 75, "rank 1 was killed", is_cause=True, suspects=[1], restart=True)
    exit_intent.write(run, segment, 1, "RuntimeError: connection closed by peer", rank=2)
    exit_intent.write(run, segment, 75, "rank 0 ended", is_cause=True)
    intent = json.loads((segment / EXIT_INTENT).read_text())
    assert (intent["code"], intent["suspects"], intent["restart"]) == (75, [1], True)


def test_an_error_of_a_rank_itself_is_replaced_only_by_broken_hardware(tmp_path: Path) -> None:
    """The deaths that follow say nothing of it."""
    run = RunDir(tmp_path)
    segment = recorder(run).segment
    exit_intent.write(run, segment, 1, "OutOfMemoryError", rank=3, own=True)
    exit_intent.write(run, segment, 75, "rank 0 exited", is_cause=True, suspects=[0], unexplained=True)
    exit_intent.write(run, segment, 75, "node-2 is lost", is_cause=True, suspects=[], lost=["node-2"])
    assert exit_intent.read(segment).reason == "OutOfMemoryError"
    exit_intent.write(run, segment, 76, "rank 0 exited", is_cause=True, suspects=[0], avoid_hosts=["node-1"])
    assert exit_intent.read(segment).avoid_hosts == ["node-1"]


def test_a_lost_node_is_the_cause_of_deaths_without_a_reason(tmp_path: Path) -> None:
    """NCCL aborts ranks that lost a peer; nothing else replaces the first death."""
    run = RunDir(tmp_path)
    segment = recorder(run).segment
    exit_intent.write(run, segment, 75, "rank 1 exited", is_cause=True, suspects=[1], unexplained=True)
    exit_intent.write(run, segment, 75, "rank 2 exited", is_cause=True, suspects=[2], unexplained=True)
    assert exit_intent.read(segment).reason == "rank 1 exited"
    exit_intent.write(run, segment, 75, "node-2 is lost", is_cause=True, suspects=[], lost=["node-2"])
    exit_intent.write(run, segment, 75, "rank 3 exited", is_cause=True, suspects=[3], unexplained=True)
    intent = exit_intent.read(segment)
    assert (intent.reason, intent.lost, intent.unexplained) == ("node-2 is lost", ["node-2"], False)


GLOO = "[/pytorch/gloo/transport/tcp/pair.cc:537] Read error [10.0.0.7]:4851: Connection reset by peer. This is typical"


@pytest.mark.parametrize(
    ("error", "said", "own"),
    [
        (
            RuntimeError(GLOO),
            "rank 3 lost the connection to another rank, at [10.0.0.7]:4851: Connection reset by peer",
            False,
        ),
        (
            dist.DistBackendError("remote process exited or there was a network error"),
            "rank 3 lost the connection",
            False,
        ),
        (RuntimeError("BrokenPipeError: [Errno 32] Broken pipe"), "", True),
        (dist.DistBackendError("ncclInvalidUsage"), "", False),
        (RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms"), "", False),
    ],
    ids=["gloo", "nccl", "a compile worker", "another error of NCCL", "another error of gloo"],
)
def test_only_a_lost_peer_is_told_in_one_line(tmp_path: Path, error: RuntimeError, said: str, own: bool) -> None:
    """Any other error keeps its traceback. It is the rank's own if it does not come from the connection to others."""
    run = RunDir(tmp_path)
    record = recorder(run)

    def fail() -> Exit:
        raise error

    with pytest.raises(PeerLostError if said else type(error)) as raised:
        record_end(3, run, record.segment, record, fail)
    assert str(raised.value).startswith(said) and (said or raised.value is error)
    intent = json.loads((record.segment / EXIT_INTENT).read_text())
    assert (intent["code"], intent["rank"]) == (1, 3) and said in intent["reason"]
    assert intent.get("own", False) is own


def test_status_shows_the_newest_scores_of_the_kept_line(tmp_path: Path) -> None:
    run, shown = RunDir(tmp_path), []
    for kind, step in (("eval", 100), ("eval", 500), ("fork", 100), ("eval", 100), ("eval", 200), ("rollback", 150)):
        journal.add(run, kind, f"entry {len(shown)}", step=step, scores={})
        shown.append(inspect(run).evaluated)
    assert [text.removeprefix("step ") for text in shown] == [
        *("100, entry 0", "500, entry 1", "100, entry 0", "100, entry 3", "200, entry 4", "100, entry 3")
    ]


@pytest.mark.parametrize(
    ("fields", "level", "text"),
    [
        ({"state": "running"}, OK, ""),
        ({"state": "running", "pid": 2**22 + 1}, ALERT, "exited without reporting a reason"),
        ({"state": "running", "heartbeat": "2020-01-01T00:00:00.000Z"}, ALERT, "no heartbeat"),
        ({"state": "failed", "exit_intent": {"code": 93, "reason": "disk"}}, ALERT, "exit 93: disk"),
        (
            {"state": "stopped", "exit_intent": {"code": 75, "reason": "SIGTERM"}},
            WARN,
            "stopped before its end: SIGTERM",
        ),
        ({"state": "complete", "exit_intent": {"code": 0, "reason": "complete"}}, OK, ""),
    ],
)
def test_status_levels(tmp_path: Path, fields: dict[str, Any], level: int, text: str) -> None:
    run = RunDir(tmp_path)
    record = recorder(run)
    record.step(step_record(2), target=10)
    record.status(force=True, **fields)
    state_files.write(run.status, {**json.loads(run.status.read_text()), **fields})
    report = inspect(run)
    assert report.level == level, render(report)
    assert text in render(report)


@pytest.mark.parametrize(("state", "level"), [("starting", WARN), ("saving", WARN), ("running", ALERT)])
def test_a_job_that_holds_its_run_is_running_however_long_a_save_takes(tmp_path: Path, state: str, level: int) -> None:
    """Nothing writes the status during a whole save, or while it loads; it can still be asked."""
    run = RunDir(tmp_path)
    record = recorder(run)
    record.step(step_record(2), target=10)
    record.status(force=True, state=state)
    late = {"state": state, "heartbeat": stamp(time.time() - 900), "host": "another"}
    state_files.write(run.status, {**json.loads(run.status.read_text()), **late})
    assert not inspect(run).running and inspect(run).level == ALERT
    with lock.hold(run, lock.TRAINING):
        report = inspect(run)
        assert report.running and report.level == level and "no heartbeat for 15m" in render(report)
        assert running_job(run).running
    with pytest.raises(UserError, match="is running"):
        running_job(run)


def test_steps_left_behind_are_those_of_the_line_that_a_start_without_steps_continues(tmp_path: Path) -> None:
    """As after second thoughts: back to step 10, then at once to step 4."""
    run = RunDir(tmp_path)
    for number, (kind, step) in enumerate([("start", 0), ("rollback", 10)], 1):
        run.segment(number).mkdir(parents=True)
        lineage.record(run.segment(number), parent=number - 1 or None, step=step, kind=kind)
    lines = [json.dumps(records.metric(step)) for step in range(1, 21)]
    (run.segment(1) / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert left_behind(run, 4, tokens=0).steps == 6 and left_behind(run, 10, tokens=0).steps == 0


def test_a_job_in_another_container_of_this_host_runs(tmp_path: Path) -> None:
    """Its process has another number there; its lock says that it is alive, until the lease is no longer renewed."""
    run = RunDir(tmp_path)
    record = recorder(run)
    record.step(step_record(2), target=10)
    record.status(force=True, state="running")
    state_files.write(run.status, {**json.loads(run.status.read_text()), "pid": 2**22 + 1})
    lease = {"token": "a", **lock.this_process(), "namespace": "pid:[1]", "purpose": lock.TRAINING}
    state_files.write(run.lock, lease)
    report = inspect(run)
    assert report.running and report.level == OK, render(report)
    os.utime(run.lock, (0, 0))
    assert inspect(run).level == ALERT


# ---------------------------------------------------------------- a read-only directory


@pytest.fixture(scope="module")
def read_only(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of the first release with a live job, according to its status, on a read-only file system."""
    with tmpfs(tmp_path_factory.mktemp("mounted")) as place:
        run = RunDir(unpack(place))
        run.lock.unlink()
        alive = {"state": "running", "host": socket.gethostname(), "pid": os.getpid(), "heartbeat": now()}
        state_files.write(run.status, {"step": 28, "total_steps": 100, "tokens": 1792, **alive})
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        yield run.path


def test_a_command_that_cannot_write_says_so(read_only: Path, run_command: Any) -> None:
    """Exit 93 and the reason; standard output shows no success. Commands that only look do not mind."""
    for line in (
        "note RUN words",
        "ack RUN rank-died",
        "control RUN save",
        "rollback RUN --to 16",
        "fork RUN --at 16 RUN-new",
    ):
        done = run_command("fsdp_pretrain.cli", *line.replace("RUN", str(read_only)).split(), expect=93)
        assert "Read-only file system" in done.stderr and not done.stdout and "Traceback" not in done.stderr
    for verb, code in (("status", 2), ("journal", 0), ("goodput", 0), ("alarms", 2)):
        assert "Traceback" not in run_command("fsdp_pretrain.cli", verb, read_only, expect=code).stderr
