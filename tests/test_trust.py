"""Checkpoints from others: what one may do to whoever opens it. See docs/trust.md."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import tomli_w
import torch
from processes import CLI, Run

from fsdp_pretrain import models
from fsdp_pretrain.checkpoint.delivery import parse_chunk, read_archive
from fsdp_pretrain.checkpoint.loading import Weights
from fsdp_pretrain.checkpoint.store import Store, describe_file
from fsdp_pretrain.checkpoint.tensors import METADATA, TENSORS, Chunk, StoredTensor, read_tensors, wrong_tensors
from fsdp_pretrain.config.config import load
from fsdp_pretrain.errors import CheckpointError
from fsdp_pretrain.run import state_files

DTYPES = get_args(StoredTensor.model_fields["dtype"].annotation)

# ---------------------------------------------------------------------- what torch.save writes is read


@pytest.mark.quick
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 7), (257, 8, 2)])
def test_every_dtype_and_shape_is_read_as_torch_reads_it(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = (10 * torch.randn(shape)).to(getattr(torch, dtype))
    content = saved(tensor)
    chunk = Chunk(first=0, rows=shape[0] if shape else 1, file="__0_0.distcp", start=0, length=len(content))
    stored = StoredTensor(dtype=dtype, shape=shape, chunks=[chunk])
    read = parse_chunk(read_archive(io.BytesIO(content), len(content)), stored, chunk)
    assert read.dtype == tensor.dtype and torch.equal(read, tensor)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("storages", "how"),
    [([8, 8], zipfile.ZIP_STORED), ([12], zipfile.ZIP_STORED), ([16], zipfile.ZIP_DEFLATED)],
)
def test_a_chunk_that_torch_did_not_write_so_is_refused(storages: list[int], how: int) -> None:
    """Two storages of the right sum, one of another size, a compressed one."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", how) as archive:
        for number, size in enumerate(storages):
            archive.writestr(f"archive/data/{number}", bytes(size))
    content = file.getvalue()
    chunk = Chunk(first=0, rows=4, file="__0_0.distcp", start=0, length=len(content))
    stored = StoredTensor(dtype="float32", shape=(4,), chunks=[chunk])
    with pytest.raises(ValueError, match=rf"has {sum(storages)} bytes where \(4,\) torch.float32 has 16"):
        parse_chunk(read_archive(io.BytesIO(content), len(content)), stored, chunk)


# ---------------------------------------------------------------------- pickles are not opened, other things refused


@pytest.fixture(scope="module")
def trained(module_lab: Any) -> Path:
    """8 steps on two ranks, saved at 4 and 8."""
    config = module_lab.config("trained", train={"duration": "8 steps"}, checkpoint={"every": "4 steps"})
    module_lab.train(config, ranks=2)
    run: Path = module_lab.path / "trained"
    return run


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be forged."""
    run = tmp_path / "copy"
    shutil.copytree(trained, run)
    return run


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """A file that exists once a payload was executed."""
    return tmp_path / "executed"


class Calls:
    """Pickled, it is a function call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def touch(marker: Path) -> Calls:
    return Calls(os.system, f"touch {marker}")


def saved(thing: Any) -> bytes:
    """What `torch.save` writes."""
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


