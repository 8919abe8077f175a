"""The small files of a run directory: every flipped bit is reported or without effect, stray files stop no command."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import CLI, Run
from records import CHECKPOINT, commit, metric
from released import unpack

from fsdp_pretrain.checkpoint.state import TrainState
from fsdp_pretrain.checkpoint.store import MANIFEST, TRAIN_STATE, VERIFIED, Store, verify_files
from fsdp_pretrain.errors import UserError
from fsdp_pretrain.launch.outcome import read_outcome, verified_step
from fsdp_pretrain.lineage.rollback import rollback
from fsdp_pretrain.run import exit_intent, lineage, requests, state_files
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.lock import hold
from fsdp_pretrain.run.state_files import FORMAT, DamagedFileError, StateFile

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run of the first release whose newest checkpoint, head and decided rollback were written by this version."""
    run = RunDir(unpack(tmp_path_factory.mktemp("flips")))
    run.lock.unlink()
    store = Store(run.checkpoints)
    old = store.find(24)
    manifest, state = old.manifest(), old.train_state()
    counters = {"step": 28, "consumed": 112, "cursor": 120, "batch": 4, "loss_scale": None}
    files = {name: (old.path / name).read_bytes() for name in CHECKPOINT}
    now = TrainState(**counters)  # type: ignore[arg-type]
    files[TRAIN_STATE] = now.to_json(identity=state.identity, tokens=1792, world=state.world).encode()
    facts = {**vars(manifest), **counters, "tokens": 1792, "world": state.world}
    commit(store, facts.pop("step"), files, **{key: facts[key] for key in facts if key not in ("files", "committed")})
    head = run.new_segment()
    shutil.copyfile(run.segment(4) / "config.toml", head / "config.toml")
    lineage.record(head, parent=4, kind="start", **counters)
    run.status.unlink()
    run.status.mkdir()  # so that the rollback is decided, and cannot be finished
    with pytest.raises(UserError, match="is not finished"):
        rollback(run, 28, reason="é")
    for other in store.scan():
        if other.step != 28:  # read in vain after each flip
            shutil.rmtree(other.path)
    return run


