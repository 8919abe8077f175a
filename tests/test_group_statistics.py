"""Statistics of parameter groups: what they are, that they change nothing, what they send, and who shows them."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from records import step_record
from torch.distributed.checkpoint.filesystem import FileSystemReader

from fsdp_pretrain.checkpoint.store import Store
from fsdp_pretrain.run.step_columns import read_steps
from fsdp_pretrain.run.step_record import StepRecord, parse
from fsdp_pretrain.train.group_statistics import group_of
from fsdp_pretrain.views.report.panels import lay_out
from fsdp_pretrain.views.trackers.points import step_values

GROUPS = ["embedding", "norms", "attention/0", "mlp/0", "attention/1", "mlp/1", "head"]
MEASURED = {"record": {"statistics_every": "3 steps", "console_every": 100}}
DROPS = {"family": "gpt", "kv_heads": None, "ffn": None, "positions": 64, "dropout": 0.1}


def train(lab: Any, name: str, ranks: int, **sections: Any) -> Path:
    """Seven steps, with all their checkpoints; a share of a step is one micro-batch."""
    config = lab.config(
        name,
        train={"duration": "7 steps", "micro_batch": 8 // ranks, "grad_clip": 0.1},
        checkpoint={"every": "1 step", "keep_last": 9},
        parallel={"shard": min(ranks, 2)},
        **sections,
    )
    lab.train(config, ranks=ranks)
    return lab.path / name  # type: ignore[no-any-return]


def tensors(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Everything in the checkpoint of a step, whole."""
    reader = FileSystemReader(run / f"checkpoints/step-{step:08d}")
    known = reader.read_metadata().state_dict_metadata
    found = {name: torch.empty(known[name].size, dtype=known[name].properties.dtype) for name in known}
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def expected(
    before: dict[str, torch.Tensor], after: dict[str, torch.Tensor], clip: float
) -> dict[str, dict[str, float]]:
    """The statistics of a step from the states around it: gradients from what they added to the first moment."""
    found: dict[str, Counter[str]] = {}
    for name in (key.removeprefix("model.") for key in after if key.startswith("model.")):
        group = found.setdefault(group_of(name, 2), Counter())
        weights = after[f"model.{name}"].double()
        m, was = (side[f"optim.{name}.exp_avg"].double() for side in (after, before))
        v = after[f"optim.{name}.exp_avg_sq"].double()
        group["gradient"] += float(((m - 0.9 * was) / 0.1 / clip).square().sum())
        group["weights"] += float(weights.square().sum())
        group["second_moment_max"] = max(group["second_moment_max"], float(v.max()))
    return {
        name: {
            "grad_norm": group["gradient"] ** 0.5,
            "weight_norm": group["weights"] ** 0.5,
            "second_moment_max": group["second_moment_max"],
        }
        for name, group in found.items()
    }


@pytest.mark.shows("B6")
def test_they_are_those_of_an_unsharded_computation(lab: Any, helpers: Any) -> None:
    """On two replicas of two; with clipping."""
    run = train(lab, "run", 4, **MEASURED)
    records = helpers.metrics(run)
    assert [record["step"] for record in records if record["groups"]] == [3, 6]
    for step in (3, 6):
        record = records[step - 1]
        assert record["clip"] < 1 and list(record["groups"]) == GROUPS
        found = expected(tensors(run, step - 1), tensors(run, step), record["clip"])
        for name, values in found.items():
            assert record["groups"][name] == pytest.approx(values, rel=1e-3), (step, name)
        squares = sum(group["grad_norm"] ** 2 for group in record["groups"].values())
        assert squares**0.5 == pytest.approx(record["grad_norm"], rel=1e-5)


def test_the_second_moment_is_that_of_the_parameters_that_have_one(lab: Any, helpers: Any) -> None:
    """Of attention, only the biases are AdamW's, and of feed-forward layers nothing is."""
    run = train(lab, "run", 1, model={"family": "qwen2"}, optimizer={"kind": "muon"}, **MEASURED)
    found = dict.fromkeys(GROUPS, -math.inf)
    for name, tensor in tensors(run, 3).items():
        if name.endswith(".exp_avg_sq"):
            group = group_of(name.removeprefix("optim.").removesuffix(".exp_avg_sq"), 2)
            found[group] = max(found[group], float(tensor.max()))
    measured = helpers.metrics(run)[2]["groups"]
    assert {name for name, largest in found.items() if largest < 0} == {"mlp/0", "mlp/1"}
    for name, largest in found.items():
        assert measured[name]["second_moment_max"] == (pytest.approx(largest) if largest >= 0 else None), name


def test_training_is_the_same_to_the_bit_without_them(lab: Any, helpers: Any) -> None:
    seen = train(lab, "seen", 2, model=DROPS, record={**MEASURED["record"], "statistics_every": "1 step"})
    blind = train(lab, "blind", 2, model=DROPS, record={"statistics_every": "0 steps"})
    digests = [[each.manifest().state_digest for each in Store(run / "checkpoints").scan()] for run in (seen, blind)]
    assert digests[0] == digests[1] and len(digests[0]) == 7
    assert all(record["groups"] for record in helpers.metrics(seen))
    assert not any(record["groups"] for record in helpers.metrics(blind))


# ------------------------------------------------------------------------ parts


@pytest.mark.quick
def test_every_parameter_is_in_the_group_of_its_kind_and_depth() -> None:
    names = ["embedding.weight", "positions.weight", "head.weight", "norm.weight", "embedding_norm.bias"]
    assert [group_of(name, 2) for name in names] == ["embedding", "embedding", "head", "norms", "norms"]
    assert group_of("blocks.7.attention.query.bias", 32) == "attention/00-07"
    assert group_of("blocks.8.mlp.up.weight", 32) == "mlp/08-15"
    assert group_of("blocks.8.attention.query_norm.weight", 32) == group_of("blocks.8.mlp_norm.bias", 32) == "norms"
    for layers in (1, 2, 3, 5, 6, 32, 70):
        found = [group_of(f"blocks.{layer}.mlp.up.weight", layers) for layer in range(layers)]
        assert found == sorted(found) and len(set(found)) <= 4


def grouped(step: int) -> StepRecord:
    """A record with statistics of two groups."""
    group = {"grad_norm": 0.5, "weight_norm": 3.0, "second_moment_max": 0.25}
    line = json.loads(step_record(step).to_line())
    line["groups"] = {"embedding": group, "mlp/0-7": {**group, "grad_norm": None}}
    record = parse(json.dumps(line))
    assert record is not None and parse(record.to_line()) == record
    return record


@pytest.mark.quick
def test_who_shows_them(tmp_path: Path) -> None:
    """Trackers, what is known; the report, panels with gaps."""
    found = step_values(grouped(7)).values
    assert found["optimizer/group_grad_norm/embedding"] == 0.5
    assert "optimizer/group_grad_norm/mlp/0-7" not in found
    lines = [(grouped(step) if step == 2 else step_record(step)).to_line() + "\n" for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    steps = read_steps(tmp_path / "metrics.jsonl")
    assert steps["gradient/embedding"].tolist()[1] == 0.5
    assert all(math.isnan(steps["gradient/embedding"][row]) for row in (0, 2))
    panels = {panel.name: panel for panel in lay_out(steps)}
    assert [trace.column for trace in panels["moment"].traces] == ["second_moment/embedding", "second_moment/mlp/0-7"]
