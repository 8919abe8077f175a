"""What is replayed: steps of the record, the checkpoint before them, and the settings they were trained with. No torch.

Everything is read from the run directory, which may belong to a live run, and nothing is written there.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Literal

from data.packing.opening import open_skips
from data.packing.position import Position
from fsdp_pretrain.checkpoint.locations import stores
from fsdp_pretrain.checkpoint.state import TrainState
from fsdp_pretrain.checkpoint.store import Checkpoint
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.model import LlamaModel
from fsdp_pretrain.config.resume_rules import load_compatible
from fsdp_pretrain.config.step_settings import unlike
from fsdp_pretrain.errors import CheckpointError, ConfigError
from fsdp_pretrain.health import limits
from fsdp_pretrain.record import environment, journal, lineage
from fsdp_pretrain.record.environment import Environment
from fsdp_pretrain.record.files import RunDir
from fsdp_pretrain.record.metrics import find_step, last_metrics
from fsdp_pretrain.record.state_files import StateFile
from fsdp_pretrain.record.step_record import StepRecord

Precision = Literal["bf16", "bf16+fp8", "fp16", "fp32"]
Kernels = Literal["sdpa", "flex", "math"]
"""Of attention: as `parallel.attention`, or PyTorch's plain formula, without a fused kernel."""


class ReplayRequest(StateFile):
    """The arguments of a replay, as the command passes them to the ranks.

    Attributes:
        run, out: run directory; directory to write to, which must not exist or be empty.
        start: step of the checkpoint.
        steps: number of steps.
        segment: the start that trained them; None: those that were kept.
        precision, attention: None: as trained.
        batch_of: the step whose batch the first step gets, the next one its successor's; None: its own.
        json_output: print the report as JSON.
    """

    run: str
    out: str
    start: int
    steps: int
    segment: int | None = None
    precision: Precision | None = None
    attention: Kernels | None = None
    batch_of: int | None = None
    json_output: bool = False


@dataclass(frozen=True)
class ReplayWindow:
    """The steps to train again, and what they are compared with.

    Attributes:
        run: the run directory.
        checkpoint: the state before them; None: the initial values.
        state: its counters.
        reset: the optimiser was reset there.
        config: the settings of these steps, with the changes that were asked for.
        changed: these changes, as `key: old -> new`.
        begun: on what that start ran.
        records: of the steps whose batches are trained, in order: those after `state`, or of `batch_of`.
        due: the record of the step after `state`; that of `records` unless there is another batch.
        usual, due_usual: records before `records` and before `due`, of which it is judged what stands out.
        first: position before the first batch.
    """

    run: RunDir
    checkpoint: Checkpoint | None
    state: TrainState
    reset: bool
    config: Config
    changed: list[str]
    begun: Environment
    records: list[StepRecord]
    due: StepRecord | None
    usual: list[StepRecord]
    due_usual: list[StepRecord]
    first: Position


def open_window(request: ReplayRequest) -> ReplayWindow:
    """Find what is to be replayed.

    Raises:
        ConfigError: the steps are not in the record or were trained with different settings, or a change that was asked
            for would change nothing.
        CheckpointError: there is no checkpoint of that step on their line.
    """
    run, head, own = RunDir(Path(request.run)), request.segment, request.batch_of is None
    first = request.batch_of or request.start + 1
    records, usual, config = _recorded(run, first, request.steps, head)
    checkpoint = _checkpoint(run, request.start, head)
    state = TrainState() if checkpoint is None else TrainState.of(checkpoint.train_state())
    before = _before(records[0], config)
    if own and state.consumed != before.consumed:
        raise ConfigError(
            f"step {first} of segment {records[0].segment} does not continue the checkpoint of step {request.start}: "
            f"it was trained after {before.consumed:_} samples, not {state.consumed:_}",
            remedy="name the start that continued it with --segment, or another step with --from",
        )
    around = last_metrics(run, request.start + 1, limits.WINDOW + 1, head)
    begun = environment.view(run, records[0].segment)
    changed, texts = _change(config, request, begun)
    return ReplayWindow(
        run=run,
        checkpoint=checkpoint,
        state=state,
        reset=journal.lost_optimizer(run, records[0].segment, request.start),
        config=changed,
        changed=texts,
        begun=begun,
        records=records,
        due=next((record for record in around if record.step == request.start + 1), None),
        usual=usual,
        due_usual=[record for record in around if record.step <= request.start],
        first=state if own else before,
    )


# ---------------------------------------------------------------------- the record


