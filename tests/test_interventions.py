"""Numeric faults in real runs on several ranks: skipped, rolled back, stopped; and what must not be disturbed."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import ROOT, scripted

LIMITS = {"WINDOW": 32, "PATIENCE": 5, "PATIENCE_WITH_NORM": 3, "DISTANCE": 4, "MARGIN": 3}


@pytest.fixture(autouse=True)
def limits(constants: Any) -> None:
    """Those of short runs."""
    constants("fsdp_pretrain.health.limits", **LIMITS)
    constants("fsdp_pretrain.parallel.replica_check", COMPARE_EVERY=4)


def found(records: list[dict[str, Any]], **wanted: Any) -> list[tuple[int, str]]:
    """(step, key) of every finding with these values."""
    return [
        (record["step"], finding["key"])
        for record in records
        for finding in record["health"]
        if all(finding[key] == value for key, value in wanted.items())
    ]


def spans(entry: dict[str, Any]) -> tuple[int, int]:
    """The samples that a rollback skips."""
    first, stop = entry["skip"].removesuffix(" samples").split(":")
    return int(first), int(stop)


def intent(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "status.json").read_text())["exit_intent"]
    return content


@pytest.mark.shows("A11", "F13")
@pytest.mark.parametrize(
    ("kind", "shard"),
    [
        ("gradient", 1),
        ("loss", 2),
    ],
)
@pytest.mark.promise("bad-steps")
def test_one_bad_step_is_skipped_by_all(lab: Any, helpers: Any, fault: Any, kind: str, shard: int) -> None:
    """A NaN on one rank, once. The others skip too, and the run ends as one configured to skip that batch: the same
    weights to the bit, on every replica."""
    config = lab.config(parallel={"shard": shard}, train={"duration": "14 steps"})
    fault(kind, rank=1, steps=[7])
    lab.train(config, ranks=2)
    run = lab.path / "run"
    records = helpers.metrics(run)
    assert [record["step"] for record in records if record["skipped"]] == [7]
    bad = records[6]
    assert bad["not_finite"] == ("loss" if kind == "loss" else "gradients")
    assert bad["nonfinite_rank"] == (1 if kind == "loss" else None)
    assert bad["consumed"] == 56 and records[-1]["consumed"] == 112  # the batch was read, schedules advance
    assert (bad["grad_norm"] is None) == (kind == "gradient")
    assert all(record["replicas"]["differing"] == [] for record in records if record["replicas"])
    (skip,) = helpers.journal(run, "health-skip")
    assert skip["step"] == 7 and skip["shares"] == {"text": 1.0}
    first = 52 if kind == "loss" else 48  # the second rank's half, if it is known that the fault was there
    assert skip["samples"] == [first, 55] and skip["documents"] and skip["data_digest"] == bad["data_digest"]
    assert found(records, key="loss/nonfinite", resolved=False) == [(7, "loss/nonfinite")]

    (end,) = (run / "checkpoints").glob("step-00000014/manifest.json")
    twin = lab.config("twin", parallel={"shard": shard}, train={"duration": "14 steps"})
    fault("gradient", rank=0, steps=[7])  # another fault in the same step has the same result
    lab.train(twin, ranks=2)
    (other,) = (lab.path / "twin/checkpoints").glob("step-00000014/manifest.json")
    assert json.loads(end.read_text())["state_digest"] == json.loads(other.read_text())["state_digest"]


@pytest.mark.shows("A11", "A27", "F14")
@pytest.mark.promise("spikes")
def test_a_fault_that_persists_is_rolled_back_once(lab: Any, helpers: Any, fault: Any) -> None:
    """NaN in every step from 14 on. One rollback that skips the samples, then exit 93."""
    config = lab.config(checkpoint={"every": "5 steps"})
    fault("gradient", rank=1, steps=[14], on=True)
    output = lab.train(config, ranks=2, expect=75)
    run = lab.path / "run"
    (back,) = helpers.journal(run, "health-rollback")
    assert (back["key"], back["start"], back["end"], back["to"]) == ("loss/nonfinite", 14, 15, 10), output
    assert [entry["repeats"] for entry in helpers.journal(run, "health-again")] == [True]
    assert back["skip"] == "80:144 samples"  # 3 steps before and after 14 and 15, but nothing before step 10
    assert intent(run)["code"] == 75 and "rolled back to step 10" in intent(run)["reason"]
    for segment in ("0001", "0002"):
        assert json.loads((run / f"segments/{segment}/exit_intent.json").read_text())["restart"] is True

    output = lab.train(config, ranks=2, expect=93)
    assert "the same incident was answered by 1 rollback already" in output and output.count("error:") == 1
    assert len(helpers.journal(run, "rollback")) == 1 and intent(run)["code"] == 93
    records = helpers.metrics(run)
    assert records[10]["cursor"] == 152 and records[10]["consumed"] == 88  # 80 to 143 were passed over

    fault()  # the cause is repaired
    lab.train(config, ranks=2)
    assert not any(record["skipped"] for record in helpers.metrics(run))


@pytest.mark.promise("live-changes")
def test_a_stop_is_heard_though_the_run_goes_back(lab: Any, helpers: Any, tmp_path: Path) -> None:
    """A person's, just before an automatic rollback; a change that comes too late is refused in the journal."""
    both = [str(ROOT / "tests/faults.py"), str(ROOT / "tests/scripted.py")]
    (tmp_path / "both.py").write_text(f"import runpy\nfor path in {both}: runpy.run_path(path)\n")
    asked = [("stop", {"reason": "maintenance"}), ("set", {"changes": ["optimizer.lr_scale=0.5"], "reason": ""})]
    fault = [{"kind": "gradient", "rank": 0, "step": 14, "on": True}]
    variables = {**scripted({15: asked}), "FAULT": json.dumps(fault), "EXECUTE_FIRST": str(tmp_path / "both.py")}
    lab.train(lab.config(checkpoint={"every": "5 steps"}), expect=75, variables=variables)
    run = lab.path / "run"
    assert len(helpers.journal(run, "rollback")) == 1
    assert [(entry.get("did"), bool(entry.get("refused"))) for entry in helpers.journal(run, "control")] == [
        ("stop", False), (None, True)]  # fmt: skip
    for segment in ("0001", "0002"):
        ended = json.loads((run / f"segments/{segment}/exit_intent.json").read_text())
        assert (ended["code"], ended["asked"], ended["restart"]) == (75, True, False)