def flips(path: Path, stride: int) -> Iterator[None]:
    """Flip every `stride`-th bit of a file in place, one at a time."""
    raw = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        for bit in range(0, 8 * len(raw), stride):
            os.pwrite(file.fileno(), bytes([raw[bit // 8] ^ 1 << bit % 8]), bit // 8)
            try:
                yield
            finally:
                os.pwrite(file.fileno(), raw[bit // 8 : bit // 8 + 1], bit // 8)
    assert path.read_bytes() == raw


def checkpoint(run: RunDir) -> object:
    """What a start, and `checkpoints verify`, find of the newest checkpoint; raises UserError with what is wrong."""
    found = next(item for item in Store(run.checkpoints).scan() if item.step == 28)
    wrong = [found.problem] if found.problem else verify_files(found.path, found.files())
    if wrong:
        raise UserError(str(wrong[0]))
    return found, found.manifest(), found.train_state()


FILES: dict[str, tuple[str, Callable[[RunDir], object]]] = {
    "manifest": (f"checkpoints/step-00000028/{MANIFEST}", checkpoint),
    "train_state": (f"checkpoints/step-00000028/{TRAIN_STATE}", checkpoint),
    "verified": (f"checkpoints/step-00000028/{VERIFIED}", checkpoint),
    "lineage": ("segments/0005/lineage.json", lineage.nodes),
    "rollback": ("rollback.json", lineage.decided_rollback),
}


@pytest.mark.shows("F4")
@pytest.mark.parametrize("stride", [13, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FILES)
@pytest.mark.promise("damage-named")
def test_every_flipped_bit_is_named_or_without_effect(written: RunDir, name: str, stride: int) -> None:
    """In files that decide which checkpoint is used, which steps are kept, what is trained next."""
    file, look = FILES[name]
    path = written.path / file
    before, named, without_effect = look(written), 0, 0
    for _ in flips(path, stride):
        try:
            found = look(written)
        except UserError as error:
            assert path.name in error.cause
            named += 1
        else:
            assert found == before
            without_effect += 1
    if name == "verified":
        assert not named  # its existence is its content
    else:
        assert named > 50 * without_effect


# ---------------------------------------------------------------- absent, damaged, of a later version


class Sample(StateFile):
    """For the tests below."""

    number: int


def test_what_a_reader_tells_apart(tmp_path: Path) -> None:
    path = tmp_path / "sample.json"
    assert state_files.read(path, Sample) is None and state_files.view(path, Sample) is None
    state_files.write(path, {"number": 3, "of": "a later version with the same format"})
    assert state_files.read(path, Sample) == Sample(number=3)
    sealed = json.loads(path.read_text())
    for damage, expected in (
        (b"", "is damaged: it is not JSON"),
        (b"[]", "is damaged"),
        (state_files.seal({"number": "3"}).encode(), "is damaged: number: input should be a valid integer"),
        (b"{}", "is damaged: number: field required"),
        (json.dumps({**sealed, "number": 4}).encode(), "is damaged: its values are not the ones that were written"),
        (json.dumps({"format": FORMAT, "number": 3}).encode(), "is damaged: its values are not the ones"),
        (b'{"number": 3, "format": 9}', f"is of another version: its format is 9, this program reads {FORMAT}"),
        (b'{"number": 3, "format": 2}', f"is of another version: its format is 2, this program reads {FORMAT}"),
    ):
        path.write_bytes(damage)
        with pytest.raises(DamagedFileError, match=expected) as caught:
            state_files.read(path, Sample)
        assert caught.value.exit == 78 and str(path) in caught.value.cause
        assert state_files.view(path, Sample) is None
    path.write_text('{"number": 3}')  # by a person, as errors advise
    assert state_files.read(path, Sample) == Sample(number=3)


# ---------------------------------------------------------------- strays


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of the first release, for changes."""
    found = RunDir(unpack(tmp_path))
    found.lock.unlink()
    return found


@pytest.fixture(scope="module")
def strayed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with files left by people, crashes and other versions that no reader expects."""
    run = unpack(tmp_path_factory.mktemp("strays"))
    (run / "lock.json").write_text("{")
    os.utime(run / "lock.json", (1, 1))
    for name in ("0003x", "0003 (copy)", "00003", "old"):
        shutil.copytree(run / "segments/0003", run / "segments" / name)
    for name in ("step-00000016x", "step-000000016", "step-16"):
        shutil.copytree(run / "checkpoints/step-00000016", run / "checkpoints" / name)
        shutil.copytree(run / "evals/step-00000016", run / "evals" / name)
    with (run / "journal.jsonl").open("a") as file:
        file.writelines(
            f"{line}\n" for line in ("[1]", '{"kind": "note", "text": "no time"}', '{"time": 3}', "\x00", "[" * 100_000)
        )
        time = {"time": "2026-11-22T07:12:00.000Z", "segment": 4}
        for kind in ("checkpoint", "eval", "stop", "alarm", "health-rollback", "rollback"):
            file.write(json.dumps({**time, "kind": kind, "text": "lacks what it should say"}) + "\n")
    with (run / "segments/0004/metrics.jsonl").open("a") as file:
        for changes in ({"step": "x"}, {"seconds": 3}, {"loss": None}, {"seconds": {"iteration": 1.0}}):
            file.write(json.dumps({**metric(33), **changes}) + "\n")
    state_files.write(run / "status.json", {"step": "x", "total_steps": [1], "exit_intent": 3, "host": 7})
    (run / "segments/0001/config.toml").open("a").write("\n[future]\nkey = 3\n")
    (run / "config.toml").open("a").write("\n[future]\nkey = 3\n")
    (run / "segments/0003/environment.json").write_text("[]")
    state_files.write(run / "segments/0004/exit_intent.json", {"code": "x"})
    state_files.write(run / "evals/step-00000008/heldout_bpb/results.json", {"scores": 3})
    for name in ("snapshot.json", "pace.json"):
        state_files.write(run / "watchdog" / name, {"step_drift": "x", "time": []})
    with (run / "watchdog/alarms.jsonl").open("ab") as alarms:
        alarms.write(b'\xff\x00\n{"key": "disk", "severity": "WARN"}\n')
        odd = {"key": "disk", "severity": "CRIT", "state": "open", "summary": "x", "opened": "yesterday", "changed": 3}
        alarms.write(json.dumps(odd).encode() + b"\n")
    state_files.write(run / "status-last-look.json", {"step": "x"})
    return run


STRAYED = [
    ("status", 2, ["status.json is damaged: host: input", "exit_intent.json is damaged", "step 24, verified"]),
    ("checkpoints RUN verify", 0, ["16  ", "24  "]),
    ("alarms", 2, ["rank-died"]),
    ("journal", 0, ["a person's line", "lacks what it should say"]),
    ("goodput", 0, ["tokens kept"]),
    ("where RUN --step 3", 78, ["future", "does not know"]),
    ("rollback RUN --to 16 --dry-run", 78, ["future", "unknown key"]),
]


def test_strays_stop_no_command(strayed: Path, run_command: Run) -> None:
    """Displays ignore and name them; decisions that would depend on them are refused."""
    for line, code, expected in STRAYED:
        words = line if "RUN" in line else f"{line} RUN"
        done = run_command(CLI, *words.replace("RUN", str(strayed)).split())
        output = done.stdout + done.stderr
        assert done.returncode == code and "Traceback" not in output, output
        assert all(text in output for text in expected), output


@pytest.mark.parametrize("damage", ["intent", "environment", "table", "lineage"])
def test_the_end_of_a_start_is_read_whatever_else_is_damaged(run: RunDir, damage: str) -> None:
    """By the launcher; here of a start ended by an automatic rollback, whose newest segment has no record."""
    rollback(run, 16)
    exit_intent.write(run, run.segment(5), 75, "rolled back", restart=True)
    if damage == "table":
        (run.segment(5) / "config.toml").open("a").write("\n[future]\nkey = 3\n")
    elif damage == "lineage":
        (run.segment(1) / "lineage.json").write_text("{")
    elif damage:
        (run.segment(5) / {"intent": "exit_intent.json", "environment": "environment.json"}[damage]).write_text("[]")
    outcome = read_outcome(run, 4, run.path / "no note", 1)
    assert (outcome.segment, verified_step(run)) == (5, 16)
    assert outcome.code == (None if damage == "intent" else 75)
    assert outcome.reason == "rolled back" or "exit_intent.json is damaged" in outcome.reason
    assert outcome.step == (None if damage == "lineage" else 16)
    assert [batch["step"] for batch in outcome.ahead] == ([] if damage in ("lineage", "table") else [17, 18, 19])


def test_a_run_is_asked_although_its_status_is_damaged(run: RunDir, run_command: Run) -> None:
    """Its lock shows whether there is a job; a damaged request is dropped with a message."""
    run.status.write_text("{")
    assert "no job of" in run_command(CLI, "control", run.path, "save", expect=78).stderr
    with hold(run, "training"):
        asked = run_command(CLI, "control", run.path, "save", "--wait", "0.2 s")
    assert asked.returncode == 75 and "the request was taken back" in asked.stderr


@pytest.mark.parametrize("hosts", [([], ["a"]), (["a"], []), (["b"], ["a"]), ([], [])])
def test_two_stops_are_both_heard(run: RunDir, hosts: tuple[list[str], list[str]]) -> None:
    """A person's, and the watchdog's that leaves hosts, in either order."""
    for avoid in hosts:
        requests.send(run, "stop", reason="broken" if avoid else "maintenance", avoid_hosts=avoid)
    asked = requests.Inbox(run).take()
    assert asked.stop and asked.asked == ([] in hosts) and asked.avoid_hosts == tuple(sorted({*hosts[0], *hosts[1]}))
    assert all(("broken" if avoid else "maintenance") in asked.reason for avoid in hosts)


def test_a_damaged_request_is_dropped_aloud(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    requests.send(run, "save")
    (run.control / "0.json").write_text('{"verb": "stop", "avoid_hosts": 3}')
    asked = requests.Inbox(run).take()
    assert asked.save and not asked.stop and not list(run.control.iterdir())
    assert "was damaged and is dropped" in capsys.readouterr().err
