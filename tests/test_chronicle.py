"""The chronicle: it contains automatically what operators of large runs wrote manually."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from processes import CLI, ROOT
from records import step_record

from fsdp_pretrain.config.config import load
from fsdp_pretrain.run import lineage, state_files
from fsdp_pretrain.run.environment import Corpora
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.journal import Journal, who
from fsdp_pretrain.run.recorder import Recorder
from fsdp_pretrain.train.environment import compare

pytestmark = pytest.mark.quick


def segment(run: RunDir, number: int, *overrides: str, **environment: Any) -> None:
    folder = run.segment(number)
    folder.mkdir(parents=True)
    config = load(ROOT / "configs/runs/quickstart.toml", list(overrides))
    (folder / "config.toml").write_text(config.to_toml())
    usual = {
        "hosts": {"n1": 8, "n2": 8}, "torch": "2.11", "driver": "570.1", "git": {"commit": "aaa", "changed": []},
        "world": {"size": 16, "replicas": 2, "shards": 8}, "variables": {"NCCL_IB_TIMEOUT": "22", "SLURM_JOB_ID": "7"},
    }  # fmt: skip
    state_files.write(folder / "environment.json", {**usual, **environment})
    lineage.record(folder, parent=number - 1 or None, step=0, kind="start")


@pytest.mark.shows("A6", "F46")
@pytest.mark.parametrize(
    ("overrides", "environment", "expected"),
    [
        ((), {}, []),
        (("optimizer.lr=5e-4",), {}, ["optimizer.lr: 0.003 -> 0.0005"]),
        ((), {"hosts": {"n1": 8, "n3": 8}}, ["hosts gone: n2", "hosts new: n3"]),
        ((), {"driver": "575.2"}, ['driver: "570.1" -> "575.2"']),
        ((), {"git": {"commit": "bbb", "changed": []}}, ['code.commit: "aaa" -> "bbb"']),
        ((), {"git": {"commit": "aaa", "changed": ["x.py"]}}, ["uncommitted changes to the code: x.py"]),
        ((), {"variables": {"NCCL_IB_TIMEOUT": "5", "SLURM_JOB_ID": "8"}}, ["environment.NCCL_IB_TIMEOUT"]),
        ((), {"world": {"size": 8, "replicas": 1, "shards": 8}}, ["world.size: 16 -> 8", "world.replicas: 2 -> 1"]),
    ],
    ids=["nothing", "learning rate", "hosts", "driver", "commit", "edited code", "variable", "mesh"],
)
def test_a_start_says_what_is_not_as_it_was(
    tmp_path: Path, overrides: tuple[str, ...], environment: dict[str, Any], expected: list[str]
) -> None:
    """A restart with another configuration, world size or host list reports the changed values."""
    run = RunDir(tmp_path)
    segment(run, 1)
    assert compare(run, 1, Corpora(corpora={"web": "f1"})) is None
    lineage.record(run.segment(2), parent=1, step=0, kind="rollback")  # not a start
    segment(run, 3, *overrides, **environment)
    found = compare(run, 3, Corpora(corpora={"web": "f1"}))
    assert found is not None and found[0] == 1 and len(found[1]) == len(expected), found
    assert all(text.startswith(start) for text, start in zip(found[1], expected, strict=True)), found


@pytest.mark.shows("A10")
@pytest.mark.promise("data-changes")
def test_another_corpus_is_told(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for number, prints in ((1, {"web": "f1"}), (2, {"web": "f2", "code": "f3"})):
        segment(run, number)
        found = compare(run, number, Corpora(corpora=prints))
    assert found == (1, ['corpora.web: "f1" -> "f2"', 'corpora.code: absent -> "f3"'])


@pytest.mark.shows("B24")
def test_the_journal_is_searched(tmp_path: Path, run_command: Any) -> None:
    run = RunDir(tmp_path)
    run.segment(1).mkdir(parents=True)
    writer = Journal(run, 1)
    for kind in ("start", "checkpoint", "stop"):
        writer.write(kind, f"a {kind}")
    run_command(CLI, "note", tmp_path, "gradients look odd", "--step", 7, expect=0)
    last = json.loads(run.journal.read_text().splitlines()[-1])
    assert (last["step"], last["by"], last["kind"]) == (7, who(), "note") and last["host"]

    def kinds(*options: object) -> list[str]:
        done = run_command(CLI, "journal", tmp_path, "--json", *options, expect=0)
        return [json.loads(line)["kind"] for line in done.stdout.splitlines()]

    assert kinds("--kind", "stop", "--kind", "start") == ["start", "stop"]
    lines = [line.removeprefix("- ").replace("**", "[", 1).replace("**", "]") for line in run.chronicle.open()]
    assert run_command(CLI, "journal", tmp_path).stdout == "".join(lines) and "[stop] a stop" in lines[2]
    refused = run_command(CLI, "journal", tmp_path, "--kind", "stops")
    assert refused.returncode == 78 and "'stops' (choose from" in refused.stderr and "'stop'" in refused.stderr


@pytest.mark.parametrize(
    ("saved", "expected", "risk"),
    [
        (
            {"step": 12, "consumed": 96, "tokens": 1024},  # later samples are longer
            "5.12K tokens trained, of which 4.1K (8 steps) are in no verified checkpoint",
            (8, 4096),
        ),
        ({"step": 20, "consumed": 160, "tokens": 5120}, "5.12K tokens trained, all saved", (0, 0)),
    ],
    ids=["some", "nothing"],
)
def test_a_stop_says_what_is_at_risk(
    tmp_path: Path, saved: dict[str, int], expected: str, risk: tuple[int, int]
) -> None:
    run = RunDir(tmp_path)
    recorder = Recorder(run, run.new_segment(), name="x", console_every=1, total_steps=40)
    recorder.status(checkpoint=saved)
    recorder.step(step_record(20), target=40)
    recorder.ended("exit 93: disk full", code=93)
    recorder.close()
    (entry,) = [json.loads(line) for line in run.journal.read_text().splitlines()]
    assert entry["text"] == f"exit 93: disk full; {expected}" and entry["code"] == 93
    assert entry["at_risk"] == {"steps": risk[0], "tokens": risk[1]}