def change_tensors(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the values of `tensors.json`, and seal it again."""
    tensors = json.loads((folder / TENSORS).read_text())["tensors"]
    change(tensors)
    state_files.write(folder / TENSORS, {"tensors": tensors})


def put(folder: Path, make: Callable[[bytes], bytes], name: str = "model.embedding.weight") -> None:
    """Replace the archives of a tensor by what `make` makes of each."""

    def place(tensors: dict[str, Any]) -> None:
        for chunk in tensors[name]["chunks"]:
            with (folder / chunk["file"]).open("r+b") as file:
                file.seek(chunk["start"])
                content = make(file.read(chunk["length"]))
                chunk |= {"start": file.seek(0, os.SEEK_END), "length": len(content)}
                file.write(content)

    change_tensors(folder, place)


def with_pickle(archive: bytes, pickled: bytes) -> bytes:
    """An archive of `torch.save` with another pickle; its values stay."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(made, "w") as new:
        for entry in old.infolist():
            new.writestr(entry.filename, pickled if entry.filename.endswith("/data.pkl") else old.read(entry))
    return made.getvalue()


def forge_pickles(folder: Path, marker: Path) -> None:
    """Whatever unpickles something of the checkpoint executes the payload; its values stay."""
    payload = pickle.dumps(touch(marker), protocol=2)
    (folder / METADATA).write_bytes(payload)
    for name in read_tensors(folder):
        put(folder, lambda archive: with_pickle(archive, payload), name)
    archive = first_archive(folder, "model.embedding.weight")
    for act in (lambda: pickle.loads(payload), lambda: torch.load(io.BytesIO(archive), weights_only=False)):
        act()
        marker.unlink()  # the payload works when unpickled


def first_archive(folder: Path, name: str) -> bytes:
    """The first archive of a tensor."""
    chunk = read_tensors(folder)[name].chunks[0]
    return (folder / chunk.file).read_bytes()[chunk.start :][: chunk.length]


def commit_again(run: Path, step: int, change: Callable[[Path], object]) -> Path:
    """Change the files of a checkpoint and correct its checksums."""
    store = Store(run / "checkpoints")
    old, attempt = store.find(step), store.begin(step)
    for entry in old.files():
        shutil.copyfile(old.path / entry.name, attempt / entry.name)
    change(attempt)
    files = [describe_file(attempt / entry.name) for entry in old.files()]
    made = store.commit(attempt, old.manifest().model_copy(update={"files": files}))
    shutil.rmtree(run / "checkpoints/abandoned")
    return made.mark_verified().path


@pytest.mark.promise("no-code")
def test_no_command_opens_a_pickle(copy: Path, marker: Path, module_lab: Any, run_command: Run) -> None:
    config = load(module_lab.path / "trained.toml")
    before = Weights(Store(copy / "checkpoints").find(8), models.build(config.model))
    wanted = {name: before[name].clone() for name in before.shapes}
    path = commit_again(copy, 8, lambda folder: forge_pickles(folder, marker))
    for command in (
        (CLI, "checkpoints", copy, "verify"),
        (CLI, "checkpoints", copy, "export", 8, copy.with_name("hf")),
        (
            "fsdp_pretrain.eval.cli",
            "run",
            path,
            "--tasks",
            "heldout_bpb",
            "--heldout",
            module_lab.heldout,
            "--limit",
            1,
        ),
    ):
        run_command(*command, expect=0)
    found = Weights(Store(copy / "checkpoints").find(8), models.build(config.model))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert not marker.exists()


def test_a_resume_opens_no_pickle(copy: Path, marker: Path, module_lab: Any, lab: Any, helpers: Any) -> None:
    commit_again(copy, 4, lambda folder: forge_pickles(folder, marker))
    shutil.rmtree(copy / "checkpoints/step-00000008")
    lab.train(module_lab.path / "trained.toml", f"run.dir={copy}", ranks=2)
    assert helpers.journal(copy, "resume")[-1]["step"] == 4
    assert helpers.losses(copy) == helpers.losses(module_lab.path / "trained") and not marker.exists()


def test_task_files_are_used_when_their_user_names_them(copy: Path, marker: Path, run_command: Run) -> None:
    """They are programs, so the configuration of a run or a checkpoint cannot choose them."""
    tasks = copy / "tasks"
    tasks.mkdir()
    (tasks / "evil.py").write_text(f"from pathlib import Path\nPath({str(marker)!r}).touch()\nload = None\n")
    (tasks / "evil.yaml").write_text("task: evil\ncustom_dataset: !function evil.load\n")
    text = f'\n[eval]\ninclude = ["{tasks}"]\ntasks = ["evil"]\n'

    def add(folder: Path) -> None:
        config = tomllib.loads((folder / "config.toml").read_text())
        del config["eval"]
        (folder / "config.toml").write_text(tomli_w.dumps(config) + text)

    path = commit_again(copy, 8, add)
    add(copy)  # the run, which the checkpoint was copied with
    assert f"--include {tasks}" in run_command("fsdp_pretrain.eval.cli", "run", path, expect=78).stderr
    assert not marker.exists()
    run_command("fsdp_pretrain.eval.cli", "run", path, "--include", tasks)
    assert marker.exists()


def change(name: str, **values: Any) -> Callable[[dict[str, Any]], None]:
    def act(tensors: dict[str, Any]) -> None:
        tensors[name] |= values

    return act


def change_chunk(**values: Any) -> Callable[[dict[str, Any]], None]:
    def act(tensors: dict[str, Any]) -> None:
        tensors["model.norm.weight"]["chunks"][0] |= values

    return act


WRONG: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no-chunk": (change("model.norm.weight", chunks=[]), r"chunks have 0 rows, the shape is \(32,\)"),
    "overlap": (change_chunk(rows=20), "a chunk begins at row 16, the one before it ends at 20"),
    "negative": (change_chunk(start=-1), "greater than or equal to 0"),
    "elsewhere": (change_chunk(file="../../other/__0_0.distcp"), "should match pattern"),
    "other-type": (change("model.norm.weight", dtype="object"), "should be 'float32'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_tensors_are_checked_field_by_field(trained: Path, tmp_path: Path, case: str) -> None:
    act, expected = WRONG[case]
    shutil.copyfile(trained / "checkpoints/step-00000008" / TENSORS, tmp_path / TENSORS)
    change_tensors(tmp_path, act)
    (wrong,) = wrong_tensors(tmp_path)
    assert wrong.startswith("tensors.json is damaged: ") and re.search(expected, wrong), wrong


@pytest.mark.parametrize("values", [{"start": 2**60}, {"length": 0}, {"start": 7}])
def test_a_chunk_that_is_not_where_it_should_be_is_told(
    copy: Path, trained: Path, module_lab: Any, values: dict[str, int]
) -> None:
    commit_again(copy, 8, lambda folder: change_tensors(folder, change_chunk(**values)))
    weights = Weights(Store(copy / "checkpoints").find(8), models.build(load(module_lab.path / "trained.toml").model))
    with pytest.raises(CheckpointError, match=r"cannot read norm\.weight of "):
        weights["norm.weight"]


@pytest.mark.parametrize("content", [b"", b"{}", b'{"tensors": 7}', b"[" * 100_000])
def test_what_describes_no_tensors_is_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / TENSORS).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tensors\.json is damaged"):
        read_tensors(tmp_path)
