"""Checkpoints and record in a mirror: what is carried out, checked, kept and carried back; with real uploaders."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from laboratory import tiny
from records import CHECKPOINT, commit
from sight import until

from fsdp_pretrain.checkpoint.store import Store, verify_files
from fsdp_pretrain.config.config import Config, load
from fsdp_pretrain.errors import Exit, Interrupted, UserError
from fsdp_pretrain.files import PARTIAL
from fsdp_pretrain.helper_process import HelperProcess
from fsdp_pretrain.job.mirroring import start_uploader
from fsdp_pretrain.mirror.layout import MirrorError, RunMirror
from fsdp_pretrain.mirror.restore import Restoration, compare_with_mirror, restore
from fsdp_pretrain.mirror.uploader import Uploader
from fsdp_pretrain.remote import Problem, RemoteError
from fsdp_pretrain.run import journal, lineage, mirror_status, run_id
from fsdp_pretrain.run.files import RunDir

pytestmark = pytest.mark.quick
FILES = {
    name: content * 100  # so that a byte that is stored wrong and then read wrong is hardly ever right again
    for name, content in {**CHECKPOINT, "__1_0.distcp": b"of the second rank", "__2_0.distcp": b"of the third"}.items()
}


class Carried:
    """A run directory as training leaves it, without training, and its mirror in a directory beside it."""

    def __init__(self, path: Path, **checkpoint: Any) -> None:
        self.path, self.run, self.place = path, RunDir(path / "run"), path / "mirror"
        self.mirror = self.place / "run"
        policy = {"every": "10 steps", "mirror": f"file://{self.place}", "keep_last": 2, **checkpoint}
        values = tiny("run", self.run.path, path, train={"duration": "1000 steps"}, checkpoint=policy)
        (path / "run.toml").write_text(tomli_w.dumps(values))
        self.config: Config = load(path / "run.toml")

    def begin(self) -> Carried:
        """The first start, up to its first step."""
        known = run_id.assign(self.run.path)
        run_id.bind(self.run.path, known)
        self.segment(1)
        self.run.config.write_text(self.config.to_toml())
        journal.add(self.run, "note", "begun")
        return self

    def segment(self, number: int, kind: str = "start", step: int = 0) -> None:
        segment = self.run.segment(number)
        segment.mkdir(parents=True)
        (segment / "environment.json").write_text(f'{{"time": "{os.urandom(8).hex()}"}}')
        (segment / "config.toml").write_text(self.config.to_toml())
        lineage.record(segment, parent=number - 1 or None, step=step, kind=kind)

    def save(self, step: int, **more: Any) -> None:
        commit(Store(self.run.checkpoints), step, {**FILES, "step": str(step).encode() * 100}, **more)

    def uploader(self) -> Uploader:
        """The uploader's work in this process."""
        own_id, segment = run_id.read(self.run.path) or "", int(self.run.segments[-1].name)
        return Uploader(self.config, self.run, own_id, segment, RunMirror(self.config, patience=0))

    def process(self) -> HelperProcess:
        return start_uploader(self.run, segment=1)

    def copy(self, worker: Uploader | None = None) -> None:
        """Carry everything out."""
        worker = worker or self.uploader()
        while worker.work(finish=True) is not None:
            pass

    def look(self, *, restore: bool = False, fresh: bool = False) -> Restoration | None:
        """What a start finds."""
        return compare_with_mirror(self.config, restore=restore, fresh=fresh)

    def whole(self) -> list[int]:
        """Steps that look whole in the mirror; each of them must be, to the last byte."""
        for path in self.mirror.glob("checkpoints/step-*/manifest.json"):
            for item in Store(path.parent.parent).scan():
                if item.step == int(path.parent.name[5:]):
                    assert item.problem is None and not verify_files(item.path, item.files())
        return sorted(int(path.parent.name[5:]) for path in self.mirror.glob("checkpoints/step-*/manifest.json"))

    def lose(self) -> None:
        run_id.unbind(self.run.path)
        shutil.rmtree(self.run.path)

    def restore(self) -> None:
        task = self.look(restore=True)
        assert task is not None
        restore(task, self.run)

    def contents(self) -> dict[str, bytes]:
        """The files of the run directory that a mirror must bring back, the journal up to here."""
        left = ("checkpoints", "mirror", "CHRONICLE.md")
        found = {path.relative_to(self.run.path).as_posix(): path for path in self.run.path.rglob("*")}
        return {name: path.read_bytes() for name, path in found.items() if path.is_file() and not name.startswith(left)}

    def messages(self, kind: str) -> list[str]:
        return [entry["text"] for entry in journal.read(self.run) if entry["kind"] == kind]


@pytest.fixture
def carried(tmp_path: Path) -> Iterator[Carried]:
    made = Carried(tmp_path)
    yield made.begin()
    run_id.unbind(made.run.path)