def _recorded(
    run: RunDir, first: int, count: int, head: int | None
) -> tuple[list[StepRecord], list[StepRecord], Config]:
    """(up to `count` records from step `first` on, records before them, their configuration). Raises ConfigError."""
    if head is not None and head not in [node.segment for node in lineage.nodes(run)]:
        raise ConfigError(f"{run.path} has no segment {head} that trained steps")
    known = last_metrics(run, first + count - 1, count + 512, head)
    records = [record for record in known if record.step >= first]
    if not records or records[0].step != first:
        others = ", ".join(str(found.record.segment) for found in find_step(run, first))
        raise ConfigError(
            f"step {first} is not in the record of {run.path}"
            + (f" as it stands; segments that have it: {others}" * bool(others)),
            remedy="look at such a segment with --segment"
            if others
            else f"`fsdp-pretrain status {run.path}` shows the last step",
        )
    config = _settings(run, records)
    return records, [record for record in known if record.step < first][-limits.WINDOW :], config


def _settings(run: RunDir, records: list[StepRecord]) -> Config:
    """The settings of the last record's start. Raises ConfigError unless all steps were trained with them, on the same
    machines."""
    parts = [(number, [*steps]) for number, steps in groupby(records, key=lambda record: record.segment)]
    last = parts[-1][0]
    config = load_compatible(run.segment(last) / "config.toml")
    for (number, steps), (following, _) in pairwise(parts):
        end = steps[-1].step
        found = unlike(load_compatible(run.segment(number) / "config.toml"), config, steps)
        wrong = [*environment.unlike(run, number, last), *found.settings, *found.rounding]
        wrong += ["with a fresh optimizer"] if journal.lost_optimizer(run, following, end) else []
        if wrong:
            raise ConfigError(
                f"from step {end + 1} on, start {following} trained with other settings: {'; '.join(wrong)}",
                remedy=f"replay up to step {end} (--steps {end - records[0].step + 1}), or from a later checkpoint",
            )
    return config


def _before(record: StepRecord, config: Config) -> Position:
    """The position before a recorded step."""
    samples = open_skips(config).take_back(record.cursor, record.batch)
    return Position(record.step - 1, record.consumed - record.batch, samples[0])


# ---------------------------------------------------------------------- the state


def _checkpoint(run: RunDir, step: int, head: int | None) -> Checkpoint | None:
    """The checkpoint of a step on the line of a segment (None: the kept line), also one that was moved aside."""
    found, line = stores(run), lineage.line(lineage.nodes(run), head)
    every = [*(item for store in found.all for item in store.abandoned()), *found.scan()]
    problems = [f"{item.path.name}: {item.problem}" for item in every if item.step == step and item.problem]
    for item in reversed([item for item in every if item.step == step and item.problem is None]):
        segment = item.manifest().segment
        if segment is None or lineage.holds(line, segment, step):
            return item
        problems.append(f"{item.path.name} is of segment {segment}")
    if step == 0 and not problems:
        return None
    steps = sorted({item.step for item in every if item.problem is None})
    raise CheckpointError(
        f"{run.path} has no checkpoint of step {step} on this line" + (f" ({'; '.join(problems)})" if problems else ""),
        remedy=f"there are those of steps {', '.join(map(str, steps)) or 'none'}; 0 is the initial values",
    )


# ---------------------------------------------------------------------- the changes


def _change(config: Config, request: ReplayRequest, begun: Environment) -> tuple[Config, list[str]]:
    """The configuration to replay with: the same mesh, the same precision, but for what was asked for."""
    precision, changed = _precision(config, begun), []
    if request.precision == precision:
        raise ConfigError(f"--precision {precision} is what the steps were trained in", remedy="leave it out")
    if request.precision is not None:
        changed.append(f"precision: {precision} -> {request.precision}")
        precision = request.precision
    attention = config.parallel.attention
    if request.attention is not None:
        _refuse_same_kernels(config, request.attention, begun)
        changed.append(f"attention: {attention} -> {request.attention}")
        attention = "sdpa" if request.attention == "math" else request.attention
    parallel = {"attention": attention, "shard": begun.world.shards if begun.world else config.parallel.shard}
    sections = {
        "train": config.train.model_copy(update={"precision": precision}),
        "parallel": config.parallel.model_copy(update=parallel),
    }
    return config.model_copy(update=sections), changed


def _precision(config: Config, begun: Environment) -> str:
    """What `auto` was on the device of a start."""
    asked = config.train.precision
    return asked if asked != "auto" else "fp32" if begun.device == "cpu" else "bf16"


def _refuse_same_kernels(config: Config, asked: Kernels, begun: Environment) -> None:
    """Raise ConfigError if other kernels of attention would not be used, or are those of the run."""
    masked = config.data.attention == "document" or config.data.objective.kind != "causal"
    own = config.parallel.attention
    if not isinstance(config.model, LlamaModel) and config.model.scores != "fused":
        why = f"model.scores = {config.model.scores} is computed step by step, without a fused kernel"
    elif asked == "math":
        return
    elif not masked:
        why = "plain causal attention has PyTorch's fused kernels, whatever parallel.attention says"
    elif asked == own or (own == "auto" and begun.device == "cpu" and asked == "sdpa"):
        why = "the steps were trained with it"
    else:
        return
    raise ConfigError(
        f"--attention {asked} would change nothing: {why}",
        remedy="use --attention math" if asked != "math" else "use --precision",
    )
