"""Surgery on the optimiser: what it does to the numbers, and that crashes and rollbacks around it change nothing."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import CLI
from torch import Tensor, nn

from fsdp_pretrain.checkpoint.store import Store
from fsdp_pretrain.config.config import load
from fsdp_pretrain.config.surgery import is_due
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.parallel.optimizer import AdamW
from fsdp_pretrain.parallel.surgery import Surgery

STEPS, BATCH = 16, 8
AT = 5
"""The step whose state is operated on: the first step it concerns is the next."""


# ------------------------------------------------------------------------ against Adam as it is written


def gradient(name: str, step: int, shape: torch.Size) -> Tensor:
    """A fixed gradient of a parameter."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + len(name)))


def adam(name: str, start: Tensor, operation: dict[str, Any], config: Any) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(parameter, first moment, second moment) after every step, in fp64, by the formulas of the paper."""
    (beta1, beta2), eps, decay = config.betas, config.eps, 0.0 if "bias" in name else config.weight_decay
    theta, m, v, count, history = start.double(), torch.zeros(()), torch.zeros(()), 0, []
    mine = any(re.search(pattern, name) for pattern in operation.get("parameters", [""]))
    reset, frozen = operation.get("reset", "both"), int(operation.get("freeze", "0 steps").split()[0])
    for step in range(1, STEPS + 1):
        if mine and step == AT + 1:
            m = m * 0 if reset in ("both", "exp_avg") else m
            v, count = (v * 0, 0) if reset in ("both", "exp_avg_sq") else (v, count)
        still = mine and AT < step <= AT + frozen
        if not (still and operation.get("frozen_moments") == "keep"):
            g, count = gradient(name, step, start.shape).double(), count + 1
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        if not still:
            hat = (m / (1 - beta1**count)) / ((v / (1 - beta2**count)).sqrt() + eps)
            theta = theta - config.lr * (hat + decay * theta)
        history.append((theta, m, v))
    return history


OPERATIONS: dict[str, dict[str, Any]] = {
    "reset": {"parameters": ["weight"]},
    "first moment": {"reset": "exp_avg"},
    "frozen and filled": {"freeze": "6 steps"},
    "second moment": {"reset": "exp_avg_sq", "freeze": "6 steps"},
    "frozen as it is": {"parameters": ["^0"], "reset": "none", "freeze": "4 steps", "frozen_moments": "keep"},
}


@pytest.mark.quick
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_it_is_adam_with_other_moments(lab: Any, operation: dict[str, Any]) -> None:
    """A group is reset or frozen, the others are not touched; moments that fill are E[g^2] to the bias correction."""
    config = load(lab.config(optimizer={"surgery": [{"at": f"{AT} steps", **operation}]}))
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    optimizer, surgery = AdamW(model, config.optimizer), Surgery(model, config)
    expected = {
        name: adam(name, parameter.detach().clone(), operation, config.optimizer)
        for name, parameter in model.named_parameters()
    }
    said = []
    for step in range(1, STEPS + 1):
        said += surgery.act(optimizer, consumed=(step - 1) * BATCH, batch=BATCH if step > 1 else 0)
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        for name, parameter in model.named_parameters():
            parameter.grad = gradient(name, step, parameter.shape)
        frozen = dict(optimizer.frozen)
        optimizer.step(lr=config.optimizer.lr)
        for name, parameter in model.named_parameters():
            theta, m, v = expected[name][step - 1]
            state = optimizer.state_by_name()[name]
            torch.testing.assert_close(parameter.detach().double(), theta, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(state["exp_avg"].double(), m, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(state["exp_avg_sq"].double(), v, rtol=1e-4, atol=1e-6)
            assert torch.equal(parameter, before[name]) == (name in frozen)
    assert len(said) == 1 + ("freeze" in operation)
    assert not optimizer.frozen


@pytest.mark.quick
def test_a_place_between_steps_acts_once_with_any_batches() -> None:
    """Before the first step that begins at it or past it."""
    batches = [4, 4, 8, 8, 16]
    begins = [sum(batches[:number]) for number in range(len(batches) + 1)]
    for place in range(sum(batches) + 1):
        steps = [
            number
            for number, consumed in enumerate(begins)
            if is_due(place, consumed=consumed, batch=batches[number - 1] if number else 0)
        ]
        assert steps == [next(number for number, consumed in enumerate(begins) if consumed >= place)]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("operation", "message"),
    [
        ({"reset": "none"}, "it resets nothing and freezes nothing"),
        ({"reset": "exp_avg_sq"}, "up to 1 / (1 - beta1) times too large"),
        ({"parameters": ["("]}, "not a regular expression"),
        ({"reset": "step"}, "should be"),
    ],
)
def test_what_would_do_nothing_or_harm_is_refused(lab: Any, operation: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(lab.config(optimizer={"surgery": [{"at": "5 steps", **operation}]}))


# ------------------------------------------------------------------------ in a run

DECLARED = [
    {"at": "5 steps", "parameters": ["^embedding"], "freeze": "4 steps", "reason": "it diverges"},
    {"at": "9 steps", "reset": "exp_avg"},
]


def digest(run: Path) -> str:
    """Of the state, optimiser included, after the last step."""
    found: str = Store(run / "checkpoints").find(STEPS).manifest().state_digest
    return found


@pytest.fixture(scope="module")
def trained(module_lab: Any) -> Path:
    """A run with surgery before steps 6 and 10, on two ranks, saved after every step."""
    config = module_lab.config(
        "trained",
        train={"duration": f"{STEPS} steps", "micro_batch": 4},
        optimizer={"surgery": DECLARED},
        checkpoint={"every": "1 step", "keep_last": 99},
    )
    module_lab.train(config, ranks=2)
    run: Path = module_lab.path / "trained"
    return run


def again(lab: Any, trained: Path, path: Path, step: int, *overrides: str, **options: Any) -> tuple[Path, str]:
    """A copy of the run that ended without a trace after `step`, and goes on; and its output."""
    run = path / f"from-{step}"
    shutil.copytree(trained, run)
    for later in range(step + 1, STEPS + 1):
        shutil.rmtree(run / f"checkpoints/step-{later:08d}")
    return run, lab.train(lab.path / "trained.toml", f"run.dir={run}", *overrides, ranks=2, **options)


def test_it_is_told_and_seen(trained: Path, helpers: Any) -> None:
    """The journal has what was done after which step, the record how much was frozen; nothing raises an alarm."""
    told = [(entry["step"], entry["text"]) for entry in helpers.journal(trained, "surgery")]
    assert [step for step, _ in told] == [5, 9, 9]
    assert "reset step and exp_avg and exp_avg_sq of 1 parameters (^embedding)" in told[0][1]
    assert "frozen for 4 steps" in told[0][1] and "because: it diverges" in told[0][1]
    records = helpers.metrics(trained)
    assert [record["frozen"] for record in records] == [0] * 5 + [1] * 4 + [0] * 7
    assert not any(record["health"] for record in records)


@pytest.mark.parametrize("step", [5, *(pytest.param(step, marks=pytest.mark.slow) for step in (3, 4, 6, 8, 9, 10, 15))])
def test_a_crash_before_at_or_after_changes_no_bit(module_lab: Any, trained: Path, tmp_path: Path, step: int) -> None:
    run, _ = again(module_lab, trained, tmp_path, step)
    assert digest(run) == digest(trained)


@pytest.mark.slow
def test_a_rollback_over_it_and_forward_again_changes_no_bit(
    module_lab: Any, trained: Path, tmp_path: Path, run_command: Any, helpers: Any
) -> None:
    run, _ = again(module_lab, trained, tmp_path, 15)
    done = run_command(CLI, "rollback", run, "--to", 4, "--reason", "again")
    assert done.returncode == 0, done.stderr
    module_lab.train(module_lab.path / "trained.toml", f"run.dir={run}", ranks=2)
    assert digest(run) == digest(trained)
    assert [entry["step"] for entry in helpers.journal(run, "surgery")][-3:] == [5, 9, 9]


@pytest.mark.slow
def test_a_rollback_declares_it(module_lab: Any, tmp_path: Path, trained: Path, run_command: Any) -> None:
    """`rollback --set` at the step it goes back to, or later, ends as the run whose configuration had it."""
    config = module_lab.config(
        "plain", train={"duration": f"{STEPS} steps", "micro_batch": 4}, checkpoint={"every": "1 step", "keep_last": 99}
    )
    module_lab.train(config, ranks=2)
    run = module_lab.path / "plain"
    assert digest(run) != digest(trained)
    tables = [", ".join(f"{key} = {value!r}" for key, value in each.items()) for each in DECLARED]
    change = f"optimizer.surgery=[{', '.join('{' + table + '}' for table in tables)}]"
    late = run_command(CLI, "rollback", run, "--to", 6, "--set", change, "--reason", "spike")
    assert late.returncode == 78 and "is past it, and was trained without" in late.stderr
    done = run_command(CLI, "rollback", run, "--to", 5, "--set", change, "--reason", "spike")
    assert done.returncode == 0, done.stderr
    module_lab.train(config, ranks=2)
    assert digest(run) == digest(trained)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "flags", "message"),
    [
        ("[{at='14 steps'}]", (), "--allow optimizer.surgery"),
        ("[{at='7 steps'}]", ("--allow", "optimizer"), "is past it, and was trained without"),
        ("[{at='14 steps', parameters=['^embedding', 'embeding']}]", ("--allow", "optimizer"), "'embeding', which"),
    ],
)
def test_a_start_refuses_what_would_not_act(
    module_lab: Any, trained: Path, tmp_path: Path, change: str, flags: tuple[str, ...], message: str
) -> None:
    _, output = again(module_lab, trained, tmp_path, 12, f"optimizer.surgery={change}", flags=flags, expect=78)
    assert message in output and output.count("error:") == 1


@pytest.mark.shows("D8")
@pytest.mark.slow
def test_everything_may_be_frozen_while_moments_fill(lab: Any, helpers: Any, constants: Any) -> None:
    """An optimiser's reset as runs did it with a rate of 0: no weight moves meanwhile, and no detector complains."""
    constants("fsdp_pretrain.health.limits", COMPARE_EVERY=2)
    frozen = [{"at": "6 steps", "freeze": "6 steps"}]
    config = lab.config(
        optimizer={"surgery": frozen},
        checkpoint={"every": "1 step", "keep_last": 99},
    )
    lab.train(config)
    records = helpers.metrics(lab.path / "run")
    digests = {record["step"]: record["replicas"]["digest"] for record in records if record["replicas"]}
    assert len({digest for step, digest in digests.items() if 7 <= step <= 13}) == 1 < len(set(digests.values()))
    assert not any(record["health"] for record in records)
    assert all(math.isfinite(record["loss"]["sum"]) for record in records)