def test_the_record_does_not_wait_for_checkpoints(carried: Carried, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may take hours, or fail each time."""
    carried.save(10)
    worker, clock, order = carried.uploader(), [0.0], list[str]()
    put, fails = worker._mirror.put, True

    def slow(name: str, *content: Any) -> None:
        if name.startswith("checkpoints/"):
            if fails:
                raise OSError(errno.EFBIG, "too large for this storage")
            clock[0] += 400.0
            journal.add(carried.run, "note", "training goes on")
        order.append(name.partition("/")[0])
        put(name, *content)

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(worker._mirror, "put", slow)
    for _ in range(2):
        with pytest.raises(OSError, match="too large"):
            worker.work(finish=False)
    assert order == ["record"] and not carried.whole()
    fails = False
    carried.copy(worker)
    assert carried.whole() == [10] and "record" in order[1 : len(order) - order[::-1].index("checkpoints")]


@pytest.mark.parametrize("folder", ["checkpoints", "segments"])
def test_an_empty_folder_is_no_run(carried: Carried, folder: str) -> None:
    """As the place where other storage is mounted, when the run directory was lost."""
    carried.save(10)
    carried.copy()
    carried.lose()
    (carried.run.path / folder).mkdir(parents=True)
    with pytest.raises(MirrorError, match=r"is empty, and its mirror .* holds"):
        carried.look()
    carried.restore()
    assert [item.step for item in Store(carried.run.checkpoints).scan()] == [10] and len(carried.run.segments) == 1


@pytest.mark.parametrize("restore", [False, True])
@pytest.mark.parametrize("entry", ["checkpoints/step-00000004", "segments/0001"])
def test_nothing_is_restored_over_what_has_no_id(carried: Carried, entry: str, restore: bool) -> None:
    """A part of a run directory that was copied by hand: whose it is, is not known."""
    carried.save(10)
    carried.copy()
    carried.lose()
    (carried.run.path / entry).mkdir(parents=True)
    with pytest.raises(MirrorError, match="is the mirror of another run"):
        carried.look(restore=restore)


def test_a_run_is_carried_out_and_back(carried: Carried) -> None:
    carried.save(10)
    carried.save(20)
    carried.save(25, verified=False)
    (carried.run.evals / "step-00000010").mkdir(parents=True)
    (carried.run.evals / "step-00000010" / "results.json").write_text("{}")
    carried.copy()
    assert carried.whole() == [10, 20]  # never one that was not verified
    journal.add(carried.run, "note", "only the new bytes")
    carried.copy()
    before = carried.contents()
    carried.lose()
    for fresh in (False, True):
        with pytest.raises(MirrorError) as refused:
            carried.look(fresh=fresh)
        assert refused.value.exit == Exit.NEEDS_PERSON and "step 20" in str(refused.value)
    assert not carried.run.path.exists()
    carried.restore()
    assert "is not known" not in carried.messages("mirror-restored")[0]  # its place in the lineage
    after = carried.contents()
    assert after["journal.jsonl"].startswith(before.pop("journal.jsonl"))
    assert before.items() <= after.items()
    (restored,) = Store(carried.run.checkpoints).scan()
    assert restored.step == 20 and restored.verified and not verify_files(restored.path, restored.files())
    assert carried.look(restore=True) is None  # harmless now


@pytest.mark.shows("F52")
@pytest.mark.parametrize("harm", ["flip", "truncate", "remove", "manifest"])
def test_a_damaged_copy_is_passed_over_loudly(carried: Carried, capsys: pytest.CaptureFixture[str], harm: str) -> None:
    for step in (10, 20, 30):
        carried.save(step)
    carried.copy()
    bad = carried.mirror / "checkpoints/step-00000030" / ("manifest.json" if harm == "manifest" else "__1_0.distcp")
    content = bad.read_bytes()
    bad.unlink()
    if harm != "remove":
        bad.write_bytes(content[:-1] if harm == "truncate" else content.replace(content[5:6], b"?"))
    carried.lose()
    carried.restore()
    assert [item.step for item in Store(carried.run.checkpoints).scan() if item.problem is None] == [20]
    assert "passed over step 30" in capsys.readouterr().out and "step 30" in carried.messages("mirror-restored")[0]
    carried.segment(2, step=20)
    assert carried.look() is None  # that start went on without it


def test_a_rollback_replaces_what_it_left(carried: Carried) -> None:
    """A checkpoint of the same step from another line is replaced; what is left of the old line is not restored."""
    for step in (10, 20, 30):
        carried.save(step)
    carried.copy()
    for step in (20, 30):
        Store(carried.run.checkpoints).abandon(carried.run.checkpoints / f"step-{step:08d}")
    carried.segment(2, "rollback", 10)
    assert carried.look() is None  # the mirror's 30 is not later
    commit(Store(carried.run.checkpoints), 20, {**FILES, "line": b"new"}, segment=2)
    carried.copy()
    carried.lose()
    carried.restore()
    newest = Store(carried.run.checkpoints).newest()
    assert newest is not None and newest.step == 20 and (newest.path / "line").read_bytes() == b"new"


def test_what_is_refused(carried: Carried, tmp_path: Path) -> None:
    """Another run's mirror, an older copy of the run directory, one without its newest checkpoint, nothing to restore."""
    carried.save(10)
    carried.copy()
    older = Path(shutil.copytree(carried.run.path, tmp_path / "older"))
    carried.segment(2)
    carried.save(20, segment=2)
    carried.copy()
    carried.lose()
    older.rename(carried.run.path)
    for allowed in (False, True):
        with pytest.raises(MirrorError, match=r"holds step 20 of start 2, and .* has step 10 and 1 starts"):
            carried.look(restore=allowed)
    carried.run.path.rename(tmp_path / "aside")  # as the message says
    carried.restore()
    assert len(lineage.nodes(carried.run)) == 2 and [item.step for item in Store(carried.run.checkpoints).scan()] == [
        20
    ]
    shutil.rmtree(carried.run.checkpoints / "step-00000020")
    for allowed in (False, True):
        with pytest.raises(MirrorError, match=r"holds step 20 of start 2, and .* has no whole checkpoint"):
            carried.look(restore=allowed)
    assert carried.look(fresh=True) is None
    (carried.run.path / "run_id").write_text("0" * 32)
    run_id.bind(carried.run.path, "0" * 32)
    for act in (lambda: carried.look(restore=True), carried.copy):
        with pytest.raises(MirrorError, match="another run"):
            act()
    carried.lose()
    shutil.rmtree(carried.place)
    with pytest.raises(UserError, match="nothing to restore"):
        carried.look(restore=True)


@pytest.mark.parametrize(
    ("segment", "steps", "again"), [(1, [30, 40], False), (1, [30, 40], True), (1, [], False), (2, [], False)]
)
def test_a_job_that_lives_on_does_not_overwrite_the_one_restored_elsewhere(
    carried: Carried, tmp_path: Path, segment: int, steps: list[int], again: bool
) -> None:
    """Told by its checkpoints of a later start, also to an uploader that was started `again`, and before it has any, or
    as a start of the same number, by its record."""
    carried.save(10)
    carried.save(20)
    carried.copy()
    if segment > 1:
        carried.segment(segment, step=20)
    stale = carried.uploader()
    carried.copy(stale)
    (tmp_path / "b").mkdir()
    other = Carried(tmp_path / "b", mirror=f"file://{carried.place}")
    other.mirror = carried.mirror
    other.restore()
    run_id.bind(other.run.path, run_id.read(other.run.path))
    if segment == 1:
        other.segment(2, step=20)
    for step in steps:
        other.save(step, segment=2)
    worker = other.uploader()
    other.copy(worker)

    def mirrored() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in carried.mirror.rglob("*") if path.is_file()}

    before = mirrored()
    for step in (30, 40):
        carried.save(step, segment=segment)
    stale = carried.uploader() if again else stale
    for _ in range(2):
        holds = "checkpoints of start 2" if steps else "a newer record, not of this job"
        with pytest.raises(MirrorError, match=f"another job continues this run: .* holds {holds}; ") as refused:
            stale.work(finish=True)
        assert refused.value.exit == Exit.NEEDS_PERSON and mirrored() == before
    other.save(50, segment=2)
    other.copy(worker)
    other.copy()  # of its next start too
    assert other.whole()[-1] == 50
    run_id.unbind(other.run.path)


