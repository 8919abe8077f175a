"""Saving during training: its cost, its behaviour when space is short, and commit hooks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import records
import torch
from machines import Disk
from processes import Run
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp_pretrain.checkpoint.async_save import Stager
from fsdp_pretrain.checkpoint.disk_space import Ballast, SpaceNeeded, make_room
from fsdp_pretrain.checkpoint.store import Store
from fsdp_pretrain.config.sections import ParallelSection
from fsdp_pretrain.errors import StorageError
from fsdp_pretrain.parallel import mesh
from fsdp_pretrain.record import state_files

# ---------------------------------------------------------------------- room


@pytest.mark.quick
def test_what_is_given_up_and_in_which_order(small_disk: Disk) -> None:
    disk = small_disk("8m")
    (disk / "cheap").write_bytes(b"x" * 2_000_000)
    (disk / "dear").write_bytes(b"x" * 2_000_000)
    acts = [
        ("nothing", lambda: False),
        ("cheap", lambda: (disk / "cheap").unlink() or True),
        ("dear", lambda: (disk / "dear").unlink() or True),
    ]
    free = shutil.disk_usage(disk).free
    assert list(make_room(disk, SpaceNeeded(free, 1), acts)) == []
    assert list(make_room(disk, SpaceNeeded(free + 1_000_000, 1), acts)) == ["cheap"] and (disk / "dear").exists()
    with pytest.raises(StorageError, match=r"needs 19\.1 MiB in 1 files, .* free"):
        list(make_room(disk, SpaceNeeded(20_000_000, 1), acts[:1]))


@pytest.mark.shows("F39")
@pytest.mark.quick
def test_names_can_run_out_before_bytes(small_disk: Disk) -> None:
    """Before a save is started."""
    disk = small_disk("8m,nr_inodes=12")
    assert list(make_room(disk, SpaceNeeded(1000, 5), [])) == []
    for n in range(9):
        (disk / str(n)).touch()
    with pytest.raises(StorageError, match=r"in 5 files, .* room for"):
        list(make_room(disk, SpaceNeeded(1000, 5), []))


@pytest.mark.shows("F36")
@pytest.mark.quick
def test_ballast_is_small_and_only_of_what_is_to_spare(small_disk: Disk) -> None:
    """The size of the ballast."""
    disk = small_disk("8m")
    ballast = Ballast(disk)
    ballast.take(1_000_000)
    assert ballast.path.stat().st_size == 100_000 and ballast.path.stat().st_blocks * 512 >= 100_000
    assert ballast.release() and not ballast.release()
    ballast.take(100_000_000)
    assert not ballast.path.exists()


@pytest.mark.shows("D21")
@pytest.mark.quick
def test_pinned_checkpoints_stay(tmp_path: Path, run_command: Run) -> None:
    store = Store(tmp_path / "checkpoints")
    (tmp_path / "segments").mkdir()
    for step in (1, 2, 3, 4, 5):
        records.commit(store, step)
    pinned = run_command("fsdp_pretrain.cli", "checkpoints", tmp_path, "pin", 2, "--json")
    assert [row["pinned"] for row in json.loads(pinned.stdout)] == [True]
    assert [checkpoint.step for checkpoint in store.retain(2, lambda _: False)] == [1, 3]
    assert run_command("fsdp_pretrain.cli", "checkpoints", tmp_path, "unpin", 2).returncode == 0
    assert [checkpoint.step for checkpoint in store.retain(2, lambda _: False)] == [2]


@pytest.mark.shows("C3", "F1")
def test_old_checkpoints_go_before_a_save_fails(lab: Any, helpers: Any, small_disk: Disk) -> None:
    """keep_last = 50 does not fit: with pruning the run completes with fewer, without it stops with 93."""
    config = lab.config(
        train={"duration": "60 steps", "micro_batch": 8},
        checkpoint={"every": "3 steps", "keep_last": 50, "max_failures": 2, "retry": "0.1 s"},
    )
    disk, other = small_disk("6m"), small_disk("6m")
    lab.train(config, f"run.dir={disk / 'run'}")
    rooms = helpers.journal(disk / "run", "checkpoint-room")
    assert rooms and all("two newest" in entry["text"] for entry in rooms)
    assert not helpers.journal(disk / "run", "checkpoint-failed")
    output = lab.train(config, f"run.dir={other / 'run'}", "checkpoint.prune=false", expect=93)
    assert "2 saves in a row failed" in output and "needs" in output
    kept = Store(other / "run/checkpoints").scan()
    assert len(kept) > 5 and all(checkpoint.verified for checkpoint in kept)
    assert helpers.losses(disk / "run")[: len(helpers.losses(other / "run"))] == helpers.losses(other / "run")
    lab.train(config, f"run.dir={other / 'run'}")  # the newest of them loads, and pruning makes room
    assert helpers.journal(other / "run", "resume")[-1]["step"] == kept[-1].step
    assert helpers.losses(disk / "run") == helpers.losses(other / "run")


@pytest.mark.shows("F21")
def test_other_storage_takes_over(lab: Any, helpers: Any, small_disk: Disk) -> None:
    """The run directory cannot hold a checkpoint: they go to the fallback, and a resume finds them there."""
    disk = small_disk("400k")
    config = lab.config(
        train={"duration": "20 steps"},
        checkpoint={"every": "5 steps", "fallback_dir": str(lab.path / "other"), "ballast": False},
    )
    lab.train(config, f"run.dir={disk / 'run'}", "train.duration=10 steps", "optimizer.decay=20 steps", ranks=2)
    (other,) = (lab.path / "other").iterdir()
    assert other.name.startswith("run-") and [c.step for c in Store(other).scan()] == [5, 10]
    assert len(helpers.journal(disk / "run", "checkpoint-fallback")) == 2
    lab.train(config, f"run.dir={disk / 'run'}", ranks=2)
    assert helpers.journal(disk / "run", "resume")[-1]["step"] == 10
    lab.train(config, f"run.dir={lab.path / 'whole'}", ranks=2)
    assert helpers.losses(disk / "run") == helpers.losses(lab.path / "whole")


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
            addresses.add(tuple(tensor.data_ptr() for tensor in tensors))
        assert len(addresses) == 1 and len(set(*addresses)) == 3


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 4))])
def test_saving_beside_training_changes_no_number(lab: Any, helpers: Any, ranks: int) -> None:
    config = lab.config(checkpoint={"every": "2 steps", "keep_last": 20}, parallel={"shard": max(1, ranks // 2)})
    lab.train(config, ranks=ranks)
    lab.train(config, f"run.dir={lab.path / 'waiting'}", "checkpoint.background=false", ranks=ranks)
    assert helpers.losses(lab.path / "run") == helpers.losses(lab.path / "waiting")
    digests = [
        [checkpoint.manifest().state_digest for checkpoint in Store(lab.path / run / "checkpoints").scan()]
        for run in ("run", "waiting")
    ]
    assert len(set(digests[0])) == 10 and digests[0] == digests[1]
    lab.train(config, f"run.dir={lab.path / 'alone'}", "checkpoint.every=20 steps", "parallel.shard=1")
    assert len(Store(lab.path / "alone/checkpoints").newest().manifest().state_digest) == 16  # type: ignore[union-attr]


@pytest.mark.shows("D13")
def test_a_state_that_is_not_what_was_saved_is_refused(lab: Any, helpers: Any) -> None:
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


# ---------------------------------------------------------------------- on_commit


@pytest.mark.shows("D21")
def test_a_command_for_every_checkpoint(lab: Any, helpers: Any) -> None:
    copies = lab.path / "my copies"
    copies.mkdir()
    config = lab.config(
        train={"duration": "10 steps"},
        checkpoint={"every": "5 steps", "on_commit": f"cp -r \"$1\" '{copies}'/ && echo $2 >> '{copies}/list'"},
    )
    lab.train(config)
    helpers.wait_for(
        lambda: (copies / "list").exists() and (copies / "list").read_text().split() == ["5", "10"], what="the copies"
    )
    assert (copies / "step-00000010/manifest.json").read_text()


def test_a_path_is_never_a_command(lab: Any, helpers: Any) -> None:
    """Whatever it contains: it is a parameter. Where an older configuration makes it text, such a path is refused."""
    out, marker, path = (
        lab.path / "out",
        lab.path / "executed",
        lab.path / 'it\'s a "run" $(touch executed);`touch executed`',
    )
    config = lab.config(
        train={"duration": "4 steps"},
        checkpoint={
            "every": "4 steps",
            "on_commit": f'cd {lab.path} && printf "%s\\n" "$1" $2 "$CHECKPOINT_PATH" $CHECKPOINT_STEP > part && mv part out',
        },
    )
    lab.train(config, f"run.dir={path}")
    helpers.wait_for(out.exists, what="the command")
    assert out.read_text().splitlines() == [str(path / "checkpoints/step-00000004"), "4"] * 2
    assert not marker.exists() and not Path("/executed").exists()


@pytest.mark.shows("B18")
def test_a_command_that_hangs_or_fails_harms_nothing(lab: Any, helpers: Any) -> None:
    """Hanging ones keep their checkpoints and do not pile up; failing ones are lines in the journal."""
    config = lab.config(
        train={"duration": "40 steps", "micro_batch": 8},
        checkpoint={
            "every": "2 steps",
            "keep_last": 2,
            "on_commit": f"echo $2 >&2; [ $2 -gt 8 ] || while [ ! -e {lab.path / 'end'} ]; do sleep 0.1; done; false",
        },
    )
    lab.train(config)
    (lab.path / "end").touch()
    lab.train(config, f"run.dir={lab.path / 'plain'}", 'checkpoint.on_commit="true"')
    assert helpers.losses(lab.path / "run") == helpers.losses(lab.path / "plain")
    texts = [entry["text"] for entry in helpers.journal(lab.path / "run", "on-commit-failed")]
    assert any("4 earlier ones still run" in text for text in texts)
    assert [c.step for c in Store(lab.path / "run/checkpoints").scan()] == [2, 4, 6, 8, 38, 40]
    lab.train(config, f"run.dir={lab.path / 'failing'}", "checkpoint.on_commit=exit 3")
    texts = [entry["text"] for entry in helpers.journal(lab.path / "failing", "on-commit-failed")]
    assert any("exit 3" in text for text in texts)