@pytest.mark.slow
@pytest.mark.promise("spikes")
def test_a_large_checkpoint_is_read_back_as_long_as_it_takes(lab: Any, helpers: Any, tmp_path: Path) -> None:
    """Longer than the watchdog waits for a rank that hangs."""
    (tmp_path / "slow.py").write_text(
        f"import runpy, time; runpy.run_path({str(ROOT / 'tests/faults.py')!r})\n"
        "from fsdp_pretrain.lineage import continuation\n"
        "read = continuation.verify_files\n"
        "continuation.verify_files = lambda *files: time.sleep(12) or read(*files)\n"
    )
    fault = [{"kind": "gradient", "rank": 1, "step": 14, "on": True}]
    variables = {"FAULT": json.dumps(fault), "EXECUTE_FIRST": str(tmp_path / "slow.py")}
    watchdog = {"enabled": True, "hang": {"soft": "1 s", "hard": "4 s"}}
    config = lab.config(checkpoint={"every": "5 steps"}, watchdog=watchdog)
    lab.train(config, ranks=2, expect=75, variables=variables)
    assert "rolled back to step 10" in intent(lab.path / "run")["reason"]
    assert len(helpers.journal(lab.path / "run", "rollback")) == 1


def poison(lab: Any, helpers: Any, until: int) -> dict[str, Any]:
    """`data` whose documents, one in a sample, are random tokens in the samples from 320 (step 41) to `until`."""
    from fsdp_pretrain.config.config import load
    from fsdp_pretrain.data.packing.opening import open_packer
    from fsdp_pretrain.data.text.tokenizer import Tokenizer

    rng, tokenizer, path = random.Random(5), Tokenizer.load(lab.tokenizer), lab.path / "corpus"
    (stored,) = (lab.corpus / "shards").glob("*.bin")
    tokens = [int(token) for token in np.fromfile(stored, "<u2") if token != tokenizer.eod]
    documents = [tokens[at : at + 31] for at in range(0, 31 * 900, 31)]
    data = {"sequence_length": 32, "sources": [{"name": "text", "path": str(path)}]}
    helpers.corpus(path, documents, tokenizer, shards=1)
    packer = open_packer(load(lab.config("clean", data=data)))
    for sample in range(320, until):
        whole, _ = packer.provenance(sample)  # the other is its last target, the first token of another document
        documents[whole.document] = [rng.randrange(20, 200) for _ in range(31)]
    shutil.rmtree(path)
    helpers.corpus(path, documents, tokenizer, shards=1)
    return data


