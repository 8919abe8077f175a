"""Parts of users' packages: trained, resumed, evaluated, exported and planned by name; never by other code unnoticed."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from laboratory import moved
from processes import CLI, ROOT, Run, python, python_path

from fsdp_pretrain import extensions
from fsdp_pretrain.checkpoint.code_identity import other_code
from fsdp_pretrain.checkpoint.witness import code_identity
from fsdp_pretrain.config.config import load
from fsdp_pretrain.errors import ConfigError

EXAMPLES = ROOT / "examples/extensions"
EVAL = "fsdp_pretrain.eval.cli"
MODEL = {"family": "parallel_block:llama", "gain": 0.7}
PATCH = """
from fsdp_pretrain.models import llama
def forward(self, x, mask, rotary):
    return x + self.attention(self.attention_norm(x), mask, rotary) + self.mlp(self.mlp_norm(x))
llama.LlamaBlock.forward = forward
"""
"""As a user without an extension might do it."""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: Any) -> Path:
    """A directory with copies of both examples."""
    folder: Path = tmp_path_factory.mktemp("packages")
    for name in ("parallel_block", "lion_lab"):
        shutil.copytree(EXAMPLES / name / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def found_in(folder: Path) -> dict[str, str]:
    """Variables of a process that can import the packages of a folder."""
    return {"PYTHONPATH": python_path(folder)}


@pytest.fixture(scope="module")
def trained(module_lab: Any, packages: Path) -> tuple[Path, Path]:
    """(configuration, run) of a parallel block, trained for 12 of 16 steps by 2 x 2 ranks."""
    config = module_lab.config(
        "parallel",
        code={"packages": ["parallel_block"]},
        model=MODEL,
        train={"duration": "12 steps", "micro_batch": 1},
        optimizer={"decay": "16 steps"},
        parallel={"shard": 2},
        checkpoint={"every": "4 steps"},
        eval={"every": "12 steps", "launch": False, "tasks": ["heldout_bpb"], "heldout": str(module_lab.heldout)},
    )
    module_lab.train(config, ranks=4, variables=found_in(packages))
    return config, module_lab.path / "parallel"


@pytest.fixture
def copy(trained: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    config, run = tmp_path / "run.toml", moved(trained[1], tmp_path / "parallel")
    config.write_text(trained[0].read_text().replace(str(trained[1]), str(run)))
    return config, run


def changed(packages: Path, folder: Path, old: str, new: str) -> Path:
    """A copy of the packages in which the model's file has other text."""
    shutil.copytree(packages, folder)
    path = folder / "parallel_block/model.py"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    return folder


@pytest.fixture
def evaluate(run_command: Run, packages: Path) -> Callable[..., CompletedProcess[str]]:
    def run(path: Path, *options: str, where: Path = packages) -> CompletedProcess[str]:
        checkpoint = path / "checkpoints/step-00000012"
        options = ("--limit", "4", "--json", *options)
        return run_command(EVAL, "run", checkpoint, *options, timeout=200, **found_in(where))

    return run


# ------------------------------------------------------------------------ a family


@pytest.mark.promise("own-parts")
def test_a_family_of_ones_own_is_resumed_evaluated_and_planned(
    copy: tuple[Path, Path], lab: Any, helpers: Any, run_command: Run, packages: Path, evaluate: Any
) -> None:
    config, run = copy
    done = run_command(CLI, "plan", config, "--world-size", 2, "--json", **found_in(packages), expect=0)
    assert json.loads(done.stdout)["parameters"] == helpers.journal(run, "start")[0]["parameters"]
    scored = evaluate(run, "--code", "parallel_block")
    assert scored.returncode == 0, scored.stderr
    run_command(EVAL, "watch", run, "--once", timeout=200, **found_in(packages), expect=0)  # a run of one's own
    (entry,) = helpers.journal(run, "eval")
    bits = entry["scores"]["heldout_bpb"]["bits_per_byte"]
    assert json.loads(scored.stdout)["scores"]["heldout_bpb"]["bits_per_byte"] == pytest.approx(bits, rel=0.2)
    for command in (("fsdp_pretrain.bench", config, "parallel.shard=1", "--steps", 1, "--warmup", 1),
                    (CLI, "status", run)):  # fmt: skip
        run_command(*command, timeout=200, **found_in(packages), expect=0)
    request = json.dumps({"run": str(run), "start": 8, "steps": 2})
    replayed = lab.train(request, ranks=4, module="fsdp_pretrain.replay", variables=found_in(packages))
    assert "\nequal\n" in replayed, replayed
    lab.train(config, "train.duration=16 steps", ranks=2, variables=found_in(packages))
    assert helpers.metrics(run)[-1]["step"] == 16
    (entry,) = helpers.journal(run, "resume")
    assert not any("code of" in text for text in entry["changed"])


