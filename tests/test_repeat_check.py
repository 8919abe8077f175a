"""Micro-batches that are computed twice: a rank that gets other bits is named and its host left; nothing else changes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import records
import torch
from processes import ROOT

from fsdp_pretrain.bench import steps
from fsdp_pretrain.config.config import Config, load
from fsdp_pretrain.config.sections import ParallelSection
from fsdp_pretrain.errors import ConfigError, DeviceError
from fsdp_pretrain.heartbeat import Heartbeat, Phase
from fsdp_pretrain.parallel import mesh
from fsdp_pretrain.run.recorder import SilentRecorder
from fsdp_pretrain.train.observer import AgreedActions, Verdict
from fsdp_pretrain.train.repeat_check import RepeatCheck
from fsdp_pretrain.train.trainer import Trainer

KEY = "repeat/gradients"
OFTEN = {"repeat_every": "0.001 s"}  # after step 3 of a start, since a request takes two, and then as often
RAY = """
import json
import os
from typing import Literal
import torch
from fsdp_pretrain.config.sections import ObserverSection
from fsdp_pretrain.extensions import Extension, Part
from fsdp_pretrain.train.observer import Observer


class Section(ObserverSection):
    use: Literal["cosmic:ray"]


class Ray(Observer):
    '''Flips a bit of a gradient in the passes between steps that RAY names for this rank; another one in each.'''

    def __init__(self, settings, context):
        self.model, self.passes, self.trains = context.model, 0, False
        self.hits = json.loads(os.environ["RAY"]).get(str(context.world.rank), [])

    def start(self):
        self.model.blocks[1].register_forward_hook(self.after)

    def before_step(self, step):
        self.trains = True

    def before_update(self, state, scale):
        self.trains = False

    def after(self, module, inputs, output):
        self.passes += not self.trains
        if not self.trains and self.passes in self.hits:
            output.register_hook(self.flip)

    def flip(self, gradient):
        gradient = gradient.clone()
        gradient.view(torch.int32).view(-1)[5] ^= 1 << self.passes
        return gradient


