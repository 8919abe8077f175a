"""The held-out loss in the training loop: what it is, what it leaves as it was, what it refuses, and who shows it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from records import step_record

from fsdp_pretrain.checkpoint.store import Store
from fsdp_pretrain.config.config import Config, load
from fsdp_pretrain.data.packing.objectives import IGNORE, Infilling
from fsdp_pretrain.data.packing.opening import open_objective
from fsdp_pretrain.data.packing.packer import Packer
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.eval.checkpoints import read_checkpoint
from fsdp_pretrain.models import Decoder
from fsdp_pretrain.models.masks import Slots
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.goodput import State, goodput
from fsdp_pretrain.watchdog.detectors.slowdown import SlowdownDetector
from fsdp_pretrain.watchdog.notify.alarms import Alarms

Sums = dict[str, tuple[float, int]]
"""Of losses and targets, by source."""
RAMP = {"first": "4 samples", "by": "4 samples", "duration": "24 samples"}
"""Six steps of 4 samples, then of 8."""
DUE = {6: 24, 9: 48, 11: 64}
"""Step after which the loss is measured -> samples consumed by then."""
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"attention": "document", "positions": "document", "loss_across_documents": False},
    "glm": {"sequence_length": 64, "objective": {"kind": "glm", "row": 56, "slots": 2, "mask_share": 0.5}},
}
GLM = {"family": "glm", "hidden": 48, "vocab": 518, "kv_heads": None, "ffn": None}


@pytest.fixture(scope="module")
def sources(module_lab: Any, tokenizer: Any, helpers: Any) -> list[dict[str, str]]:
    """Two held-out corpora: of some samples, and of two and a bit."""
    found = []
    for name, documents, words in (("prose", 30, 60), ("code", 3, 60)):
        texts = tokenizer.encode([helpers.text(5000 + number + documents, words) for number in range(documents)])
        found.append({"name": name, "path": str(helpers.corpus(module_lab.path / name, texts, tokenizer))})
    return found


@pytest.fixture(scope="module")
def trained(module_lab: Any, sources: list[dict[str, str]]) -> Callable[..., Path]:
    """`trained("llama", 2)`: the directory of a run of eleven steps, on so many ranks, with all checkpoints it measured."""

    def train(kind: str, ranks: int, *stops: str) -> Path:
        run: Path = module_lab.path / f"{kind}-{ranks}{len(stops) or ''}"
        if not run.exists():
            config = module_lab.config(
                kind,
                run={"name": "run", "dir": str(run)},
                model=GLM if kind == "glm" else {},
                data=KINDS[kind],
                train={"duration": "64 samples", "micro_batch": 1, "batch_ramp": RAMP},
                checkpoint={"every": "24 samples", "keep_last": 9},
                eval={"loss_on": sources, "loss_every": "22 samples"},
                record={"console_every": 100},
            )
            shard = f"parallel.shard={min(ranks, 2)}"
            for stop in (*stops, "64 samples"):
                module_lab.train(config, shard, f"train.duration={stop}", "optimizer.decay=64 samples", ranks=ranks)
        return run

    return train


def measured(records: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """{step: held-out losses} of the records that have them."""
    return {record["step"]: record["heldout"] for record in records if record["heldout"] is not None}


# ------------------------------------------------------------------------ a computation of its own


def plain(model: Decoder, config: Config, names: list[tuple[str, Path, int]]) -> Sums:
    """The loss of the first samples of each corpus: (name, path, samples); one sample or document at a time."""
    data, found = config.data, {}
    one = infilled if data.objective.kind == "glm" else documents if data.attention == "document" else whole
    for name, path, count in names:
        slots = (2, 32) if one is infilled else None
        packer = Packer([(name, path, 1.0)], data.row, seed=0, lanes=256, slots=slots)
        total, targets = 0.0, 0
        for number in range(count):
            losses = one(model, config, packer, number)
            total, targets = total + float(losses.double().sum()), targets + len(losses)
        found[name] = (total, targets)
    return found


def whole(model: Decoder, config: Config, packer: Packer, number: int) -> torch.Tensor:
    del config
    tokens = torch.from_numpy(packer.pack(number, 1).tokens)
    return F.cross_entropy(model(tokens[:, :-1])[0], tokens[0, 1:], reduction="none")


def documents(model: Decoder, config: Config, packer: Packer, number: int) -> torch.Tensor:
    """Each document by itself; the first token of one is not predicted from the separator before it."""
    del config
    row = packer.pack(number, 1).tokens[0]
    ends = [*(np.flatnonzero(row == packer.eod) + 1), len(row)]
    losses = []
    for start, stop in zip([0, *ends], ends, strict=False):
        if stop - start > 1:
            tokens = torch.from_numpy(row[start:stop])
            losses.append(F.cross_entropy(model(tokens[None, :-1])[0], tokens[1:], reduction="none"))
    return torch.cat(losses)


def infilled(model: Decoder, config: Config, packer: Packer, number: int) -> torch.Tensor:
    objective = open_objective(config, packer, seed=0)
    assert isinstance(objective, Infilling)
    made = objective.apply(packer.pack(number, 1))
    slots = Slots(torch.from_numpy(made.lengths), torch.from_numpy(made.prefix))
    logits = model(torch.from_numpy(made.inputs), None, slots, torch.from_numpy(made.positions))[0]
    labels = torch.from_numpy(made.labels[0])
    return F.cross_entropy(logits, labels, reduction="none")[labels != IGNORE]


def agrees(
    losses: dict[str, Any], run: Path, step: int, sources: list[dict[str, str]], samples: dict[str, int]
) -> None:
    """The recorded losses after a step are those of its checkpoint."""
    model, config = read_checkpoint(Store(run / "checkpoints").find(step), "cpu")
    with torch.inference_mode():
        expected = plain(
            model.eval(), config, [(each["name"], Path(each["path"]), samples[each["name"]]) for each in sources]
        )
    assert {name: loss["count"] for name, loss in losses.items()} == {name: n for name, (_, n) in expected.items()}
    for name, (total, _) in expected.items():
        assert losses[name]["sum"] == pytest.approx(total, rel=1e-5), (step, name)


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [("llama", 1), ("llama", 4), pytest.param("glm", 2, marks=pytest.mark.slow)],
)
def test_it_is_that_of_a_separate_computation(
    trained: Callable[..., Path], helpers: Any, sources: list[dict[str, str]], kind: str, ranks: int
) -> None:
    """At the first step of each interval and the last, from the same samples under a ramp, on every number of ranks."""
    run = trained(kind, ranks)
    records = helpers.metrics(run)
    assert {step: records[step - 1]["consumed"] for step in measured(records)} == DUE
    (entry,) = helpers.journal(run, "heldout")
    for step, losses in measured(records).items():
        agrees(losses, run, step, sources, entry["samples"])
    share = 4 * 8 // 2  # four of the full batches, shared by two sources; `code` has fewer samples
    assert entry["samples"]["prose"] == share > entry["samples"]["code"] > 0
    assert {r["seconds"]["heldout"] > 0 for r in records if r["step"] in DUE} == {True}
    assert {r["seconds"]["heldout"] for r in records if r["step"] not in DUE} == {0.0}


def test_after_a_resume_it_goes_on_as_if_never_stopped(trained: Callable[..., Path], helpers: Any) -> None:
    """To the bit, on the same mesh. The first part measures also after its last step."""
    whole, stopped = (measured(helpers.metrics(trained("llama", 2, *stops))) for stops in ((), ("32 samples",)))
    assert set(whole) == set(DUE) and set(stopped) == {*DUE, 7}
    assert {step: stopped[step] for step in DUE} == whole


# ------------------------------------------------------------------------ what it leaves as it was


def test_training_is_the_same_to_the_bit(lab: Any, helpers: Any, sources: list[dict[str, str]], constants: Any) -> None:
    """Measured after every step: with dropout (of training alone), accumulation, gathered parameters, and saves."""
    constants("fsdp_pretrain.parallel.replica_check", COMPARE_EVERY=1)
    config = lab.config(
        model={"family": "gpt", "dropout": 0.1, "positions": 32, "kv_heads": None, "ffn": None},
        train={"duration": "8 steps", "micro_batch": 2},
        parallel={"shard": 2, "reshard_after_forward": False, "recompute": 1},
        checkpoint={"every": "3 steps"},
        eval={"loss_every": "1 step", "loss_samples": 2},
    )
    runs = {name: lab.path / name for name in ("without", "with")}
    named = "eval.loss_on=[" + ", ".join(f'{{name="{each["name"]}", path="{each["path"]}"}}' for each in sources) + "]"
    lab.train(config, f"run.dir={runs['without']}", ranks=2)
    lab.train(config, f"run.dir={runs['with']}", named, ranks=2)
    assert helpers.losses(runs["with"]) == helpers.losses(runs["without"])
    records = {name: helpers.metrics(run) for name, run in runs.items()}
    assert [r["replicas"] for r in records["with"]] == [r["replicas"] for r in records["without"]]
    digests = [[c.manifest().state_digest for c in Store(run / "checkpoints").scan()] for run in runs.values()]
    assert digests[0] == digests[1] and len(digests[0]) == 3
    losses = measured(records["with"])
    assert list(losses) == list(range(1, 9)) and not measured(records["without"])
    agrees(losses[6], runs["with"], 6, sources, {"prose": 2, "code": 2})


# ------------------------------------------------------------------------ what it refuses


def test_what_cannot_be_measured_is_refused_at_once(
    lab: Any, helpers: Any, tokenizer: Any, sources: list[dict[str, str]]
) -> None:
    """All problems in one report, before anything is trained."""
    foreign, answers = (helpers.corpus(lab.path / name, [[1, 2, 3]] * 98, tokenizer) for name in ("foreign", "answers"))
    manifest = json.loads((answers / "manifest.json").read_text())
    (answers / "manifest.json").write_text(json.dumps({**manifest, "pairs": True}))
    entry = {**manifest["tokenizer"], "fingerprint": "of another"}
    (foreign / "manifest.json").write_text(json.dumps({**manifest, "tokenizer": entry}))
    bad = {"trained": lab.corpus, "gone": lab.path / "gone", "foreign": foreign, "answers": answers}
    listed = [{"name": name, "path": str(path)} for name, path in bad.items()]
    output = lab.train(lab.config(eval={"loss_on": [*sources, *listed]}), expect=78)
    assert "4 problems in eval.loss_on" in output and "Traceback" not in output
    for text in (
        f"trained: {lab.corpus} is the training source 'text'",
        f"gone: {lab.path / 'gone'} is not a corpus",
        f"foreign: {foreign} was made with another tokenizer",
        f"answers: {answers} holds prompts with answers",
    ):
        assert text in output
    assert not helpers.metrics(lab.path / "run")
    output = lab.train(lab.config(eval={"loss_on": sources, "loss_samples": 16}), expect=78)
    assert "code: the corpus has" in output and "16 are to be measured" in output and "prose" not in output
    for wrong, text in (
        ({"loss_on": [sources[0]] * 2}, "source names must differ"),
        ({"loss_every": "0 steps"}, "0 steps is no length"),
    ):
        with pytest.raises(ConfigError, match=text):
            load(lab.config(eval=wrong))


# ------------------------------------------------------------------------ who shows it


@pytest.mark.shows("D18")
def test_status_console_and_goodput_show_it(trained: Callable[..., Path], helpers: Any, run_command: Any) -> None:
    run = trained("llama", 1)
    record = helpers.metrics(run)[-1]
    means = {name: f"{loss['sum'] / loss['count']:.4f}" for name, loss in record["heldout"].items()}
    shown = run_command("fsdp_pretrain.cli", "status", run)
    assert f"prose {means['prose']}, code {means['code']}, loss after step 11" in shown.stdout
    log = (run / "segments/0001/log").read_text()
    lines = [line for line in log.splitlines() if "heldout/prose=" in line]
    assert [line.split(" step=")[1].split("/")[0] for line in lines] == [str(step) for step in DUE]
    assert lines[-1].endswith(f"heldout/prose={means['prose']} heldout/code={means['code']}")
    account = goodput(RunDir(run))
    assert account is not None
    spent = sum(r["seconds"]["heldout"] for r in helpers.metrics(run))
    assert account.states[State.HELDOUT] == pytest.approx(spent) != 0.0


@pytest.mark.quick
@pytest.mark.parametrize("part", ["heldout", "forward_backward"])
def test_its_time_is_no_slowdown(tmp_path: Path, part: str) -> None:
    """From step 1,000 on, every step takes 30% longer: an alarm, unless the held-out loss does it."""
    alarms = Alarms(tmp_path / "alarms.jsonl", lambda alarm: None)
    detector = SlowdownDetector(alarms, tmp_path / "pace.json", ["node"])
    for step in range(1, 1500):
        seconds = {"iteration": 1.0, "data": 0.0, "checkpoint": 0.0, "forward_backward": 1.0}
        if step >= 1000:
            seconds = {**seconds, "iteration": 1.3, part: seconds.get(part, 0.0) + 0.3}
        detector.step(step_record(step, seconds=seconds))
    assert alarms.open_keys() == ([] if part == "heldout" else ["pace"])