def test_a_checkpoint_of_others_only_names_code(copy: tuple[Path, Path], evaluate: Any, tmp_path: Path) -> None:
    done = evaluate(copy[1])
    assert done.returncode == 78 and "needs the code of parallel_block" in done.stderr
    assert "--code parallel_block" in done.stderr
    absent = tmp_path / "absent"
    absent.mkdir()
    done = evaluate(copy[1], "--code", "parallel_block", where=absent)
    assert done.returncode == 78 and "cannot import parallel_block:extension" in done.stderr


@pytest.mark.promise("own-parts")
def test_code_that_computes_something_else_is_refused_by_all(
    copy: tuple[Path, Path], evaluate: Any, lab: Any, run_command: Run, packages: Path, tmp_path: Path
) -> None:
    config, run = copy
    other = changed(packages, tmp_path / "other", "x + self.gain * added", "x + 0.99 * self.gain * added")
    refused = [evaluate(run, "--code", "parallel_block", where=other)]
    out = tmp_path / "hf"
    export = (CLI, "checkpoints", run, "export", 12, out, "--code", "parallel_block")
    refused.append(run_command(*export, **found_in(other)))
    for done in refused:
        assert done.returncode == 78 and "computes something else than the code that trained" in done.stderr
    output = lab.train(config, "train.duration=16 steps", ranks=2, variables=found_in(other), expect=78)
    assert "computes something else than the code that trained" in output
    run_command(*export, **found_in(packages), expect=0)
    exported = json.loads((out / "config.json").read_text())
    assert exported["gain"] == 0.7 and exported["kv_heads"] == 2 and "tied_head" in exported


def test_code_that_computes_the_same_is_noted(
    copy: tuple[Path, Path], lab: Any, helpers: Any, packages: Path, tmp_path: Path
) -> None:
    config, run = copy
    other = changed(packages, tmp_path / "other", "x + self.gain * added", "added * self.gain + x")
    lab.train(config, "train.duration=16 steps", ranks=2, variables=found_in(other))
    (entry,) = helpers.journal(run, "resume")
    assert any(text.startswith("code of model: ") and "computes the same" in text for text in entry["changed"])


@pytest.mark.promise("own-parts")
def test_a_patched_class_is_seen(lab: Any, tmp_path: Path, run_command: Run) -> None:
    """The score of the class that was not patched would be wrong."""
    patch = tmp_path / "patch.py"
    patch.write_text(PATCH)
    config = lab.config(train={"duration": "4 steps"}, eval={"heldout": str(lab.heldout), "tasks": ["heldout_bpb"]})
    lab.train(config, variables={"EXECUTE_FIRST": str(patch)})
    command = (EVAL, "run", lab.path / "run/checkpoints/step-00000004", "--limit", "4")
    assert "the code of llama" in run_command(*command, timeout=200, expect=78).stderr
    run_command(*command, timeout=200, EXECUTE_FIRST=str(patch), expect=0)


WINDOWS = {"sliding_window": 64, "sliding_window_pattern": 4}


MODELS: list[dict[str, Any]] = [
    {"family": "qwen3", "head_size": 16, "rope_scaling": {"kind": "llama3", "factor": 8.0}},
    {"family": "olmo3", **WINDOWS, "rope_scaling": {"kind": "yarn", "factor": 8.0}},
    {"family": "gemma3_text", "head_size": 16, **WINDOWS},
    {"family": "gpt", "kv_heads": None, "ffn": 96, "positions": 64, "dropout": 0.1},
    {"family": "gpt", "kv_heads": None, "ffn": 96, "positions": "alibi", "embedding_norm": True},
    {"family": "glm", "kv_heads": None, "ffn": None, "hidden": 48, "scores": "layer_scaled"},
]
WITNESSES = """
import sys, json
from fsdp_pretrain.config.config import load
from fsdp_pretrain.checkpoint.witness import code_identity
print(json.dumps([{k: v.model_dump() for k, v in code_identity(load(path)).items()} for path in sys.argv[1:]]))
"""


