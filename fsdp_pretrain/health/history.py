"""The health state that a start inherits from the records of earlier segments."""

from __future__ import annotations

from fsdp_pretrain.config.config import Config, load
from fsdp_pretrain.config.step_settings import rounding_differences, same_values
from fsdp_pretrain.errors import UserError
from fsdp_pretrain.run import environment, journal, lineage
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.metrics import last_metrics, tail
from fsdp_pretrain.run.step_record import StepRecord

from .monitor import HISTORY, ExpectedSteps, Health

REPEATED = 3
"""Number of repeated steps that are compared with their first records."""


def recall(
    run: RunDir, config: Config, *, segment: int, parent: int | None, step: int, whole: bool, exact: bool
) -> Health:
    """The `Health` of a start.

    Args:
        segment: this start's segment, already in the lineage.
        parent: the segment that wrote the checkpoint to continue from; None when starting from scratch.
        step: step of that checkpoint.
        whole: whether the optimiser was restored too, so that steps repeat.
        exact: whether operations are bitwise deterministic on these devices.
    """
    repeated = _expected(run, config, segment, parent, step, exact) if whole else None
    return Health(config, last_metrics(run, step, HISTORY), repeated)


def _expected(
    run: RunDir, config: Config, segment: int, parent: int | None, step: int, exact: bool
) -> ExpectedSteps | None:
    """The records of the following steps by the newest segment that continued from the same state.

    None if no segment trained these steps with the settings that this start has for them.
    """
    for node in reversed(lineage.nodes(run)):
        from_here = node.segment == parent or (node.parent, node.step) == (parent, step)
        if node.segment >= segment or not from_here:
            continue
        records = dict[int, StepRecord]()
        for record in tail(run.segment(node.segment), step + 1):
            if record.step > step + REPEATED or record.not_finite is not None:
                break  # a non-finite step, and so all later ones, may give other values
            records[record.step] = record
        if not records or (node.step == step and journal.lost_optimizer(run, node.segment, step)):
            continue
        try:
            old = load(run.segment(node.segment) / "config.toml")
        except UserError:  # written by a version that knew other keys
            continue
        if same_values(old, config, records.values()):
            same = not rounding_differences(old, config) and not environment.unlike(run, node.segment, segment)
            return ExpectedSteps(records, node.segment, exact and same)
    return None
