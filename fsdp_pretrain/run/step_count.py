"""Converts between steps and samples of a run whose starts may have had different batches."""

from __future__ import annotations

from bisect import bisect_right

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.resume_rules import load_recorded
from fsdp_pretrain.config.schedule import BatchSchedule

from . import lineage
from .files import RunDir
from .metrics import last_records


class StepCount:
    """Steps and samples of a run: on the kept line of `config.run.dir` as they were trained, after it (or before the
    run has begun) as configured. Raises UserError if the record cannot be read."""

    def __init__(self, config: Config) -> None:
        run, batch = RunDir(config.run.dir), config.schedule.batch
        nodes = {node.segment: node for node in lineage.nodes(run)}
        line = lineage.line(nodes.values())
        self._after, self._consumed, self._batches = [0], [0], list[BatchSchedule]()
        segments = [0, *(part.segment for part in line)]
        boundaries = [(part.after, nodes[part.segment].consumed) for part in line]
        if line and (last := last_records(run.segment(line[-1].segment))):
            boundaries.append((last[-1].step, last[-1].consumed))
        for segment, (step, consumed) in zip(segments, boundaries, strict=False):
            if step > self._after[-1] and consumed is not None:
                steps = step - self._after[-1]
                unchanged = not segment or batch.ahead(self._consumed[-1], steps) == consumed
                recorded = None if unchanged else load_recorded(run.segment(segment) / "config.toml")
                self._batches.append(batch if recorded is None else recorded.schedule.batch)
                self._after.append(step)
                self._consumed.append(consumed)
        self._batches.append(batch)

    def consumed_at(self, step: int) -> int:
        """Samples consumed after a step."""
        part = bisect_right(self._after, step) - 1
        return self._batches[part].ahead(self._consumed[part], step - self._after[part])

    def step_at(self, consumed: int) -> int:
        """The number of whole steps after which at least `consumed` samples have been consumed."""
        part = bisect_right(self._consumed, consumed) - 1
        return self._after[part] + self._batches[part].steps_between(self._consumed[part], consumed)