@pytest.mark.parametrize(
    "variables",
    [
        {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"},
        {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    ],
    ids=["threads", "kernels"],
)
def test_a_witness_is_stable_and_knows_the_settings(lab: Any, variables: dict[str, str]) -> None:
    """Other kernels of the processor and more threads give the same code; another computation does not."""
    configs = [lab.config(f"model-{number}", model=model) for number, model in enumerate(MODELS)]
    done = python("-c", WITNESSES, *configs, **variables)
    for config, found in zip(configs, json.loads(done.stdout), strict=True):
        here = code_identity(load(config))
        there = {key: type(here[key])(**value) for key, value in found.items()}
        assert other_code(here, there, "model") is None and other_code(here, there, "optimizer") is None, config
        damaged = here["model"].model_copy(update={"witness": [value * 1.001 for value in here["model"].witness]})
        assert other_code(here, {"model": damaged}, "model") is not None, config


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("self.gain = config.gain", "self.gain = config.gain; self.gate = nn.Parameter(torch.ones(4))",
         "Parallel.initial has no rule for the parameter blocks.0.gate"),
        ("\n    def block(",
         "\n    def __init__(self, *given):\n        super().__init__(*given)\n"
         "        self.scale = nn.Parameter(torch.ones(4))\n\n    def block(",
         "Parallel.initial has no rule for the parameter scale"),
        ("x + self.gain * added", "nn.functional.dropout(x, 0.1) + self.gain * added", "override `uses_dropout`"),
    ],
)  # fmt: skip
def test_what_a_family_forgot_is_named_before_training(
    lab: Any, packages: Path, tmp_path: Path, old: str, new: str, message: str
) -> None:
    folder = changed(packages, tmp_path / "other", old, new)
    path = folder / "parallel_block/model.py"
    path.write_text(path.read_text().replace("from torch import", "import torch\nfrom torch import"))
    config = lab.config(code={"packages": ["parallel_block"]}, model=MODEL)
    output = lab.train(config, variables=found_in(folder), expect=78)
    assert message in output and "Traceback" not in output


def test_a_family_may_have_another_loss(lab: Any, helpers: Any, packages: Path, tmp_path: Path) -> None:
    """Half the loss: every recorded sum is half of what it was at first."""
    method = """
    def position_losses(self, x, weight, labels):
        losses, normalisers = super().position_losses(x, weight, labels)
        return 0.5 * losses, normalisers

    def block("""
    folder = changed(packages, tmp_path / "loss", "\n    def block(", method)
    sums = []
    for name, where in (("plain", packages), ("half", folder)):
        config = lab.config(name, code={"packages": ["parallel_block"]}, model=MODEL, train={"duration": "6 steps"})
        lab.train(config, variables=found_in(where))
        sums.append(helpers.metrics(lab.path / name)[0]["loss"]["sum"])
    assert sums[1] == pytest.approx(sums[0] / 2, rel=1e-6)


# ------------------------------------------------------------------------ an objective

HALF = """
from dataclasses import replace
from typing import Annotated, Literal
from pydantic import Field
from fsdp_pretrain.config.data_section import CausalObjective
from fsdp_pretrain.data.packing.own_objective import OwnObjective
from fsdp_pretrain.extensions import Extension, Part


class Section(CausalObjective):
    kind: Literal["half_lab:half"]
    share: Annotated[float, Field(gt=0, lt=1)] = 0.5


class Half(OwnObjective):
    def __init__(self, settings, context):
        self.share, self.web = settings.share, list(context.names).index("web")

    def change(self, batch, packed):
        labels = batch.tokens[:, 1:].clone() if batch.labels is None else batch.labels
        labels[:, : int(self.share * labels.shape[1])] = -100
        return replace(batch, labels=labels)


extension = Extension(objectives={"half": Part(Section, code="half_lab:Half")})
"""
"""Learns only what is behind the first half of a sample."""


