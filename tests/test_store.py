"""The checkpoint store: what exists, what is verified, what is kept. Directories only."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laboratory import tiny
from records import CHECKPOINT, commit

from fsdp_pretrain.checkpoint.manifest import is_permanent
from fsdp_pretrain.checkpoint.store import Store, verify_files
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.errors import CheckpointError, StorageError
from fsdp_pretrain.run import state_files

pytestmark = pytest.mark.quick


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "checkpoints")


def steps(store: Store) -> list[int]:
    return [checkpoint.step for checkpoint in store.scan() if checkpoint.problem is None]


def test_life_of_a_checkpoint(store: Store) -> None:
    assert store.scan() == [] and store.newest() is None
    attempt = store.begin(7)
    assert store.scan() == []  # being written: not visible
    store.discard(attempt)
    made = commit(store, 7, verified=False)
    assert made.path.name == "step-00000007"
    (found,) = store.scan()
    assert (found.step, found.problem, found.verified) == (7, None, False)
    assert found.mark_verified().verified and store.scan()[0].verified
    assert verify_files(found.path, found.files()) == []
    assert {entry.name for entry in found.files()} == CHECKPOINT.keys()


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda p: state_files.write(p / "manifest.json", {}), "manifest.json is damaged: step: field required"),
        (
            lambda p: shutil.copyfile(p.with_name("step-00000001") / "manifest.json", p / "manifest.json"),
            "is that of step 1",
        ),
        (lambda p: (p / ".metadata").unlink(), ".metadata is missing"),
        (lambda p: (p / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
        (lambda p: (p / "__0_0.distcp").write_bytes(b"we"), "has 2 bytes, the manifest says 7"),
        (lambda p: (shutil.rmtree(p), p.write_text("")), "not a directory"),
    ],
)
def test_damage_that_a_look_can_see(store: Store, damage: object, problem: str) -> None:
    commit(store, 1)
    damage(commit(store, 2).path)  # type: ignore[operator]
    assert problem in (store.scan()[1].problem or "")
    newest = store.newest()
    assert newest is not None and newest.step == 1
    with pytest.raises(CheckpointError, match="cannot be used"):
        store.find(2)


@pytest.mark.promise("verified")
def test_flipped_bit_needs_and_gets_a_reading(store: Store) -> None:
    made = commit(store, 1)
    (made.path / "__0_0.distcp").write_bytes(b"weighus")
    assert store.scan()[0].problem is None
    (wrong,) = verify_files(made.path, made.files())
    assert "__0_0.distcp" in wrong and "checksum" in wrong


def test_names_of_checkpoints(store: Store) -> None:
    """Ordered by step, not by time or spelling; stray ones are no checkpoints."""
    for step in (100_000_000, 20, 5):
        commit(store, step)
    for name in ("step-abc", "step-00000009.bak", "notes", "step-9", "latest", "step-00000008.writing-0123"):
        (store.directory / name).mkdir()
    (store.directory / "step-00000007.txt").write_text("")
    assert [checkpoint.step for checkpoint in store.scan()] == [5, 20, 100_000_000]
    newest = store.newest()
    assert newest is not None and newest.step == 100_000_000
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 6 \(there are: 5, 20, 100000000\)"):
        store.find(6)


# ---------------------------------------------------------------- the policy, reimplemented

INTERVALS = ["7 steps", "90 samples", "2K tokens"]


@dataclass
class Save:
    """One simulated save: its kind, and what else happens around it."""

    batch: int
    verified: bool
    final: bool = False
    protect: int | None = None


def must_stay(made: dict[int, dict[str, Any]], keep_last: int, every: list[str], protected: set[int]) -> set[int]:
    """What the policy keeps among existing checkpoints, in the words of docs/training.md."""
    verified = sorted((step for step, facts in made.items() if facts["verified"]), reverse=True)
    if len(verified) < keep_last:
        return set(made)  # nothing is deleted before its successors are verified
    units = {"7 steps": ("step", 7), "90 samples": ("consumed", 90), "2K tokens": ("tokens", 2000)}
    stay = set(verified[:keep_last]) | protected
    for step, facts in made.items():
        crossed = any(facts[units[e][0]] // units[e][1] > facts["last"][units[e][0]] // units[e][1] for e in every)
        newer = step > verified[keep_last - 1]
        if newer or facts["final"] or crossed:
            stay.add(step)
    return stay & set(made)


def play(store: Store, keep_last: int, every: list[str], saves: list[Save]) -> tuple[set[int], set[int]]:
    """Make the saves, applying the policy after each as a run does; compare what exists every time.

    Returns:
        The remaining steps, and the deleted ones.
    """
    config = run_config(keep_last, every)
    made: dict[int, dict[str, Any]] = {}
    last, deleted = {"step": 0, "consumed": 0, "tokens": 0}, set[int]()
    for save in saves:
        consumed = last["consumed"] + save.batch
        new = {"step": last["step"] + 1, "consumed": consumed, "tokens": consumed * 32}
        step = new["step"]
        checkpoint = commit(store, step, verified=save.verified, batch=save.batch, final=save.final, consumed=consumed)
        made[step] = {**new, "last": last, "verified": save.verified, "final": save.final}
        last = new
        protected = set() if save.protect is None else {max(1, step - save.protect)}
        gone = store.retain(
            keep_last, lambda found: is_permanent(config, found.manifest(), config.checkpoint.kept_intervals), protected
        )
        stay = must_stay(made, keep_last, every, protected)
        assert {found.step for found in gone} == set(made) - stay
        deleted |= set(made) - stay
        made = {step: made[step] for step in stay}
        assert set(steps(store)) == stay and checkpoint.path.exists()
        assert sum(facts["verified"] for facts in made.values()) >= 2 or not gone
    return set(steps(store)), deleted


def run_config(keep_last: int, every: list[str]) -> Config:
    policy = {"every": "1 step", "keep_last": keep_last, "keep_every": every}
    values = tiny("policy", Path("unused"), "unused", train={"duration": "100000 steps"}, checkpoint=policy)
    return Config.model_validate(values)


SAVES = st.builds(
    Save,
    batch=st.integers(1, 40),
    verified=st.booleans(),
    final=st.sampled_from([False] * 9 + [True]),
    protect=st.none() | st.integers(0, 10),
)


@settings(max_examples=15, deadline=None)
@given(keep_last=st.integers(2, 4), every=st.lists(st.sampled_from(INTERVALS), unique=True), saves=st.lists(SAVES, max_size=25))  # fmt: skip
@pytest.mark.shows("D21")
@pytest.mark.promise("successor-first")
def test_any_saves_leave_exactly_the_policy(keep_last: int, every: list[str], saves: list[Save]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        left, deleted = play(Store(Path(folder)), keep_last, every, saves)
        assert left | deleted == set(range(1, len(saves) + 1)) and not left & deleted


@pytest.mark.promise("verified")
def test_a_commit_that_cannot_be_made_durable_is_none(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory cannot be synced after the rename: the attempt can be discarded, and the step saved again."""

    def fsync(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(store.directory):  # noqa: PTH115 (not a path)
            raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(StorageError, match=r"cannot commit .*step-00000005: .*Input/output error"):
            commit(store, 5)
    (attempt,) = store.directory.iterdir()
    assert ".writing-" in attempt.name
    store.discard(attempt)
    assert commit(store, 5).verified and not (store.directory / "abandoned").exists()


def test_sweep_removes_leftovers_only(store: Store) -> None:
    commit(store, 5)
    store.begin(6)
    (store.directory / "step-00000004.deleting-abc").mkdir()
    (store.directory / "abandoned").mkdir()
    assert len(store.sweep()) == 2
    assert sorted(path.name for path in store.directory.iterdir()) == ["abandoned", "step-00000005"]


def test_what_cannot_be_deleted_is_not_reported_as_deleted(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3, 4):
        commit(store, step)
    rename = Path.rename

    def refuses(path: Path, target: Path) -> Path:
        if path.name == "step-00000001":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuses)
    assert [found.step for found in store.retain(2, lambda found: False, ())] == [2] and steps(store) == [1, 3, 4]
