"""Saving during training: its cost, its behaviour when space is short."""

from __future__ import annotations

import json
import mmap
import shutil
import signal
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from machines import Disk
from processes import spawn
from sight import until
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp_pretrain.checkpoint.async_save import Stager
from fsdp_pretrain.checkpoint.dcp import SaveResult
from fsdp_pretrain.checkpoint.disk_space import SpaceNeeded, make_room
from fsdp_pretrain.checkpoint.state import TrainState
from fsdp_pretrain.checkpoint.store import Store
from fsdp_pretrain.config.config import load
from fsdp_pretrain.config.operations import HangSection
from fsdp_pretrain.config.sections import ParallelSection
from fsdp_pretrain.errors import CheckpointError, StorageError
from fsdp_pretrain.heartbeat import Heartbeat, Phase
from fsdp_pretrain.parallel import mesh
from fsdp_pretrain.parallel.mesh import SingleProcess
from fsdp_pretrain.run import state_files
from fsdp_pretrain.run.recorder import SilentRecorder
from fsdp_pretrain.train.checkpointing import Checkpointing
from fsdp_pretrain.watchdog.hang.deadlines import UNKNOWN_SOFT, PhaseHistory
from fsdp_pretrain.watchdog.hang.page import Beat

# ---------------------------------------------------------------------- room


@pytest.mark.quick
def test_older_ones_are_given_up_only_for_one_that_does_not_fit(small_disk: Disk) -> None:
    disk = small_disk("8m")
    old = disk / "old"
    old.write_bytes(b"x" * 2_000_000)

    def prune() -> bool:
        old.unlink()
        return True

    free = shutil.disk_usage(disk).free
    assert not make_room(disk, SpaceNeeded(free, 1), prune)
    with pytest.raises(StorageError, match=r"needs .* in 1 file, .* free"):
        make_room(disk, SpaceNeeded(free + 1_000_000, 1), None)
    assert make_room(disk, SpaceNeeded(free + 1_000_000, 1), prune) and not old.exists()
    with pytest.raises(StorageError, match=r"needs 19\.1 MiB in 1 file, .* free"):
        make_room(disk, SpaceNeeded(20_000_000, 1), lambda: False)

    def gone() -> NoReturn:
        raise CheckpointError("its manifest is missing")

    with pytest.raises(StorageError, match="old checkpoints cannot be deleted: its manifest is missing"):
        make_room(disk, SpaceNeeded(20_000_000, 1), gone)


@pytest.mark.shows("F39")
@pytest.mark.quick
def test_names_can_run_out_before_bytes(small_disk: Disk) -> None:
    """Before a save is started."""
    disk = small_disk("8m,nr_inodes=12")
    assert not make_room(disk, SpaceNeeded(1000, 5), None)
    for n in range(9):
        (disk / str(n)).touch()
    with pytest.raises(StorageError, match=r"in 5 files, .* room for"):
        make_room(disk, SpaceNeeded(1000, 5), None)


@pytest.mark.shows("C3", "F1", "F36")
def test_old_checkpoints_go_before_a_save_fails(lab: Any, helpers: Any, small_disk: Disk) -> None:
    """keep_last = 50 does not fit: the run completes with fewer."""
    config = lab.config(
        train={"duration": "60 steps", "micro_batch": 8}, checkpoint={"every": "3 steps", "keep_last": 50}
    )
    disk = small_disk("6m")
    lab.train(config, f"run.dir={disk / 'run'}")
    rooms = helpers.journal(disk / "run", "checkpoint-room")
    assert rooms and all("two newest" in entry["text"] for entry in rooms)
    assert not helpers.journal(disk / "run", "checkpoint-failed")


# ---------------------------------------------------------------------- during training


@pytest.mark.quick
def test_every_copy_of_the_state_is_made_into_the_same_memory() -> None:
    """It shares none with the live state, and is as large as this rank's share of it."""
    with mesh.connect(ParallelSection()) as world:
        ones = torch.ones(6, 2048, device=world.device)
        weight, step = distribute_tensor(ones, world.mesh, (Replicate(), Shard(0))), torch.zeros((), device=ones.device)
        stager, addresses = Stager(world.device), set()
        for number in (1.0, 2.0, 3.0):
            step.fill_(number)
            weight.to_local().fill_(number)
            copy = stager.copy({"model": {"w": weight}, "optim": {"w": {"step": step, "exp_avg": weight}}})
            step.fill_(9.0)
            weight.to_local().fill_(9.0)
            counted, copied = copy["optim"]["w"]["step"], copy["model"]["w"]
            assert isinstance(copied, DTensor) and (copied.device_mesh, copied.placements, copied.shape) == (
                *(weight.device_mesh, weight.placements, weight.shape),
            )
            tensors = [counted, copied.to_local(), copy["optim"]["w"]["exp_avg"].to_local()]
            for tensor in tensors:
                assert tensor.device.type == "cpu" and (tensor == number).all()
                assert tensor.untyped_storage().nbytes() == tensor.nbytes
            # One piece of memory that begins with a page, so that it can be pinned at once.
            first, *others = sorted(tensors, key=torch.Tensor.data_ptr)
            assert first.data_ptr() % mmap.PAGESIZE == 0
            assert others[-1].data_ptr() - first.data_ptr() < sum(tensor.nbytes + 64 for tensor in tensors)
            addresses.add(tuple(tensor.data_ptr() for tensor in tensors))
        assert len(addresses) == 1 and len(set(*addresses)) == 3