def test_an_objective_of_ones_own(lab: Any, helpers: Any, run_command: Run, tmp_path: Path) -> None:
    """The same samples, and half the targets, on any mesh; what it learns may not change on a resume."""
    package = tmp_path / "half_lab.py"
    package.write_text(HALF)
    variables, records = found_in(tmp_path), {}
    for name, ranks, objective in (
        ("causal", 1, None),
        ("one", 1, {"kind": "half_lab:half"}),
        ("two", 2, {"kind": "half_lab:half"}),
    ):
        data = {
            "sources": [{"name": "web", "path": str(lab.corpus)}],
            **({"objective": objective} if objective else {}),
        }
        config = lab.config(name, code={"packages": ["half_lab"]}, data=data, train={"duration": "6 steps"})
        lab.train(config, ranks=ranks, variables=variables)
        records[name] = helpers.metrics(lab.path / name)
    (tight := tmp_path / "tight.toml").write_text(re.sub("(?m)^vocab = .*", "vocab = 512", config.read_text()))
    done = run_command("fsdp_pretrain.data.cli", "validate", lab.corpus, "--against", tight, **variables)
    assert "vocabulary-too-small" not in done.stdout and done.returncode == 0, done.stdout
    for causal, one, two in zip(*records.values(), strict=True):
        assert causal["data_digest"] == one["data_digest"] == two["data_digest"]
        assert causal["loss"]["count"] == 2 * one["loss"]["count"] == 2 * two["loss"]["count"]
        assert one["loss"]["sum"] == pytest.approx(two["loss"]["sum"], rel=1e-5)
    longer = ("train.duration=8 steps", "optimizer.decay=6 steps")
    output = lab.train(config, *longer, "data.objective.share=0.25", ranks=2, variables=variables, expect=78)
    assert "data.objective.share: 0.5 -> 0.25" in output
    output = lab.train(config, *longer, "data.objective.shore=0.25", ranks=2, variables=variables, expect=78)
    assert "data.objective.shore" in output and "unknown key" in output
    package.write_text(HALF.replace("int(self.share", "int(0.9 * self.share"))
    output = lab.train(config, *longer, ranks=2, variables=variables, expect=78)
    assert "objective: the code of half_lab:half" in output and "computes something else" in output


# ------------------------------------------------------------------------ an optimiser and an observer


def lion(lab: Any, name: str = "lion", **sections: Any) -> Path:
    config: Path = lab.config(
        name,
        code={"packages": ["lion_lab"]},
        train={"duration": "12 steps", "micro_batch": 1},
        optimizer={"kind": "lion_lab:lion", "lr": 1e-3, "min_lr": 1e-4, "betas": [0.9, 0.99]},
        checkpoint={"every": "6 steps"},
        **sections,
    )
    with config.open("a") as file:
        file.write('\n[[observers]]\nuse = "lion_lab:histogram"\nevery = 3\n')
    return config


@pytest.mark.promise("own-parts")
def test_an_optimiser_and_an_observer_of_ones_own(lab: Any, helpers: Any, packages: Path) -> None:
    variables, runs = found_in(packages), {}
    for name, ranks in (("one", 1), ("four", 4), ("parts", 4)):
        config = lion(lab, name, parallel={"shard": 2 if ranks > 1 else 1})
        if name == "parts":
            lab.train(config, "train.duration=6 steps", "optimizer.decay=12 steps", ranks=ranks, variables=variables)
        lab.train(config, ranks=ranks, variables=variables)
        runs[name] = lab.path / name
    curves = {name: helpers.losses(run) for name, run in runs.items()}
    assert curves["parts"] == curves["four"] and curves["one"][-1][1] < curves["one"][0][1]
    for name, run in runs.items():
        found = [json.loads(line) for line in (run / "histograms.jsonl").read_text().splitlines()]
        assert [line["step"] for line in found] == [3, 6, 9, 12], name
        parameters = helpers.journal(run, "start")[0]["parameters"]
        for record, line in zip(helpers.metrics(run)[2::3], found, strict=True):
            assert record["observed"] == {key: value for key, value in line.items() if key != "step"}
            # All elements but exact zeros, such as those of tokens that no sample has: each counted once on any mesh.
            assert 0.3 * parameters < sum(record["observed"].values()) <= parameters
    first, other = (helpers.metrics(runs[name])[2]["observed"] for name in ("one", "four"))
    assert sum(abs(first[key] - other[key]) for key in first) < 0.01 * sum(first.values())


