"""What the verdicts of a start know from the records of previous starts. No torch."""

from __future__ import annotations

from fsdp_pretrain.config.config import Config, load
from fsdp_pretrain.config.resume_rules import FREE, changes
from fsdp_pretrain.errors import UserError
from fsdp_pretrain.record import environment, lineage
from fsdp_pretrain.record.files import RunDir
from fsdp_pretrain.record.metrics import last_metrics, tail
from fsdp_pretrain.record.step_record import StepRecord

from .monitor import HISTORY, ExpectedSteps, Health

REPEATED = 3
"""Number of repeated steps that are compared with their earlier records."""

_NUMERIC = ("parallel.", "train.")
_MACHINES = ("world", "device", "torch")


def recall(
    run: RunDir, config: Config, *, segment: int, parent: int | None, step: int, whole: bool, exact: bool
) -> Health:
    """The judge of the steps of a start.

    Args:
        segment: of this start, which has its place in the lineage.
        parent: the segment that wrote the checkpoint that this start continues; None for a beginning.
        step: of that checkpoint.
        whole: the optimiser was restored as well, so that steps repeat.
        exact: operations give the same bits every time on these devices.
    """
    repeated = _expected(run, config, segment, parent, step, exact) if whole else None
    return Health(config, last_metrics(run, step, HISTORY), repeated)


def _expected(
    run: RunDir, config: Config, segment: int, parent: int | None, step: int, exact: bool
) -> ExpectedSteps | None:
    """What the newest start that continued from the same state recorded of the steps after it.

    None if there is no such start, or a change since then changes what is learned.
    """
    known = lineage.nodes(run)
    for node in reversed(known):
        from_here = node.segment == parent or (node.parent, node.step) == (parent, step)
        if node.segment >= segment or not from_here:
            continue
        records = dict[int, StepRecord]()
        for record in tail(run.segment(node.segment), step + 1):
            if record.step > step + REPEATED or record.not_finite is not None:
                break  # what a device spoilt once comes out differently, and so does all that follows
            records[record.step] = record
        if not records:
            continue
        try:
            differences = changes(load(run.segment(node.segment) / "config.toml"), config)
        except UserError:  # written by a version that knew other keys
            return None
        if any(change.kind != FREE for change in differences):
            return None
        then, now = (environment.view(run, number) for number in (node.segment, segment))
        same = all(getattr(then, key) == getattr(now, key) for key in _MACHINES)
        same &= not any(change.key.startswith(_NUMERIC) for change in differences)
        return ExpectedSteps(records, node.segment, exact and same)
    return None