def test_a_restoration_that_was_cut_off(carried: Carried) -> None:
    """Refused without the flag, whatever it left; with it, begun again."""
    carried.save(10)
    carried.copy()
    carried.lose()
    task = carried.look(restore=True)
    assert task is not None
    stop = threading.Event()
    stop.set()
    with pytest.raises(Interrupted):
        restore(task, carried.run, stop)
    (carried.run.path / "journal.jsonl").write_text("moved there already")
    (Store(carried.run.checkpoints).begin(10) / "__0_0.distcp").write_text("half of it")
    with pytest.raises(MirrorError, match="is not complete"):
        carried.look()
    carried.restore()
    assert carried.run.config.read_text() == carried.config.to_toml() and carried.messages("note") == ["begun"]
    assert [path.name for path in carried.run.checkpoints.iterdir()] == ["step-00000010"] and carried.look() is None


def test_a_mirror_does_not_follow_a_run_directory_that_goes(carried: Carried) -> None:
    """When its id is gone, nothing is copied; nor are logs, ever, and what only a live process needs."""
    carried.save(10)
    overrides, passing = carried.run.overrides, (carried.run.segment(1) / "log", carried.run.lock)
    for path in (overrides, *passing):
        path.write_text("set = []\n")
    worker = carried.uploader()
    carried.copy(worker)
    overrides.unlink()
    (carried.run.path / "run_id").unlink()
    with pytest.raises(UserError, match="gone"):
        worker.work(finish=True)
    carried.lose()
    carried.restore()
    assert overrides.exists() and not any(path.exists() for path in passing)
    overrides.unlink()
    carried.copy()
    carried.lose()
    carried.restore()
    assert not overrides.exists()