EMA = """
import torch
from typing import Annotated, Literal
from pydantic import Field
from fsdp_pretrain.config.sections import ObserverSection
from fsdp_pretrain.extensions import Extension, Part
from fsdp_pretrain.parallel.mesh import local_part
from fsdp_pretrain.train.observer import Max, Observer, Sum


class EmaSection(ObserverSection):
    use: Literal["ema_lab:ema"]
    decay: Annotated[float, Field(gt=0, lt=1)] = 0.9


class Ema(Observer):
    def __init__(self, settings, context):
        self.decay, self.parameters = settings.decay, dict(context.model.named_parameters())
        self.average = {name: torch.zeros_like(p, requires_grad=False) for name, p in self.parameters.items()}
        self.seen = 0

    def tensors(self):
        return self.average

    @torch.no_grad()
    def start(self):
        for name, parameter in self.parameters.items() if not self.restored else ():
            self.average[name].copy_(parameter)

    def batch_read(self, batch):
        self.seen += batch.targets

    @torch.no_grad()
    def measures(self):
        for name, parameter in self.parameters.items():
            self.average[name].lerp_(parameter, 1 - self.decay)
        local = [local_part(tensor) for tensor in self.average.values() if local_part(tensor).numel()]
        largest = torch.stack([tensor.abs().max() for tensor in local]).max()
        return {"square": Sum(sum(tensor.square().sum() for tensor in local)), "largest": Max(largest)}


extension = Extension(observers={"ema": Part(EmaSection, code="ema_lab:Ema")})
"""


@pytest.mark.slow
def test_tensors_of_an_observer_are_in_the_checkpoints(lab: Any, helpers: Any, tmp_path: Path) -> None:
    """An average of the weights: resumed to the bit; left out and begun anew where the configuration says so."""
    (tmp_path / "ema_lab.py").write_text(EMA)
    variables, configs = found_in(tmp_path), {}
    for name in ("whole", "parts"):
        options = {"train": {"duration": "12 steps", "micro_batch": 1}, "checkpoint": {"every": "6 steps"}}
        config = lab.config(name, code={"packages": ["ema_lab"]}, parallel={"shard": 2}, **options)
        with config.open("a") as file:
            file.write('\n[[observers]]\nuse = "ema_lab:ema"\n')
        configs[name] = config
    lab.train(configs["whole"], ranks=4, variables=variables)
    lab.train(configs["parts"], "train.duration=6 steps", "optimizer.decay=12 steps", ranks=4, variables=variables)
    lab.train(configs["parts"], ranks=4, variables=variables)
    whole, parts = (helpers.metrics(lab.path / name) for name in ("whole", "parts"))
    assert [record["observed"] for record in whole] == [record["observed"] for record in parts]
    assert whole[0]["observed"].keys() == {"ema_lab:ema/square", "ema_lab:ema/largest"}
    assert "state digest" in helpers.journal(lab.path / "parts", "resume")[0]["text"]
    without = configs["parts"].read_text().replace('\n[[observers]]\nuse = "ema_lab:ema"\n', "")
    (plain := tmp_path / "plain.toml").write_text(without)
    decay = "optimizer.decay=12 steps"
    lab.train(plain, "train.duration=15 steps", decay, ranks=2, variables=variables)
    lab.train(configs["parts"], "train.duration=18 steps", decay, ranks=2, variables=variables)
    _, left_out, fresh = helpers.journal(lab.path / "parts", "resume")
    assert "tensors of the observer ema_lab:ema are left out" in left_out["text"]
    assert "the observer ema_lab:ema starts fresh" in fresh["text"]


def test_an_optimiser_that_computes_something_else_must_be_declared(
    lab: Any, helpers: Any, packages: Path, tmp_path: Path
) -> None:
    folder, config = tmp_path / "other", lion(lab)
    shutil.copytree(packages, folder)
    lab.train(config, "train.duration=6 steps", "optimizer.decay=12 steps", variables=found_in(packages))
    path = folder / "lion_lab/parts.py"
    path.write_text(path.read_text().replace("1 - betas[0]).sign()", "1 - betas[0]).sign() * 1.01"))
    output = lab.train(config, variables=found_in(folder), expect=78)
    assert "optimizer: the code of lion_lab:lion" in output and "--allow optimizer.kind" in output
    lab.train(config, variables=found_in(folder), flags=("--allow", "optimizer.kind"))
    assert "declared: optimizer: the code" in helpers.journal(lab.path / "lion", "resume")[-1]["text"]