extension = Extension(observers={"ray": Part(Section, code="cosmic:Ray")})
"""


@pytest.fixture
def ray(lab: Any) -> Any:
    """`ray(config, '{"rank": [passes]}')`: variables with which a run is hit in these passes between steps."""
    (lab.path / "cosmic.py").write_text(RAY)

    def aim(config: Path, hits: str) -> dict[str, str]:
        text = config.read_text()
        config.write_text(text + '\n[code]\npackages = ["cosmic"]\n\n[[observers]]\nuse = "cosmic:ray"\n')
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests/constants"), str(lab.path)])
        return {"PYTHONPATH": path, "RAY": hits, "EXECUTE_FIRST": str(ROOT / "tests/hostname.py")}

    return aim


def settings(**more: Any) -> dict[str, Any]:
    """Of runs on 2 x 2 ranks, two micro-batches a step."""
    train = {"duration": "8 steps", "micro_batch": 1}
    return {"train": train, "parallel": {"shard": 2}, "checkpoint": {"every": "4 steps"}, **more}


def checks(metrics: list[dict[str, Any]]) -> list[int]:
    """The steps after which there was a check."""
    return [record["step"] - 1 for record in metrics if "repeat" in record["beside"]]


@pytest.mark.shows("F54")
@pytest.mark.promise("repeated-gradients")
def test_a_rank_that_computes_wrongly_is_named_and_its_host_left(lab: Any, helpers: Any, ray: Any) -> None:
    """One bit of a gradient of rank 3 is another in the first pass of the second check. Ended without a save, 76; the
    next start, on good devices, continues from the checkpoint to the curve of a run that was never checked."""
    lab.train(lab.config("plain", **settings()), ranks=4)
    config = lab.config(**settings(health=OFTEN))
    variables = ray(config, '{"3": [3]}')
    output, run = lab.train(config, ranks=4, nodes=2, expect=76, variables=variables), lab.path / "run"
    assert "rank 3 on node-1 did not get the same gradients" in output and output.count("error:") == 1
    intent = helpers.intent(run)
    assert (intent["code"], intent["avoid_hosts"]) == (76, ["node-1"]) and "restart" not in intent
    (entry,) = helpers.journal(run, "health")
    facts = [entry[name] for name in ("key", "severity", "ranks", "hosts", "passed")]
    assert facts == [KEY, "CRIT", [3], ["node-1"], 3] and entry["step"] in (5, 6, 7)
    assert [saved["step"] for saved in helpers.journal(run, "checkpoint")] == [4]

    lab.train(config, ranks=4, nodes=2, variables=variables | {"RAY": "{}"})
    assert helpers.losses(run) == helpers.losses(lab.path / "plain")
    assert checks(helpers.metrics(run)) == [3, 7] and len(helpers.journal(run, "health")) == 1


@pytest.mark.parametrize(
    ("hits", "code", "severity", "says"),
    [
        ('{"0": [3, 4, 5], "1": [3, 4, 5]}', 0, "WARN", "no rank gets the same gradients twice"),
        pytest.param('{"0": [4], "1": [4]}', 93, "CRIT", "ranks 0, 1 on node-0, node-1", marks=pytest.mark.slow),
    ],
    ids=["kernels", "several-hosts"],
)
def test_what_no_single_host_did_blames_none(
    lab: Any, helpers: Any, ray: Any, hits: str, code: int, severity: str, says: str
) -> None:
    """Kernels that never give the same bits end the checks, not the run; of several hosts, a person finds the one."""
    config = lab.config(health=OFTEN, parallel={"shard": 1}, train={"duration": "10 steps"})
    variables = ray(config, hits)
    lab.train(config, ranks=2, nodes=2, expect=code, variables=variables)
    run = lab.path / "run"
    (entry,) = helpers.journal(run, "health")
    assert entry["severity"] == severity and entry["summary"].startswith(says) and entry["passed"] == 3
    if code:
        assert "avoid_hosts" not in helpers.intent(run) and not helpers.journal(run, "checkpoint")
    else:
        assert checks(helpers.metrics(run)) == [3, entry["step"]] and helpers.metrics(run)[-1]["step"] == 10


@pytest.mark.slow
def test_its_alarm_stays_open(lab: Any, helpers: Any, ray: Any) -> None:
    """Until somebody starts the run on other hosts."""
    config = lab.config(health=OFTEN, watchdog={"enabled": True})
    lab.train(config, ranks=2, expect=76, variables=ray(config, '{"1": [3]}'))
    run = lab.path / "run"
    helpers.wait_for(lambda: not helpers.agents(run), what="the end of the watchdog")
    assert [(alarm["severity"], alarm["state"]) for alarm in helpers.alarms(run, KEY)] == [("CRIT", "open")]


VARIANTS: dict[str, list[str]] = {
    "fp16": ["train.precision=fp16"],
    "bf16-recomputed": ["train.precision=bf16", "parallel.recompute=1", "model.tied_head=true"],
    "dropout": ["model={family='gpt', layers=2, hidden=32, heads=4, vocab=512, positions=32, dropout=0.1}"],
    "compiled": ["parallel.compile=true", "parallel.recompute=feed-forward"],
}


def flip_once(module: torch.nn.Module) -> None:
    """Flip a bit of the gradient of a module's output in its next pass."""

    def after(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> None:
        handle.remove()
        output.register_hook(flip)

    def flip(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient.view(torch.int16).view(-1)[-1] ^= 1 << 6  # of the upper half of an fp32
        return gradient

    handle = module.register_forward_hook(torch.compiler.disable(after))


Checked = tuple[Trainer, RepeatCheck]


@pytest.fixture
def build() -> Iterator[Callable[[Config], Checked]]:
    """`build(config)` makes a trainer of one rank on random tokens, and what checks it."""
    with mesh.connect(ParallelSection()) as world:

        def make(config: Config) -> Checked:
            torch._dynamo.reset()
            trainer = steps.build(config, world)
            parts = (trainer.model, trainer.optimizer, trainer.scaler, SilentRecorder(), Heartbeat())
            check = RepeatCheck(config, world, *parts)
            trainer.observers += (check,)
            return trainer, check

        yield make


def verdict_of(check: RepeatCheck, step: int) -> Verdict | None:
    """Of a check after a step."""
    check.between_steps(AgreedActions(step=step, repeat=True))
    assert check.beside(step + 1) == ["repeat"]
    return check.judge(records.step_record(step))


@pytest.mark.promise("repeated-gradients")
@pytest.mark.parametrize("variant", [*list(VARIANTS)[:-1], pytest.param("compiled", marks=pytest.mark.slow)])
def test_checks_change_no_number_and_see_one_bit(
    lab: Any, build: Callable[[Config], Checked], monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **how: plain(function, backend="aot_eager", **how))
    config, curves = load(lab.config(), VARIANTS[variant]), []
    for checked in (False, True):
        trainer, check = build(config)
        for step in range(1, 4):
            trainer.step()
            assert not checked or verdict_of(check, step) is None
        curves.append([(record.loss, record.grad_norm) for _, record in trainer.read(keep=0)])
    assert curves[0] == curves[1] and len(curves[0]) == 3
    for module in (trainer.model.blocks[-1], trainer.model.embedding):
        flip_once(module)
        verdict = verdict_of(check, 4)
        assert verdict is not None and isinstance(verdict.error, DeviceError)
        assert list(verdict.error.avoid_hosts) == [os.uname().nodename]


def test_the_first_check_of_samples_of_a_length_has_the_deadline_of_loading(
    lab: Any, build: Callable[[Config], Checked], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compiles once more, which may take minutes and is no hang."""
    plain, phases = torch.compile, list[Phase]()
    monkeypatch.setattr(torch, "compile", lambda function, **how: plain(function, backend="eager", **how))
    stages = ["data.stages=[{length=16, until='16 samples'}]", "parallel.compile=true"]
    trainer, check = build(load(lab.config(train={"duration": "8 steps"}), stages))
    monkeypatch.setattr(check._heartbeat, "beat", phases.append)
    for width in (16, 16, 32):
        trainer.step()
        for micro in check._batch.micro:  # type: ignore[union-attr]
            micro.tokens = micro.tokens[:, : width + 1]
        check.between_steps(AgreedActions(step=1, repeat=True))
    compiling = [phase for phase in phases if phase is not Phase.REDUCE]
    again = [Phase.COMPUTE] * 2
    assert compiling == [Phase.LOAD, Phase.COMPUTE, *again, Phase.LOAD, Phase.COMPUTE]


@pytest.mark.slow
def test_many_checks_of_good_devices_raise_no_alarm(lab: Any, build: Callable[[Config], Checked]) -> None:
    trainer, check = build(load(lab.config()))
    for step in range(1, 201):
        if step % 20 == 1:  # another batch, other parameters
            trainer.step()
        assert verdict_of(check, step) is None


@pytest.mark.quick
@pytest.mark.parametrize("value", ["0 s", "never", "10 steps"])
def test_an_interval_without_a_meaning_is_refused(lab: Any, value: str) -> None:
    with pytest.raises(ConfigError, match=r"health\.repeat_every"):
        load(lab.config(), [f"health.repeat_every={value}"])
