"""What a resume accepts and refuses: three classes of changes, partial loads."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
import torch.distributed.checkpoint as dcp
from laboratory import moved, tiny
from processes import CLI, Run
from torch.distributed.checkpoint.filesystem import FileSystemReader

from fsdp_pretrain import models
from fsdp_pretrain.checkpoint.loading import Weights
from fsdp_pretrain.checkpoint.state import forbidden, identity
from fsdp_pretrain.checkpoint.store import Store
from fsdp_pretrain.checkpoint.witness import code_identity
from fsdp_pretrain.config.config import load, schema_keys
from fsdp_pretrain.config.resume_rules import (
    CLASSES,
    DECLARED,
    FORBIDDEN,
    FREE,
    changes,
    class_of,
    read_allowed,
    undeclared,
)
from fsdp_pretrain.data.packing.opening import open_packer
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.run.files import RunDir


@pytest.fixture(scope="module")
def trained(module_lab: Any) -> Path:
    """24 steps of 8 samples on one rank, saved every 6."""
    config = module_lab.config(
        "trained",
        train={"duration": "24 steps"},
        checkpoint={"every": "6 steps", "keep_last": 4},
        eval={"every": "6 steps", "launch": False, "heldout": str(module_lab.heldout)},
    )
    module_lab.train(config)
    run: Path = module_lab.path / "trained"
    return run


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> tuple[Path, Path]:
    """(configuration, run directory) of the run as if trained in another place, for changes."""
    run = moved(trained, tmp_path / "copy")
    return Path(shutil.copyfile(run / "config.toml", tmp_path / "run.toml")), run


# ---------------------------------------------------------------- what may change


@pytest.mark.quick
def test_every_key_is_in_a_class_and_forbidden_is_what_identity_compares(trained_config: Path) -> None:
    sections = {key for key in schema_keys() if "." not in key}
    assert {class_of(key) for key in schema_keys() if key not in sections - set(CLASSES)} == {FREE, DECLARED, FORBIDDEN}
    assert set(CLASSES) <= set(schema_keys())
    config = load(trained_config)
    compared = identity(config, open_packer(config)).model_dump()
    for key in (key for key, kind in CLASSES.items() if kind == FORBIDDEN):
        node: Any = compared
        for part in key.split("."):
            assert part in node, key
            node = node[part]


@pytest.mark.shows("A16")
@pytest.mark.quick
@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        # longer: free with the curve as it was, else the curve is what changes
        (["optimizer.decay=20 steps"], ["train.duration=60 steps", "optimizer.decay=20 steps"], {}),
        ([], ["train.duration=60 steps", "optimizer.decay=160 samples"], {}),
        (["optimizer.curve=constant"], ["optimizer.curve=constant", "train.duration=60 steps"], {}),
        ([], ["train.duration=60 steps"], {"optimizer.decay": "20 steps -> 60 steps, the end of the run"}),
        ([], ["train.duration=160 samples"], {}),
        ([], ["train.duration=12 steps", "optimizer.decay=20 steps"], {"train.duration": "20 steps -> 12 steps"}),
        # what is counted in steps moves with the batch, though its text is what it was
        (
            [],
            ["train.global_batch=16 samples"],
            {
                "train.global_batch": '"8 samples" -> "16 samples"',
                "optimizer.warmup": "4 steps: 32 -> 64 samples",
                "optimizer.decay": "20 steps: 160 -> 320 samples, the end of the run",
            },
        ),
        (
            ["optimizer.decay=20 steps"],
            ["train.global_batch=16 samples", "optimizer.warmup=32 samples", "optimizer.decay=160 samples"],
            {"train.global_batch": '"8 samples" -> "16 samples"'},
        ),
        ([], ["train.micro_batch=4", "parallel.compile=true", "checkpoint.every=2 steps", "eval.limit=3"], {}),
        ([], ["optimizer.betas=[0.9, 0.99]"], {"optimizer.betas": "[0.9, 0.95] -> [0.9, 0.99]"}),
        ([], ["train.loss_scale.first=8"], {"train.loss_scale.first": "65536.0 -> 8.0"}),
        (
            [],
            ['data.sources=[{name="web",path="/w"},{name="text",path="/t",weight=2}]'],
            {"data.sources": '{"name": "web"', "data.sources.weight": "data.sources.text.weight: 1.0 -> 2.0"},
        ),
        (
            [],
            ['train.batch_ramp={first="2 samples",by="2 samples",duration="100 samples"}'],
            {
                "train.batch_ramp": "absent",
                "train.duration": "20 steps: 160 -> 46 samples",
                "optimizer.warmup": "4 steps: 32 -> 8 samples",
                "optimizer.decay": "20 steps: 160 -> 46 samples, the end of the run",
            },
        ),
    ],
)
@pytest.mark.promise("data-changes")
def test_what_must_be_declared(
    trained_config: Path, before: list[str], after: list[str], expected: dict[str, str]
) -> None:
    found = undeclared(changes(load(trained_config, before), load(trained_config, after)), ())
    assert {change.key for change in found} == set(expected)
    assert all(expected[change.key] in change.text for change in found)
    assert not undeclared(found, {key.split(".")[0] for key in expected})  # a table allows its keys


STEPPED = (
    "optimizer.curve=wsd", "optimizer.decay_length=5 steps",
    "timeline=[{at='10 steps',optimizer={weight_decay=0.5}},{at='12 steps',train={z_loss={to=1e-3,over='4 steps'}}}]",
)  # fmt: skip
"""With a batch of 8, then 16: a warm-up to 32 or 64 samples; entries at 80 or 160, and 96 to 128 or 192 to 256; a decay
from 120 to 160, or from 240 to 320."""


@pytest.mark.quick
@pytest.mark.parametrize(
    ("consumed", "expected"),
    [
        (40, "optimizer.warmup optimizer.decay_length"),
        (64, "optimizer.decay_length"),
        (80, "optimizer.decay_length"),  # where the run is: the next step is the first of the entry
        (88, "optimizer.decay_length timeline"),
        (128, "optimizer.decay optimizer.decay_length timeline"),
        (248, "optimizer.decay optimizer.decay_length timeline"),
        (256, "optimizer.decay optimizer.decay_length"),
        (320, ""),
    ],
)
def test_what_moves_with_the_batch_is_declared_unless_ahead_or_past(
    trained_config: Path, consumed: int, expected: str
) -> None:
    old = load(trained_config, STEPPED)
    new = load(trained_config, [*STEPPED, "train.global_batch=16 samples"])
    found = undeclared(changes(old, new), {"train.global_batch"}, consumed)
    assert {change.key for change in found} == {*expected.split()}


@pytest.fixture
def trained_config(tmp_path: Path, shared_corpus: Path) -> Path:
    """A configuration of 20 steps of 8 samples, not trained."""
    path = tmp_path / "plain.toml"
    path.write_text(tomli_w.dumps(tiny("plain", tmp_path / "plain", shared_corpus / "corpus")))
    return path


@pytest.mark.quick
@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.hidden=48", "model.hidden: 32 -> 48"),
        ("data.seed=9", "data.seed: 1234 -> 9"),
        ("data.lanes=9", "data.lanes: "),
        ("data.attention=document", 'data.attention: "causal" -> "document"'),
        ("data.loss_across_documents=false", "data.loss_across_documents: true -> false"),
        ("data.sources.0.name=other", "data.sources.other"),
    ],
)
def test_what_no_resume_may_change(trained_config: Path, override: str, expected: str) -> None:
    """Found when a start compares itself with the checkpoint after ten steps of eight samples."""
    saved, now = (
        identity(config, open_packer(config)) for config in (load(trained_config), load(trained_config, [override]))
    )
    assert not forbidden(saved, saved, 80)
    assert any(text.startswith(expected) for text in forbidden(saved, now, 80))


@pytest.mark.quick
def test_other_settings_are_no_other_code(trained_config: Path) -> None:
    config, other = load(trained_config), load(trained_config, ["model.norm_eps=1e-3"])
    saved, now = (identity(each, open_packer(each), code_identity(each)) for each in (config, other))
    assert forbidden(saved, now, 80) == ["model.norm_eps: 1e-05 -> 0.001"]
    patched = {key: part.model_copy(update={"witness": [2.0]}) for key, part in saved.code.items()}
    assert "the code of llama" in forbidden(saved, saved.model_copy(update={"code": patched}), 80)[0]


@pytest.mark.shows("A33")
@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("optimizer.lrr", "did you mean 'optimizer.lr'?"),
        ("model", "no resume may change this"),
        ("model.hidden", "no resume may change this"),
        ("data.objective.row", "no resume may change this"),
    ],
)
def test_what_cannot_be_allowed(name: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        read_allowed([name, "optimizer", "train.batch_ramp.by", "data", "parallel.shard"])


@pytest.mark.shows("B23", "F46")
def test_all_refusals_are_one_report_and_its_line_is_what_to_add(
    lab: Any, copy: tuple[Path, Path], helpers: Any, gates: Any
) -> None:
    """Changes that a resume cannot accept are refused."""
    config, run = copy
    changed = ("optimizer.lr=5e-3", "train.duration=30 steps", "train.z_loss=1e-4", "parallel.shard=1")
    output = lab.train(config, *changed, "model.ffn=96", ranks=2, expect=78)
    assert output.count("error:") == 1 and "Traceback" not in output
    for text in ("model.ffn: 64 -> 96", "optimizer.lr: 0.01 -> 0.005", "train.z_loss: 0.0 -> 0.0001"):
        assert text in output
    assert "optimizer.decay: 24 steps -> 30 steps" in output and 'optimizer.decay="24 steps" keeps the curve' in output
    assert "parallel.shard" not in output and "train.duration:" not in output
    output = lab.train(config, *changed, ranks=2, expect=78)
    line = next(line for line in output.splitlines() if "if it is meant" in line)
    flags = tuple(line.partition("add:")[2].split())
    assert flags == ("--allow", "train.z_loss", "--allow", "optimizer.lr", "--allow", "optimizer.decay")
    assert helpers.metrics(run)[-1]["step"] == 24
    gates(28)
    job = lab.start(config, *changed, ranks=2, flags=flags)
    helpers.wait_for(lambda: helpers.metrics(run)[-1]["step"] >= 25, what="a step")
    job.kill()
    job.wait()
    gates()
    lab.train(config, *changed, ranks=2)  # declaring it once is enough, also if the start made no checkpoint
    first, last = helpers.journal(run, "resume")
    assert len(first["declared"]) == 3 and not last["declared"] and last["changed"] == first["changed"]
    assert "optimizer.lr: 0.01 -> 0.005" in first["text"] and helpers.metrics(run)[-1]["step"] == 30
    lab.train(config, "train.duration=30 steps", ranks=2, expect=78)  # nor does it go back by itself


@pytest.mark.parametrize(
    ("table", "code"), [("[watchdog.colour]\nred = 1", 0), ("[future]\nkey = 3", 78), ("[model.mixer]\nkind = 1", 78)]
)
def test_keys_of_another_version(lab: Any, copy: tuple[Path, Path], run_command: Run, table: str, code: int) -> None:
    """In the record of a start: free ones are left out; keys that could affect training are not dropped silently."""
    config, run = copy
    shutil.rmtree(run / "checkpoints/step-00000024")
    (run / "segments/0001/config.toml").open("a").write(f"\n{table}\n")
    key = table.replace("[", "").replace("]\n", ".").replace(" = ", ": ")
    output = lab.train(config, expect=code)
    if code:
        assert f"segments/0001/config.toml has keys that this version does not know:\n    {key.split('.')[0]}" in output
        assert "environment.json of the segment" in output and "Traceback" not in output
    run_command(CLI, "where", run, "--step", 3, expect=code)


# ---------------------------------------------------------------- what comes back


@pytest.mark.shows("D6")
def test_the_load_is_reported(lab: Any, copy: tuple[Path, Path], helpers: Any) -> None:
    config, run = copy
    shutil.rmtree(run / "checkpoints/step-00000024")
    output = lab.train(config, "parallel.shard=1", ranks=2)
    (entry,) = helpers.journal(run, "resume")
    assert "restored: model, optimiser, data position (sample 144)" in entry["text"] and entry["text"] in output
    assert "written by 1 x 1 ranks, read by 2 x 1 ranks" in entry["text"]
    saved = Store(RunDir(run).checkpoints).find(18).manifest().state_digest
    assert entry["state_digest"] == saved and f"state digest {saved} as saved" in entry["text"]


@pytest.mark.shows("D7", "D8")
def test_the_optimiser_begins_anew_where_it_is_asked_to_and_nowhere_else(
    lab: Any, copy: tuple[Path, Path], helpers: Any
) -> None:
    config, run = copy
    before = helpers.metrics(run)
    output = lab.train(config, flags=("--reset-optimizer", "25"), expect=78)
    assert "the newest valid checkpoint is of step 24" in output
    shutil.rmtree(run / "checkpoints/step-00000024")
    lab.train(config, flags=("--reset-optimizer", "18"))
    (entry,) = helpers.journal(run, "resume")
    assert not entry["optimizer"] and "the optimiser starts fresh (--reset-optimizer)" in entry["text"]
    after = helpers.metrics(run)
    assert after[18]["loss"] == before[18]["loss"] and after[19]["loss"] != before[19]["loss"]
    assert [r["data_digest"] for r in after] == [r["data_digest"] for r in before]
    assert [r["lr"] for r in after] == [r["lr"] for r in before]
    moments = FileSystemReader(run / "checkpoints/step-00000024").read_metadata().state_dict_metadata
    name = "optim.norm.weight.step"
    step = {name: torch.zeros(())}
    assert name in moments
    dcp.load(step, storage_reader=FileSystemReader(run / "checkpoints/step-00000024"), no_dist=True)
    assert step[name] == 6  # steps of the new optimiser
    lab.train(config, "train.duration=26 steps", "optimizer.decay=24 steps", flags=("--reset-optimizer", "18"))
    assert helpers.journal(run, "resume")[-1]["optimizer"]


def test_what_a_start_with_a_fresh_optimiser_recorded_is_expected_of_no_other(
    lab: Any, copy: tuple[Path, Path], helpers: Any
) -> None:
    config, run = copy
    before = helpers.losses(run)
    for flags in (("--reset-optimizer", "18"), ()):
        shutil.rmtree(run / "checkpoints/step-00000024")
        lab.train(config, flags=flags)
        assert (helpers.losses(run) == before) is (not flags)


# ---------------------------------------------------------------- weights alone


def test_a_run_begins_with_the_weights_of_another(
    lab: Any, copy: tuple[Path, Path], helpers: Any, run_command: Run
) -> None:
    """Into a model with more rows; the schedule may still be chosen, since nothing was learned yet."""
    config, run = copy
    new = run.with_name("new")
    changed = [f"run.dir={new}", "model.vocab_multiple=600", "optimizer.lr=1e-3", "train.duration=4 steps"]
    changed += ["optimizer.decay=24 steps", "optimizer.min_lr=0"]
    source = run.with_name("exported")
    run_command(CLI, "checkpoints", run, "export", 18, source, "--dtype", "fp32", expect=0)
    done = run_command(
        CLI, "checkpoints", new, "import", source, "--config", config, *changed, "--json", timeout=300, expect=0
    )
    assert json.loads(done.stdout)["padded_rows"] == 88
    (new / "checkpoints").rename(new / "kept")
    assert "a checkpoint of step 0 was saved, and there is none" in lab.train(config, *changed[:-1], expect=93)
    (new / "kept").rename(new / "checkpoints")
    lab.train(config, *changed[:-1])
    (entry,) = helpers.journal(new, "resume")
    assert entry["step"] == 0 and not entry["optimizer"] and "the optimiser starts fresh" in entry["text"]
    first, model = helpers.metrics(new)[0], models.build(load(config, ["model.vocab_multiple=600"]).model)
    assert first["cursor"] == 8 and first["lr"] == 1e-3 / 4
    assert Store(RunDir(new).checkpoints).find(0).manifest().imported
    weights, imported = (
        Weights(checkpoint, models.build(load(checkpoint.path / "config.toml").model))
        for checkpoint in (Store(RunDir(run).checkpoints).find(18), Store(RunDir(new).checkpoints).find(0))
    )
    assert set(imported.shapes) == set(model.state_dict())
    for name in imported.shapes:
        assert torch.equal(imported[name][: weights.shapes[name][0]], weights[name]), name


# ---------------------------------------------------------------- a live run