def test_an_observer_may_ask_for_a_stop(lab: Any, helpers: Any, packages: Path, tmp_path: Path) -> None:
    """The run saves and ends with 75, a few steps after the request, on all ranks."""
    folder = tmp_path / "asking"
    shutil.copytree(packages, folder)
    path = folder / "lion_lab/parts.py"
    asks = '    def requests(self):\n        return {"stop": int(len(self._counts) > 0)}\n\n    def measures('
    path.write_text(path.read_text().replace("    def measures(", asks))
    lab.train(lion(lab, parallel={"shard": 2}), ranks=2, variables=found_in(folder), expect=75)
    last = helpers.metrics(lab.path / "lion")[-1]["step"]
    assert 3 < last < 9 and (lab.path / f"lion/checkpoints/step-{last:08}").exists()


def test_an_observer_may_end_the_run_with_an_error(lab: Any, packages: Path, tmp_path: Path) -> None:
    """With its cause, effect and remedy."""
    folder = tmp_path / "failing"
    shutil.copytree(packages, folder)
    path = folder / "lion_lab/parts.py"
    fails = """    def judge(self, record):
        from fsdp_pretrain.train.observer import Verdict

        verdict = Verdict()
        if record.step == 4:
            verdict.fail("no bin is filled", effect="nothing is learned", remedy="look at the bins")
        return verdict

    def measures("""
    path.write_text(path.read_text().replace("    def measures(", fails))
    output = lab.train(lion(lab), variables=found_in(folder), expect=93)
    assert all(text in output for text in ("no bin is filled", "nothing is learned", "look at the bins"))