@pytest.mark.shows("F53")
def test_a_killed_uploader_comes_back(carried: Carried) -> None:
    """As a process, ended by a word of the rank that runs it. What it was writing goes."""
    process = carried.process()
    until(lambda: mirror_status.read(carried.run))
    first = process.process
    assert first is not None
    first.kill()
    died = "the process that copies ended with -9"
    until(lambda: (report := mirror_status.read(carried.run, 1)) is not None and died in report.problem)
    half = carried.mirror / "record" / f".{'0' * 14}-copy{PARTIAL}"
    half.parent.mkdir(parents=True, exist_ok=True)
    half.write_bytes(b"half")
    carried.save(10)
    process.finish()
    until(lambda: process.ended, what=lambda: str(mirror_status.read(carried.run)))
    assert carried.whole() == [10] and not half.exists()
    report = mirror_status.read(carried.run, 1)
    assert report is not None and (report.newest, report.problem) == (10, "")
    assert not mirror_status.copied_steps(carried.run, 1)
    assert mirror_status.read(carried.run, 2) is None


def test_an_uploader_that_dies_again_and_again_is_told(carried: Carried, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end stays in the report while the next one has copied nothing, so that the watchdog sees it."""

    def die(*_: Any) -> None:
        raise SystemExit(9)

    carried.save(10)
    carried.copy()
    carried.save(20)
    mirror_status.tell_death(carried.run, 1, -9)
    told = mirror_status.read(carried.run)
    with monkeypatch.context() as patch:
        patch.setattr(Uploader, "_upload", die)
        for _ in range(2):
            with pytest.raises(SystemExit):
                carried.uploader().work(finish=False)
            report = mirror_status.read(carried.run)
            assert told is not None and told.problem and report is not None
            assert (report.problem, report.newest, report.copying) == (told.problem, 10, 20)
    carried.segment(2)
    carried.copy()
    report = mirror_status.read(carried.run)
    assert report is not None and (report.segment, report.problem) == (2, "")  # another start begins anew


@pytest.mark.shows("F53")
def test_an_uploader_comes_back_with_its_run_directory(carried: Carried, constants: Callable[..., None]) -> None:
    """It ends where the directory is gone or another, and writes nothing there."""
    constants("fsdp_pretrain.mirror.uploader", _LOOK_SECONDS=0.2)
    process = carried.process()
    until(lambda: mirror_status.read(carried.run))
    first, mark = process.process, carried.run.path / "run_id"
    assert first is not None
    own = mark.read_bytes()
    mark.unlink()
    until(lambda: first.poll() is not None)
    report = mirror_status.report_file(carried.run).read_bytes()
    time.sleep(2.0)
    assert mirror_status.report_file(carried.run).read_bytes() == report
    mark.write_bytes(own)
    carried.save(10)
    until(lambda: (report := mirror_status.read(carried.run)) and report.newest == 10)  # else a file may be half there
    assert carried.whole() == [10]
    process.finish()
    until(lambda: process.ended)
    assert process.finished


@pytest.mark.slow
@pytest.mark.shows("F53")
def test_storage_that_stays_away_is_asked_again_and_again(carried: Carried, constants: Callable[..., None]) -> None:
    """After more failures than there are pauses, too."""
    constants("fsdp_pretrain.mirror.uploader", _PAUSES=[0.01, 0.02], _PATIENCE=0.05)
    carried.place.write_text("in the way")
    process = carried.process()
    carried.save(10)
    until(lambda: (report := mirror_status.read(carried.run)) is not None and report.problem)
    time.sleep(0.5)
    assert not process.ended
    carried.place.unlink()
    process.finish()
    until(lambda: process.ended)
    assert process.finished and carried.whole() == [10]


@pytest.mark.parametrize(
    ("error", "needs_person"),
    [
        (OSError(28, "no space"), False),
        (RemoteError("s3://bucket", Problem.FAILED, "busy"), False),
        (RemoteError("s3://bucket", Problem.DENIED, "no access"), True),
        (MirrorError("another run"), True),
    ],
)
def test_what_does_not_pass_by_itself_needs_a_person(carried: Carried, error: Any, needs_person: bool) -> None:
    carried.uploader().failed(error)
    report = mirror_status.read(carried.run)
    assert report is not None and report.problem and report.needs_person == needs_person
