"""Opens what is replayed: steps of the record, the checkpoint before them, and the settings they were trained with.

Everything is read from the run directory, which may belong to a live run, and nothing is written there.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

from fsdp_pretrain.checkpoint.state import TrainState
from fsdp_pretrain.checkpoint.store import Checkpoint, Store
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.step_settings import rounding_differences, same_values, value_differences
from fsdp_pretrain.errors import CheckpointError, ConfigError
from fsdp_pretrain.lineage.provenance import settings_of
from fsdp_pretrain.run import environment, journal, lineage
from fsdp_pretrain.run.environment import Environment
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.metrics import find_step, last_metrics
from fsdp_pretrain.run.state_files import StateFile
from fsdp_pretrain.run.step_record import StepRecord

Precision = Literal["bf16", "bf16+fp8", "fp16", "fp32"]


class ReplayRequest(StateFile):
    """The arguments of a replay, as the command passes them to the ranks."""

    run: str  # run directory
    start: int  # step of the checkpoint
    steps: int  # number of steps
    segment: int | None = None  # number of the segment that trained the steps; None: the kept steps
    precision: Precision | None = None  # precision to use; None: that of the run


@dataclass(frozen=True)
class ReplayWindow:
    """The steps to train again, and what they are compared with."""

    checkpoint: Checkpoint | None  # the state before them; None: the initial values
    state: TrainState  # counters of the checkpoint
    reset: bool  # whether the optimiser was reset there
    config: Config  # the settings of these steps
    begun: Environment  # the environment of the segment that trained them
    circumstances: list[str]  # what changed within the window
    others: list[int]  # segments whose steps had other settings
    records: list[StepRecord]  # the records of these steps, in order


def open_window(request: ReplayRequest) -> ReplayWindow:
    """Find what is to be replayed.

    Raises:
        ConfigError: the steps are not in the record.
        CheckpointError: there is no checkpoint of that step on their line.
    """
    run, head = RunDir(Path(request.run)), request.segment
    records = _recorded(run, request.start + 1, request.steps, head)
    segment, before = records[0].segment, records[0].consumed - records[0].batch
    config, circumstances, others = _settings(run, records)
    checkpoint = _checkpoint(run, request.start, head)
    state = TrainState() if checkpoint is None else TrainState.of(checkpoint.train_state())
    if state.consumed != before:
        raise ConfigError(
            f"segment {segment} does not continue the checkpoint of step {request.start}: its next step was trained "
            f"after {before:_} samples, not {state.consumed:_}",
            remedy="name the start that continued it with --segment, or another step with --from",
        )
    return ReplayWindow(
        checkpoint=checkpoint,
        state=state,
        reset=journal.lost_optimizer(run, segment, request.start),
        config=config,
        begun=environment.view(run, segment),
        circumstances=circumstances,
        others=others,
        records=records,
    )


def _recorded(run: RunDir, first: int, count: int, head: int | None) -> list[StepRecord]:
    """Up to `count` records from step `first` on. Raises ConfigError if there are none."""
    if head is not None and head not in [node.segment for node in lineage.nodes(run)]:
        raise ConfigError(f"{run.path} has no segment {head} that trained steps")
    records = [record for record in last_metrics(run, first + count - 1, count, head) if record.step >= first]
    if not records or records[0].step != first:
        others = ", ".join(str(trained.record.segment) for trained in find_step(run, first))
        raise ConfigError(
            f"step {first} is not in the record of {run.path}"
            + (f" as it stands; segments that have it: {others}" if others else ""),
            remedy="look at such a segment with --segment"
            if others
            else f"`fsdp-pretrain status {run.path}` shows the last step",
        )
    return records


def _settings(run: RunDir, records: list[StepRecord]) -> tuple[Config, list[str], list[int]]:
    """The settings of the newest segment that has the same values as all earlier ones in their steps; how the steps of
    other segments differ from that; and which segments have other settings."""
    parts = [(number, [*steps]) for number, steps in groupby(records, key=lambda record: record.segment)]
    configs = [settings_of(run, number) for number, _ in parts]

    def agrees(newest: int) -> bool:
        """Whether all earlier segments had the same values in their steps."""
        return all(same_values(configs[at], configs[newest], parts[at][1]) for at in range(newest))

    config, changed = configs[max(filter(agrees, range(len(parts))))], list[str]()
    others = list[int]()
    for at, (number, steps) in enumerate(parts):
        settings, first = value_differences(configs[at], config, steps), steps[0].step
        texts = [*environment.unlike(run, parts[0][0], number), *settings, *rounding_differences(configs[at], config)]
        texts += ["a fresh optimizer"] if at and journal.lost_optimizer(run, number, first - 1) else []
        changed += [f"from step {first} on, {text}" for text in texts]
        others += [number] if settings else []
    return config, changed, others


def _checkpoint(run: RunDir, step: int, head: int | None) -> Checkpoint | None:
    """The checkpoint of a step on the line of a segment (None: the kept line), including those moved aside."""
    store, line = Store(run.checkpoints), lineage.line(lineage.nodes(run), head)
    checkpoints = [*store.abandoned(), *store.scan()]
    problems = [f"{item.path.name}: {item.problem}" for item in checkpoints if item.step == step and item.problem]
    for item in reversed([item for item in checkpoints if item.step == step and item.problem is None]):
        segment = item.manifest().segment
        if segment is None or lineage.holds(line, segment, step):
            return item
        problems.append(f"{item.path.name} is of segment {segment}")
    if step == 0 and not problems:
        return None
    steps = sorted({item.step for item in checkpoints if item.problem is None})
    raise CheckpointError(
        f"{run.path} has no checkpoint of step {step} on this line" + (f" ({'; '.join(problems)})" if problems else ""),
        remedy=f"there are those of steps {', '.join(map(str, steps)) or 'none'}; 0 is the initial values",
    )