@pytest.mark.shows("B1", "F8")
@pytest.mark.parametrize("until", [368, pytest.param(440, marks=pytest.mark.slow)])
@pytest.mark.promise("spikes")
def test_poisoned_data_is_left_and_never_read_again(lab: Any, helpers: Any, run_command: Any, until: int) -> None:
    """Warned, marked, rolled back to a clean checkpoint, and the samples are skipped for good. If more is poisoned than
    the first one skips, a second one skips twice as much."""
    config = lab.config(
        data=poison(lab, helpers, until),
        train={"duration": "58 steps"},
        checkpoint={"every": "4 steps", "keep_last": 2},
        optimizer={"lr": 2e-2, "min_lr": 2e-2, "warmup": "4 steps"},
    )
    output = lab.train(config, ranks=2, expect=75)
    run = lab.path / "run"
    before = {r["step"]: r for r in map(json.loads, (run / "segments/0001/metrics.jsonl").read_text().splitlines())}
    warned = found(list(before.values()), key="loss/spike", severity="WARN")
    (crit,) = found(list(before.values()), key="loss/spike", severity="CRIT")
    assert warned[0][0] in (43, 44) and crit[0] <= 52, output
    (back,) = helpers.journal(run, "health-rollback")
    assert back["start"] == 41 and back["to"] <= 37
    left = [json.loads(path.read_text()) for path in (run / "checkpoints/abandoned").glob("step-*/manifest.json")]
    suspects = {manifest["step"]: manifest.get("suspect") for manifest in left}
    assert 40 in suspects and suspects == {
        step: "loss/spike since step 41" if step >= warned[0][0] else None for step in range(back["to"] + 4, crit[0], 4)
    }

    if until == 440:
        lab.train(config, ranks=2, expect=75)
        back, wider = helpers.journal(run, "health-rollback")
        assert (back["repeats"], wider["repeats"]) == (0, 1)
        assert spans(wider)[1] - 320 > 1.5 * (spans(back)[1] - 320)
    lab.train(config, ranks=2)
    records = helpers.metrics(run)
    assert records[-1]["step"] == 58 and records[-1]["consumed"] == 464
    skipped = [spans(entry) for entry in helpers.journal(run, "health-rollback")]
    assert min(skipped)[0] <= 320 and max(stop for _, stop in skipped) >= until
    poisoned = {before[step]["data_digest"] for step in range(41, crit[0])}
    assert not poisoned & {record["data_digest"] for record in records}
    step = next(record["step"] for record in records if record["cursor"] > 320)
    shown = json.loads(run_command("fsdp_pretrain.cli", "where", run, "--step", step, "--json").stdout)
    indices = {sample["index"] for sample in shown["samples"]}
    assert not any(first <= index < stop for index in indices for first, stop in skipped)
    assert not found(records, severity="CRIT")


@pytest.mark.shows("D12", "F43")
@pytest.mark.promise("equal-replicas")
def test_replicas_that_differ_stop_the_run(lab: Any, helpers: Any, fault: Any) -> None:
    """One parameter of one replica changes, which nothing else would detect."""
    fault("nudge", rank=3, steps=[7])
    config = lab.config(parallel={"shard": 2}, train={"micro_batch": 1})
    output = lab.train(config, ranks=4, expect=93)
    assert "before step 7 the replicas hold different parameters: ranks 1, 3 do not agree" in output
    run = lab.path / "run"
    assert not list((run / "checkpoints").glob("step-*")) and intent(run)["code"] == 93
    records = helpers.metrics(run)
    assert found(records, severity="CRIT") == [(records[-1]["step"], "replicas/parameters")]


@pytest.mark.shows("D9", "F5", "F19")
def test_a_resume_repeats_what_was_recorded(lab: Any, helpers: Any, fault: Any) -> None:
    """Killed after its checkpoint, the run repeats steps to the bit and reports nothing; with a batch repeated it is
    stopped."""
    saves = {"every": "10 steps", "background": False}  # that of step 10 is there when the run is killed
    config = lab.config(checkpoint=saves)
    fault("die", rank=1, steps=[15])
    job = lab.start(config, ranks=2)
    helpers.wait_for(lambda: job.ranks[1].poll() is not None, what="the kill")
    job.kill()
    job.wait()
    run = lab.path / "run"
    assert [record["step"] for record in helpers.metrics(run)][-1] >= 11
    fault("repeat", rank="all", steps=[11])
    output = lab.train(config, ranks=2, expect=93)
    assert "step 11 trained on the batch" in output and output.count("error:") == 1
    assert not (run / "checkpoints/step-00000020").exists()
    fault()
    lab.train(config, "health.stop_on_mismatch=false", ranks=2)
    repeated = found(helpers.metrics(run))
    assert [key for _, key in repeated] == ["replay/step"] * len(repeated)  # against the bad repetition, if anything
    lab.train(config, ranks=2)


def test_what_a_device_does_wrong_is_no_reason_to_leave_samples(lab: Any, helpers: Any, fault: Any) -> None:
    """Steps 14 and 15 are not finite on one rank; repeated from the same batch, 15 is. No rollback: the next start
    resumes from the last checkpoint, trains these samples, and expects that steps now differ. Also if that is found
    when step 16 is to be saved, together with what step 16 measured: it is not saved."""
    config = lab.config(checkpoint={"every": "8 steps"})
    fault("loss", rank=1, steps=[14, 15])
    output = lab.train(config, ranks=2, expect=75)
    run = lab.path / "run"
    (again,) = helpers.journal(run, "health-again")
    assert (again["rank"], again["repeats"], again["step"]) == (1, False, 15), output
    assert f"suspect a device of rank 1 on {os.uname().nodename}, not the data" in intent(run)["reason"]
    assert json.loads((run / "segments/0001/exit_intent.json").read_text())["restart"] is True
    assert not helpers.journal(run, "health-rollback")
    assert [entry["step"] for entry in helpers.journal(run, "checkpoint")] == [8]
    fault()
    lab.train(config, ranks=2)
    assert [entry["step"] for entry in helpers.journal(run, "resume")] == [8]
    records = helpers.metrics(run)
    assert records[-1]["cursor"] == 8 * len(records) == 160 and not any(record["skipped"] for record in records)
    assert not found(records, key="replay/step")
