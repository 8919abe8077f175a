"""The checkpoint store: what exists, what is proved, what is kept. Directories only, no torch."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from fsdp_pretrain.checkpoint.store import CONFIG, TRAIN_STATE, Checkpoint, Store, describe_file, verify_files
from fsdp_pretrain.errors import CheckpointError, StorageError

pytestmark = pytest.mark.quick


def make(store: Store, step: int, *, verified: bool = True, content: bytes = b"weights") -> Checkpoint:
    attempt = store.begin(step)
    for name, data in (("__0_0.distcp", content), (".metadata", b"meta"), (TRAIN_STATE, b"{}"), (CONFIG, b"")):
        (attempt / name).write_bytes(data)
    names = ("__0_0.distcp", ".metadata", TRAIN_STATE, CONFIG)
    checkpoint = store.commit(attempt, [describe_file(attempt / name) for name in names], {"step": step})
    return store.mark_verified(checkpoint) if verified else checkpoint


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "checkpoints")


def steps(store: Store) -> list[int]:
    return [checkpoint.step for checkpoint in store.scan() if checkpoint.problem is None]


def test_life_of_a_checkpoint(store: Store) -> None:
    assert store.scan() == [] and store.newest() is None
    attempt = store.begin(7)
    assert store.scan() == []  # being written: it does not exist
    store.discard(attempt)
    made = make(store, 7, verified=False)
    assert made.path.name == "step-00000007"
    (found,) = store.scan()
    assert (found.step, found.problem, found.verified) == (7, None, False)
    assert store.mark_verified(found).verified and store.scan()[0].verified
    assert verify_files(found.path, found.files()) == []
    assert {entry.name for entry in found.files()} == {"__0_0.distcp", ".metadata", TRAIN_STATE, CONFIG}


def test_order_is_by_step_not_by_time_or_spelling(store: Store) -> None:
    for step in (100_000_000, 20, 3):
        make(store, step)
    assert steps(store) == [3, 20, 100_000_000]
    newest = store.newest()
    assert newest is not None and newest.step == 100_000_000


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda p: (p / "manifest.json").write_text("{"), "manifest.json is missing or damaged"),
        (lambda p: (p / "manifest.json").write_text('{"format": 1}'), "does not list files"),
        (lambda p: (p / "manifest.json").write_text('{"format": 99, "files": []}'), "format is 99"),
        (lambda p: (p / ".metadata").unlink(), ".metadata is missing"),
        (lambda p: (p / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
        (lambda p: (p / "__0_0.distcp").write_bytes(b"we"), "has 2 bytes, the manifest says 7"),
        (lambda p: (shutil.rmtree(p), p.write_text("")), "not a directory"),
    ],
)
def test_damage_that_a_look_can_see(store: Store, damage: object, problem: str) -> None:
    make(store, 1)
    damage(make(store, 2).path)  # type: ignore[operator]
    assert problem in (store.scan()[1].problem or "")
    newest = store.newest()
    assert newest is not None and newest.step == 1
    with pytest.raises(CheckpointError, match="cannot be used"):
        store.find(2)


def test_flipped_bit_needs_and_gets_a_reading(store: Store) -> None:
    made = make(store, 1)
    (made.path / "__0_0.distcp").write_bytes(b"weighus")
    assert store.scan()[0].problem is None
    (wrong,) = verify_files(made.path, made.files())
    assert "__0_0.distcp" in wrong and "checksum" in wrong


def test_stray_names_are_not_checkpoints(store: Store) -> None:
    make(store, 5)
    for name in ("step-abc", "step-00000009.bak", "notes", "step-9", "latest", "step-00000008.writing-0123"):
        (store.directory / name).mkdir()
    (store.directory / "step-00000007.txt").write_text("")
    assert [checkpoint.step for checkpoint in store.scan()] == [5]


def test_asking_for_a_step_that_is_not_there(store: Store) -> None:
    make(store, 5)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 6 \(there are: 5\)"):
        store.find(6)


def test_a_damaged_one_of_the_same_step_is_moved_aside(store: Store) -> None:
    make(store, 5, content=b"old")
    (store.directory / "step-00000005/manifest.json").unlink()
    make(store, 5, content=b"new")
    assert (store.find(5).path / "__0_0.distcp").read_bytes() == b"new"
    assert len(list((store.directory / "abandoned").iterdir())) == 1


def test_retention_keeps_what_the_policy_names(store: Store) -> None:
    for step in range(10, 130, 10):
        make(store, step)
    deleted = store.retain(3, lambda checkpoint: checkpoint.step % 50 == 0, protected={70})
    assert steps(store) == [50, 70, 100, 110, 120]
    assert [checkpoint.step for checkpoint in deleted] == [10, 20, 30, 40, 60, 80, 90]
    assert not list(store.directory.glob("*deleting*"))


def test_only_verified_ones_count(store: Store) -> None:
    """Nothing is deleted before its successors are proved, however many unproved ones there are."""
    make(store, 10)
    for step in (20, 30, 40):
        make(store, step, verified=False)
    assert store.retain(2, lambda _: False) == []
    make(store, 50)
    store.retain(2, lambda _: False)
    assert steps(store) == [10, 20, 30, 40, 50]
    make(store, 60)
    store.retain(2, lambda _: False)
    assert steps(store) == [50, 60]


def test_damaged_ones_do_not_count(store: Store) -> None:
    for step in (10, 20, 30):
        make(store, step)
    (store.directory / "step-00000030/.metadata").unlink()
    store.retain(2, lambda _: False)
    assert steps(store) == [10, 20]


def test_many_saves_leave_exactly_the_policy(store: Store) -> None:
    rng = random.Random(0)
    kept: list[int] = []
    for step in range(1, 200):
        verified = rng.random() < 0.8
        make(store, step, verified=verified)
        kept.append(step)
        store.retain(3, lambda checkpoint: checkpoint.step % 40 == 0)
        proved = [checkpoint.step for checkpoint in store.scan() if checkpoint.verified]
        assert len(proved) >= min(3, len(proved))
        assert {s for s in kept if s % 40 == 0} <= set(steps(store))
        assert len([s for s in proved if s % 40]) <= 3


def test_sweep_removes_leftovers_only(store: Store) -> None:
    make(store, 5)
    store.begin(6)
    (store.directory / "step-00000004.deleting-abc").mkdir()
    (store.directory / "abandoned").mkdir()
    assert len(store.sweep()) == 2
    assert sorted(path.name for path in store.directory.iterdir()) == ["abandoned", "step-00000005"]


def test_unwritable_places_are_storage_errors(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot create"):
        Store(tmp_path / "file").begin(1)