def test_an_observer_that_raises_ends_the_run_and_is_named(lab: Any, packages: Path, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(packages, folder)
    path = folder / "lion_lab/parts.py"
    path.write_text(path.read_text().replace("        return self._counts", "        return self._nothing"))
    output = lab.train(lion(lab), variables=found_in(folder), expect=78)
    assert "the observer lion_lab:histogram raised AttributeError" in output and "parts.py:" in output


# ------------------------------------------------------------------------ a package to start from


@pytest.mark.slow
def test_init_writes_a_package_with_a_test(run_command: Run, tmp_path: Path, lab: Any) -> None:
    """Its test passes, it trains, and no file of its name is overwritten."""
    folder = tmp_path / "mylab"
    assert "mylab:llama" in run_command(CLI, "init", folder, "--extension", "mylab", expect=0).stdout
    assert sorted(path.name for path in folder.rglob("*.py")) == ["__init__.py", "model.py", "test_mylab.py"]
    python("-m", "pytest", "-q", "-p", "no:cacheprovider", folder, cwd=tmp_path, **found_in(folder))
    config = lab.config(code={"packages": ["mylab"]}, model={"family": "mylab:llama"}, train={"duration": "6 steps"})
    lab.train(config, variables=found_in(folder))
    for arguments, message in ((["mylab"], "these files exist"), (["my-lab"], "not a name of a Python package")):
        assert message in run_command(CLI, "init", folder, "--extension", *arguments, expect=78).stderr


PAGE = ROOT / "docs/extend.md"


def test_the_package_of_the_page_is_watched_and_known_by_what_it_computes(
    lab: Any, tmp_path: Path, run_command: Run
) -> None:
    """The processes beside training know its parts too. Parameters that begin equal show in which order they are used."""
    for name, text in re.findall(r"^```python package (\S+)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    config = lab.config(
        code={"packages": ["mylab"]},
        model={"family": "mylab:llama", "gain": 0.7},
        optimizer={"kind": "mylab:sign", "lr": 1e-3, "min_lr": 0.0, "rho": 0.9},
        train={"duration": "6 steps"},
        data={
            "sources": [{"name": "text", "path": f"file://{lab.corpus}"}],
            "cache": {"dir": str(tmp_path / "cache"), "size": "1GB"},
        },
        eval={"heldout": str(lab.heldout)},
        watchdog={"enabled": True},
    )
    output = lab.train(config, ranks=2, variables=found_in(tmp_path))
    assert "Traceback" not in output and "cannot start" not in output
    assert (lab.path / "run/watchdog/snapshot.json").exists()
    allowed = ("--allow", "optimizer.rho", "--allow", "optimizer.decay")  # keys of a package, too
    lab.train(
        config, "train.duration=8 steps", "optimizer.rho=0.8", ranks=2, flags=allowed, variables=found_in(tmp_path)
    )
    arguments = ("run", lab.path / "run", "--tasks", "heldout_bpb", "--limit", 2, "--code", "mylab")
    run_command(EVAL, *arguments, **found_in(tmp_path), expect=0)
    code = tmp_path / "mylab/parts.py"
    code.write_text(code.read_text().replace("self.gain.to(x.dtype)", "self.gain.to(x.dtype).roll(1)"))
    refused = run_command(EVAL, *arguments, **found_in(tmp_path))
    assert refused.returncode == 78 and "computes something else" in refused.stderr
    was, is_ = re.findall(r"on fixed input (\S+) instead of (\S+)", refused.stderr)[0]
    assert was != is_


# ------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({"code": {"packages": ["nowhere"]}}, ["cannot import nowhere:extension", "No module named 'nowhere'"]),
        ({"code": {"packages": ["json"]}}, ["cannot import json:extension"]),
        ({"code": {"packages": ["a-b"]}}, ["code.packages.0"]),
        (
            {"model": {"family": "parallel_block:lama"}, "optimizer": {"kind": "x:y"}},
            ["model.family = 'parallel_block:lama'", "parallel_block has no such part; the packages have parallel_block:llama",
             "optimizer.kind = 'x:y'", "add code.packages = [\"x\"]"],
        ),
        (
            {"code": {"packages": ["lion_lab"]}, "optimizer": {"groups": [{"match": "*", "kind": "lion_lab:lion"}]}},
            ["`groups` have the kind lion_lab:lion, but can have adamw, muon", "it must be its `kind` too"],
        ),
        ({"model": {**MODEL, "gian": 2.0}}, ["model.gian", "unknown key; did you mean 'model.gain'"]),
        ({"model": {**MODEL, "gain": -1.0}}, ["model.gain = -1.0", "greater than 0"]),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_mistakes(lab: Any, run_command: Run, packages: Path, changes: dict[str, Any], messages: list[str]) -> None:
    config = lab.config(**{"code": {"packages": ["parallel_block"]}, **changes})
    done = run_command(CLI, "plan", config, **found_in(packages))
    assert done.returncode == 78 and "Traceback" not in done.stderr
    for message in messages:
        assert message in done.stderr


@pytest.mark.quick
@pytest.mark.parametrize(
    ("families", "message"),
    [
        ("{'own': Part(LlamaModel, code='a:b')}", r'LlamaModel must have the key family: Literal\["wrong_lab:own"\]'),
        ("{'own': LlamaModel}", r"families 'own' is no `Part\(settings, code\)`"),
        ("[Part(LlamaModel, code='a:b')]", "families is a list, not a mapping"),
        ("{'own': Part(Extension, code='a:b')}", "families 'own': its settings are no class of pydantic"),
    ],
)
def test_sections_must_have_the_names_of_their_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, families: str, message: str
) -> None:
    (tmp_path / "wrong_lab.py").write_text(
        "from fsdp_pretrain.config.model import LlamaModel\nfrom fsdp_pretrain.extensions import Extension, Part\n"
        f"extension = Extension(families={families})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wrong_lab", raising=False)
    with pytest.raises(ConfigError, match=message):
        extensions.load(["wrong_lab"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fsdp_pretrain"], "there is a package of this name already"),
        (["json"], "there is a package of this name already"),
        (["mylab", "--minimal"], "write different things"),
    ],
)
def test_init_writes_no_package_that_hides_another(
    run_command: Run, tmp_path: Path, arguments: list[str], message: str
) -> None:
    assert message in run_command(CLI, "init", tmp_path / "new", "--extension", *arguments, expect=78).stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.quick
def test_reading_a_configuration_imports_no_code_of_parts(packages: Path, lab: Any) -> None:
    """A package is imported without torch, so that commands which need none stay quick."""
    config = lab.config(code={"packages": ["parallel_block"]}, model=MODEL)
    program = (
        "import sys\nfrom fsdp_pretrain.config.config import load\n"
        f"print(load({str(config)!r}).model.gain, 'torch' in sys.modules)"
    )
    assert python("-c", program, **found_in(packages)).stdout.split() == ["0.7", "False"]
