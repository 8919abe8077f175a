"""A mirror of which something is wrong: every whole checkpoint is restored, and what is lost is told."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zstandard
from object_store import Faults, ObjectStore
from records import commit, flip
from sight import seeded, until
from test_mirror import FILES, Carried
from test_mirror_runs import uploader, whole, whole_now

from fsdp_pretrain.checkpoint.missing import missing
from fsdp_pretrain.checkpoint.store import Store, describe_file, verify_files
from fsdp_pretrain.mirror.layout import MirrorError, RunMirror
from fsdp_pretrain.remote import RemoteError
from fsdp_pretrain.run import journal, lineage, run_id
from fsdp_pretrain.run.lineage import LINEAGE
from fsdp_pretrain.run.state_files import DamagedFileError

LYING = Faults(failing=0.1, cut=0.1, corrupt=0.1, spoiled=0.1, unanswered=0.1)
"""A tenth of all answers and uploads is refused, cut or wrong."""


@pytest.fixture
def carried(tmp_path: Path) -> Iterator[Carried]:
    """A run of two starts, with two checkpoints."""
    made = Carried(tmp_path).begin()
    made.save(10)
    made.segment(2, step=10)
    made.save(20, segment=2)
    (made.run.path / "overrides.toml").write_text("set = []\n")
    yield made
    run_id.unbind(made.run.path)


def cut(path: Path, place: int) -> None:
    path.write_bytes(path.read_bytes()[:place])


def restored(carried: Carried, step: int) -> None:
    """Restore the run directory; the newest checkpoint is that of a step, whole, and a start could go on from it."""
    carried.lose()
    carried.restore()
    newest = Store(carried.run.checkpoints).newest()
    assert newest is not None and newest.step == step and not verify_files(newest.path, newest.files())
    nodes = lineage.nodes(carried.run)
    assert int(carried.run.segments[-1].name) >= (newest.manifest().segment or 0)
    assert newest.manifest().segment in {node.segment for node in nodes}
    assert missing(carried.run) is None


@pytest.mark.quick
@pytest.mark.shows("F52")
@pytest.mark.parametrize("harm", [flip, cut])
def test_a_wrong_byte_costs_one_copy(carried: Carried, tmp_path: Path, harm: Callable[[Path, int], None]) -> None:
    """In every object of the record in turn; the next copy makes the mirror whole again."""
    carried.copy()
    journal.add(carried.run, "note", "in the last copy alone")
    carried.copy()
    random, before = seeded(5), carried.contents()
    keep = Path(shutil.copytree(carried.mirror, tmp_path / "keep"))
    objects = sorted((keep / "record").iterdir())
    assert len(objects) == 2
    for path in objects:
        shutil.rmtree(carried.mirror)
        shutil.copytree(keep, carried.mirror)
        damaged = carried.mirror / path.relative_to(keep)
        harm(damaged, random.randrange(damaged.stat().st_size))
        restored(carried, 20)
        after, is_newest = carried.contents(), path == objects[1]
        journal_before = before["journal.jsonl"][: -1 if is_newest else None]
        for name, content in {**before, "journal.jsonl": journal_before}.items():
            assert after[name] == content or (name == "journal.jsonl" and after[name].startswith(content) != is_newest)
        assert ("in the last copy alone" in carried.messages("note")) != is_newest
        (told,) = carried.messages("mirror-restored")
        assert ("is damaged" in told) == is_newest
        assert carried.look() is None
        carried.run.config.write_bytes(before["config.toml"])  # as the next start does
        carried.copy()
        restored(carried, 20)


@pytest.mark.quick
@pytest.mark.parametrize(("name", "kind"), [("../outside", tarfile.REGTYPE), ("journal.jsonl", tarfile.SYMTYPE)])
def test_nothing_outside_the_run_is_written(carried: Carried, tmp_path: Path, name: str, kind: bytes) -> None:
    """Whoever may write to the mirror could have made the archive."""
    carried.copy()
    object_ = max((carried.mirror / "record").iterdir())
    member, packed = tarfile.TarInfo(name), io.BytesIO()
    member.type, member.linkname = kind, "../outside"
    with tarfile.open(mode="w", fileobj=packed) as archive:
        archive.addfile(member)
    object_.write_bytes(zstandard.ZstdCompressor().compress(packed.getvalue()))
    prefix = object_.name.rpartition("-")[0]
    object_.rename(object_.with_name(f"{prefix}-{describe_file(object_).xxh3}.tar.zst"))
    carried.lose()
    with pytest.raises(MirrorError, match=f"holds '{name}', which is not a file of it"):
        carried.restore()
    assert not any(path.name == "outside" for path in tmp_path.rglob("*"))


@pytest.mark.quick
@pytest.mark.shows("F52")
@pytest.mark.parametrize("gone", [False, True], ids=["nothing", "record"])
@pytest.mark.promise("mirror")
def test_a_checkpoint_is_enough(carried: Carried, gone: bool) -> None:
    carried.copy()
    before = carried.contents()
    if gone:
        shutil.rmtree(carried.mirror / "record")
    carried.lose()
    with pytest.raises(MirrorError, match=r"holds .*2 whole checkpoints, the newest of step 20"):
        carried.look()
    carried.restore()
    restored(carried, 20)
    (told,) = carried.messages("mirror-restored")
    if gone:
        assert "the record is lost" in told and len(lineage.nodes(carried.run)) == 1
        assert int(carried.run.new_segment().name) == 3
        carried.run.config.write_bytes(before["config.toml"])  # as the next start does
    else:
        after = carried.contents()
        assert all(after[name] == before[name] for name in before.keys() - {"journal.jsonl", "run_id"})
    carried.copy()
    assert RunMirror(carried.config).look().records[0].run_id == run_id.read(carried.run.path)


@pytest.mark.quick
def test_without_its_lineage_a_later_start_is_believed(carried: Carried, capsys: pytest.CaptureFixture[str]) -> None:
    """What a rollback left has later steps. With the lineage lost, the start after it says what counts."""
    Store(carried.run.checkpoints).abandon(carried.run.checkpoints / "step-00000020")
    carried.copy()
    carried.segment(3, "rollback", 10)
    commit(Store(carried.run.checkpoints), 15, FILES, segment=3)
    commit(Store(carried.run.checkpoints), 20, FILES, segment=2)
    carried.copy()
    for path in (carried.mirror / "record").glob("*.zst"):
        flip(path, 30)
    restored(carried, 15)
    out = capsys.readouterr().out
    assert "the record is lost" in out and "whether a rollback had left this checkpoint is not known" in out
    assert {node.segment: node.parent for node in lineage.nodes(carried.run)} == {3: None}


@pytest.mark.quick
def test_a_damaged_lineage_is_not_copied(carried: Carried) -> None:
    """It is told, and the mirror keeps the record as it was."""
    worker = carried.uploader()
    carried.copy(worker)
    (carried.run.segment(2) / LINEAGE).write_text("{")
    with pytest.raises(DamagedFileError, match=LINEAGE):
        worker.work(finish=True)
    restored(carried, 20)
    assert [node.segment for node in lineage.nodes(carried.run)] == [1, 2]


@pytest.mark.quick
def test_an_unfinished_copy_is_no_beginning(carried: Carried) -> None:
    """With damaged ones beside it nothing is restored: training would begin at step 0. Alone it is passed over: the
    run had saved nothing else."""
    carried.copy()
    for path in carried.mirror.glob("checkpoints/step-*/__0_0.distcp"):
        flip(path, 3)
    unfinished = carried.mirror / "checkpoints/step-00000030/__0_0.distcp"
    unfinished.parent.mkdir()
    unfinished.write_bytes(b"weights")
    carried.lose()
    with pytest.raises(MirrorError, match=r"3 checkpoints, none of them valid:\n    step 30: .*incomplete") as refused:
        carried.restore()
    assert "step 20: __0_0.distcp" in str(refused.value) and "step 10" in str(refused.value)
    assert run_id.read(carried.run.path) is None
    for step in (10, 20):
        shutil.rmtree(carried.mirror / f"checkpoints/step-{step:08d}")
    carried.restore()
    assert not Store(carried.run.checkpoints).scan() and "no checkpoint" in carried.messages("mirror-restored")[0]


@pytest.mark.quick
def test_a_slow_mirror_gets_what_is_kept_and_what_leads_to_it(tmp_path: Path) -> None:
    """Of many new checkpoints the last two and permanent ones; a checkpoint never without its record; and never
    one that is damaged in the run directory."""
    made = Carried(tmp_path, keep_every="40 steps").begin()
    for step in range(10, 80, 10):
        made.save(step)
    flip(made.run.checkpoints / "step-00000060/__0_0.distcp", 3)
    worker = made.uploader()
    assert worker.work(finish=False) == 0 and made.whole() == [70]
    assert RunMirror(made.config).look().records
    made.copy()
    assert made.whole() == [40, 70]
    (missed,) = made.messages("mirror-missed")
    assert "step-00000060 is damaged in the run directory" in missed
    run_id.unbind(made.run.path)


@pytest.mark.quick
def test_what_a_restoration_passed_over_is_not_missing(carried: Carried) -> None:
    """Its end is told once; what is saved and lost after it is missing as ever."""
    for step in (10, 20):
        journal.add(carried.run, "checkpoint", "saved", segment=2 if step > 10 else 1, step=step, seconds=1.0, bytes=1)
    carried.copy()
    flip(carried.mirror / "checkpoints/step-00000020/__0_0.distcp", 3)
    restored(carried, 10)
    assert "passed over step 20" in carried.messages("mirror-restored")[0]
    carried.segment(3, step=10)
    flip(carried.mirror / "checkpoints/step-00000020/__0_0.distcp", 3)
    assert carried.look() is None  # whole again, and that start did without it
    journal.add(carried.run, "checkpoint", "saved", segment=3, step=15, seconds=1.0, bytes=1)
    found = missing(carried.run)
    assert found is not None and (found.step, found.newest) == (15, 10)


def left(carried: Carried) -> list[str]:
    return sorted(path.name for path in (carried.mirror / "checkpoints").iterdir())


@pytest.mark.quick
@pytest.mark.promise("mirror")
def test_nothing_is_left_of_what_retention_deletes(carried: Carried) -> None:
    """Also damaged and unfinished copies go with their time, unless their manifest does not say if they are
    permanent."""
    carried.copy()
    for step in (6, 7):
        shutil.copytree(carried.mirror / "checkpoints/step-00000010", carried.mirror / f"checkpoints/step-{step:08d}")
    (carried.mirror / "checkpoints/step-00000007/manifest.json").write_bytes(b"{")
    (carried.mirror / "checkpoints/step-00000008").mkdir()
    (carried.mirror / "checkpoints/step-00000008/__0_0.distcp").write_bytes(b"weights")
    for step in range(30, 80, 10):
        carried.save(step, segment=2)
        carried.copy()
        assert left(carried) == ["step-00000007", f"step-{step - 10:08d}", f"step-{step:08d}"]
    shutil.rmtree(carried.mirror / "checkpoints/step-00000007")
    flip(carried.mirror / "checkpoints/step-00000070/manifest.json", 40)
    carried.copy()  # from the run directory, which has it
    assert carried.whole() == [60, 70]
    assert len([*(carried.mirror / "record").iterdir()]) == 2


@pytest.mark.quick
def test_what_a_rollback_left_goes_though_it_would_be_permanent(tmp_path: Path) -> None:
    made = Carried(tmp_path, keep_every="20 steps").begin()
    unfinished = made.mirror / "checkpoints/step-00000005/__0_0.distcp"
    unfinished.parent.mkdir(parents=True)
    unfinished.write_bytes(b"weights")
    made.copy()
    assert left(made) == ["step-00000005"]  # until there are enough whole ones
    for step in (10, 20):
        made.save(step)
    made.copy()
    Store(made.run.checkpoints).abandon(made.run.checkpoints / "step-00000020")
    made.segment(2, "rollback", 10)
    for step in (15, 25, 35):
        made.save(step, segment=2)
        made.copy()
    assert left(made) == ["step-00000025", "step-00000035"]
    run_id.unbind(made.run.path)


@pytest.mark.quick
def test_the_last_two_copies_of_the_record_stay(carried: Carried) -> None:
    """The one before is there if the newest is gone. A clock that goes back changes no order."""
    for number in range(4):
        journal.add(carried.run, "note", f"number {number}")
        carried.copy()
    older, newest = sorted((carried.mirror / "record").iterdir())
    newest.unlink()
    restored(carried, 20)
    assert carried.messages("note")[-1] == "number 2"
    older.rename(older.with_name("9" + older.name[1:]))
    journal.add(carried.run, "note", "number 4")
    carried.copy()
    restored(carried, 20)
    assert carried.messages("note")[-1] == "number 4" and len([*(carried.mirror / "record").iterdir()]) == 2


@pytest.mark.quick
def test_a_manifest_of_another_step_vouches_for_nothing(carried: Carried) -> None:
    carried.copy()
    shutil.copytree(carried.mirror / "checkpoints/step-00000010", carried.mirror / "checkpoints/step-00000030")
    restored(carried, 20)
    assert "passed over step 30: manifest.json is that of step 10" in carried.messages("mirror-restored")[0]


@pytest.fixture
def stored(tmp_path: Path, object_store: ObjectStore) -> Iterator[Carried]:
    made = Carried(tmp_path, mirror=f"{object_store.url}/runs").begin()
    yield made
    run_id.unbind(made.run.path)


def kill_after(process: subprocess.Popen[bytes], done: Callable[[], bool]) -> None:
    try:
        until(done, every=0.002)
    finally:
        process.kill()
        process.wait()


@pytest.mark.timeout(600)
@pytest.mark.shows("F53")
@pytest.mark.parametrize("kills", [2, pytest.param(6, marks=pytest.mark.slow)])
@pytest.mark.promise("mirror")
def test_through_storage_that_lies_and_kills_every_whole_copy_comes_back(
    stored: Carried, object_store: ObjectStore, kills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of all answers and uploads is wrong, cut or refused, uploaders are killed in an upload, and what looks
    whole is restored to the bit through the same storage. In the end nothing is left but what retention keeps."""
    monkeypatch.setattr("fsdp_pretrain.remote._FIRST_PAUSE", 0.01)
    random = seeded()
    object_store.faults = Faults(**{**vars(LYING), "seed": random.randrange(10**6)})
    last = 0
    for _ in range(kills):
        last += 10
        stored.save(last)
        count = len(object_store.log) + random.randrange(1, 60)
        kill_after(uploader(stored), lambda c=count, s=last: len(object_store.log) >= c or whole_now(object_store, s))
        faults, object_store.faults = object_store.faults, Faults()
        found = whole(stored)
        object_store.faults = faults
        if found:
            kept = Path(shutil.copytree(stored.run.path, stored.path / "kept", symlinks=True))
            stored.lose()
            stored.restore()
            newest = Store(stored.run.checkpoints).newest()
            assert newest is not None and newest.step == found[-1] and not verify_files(newest.path, newest.files())
            stored.lose()
            kept.rename(stored.run.path)
            run_id.bind(stored.run.path, run_id.read(stored.run.path) or "")
    for step in (last + 10, last + 20):
        stored.save(step)
        process = stored.process()
        process.finish()
        until(lambda process=process: process.ended)
    object_store.faults = Faults()
    stored.copy()
    assert whole(stored) == [last + 10, last + 20]
    held = RunMirror(stored.config, patience=10).look().checkpoints
    # A manifest that was never read back may be damaged: then nobody can say whether it is to be kept, and it stays.
    unclear = {item.name.rpartition("/")[2] for item in held if item.raw is not None and item.problem is not None}
    folders = {name.split("/")[3] for name in object_store.names("runs/run/checkpoints/")} - unclear
    assert folders == {f"step-{step:08d}" for step in (last + 10, last + 20)}
    assert os.path.commonpath(object_store.names("runs/run/record/")) == "runs/run/record"