def test_saving_beside_training_changes_no_number(lab: Any, helpers: Any) -> None:
    sections = {"train": {"duration": "10 steps"}, "checkpoint": {"every": "2 steps", "keep_last": 20}}
    config = lab.config(parallel={"shard": 1}, **sections)
    lab.train(config, ranks=2)
    lab.train(config, f"run.dir={lab.path / 'waiting'}", "checkpoint.background=false", ranks=2)
    assert helpers.losses(lab.path / "run") == helpers.losses(lab.path / "waiting")
    digests = [
        [checkpoint.manifest().state_digest for checkpoint in Store(lab.path / run / "checkpoints").scan()]
        for run in ("run", "waiting")
    ]
    assert len(set(digests[0])) == 5 and digests[0] == digests[1]


def test_ctrl_c_of_the_benchmark_leaves_nothing(lab: Any, tmp_path: Path) -> None:
    """Neither a checkpoint of many GB, nor an abort because a thread still writes one."""
    to, line = tmp_path / "to", [sys.executable, "-m", "fsdp_pretrain.bench", lab.config(model={"vocab": 200_000})]
    process = spawn([*line, "--saves", to, "--rounds", 1000, "--steps", 1, "--warmup", 1], tmp_path / "log")
    until(lambda: list(to.glob("bench-saves/*")), what=(tmp_path / "log").read_text)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130 and (tmp_path / "log").read_text() == "interrupted\n"
    assert not list(to.iterdir())


@pytest.mark.shows("D13")
def test_a_state_that_is_not_what_was_saved_is_refused(lab: Any) -> None:
    """Bytes and manifest agree, the digest of the state does not, as with damaged memory."""
    config = lab.config()
    lab.train(config, "train.duration=10 steps", "optimizer.decay=20 steps")
    path = Store(lab.path / "run/checkpoints").find(10).path / "manifest.json"
    content = json.loads(path.read_text())
    content["state_digest"] = f"{int(content['state_digest'], 16) ^ 1:016x}"
    state_files.write(path, content)
    output = lab.train(config, expect=78)
    assert "is not the state that was saved" in output and output.count("error:") == 1


def test_no_checkpoint_for_too_long_ends_the_run(lab: Any, helpers: Any, small_disk: Disk) -> None:
    disk = small_disk("300k")
    config = lab.config(
        train={"duration": "100000 steps"},
        checkpoint={"every": "2 steps", "max_failures": 10000, "max_age": "5 s", "retry": "1 s"},
    )
    output = lab.train(config, f"run.dir={disk / 'run'}", ranks=2, expect=93)
    assert "no checkpoint was verified for longer than checkpoint.max_age = 5 s" in output
    assert helpers.journal(disk / "run", "checkpoint-failed")


# ---------------------------------------------------------------------- waiting


class Hung:
    """In place of what writes checkpoints, on storage that hangs, and then fails."""

    def begin(self, state: TrainState) -> Future[SaveResult]:
        return Future()

    def save(self, state: TrainState, *, final: bool) -> SaveResult:
        raise StorageError("the storage is gone")

    def replace_writers(self) -> None:
        pass


class Phases(Heartbeat):
    def __init__(self) -> None:
        self.seen = list[Phase]()

    def beat(self, phase: Phase) -> None:
        self.seen.append(phase)


@pytest.fixture
def hung(lab: Any) -> tuple[Checkpointing, Phases]:
    """Saves that hang, waited for during a tenth of a second, on rank 0; and the phases that are reported."""
    config, phases = (
        load(lab.config(), ["parallel.timeout=0.1 s", "checkpoint.max_age=2 hours", "checkpoint.max_failures=9"]),
        Phases(),
    )
    return Checkpointing(config, SingleProcess(), Hung(), SilentRecorder(), phases, 0), phases  # type: ignore[arg-type]


def beat_of(step: int, phase: Phase, at: int) -> Beat:
    page = {"pid": 1, "started": 1, "rank": 0, "segment": 1, "beats": 0, "window": 0, "own": 0.1}
    return Beat(**page, step=step, step_at=at, phase=phase, phase_at=at, alive_at=at)


@pytest.mark.quick
def test_waiting_for_a_whole_save_has_a_deadline_of_its_own(hung: tuple[Checkpointing, Phases]) -> None:
    """Not that of steps, nor that of saves which continue in the background: both are far shorter."""
    saves, phases = hung
    saves.save(TrainState(step=1))
    assert phases.seen == [Phase.SAVE]
    saves.abandon()  # as for an error or a rollback
    assert phases.seen[-1] is Phase.WRITE
    saves.save(TrainState(step=2))  # the one before has failed, so training waits
    saves.save(TrainState(step=3), final=True)
    assert phases.seen.count(Phase.SAVE) == 1 and phases.seen[-1] is Phase.WRITE
    history = PhaseHistory(HangSection())
    for number in range(8):
        for phase, second in ((Phase.SAVE, 0), (Phase.WRITE, 3), (Phase.DATA, 4)):
            at = int(1e9) * (10 * number + second)
            history.observe(beat_of(number, phase, at), {phase})
    assert history.deadlines({Phase.SAVE}).soft < 600 < UNKNOWN_SOFT <= history.deadlines({Phase.WRITE}).soft


@pytest.mark.quick
@pytest.mark.parametrize(("later", "overdue"), [(7100, False), (7300, True)])
def test_a_pause_does_not_make_a_checkpoint_of_the_pause_younger_than_it_is(
    hung: tuple[Checkpointing, Phases], monkeypatch: pytest.MonkeyPatch, later: float, overdue: bool
) -> None:
    """A save at the end of a pause of ten hours, and `checkpoint.max_age` = 2 hours from then."""
    now = time.monotonic()
    hung[0].exclude_pause(36_000)
    monkeypatch.setattr(time, "monotonic", lambda: now + later)
    assert hung[0].signals()[2] is overdue
