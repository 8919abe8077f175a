"""Checkpoints from others: what one may do to whoever opens it. See docs/trust.md."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
import torch.distributed.checkpoint as dcp
from processes import CLI, Run
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from fsdp_pretrain.checkpoint.metadata import DTYPES, NAMES, read_metadata, wrong_metadata
from fsdp_pretrain.checkpoint.store import Store, describe_file
from fsdp_pretrain.checkpoint.weights_import import import_checkpoint
from fsdp_pretrain.config.config import load
from fsdp_pretrain.errors import CheckpointError
from fsdp_pretrain.record.files import RunDir

_DCP = "torch.distributed.checkpoint"

# ---------------------------------------------------------------------- what DCP writes is read


def test_the_names_that_a_metadata_may_hold() -> None:
    """Any untrusted file can use a name that is added here: it must be harmless in any combination."""
    assert NAMES - {f"torch.{dtype}" for dtype in DTYPES} == {
        *("pathlib.PosixPath", "pathlib._local.PosixPath", "torch.Size", "torch.serialization._get_layout"),
        *(f"{_DCP}.metadata.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
        *(f"{_DCP}.metadata.{name}" for name in ("TensorStorageMetadata", "ChunkStorageMetadata")),
        *(f"{_DCP}.metadata._MEM_FORMAT_ENCODING", f"{_DCP}.filesystem._StorageInfo"),
    }


@pytest.mark.filterwarnings("ignore")
def test_every_dtype_and_shape_is_read_as_dcp_reads_it(tmp_path: Path) -> None:
    tensors = {dtype: torch.ones(3, 5, dtype=getattr(torch, dtype)) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(1.0), "empty": torch.ones(0, 7)}
    dcp.save(tensors, checkpoint_id=tmp_path, no_dist=True)
    ours, theirs = read_metadata(tmp_path), FileSystemReader(tmp_path).read_metadata()
    assert ours.keys() == theirs.state_dict_metadata.keys() == tensors.keys()
    for name, tensor in ours.items():
        wanted = theirs.state_dict_metadata[name]
        assert (tensor.shape, f"torch.{tensor.dtype}") == (wanted.size, str(wanted.properties.dtype))
        assert [(chunk.offsets, chunk.sizes) for chunk in tensor.chunks] == [
            (chunk.offsets, chunk.sizes) for chunk in wanted.chunks
        ]
        for chunk in tensor.chunks:
            place = theirs.storage_data[MetadataIndex(name, chunk.offsets)]
            assert (chunk.file, chunk.start, chunk.length) == (place.relative_path, place.offset, place.length)


# ---------------------------------------------------------------------- what DCP does not write is refused


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


def dotted(module: str, name: str, argument: str) -> bytes:
    """A pickle that calls an attribute path of a module: `STACK_GLOBAL` follows the dots of a name."""
    first, second, third = (b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name, argument))
    return b"\x80\x04" + first + second + b"\x93" + third + b"\x85R."


def in_a_field(folder: Path, marker: Path) -> bytes:
    """A whole metadata, with a call in an unread field."""
    metadata = FileSystemReader(folder).read_metadata()
    metadata.storage_meta.modules = [touch(marker)]
    return pickle.dumps(metadata)


def moved(folder: Path, content: bytes, entry: Any = None, name: str = "model.embedding.weight") -> bytes:
    """A metadata in which a tensor is `content`, appended to a file."""
    metadata = FileSystemReader(folder).read_metadata()
    metadata.state_dict_metadata[name] = entry or metadata.state_dict_metadata[name]
    place = _StorageInfo("__0_0.distcp", (folder / "__0_0.distcp").stat().st_size, len(content))
    offsets = [None] if entry else [chunk.offsets for chunk in metadata.state_dict_metadata[name].chunks]
    metadata.storage_data |= {MetadataIndex(name, offset): place for offset in offsets}
    with (folder / "__0_0.distcp").open("ab") as file:
        file.write(content)
    return pickle.dumps(metadata)


def saved(thing: Any) -> bytes:
    """What `torch.save` writes."""
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


# How a forged step directory could run a program: (its new .metadata, the expected report).
FORGED: dict[str, tuple[Callable[[Path, Path], bytes], str]] = {
    "call": (lambda _, marker: pickle.dumps(touch(marker)), "names 'posix.system'"),
    "dotted-name": (
        lambda _, marker: dotted("torch.serialization", "os.system", f"touch {marker}"),
        "names 'torch.serialization.os.system'",
    ),
    "pickle-in-pickle": (
        lambda _, marker: pickle.dumps(Calls(torch.storage._load_from_bytes, saved(touch(marker)))),
        "names 'torch.storage._load_from_bytes'",
    ),
    "unread-field": (in_a_field, "names 'posix.system'"),
    "object-entry": (
        lambda folder, marker: moved(folder, saved(touch(marker)), BytesStorageMetadata()),
        "names 'torch.distributed.checkpoint.metadata.BytesStorageMetadata'",
    ),
    "tensor-entry": (lambda folder, marker: moved(folder, saved(touch(marker))), "UnpicklingError: "),
}


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


def forge(run: Path, step: int, name: str, marker: Path) -> Path:
    """Turn the checkpoint of a step into one of `FORGED`."""
    return commit_again(run, step, lambda path: (path / ".metadata").write_bytes(FORGED[name][0](path, marker)))


@pytest.mark.parametrize("name", [name for name in FORGED if name != "tensor-entry"])
def test_a_forged_metadata_is_known_by_a_name(trained: Path, tmp_path: Path, marker: Path, name: str) -> None:
    folder = tmp_path / "step"
    shutil.copytree(trained / "checkpoints/step-00000008", folder)
    make, expected = FORGED[name]
    (folder / ".metadata").write_bytes(make(folder, marker))
    (wrong,) = wrong_metadata(folder)
    assert expected in wrong and not marker.exists()


SLOW = {"dotted-name", "pickle-in-pickle", "unread-field"}  # refused like "call"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in FORGED]
)
@pytest.mark.promise("no-code")
def test_no_command_runs_what_a_checkpoint_says(
    copy: Path, marker: Path, module_lab: Any, run_command: Run, name: str
) -> None:
    whole = (copy / "checkpoints/step-00000008/__0_0.distcp").stat().st_size
    path, expected = forge(copy, 8, name, marker), FORGED[name][1]
    pickle.loads((path / ".metadata").read_bytes())
    if name.endswith("-entry"):
        torch.load(io.BytesIO((path / "__0_0.distcp").read_bytes()[whole:]), weights_only=False)
    marker.unlink()  # the payload works when unpickled

    verified = run_command(CLI, "checkpoints", copy, "verify", "--json")
    problems = {row["step"]: row["problem"] for row in json.loads(verified.stdout)}
    if name != "tensor-entry":  # found when it is read
        assert verified.returncode == 2 and expected in problems[8] and not problems[4]
    new = copy.with_name("new")
    for command in (
        (CLI, "checkpoints", copy, "export", 8, copy.with_name("hf")),
        (CLI, "checkpoints", new, "import", path, "--config", module_lab.path / "trained.toml", f"run.dir={new}"),
        ("eval.cli", "run", path, "--tasks", "heldout_bpb", "--heldout", module_lab.heldout, "--limit", 1),
    ):
        done = run_command(*command)
        assert done.returncode == 78, done.stderr
        assert done.stderr.count("error:") == 1 and "Traceback" not in done.stderr
        assert expected in done.stderr
    assert not marker.exists() and not new.exists() and not copy.with_name("hf").exists()


@pytest.mark.parametrize("name", ["unread-field", "tensor-entry"])
def test_a_resume_passes_over_what_is_forged(
    copy: Path, marker: Path, module_lab: Any, lab: Any, helpers: Any, name: str
) -> None:
    """On all ranks: in the metadata it is found before anything is loaded, in a tensor after some of it is."""
    forge(copy, 8, name, marker)
    output = lab.train(module_lab.path / "trained.toml", f"run.dir={copy}", ranks=2)
    assert "passed over step-00000008: " in output and FORGED[name][1] in output
    assert helpers.journal(copy, "resume")[-1]["step"] == 4
    assert helpers.losses(copy) == helpers.losses(module_lab.path / "trained")
    assert not marker.exists()


@pytest.mark.slow
def test_moments_of_what_is_passed_over_do_not_stay(
    copy: Path, marker: Path, module_lab: Any, lab: Any, helpers: Any
) -> None:
    """The optimiser was filled when a last tensor could not be read; the checkpoint before it has only weights."""
    new, path = copy.with_name("new"), module_lab.path / "trained.toml"
    changed = (f"run.dir={new}", "train.duration=4 steps", "optimizer.decay=8 steps")
    import_checkpoint(RunDir(new), copy / "checkpoints/step-00000008", load(path, changed))
    lab.train(path, *changed)
    before = helpers.losses(new)
    last = list(read_metadata(new / "checkpoints/step-00000004"))[-1]
    assert last.startswith("optim.")
    content = saved(touch(marker))
    commit_again(new, 4, lambda to: (to / ".metadata").write_bytes(moved(to, content, name=last)))
    output = lab.train(path, *changed)
    assert "passed over step-00000004: " in output and helpers.journal(new, "resume")[-1]["step"] == 0
    assert helpers.losses(new) == before and not marker.exists()


def test_nothing_but_forged_checkpoints_needs_a_person(copy: Path, marker: Path, module_lab: Any, lab: Any) -> None:
    for step in (4, 8):
        forge(copy, step, "call", marker)
    output = lab.train(module_lab.path / "trained.toml", f"run.dir={copy}", ranks=2, expect=93)
    assert "none of them valid" in output and "or pass --allow-fresh" in output and output.count("error:") == 1
    assert "Traceback" not in output and not marker.exists()


@pytest.mark.slow
def test_a_fresh_start_after_parts_were_loaded_has_the_initial_values(
    copy: Path, marker: Path, module_lab: Any, lab: Any, helpers: Any
) -> None:
    path = module_lab.path / "trained.toml"
    for step in (4, 8):
        forge(copy, step, "tensor-entry", marker)
    lab.train(path, f"run.dir={copy}", ranks=2, flags=("--allow-fresh",))
    assert helpers.losses(copy) == helpers.losses(module_lab.path / "trained") and not marker.exists()


def test_a_metadata_changes_nothing_of_torch(trained: Path, tmp_path: Path) -> None:
    """`BUILD` sets attributes of whatever is on the stack, also of a class; the rest of the file is whole."""
    whole = (trained / "checkpoints/step-00000008/.metadata").read_bytes()
    owner = pickle.dumps(Metadata, protocol=4)[2:-1].replace(b"\x94", b"")
    owner = owner[9:] if owner[:1] == b"\x95" else owner  # without its frame
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + owner + b"N}\x8c\x06spoilt\x88s\x86b0" + whole)
    try:
        assert wrong_metadata(tmp_path)
        assert not hasattr(Metadata, "spoilt")
    finally:
        if hasattr(Metadata, "spoilt"):
            del Metadata.spoilt


def test_task_files_are_used_when_their_user_names_them(copy: Path, marker: Path, run_command: Run) -> None:
    """They are programs, so the configuration of a checkpoint cannot choose them."""
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
    done = run_command("eval.cli", "run", path)
    assert done.returncode == 78 and f"--include {tasks}" in done.stderr, done.stderr
    assert not marker.exists()
    run_command("eval.cli", "run", path, "--include", tasks)
    assert marker.exists()


def change_size(size: Any) -> Callable[[Any], None]:
    def act(metadata: Any) -> None:
        metadata.state_dict_metadata["model.norm.weight"].size = size

    return act


def drop_a_place(metadata: Any) -> None:
    del metadata.storage_data[next(index for index in metadata.storage_data if "exp_avg" in index.fqn)]


def set_place(**values: Any) -> Callable[[Any], None]:
    def act(metadata: Any) -> None:
        for place in metadata.storage_data.values():
            vars(place).update(values)

    return act


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no-place": (drop_a_place, r"lists 1 chunks that are in no file, the first of optim\."),
    "other-size": (change_size(torch.Size([64])), "has chunks of 32 elements for model.norm.weight, which has 64"),
    "small": (change_size(torch.Size([16])), "has a chunk outside model.norm.weight"),
    "enormous": (change_size((2**60,)), "negative, enormous or no number"),
    "text": (change_size("32"), "has a size that is not a short tuple"),
    "elsewhere": (set_place(relative_path="../../other/__0_0.distcp"), "where DCP puts none"),
    "negative": (set_place(offset=-1), "negative, enormous or no number"),
    "no-tensors": (lambda metadata: setattr(metadata, "state_dict_metadata", 7), "is damaged"),
    "other-object": (lambda metadata: setattr(metadata, "storage_data", {1: 2}), "has a int where"),
}


@pytest.mark.parametrize("case", WRONG)
def test_metadata_is_checked_field_by_field(trained: Path, tmp_path: Path, case: str) -> None:
    change, expected = WRONG[case]
    metadata = FileSystemReader(trained / "checkpoints/step-00000008").read_metadata()
    change(metadata)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    (wrong,) = wrong_metadata(tmp_path)
    assert re.search(expected, wrong), wrong


@pytest.mark.parametrize("content", [b"", b"x", b"\x80\x04.", b"\x80\xff", b"\x80\x04N.", b"\x80\x04]\x94h\x00a."])
def test_what_is_no_metadata_is_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata (is damaged|has a)"):
        read_metadata(tmp_path)