def test_what_is_written_is_read_back(stored: Carried, object_store: ObjectStore) -> None:
    """Half of all uploads store a wrong byte."""
    mirror = RunMirror(stored.config)
    object_store.faults = Faults(spoiled=0.5)
    told = 0
    for number in range(20):
        content = f"content of {number}".encode()
        try:
            mirror.put(f"record/{number}", content)
            assert object_store.get(f"runs/run/record/{number}") == content
        except RemoteError as error:
            told += 1
            assert "after it was written" in str(error)
    assert 0 < told < 20 and any(request.fault == "spoiled" for request in object_store.log)


@pytest.mark.quick
def test_an_object_that_is_missing_is_no_failure_of_storage(carried: Carried) -> None:
    """Nor is a failure taken for a missing object."""
    carried.copy()
    mirror = RunMirror(carried.config, patience=0)
    folder = carried.mirror / "checkpoints/step-00000020"
    entry = describe_file(folder / "train_state.json")
    name = f"checkpoints/step-00000020/{entry.name}"
    assert mirror.fetch(name, entry) == ""
    (folder / entry.name).unlink()
    assert mirror.fetch(name, entry) == f"{entry.name} is missing"
    (folder / entry.name).mkdir()
    with pytest.raises(RemoteError):
        mirror.fetch(name, entry)


@pytest.mark.quick
def test_a_mirror_with_a_later_checkpoint(carried: Carried) -> None:
    """The same starts in both, and the run directory has lost its newest checkpoint."""
    carried.copy()
    shutil.rmtree(carried.run.checkpoints / "step-00000020")
    with pytest.raises(MirrorError, match=r"holds step 20 of start 2, and .* has step 10 and 2 starts"):
        carried.look()
    assert carried.look(fresh=True) is None
    with pytest.raises(MirrorError, match="holds step 20"):
        carried.look(restore=True)


@pytest.mark.quick
def test_without_a_record_no_start_gets_the_number_of_another(carried: Carried) -> None:
    """The mirror has a checkpoint of the second start that is damaged: a new start is the third."""
    carried.copy()
    shutil.rmtree(carried.mirror / "record")
    flip(carried.mirror / "checkpoints/step-00000020/__0_0.distcp", 3)
    restored(carried, 10)
    assert int(carried.run.new_segment().name) == 3
