"""The metrics record: what one optimiser step did and measured, one line of `metrics.jsonl`. No torch.

The only place that knows its keys. Lines of release 0.1 have no `schema` and are read too.
"""

from __future__ import annotations

import json
import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, computed_field

from ..severity import SeverityName

SCHEMA = 1


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class Finding(_Part):
    """A health incident begins, gets worse, or ends.

    Attributes:
        key: names the incident, `detector/scope` as in an alarm.
        severity: of it.
        summary: what, with its numbers.
        resolved: it has ended.
    """

    key: str
    severity: SeverityName
    summary: str
    resolved: bool = False


class LossSum(_Part):
    """A loss as a sum and what it is to be divided by, natural log.

    Attributes:
        sum: None if it was not finite.
        count: target tokens; samples in `loss_sequence`.
    """

    sum: float | None
    count: int

    @property
    def mean(self) -> float:
        """NaN if it was not finite, or over nothing."""
        return self.sum / self.count if self.sum is not None and self.count else math.nan


class Seconds(_Part):
    """Parts of an iteration, which runs from the end of the update before to the end of this one.

    Attributes:
        iteration: all of it.
        data: waiting for the batch.
        forward_backward, optimizer: on the device.
        checkpoint: held up by a save.
        other: the rest.
    """

    iteration: float
    data: float
    checkpoint: float
    forward_backward: float = 0.0
    optimizer: float = 0.0
    other: float = 0.0


class Ramps(_Part):
    """What schedules other than those of the learning rate and the batch gave.

    Attributes:
        shares: planned share of each source.
        embedding_shrink: factor of the embedding's gradient; None if it is not configured.
    """

    shares: dict[str, float] = Field(default_factory=dict)
    embedding_shrink: float | None = None


class ReadTimes(_Part):
    """Reads of the corpora since the step before, on rank 0; see `data.reading.ReadTimes`."""

    reads: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    file: str = ""


class Replicas(_Part):
    """The comparison of the replicas' parameters before the step.

    Attributes:
        digest: of the parameters of the first replica.
        differing: ranks that hold another share than most replicas do; all of that shard if there is no majority.
    """

    digest: str
    differing: list[int]


class StepRecord(_Part):
    """One optimiser step.

    Attributes:
        schema_version: `schema` in the file; lines of release 0.1 have none.
        step, consumed, cursor, tokens: after it: optimiser steps, samples trained, samples read, tokens trained.
        loss: cross-entropy of all target tokens.
        loss_sequence: of the samples' means.
        z_loss: penalty on the squared log-normalisers; None without one.
        sources: cross-entropy by source.
        grad_norm: before clipping, unscaled; None if not finite.
        clip: what gradients were multiplied by.
        loss_scale: of fp16; None otherwise.
        skipped: the update was not applied, because something was not finite.
        not_finite: what was not; None if all was.
        nonfinite_rank: the rank whose loss was not finite, if it was one alone.
        replicas: of the steps that compare them.
        lr: applied.
        ramps: of further schedules.
        batch, sequence_length: samples, and tokens of a sample.
        mixture: share of each source in the target tokens.
        epochs: how often each source was read.
        data_digest: of the tokens of the global batch, 16 hex digits.
        data_distance: of the batch's tokens from those of the first steps, in deviations; None if it was not compared.
        documents, separators, adjacent_specials, quarantined: in the batch; see `data.packer`.
        data_read: reads that it took.
        beside: what else ran on the node.
        world: ranks.
        seconds: parts of its time.
        tokens_per_second: of all ranks.
        mfu: model FLOPs utilisation; None if the device's peak is not known.
        memory_bytes: in use on rank 0's device.
        health: what begins, gets worse or ends with it.
        segment, host, time: of the start, of rank 0, and when it was written.
    """

    schema_version: int = Field(default=SCHEMA, alias="schema", le=SCHEMA)
    step: int
    consumed: int
    cursor: int
    tokens: int
    loss: LossSum
    loss_sequence: LossSum | None = None
    z_loss: LossSum | None = None
    sources: dict[str, LossSum]
    grad_norm: float | None
    clip: float = 1.0
    loss_scale: float | None
    skipped: bool
    not_finite: Literal["loss", "gradients"] | None
    nonfinite_rank: int | None = None
    replicas: Replicas | None = None
    lr: float
    ramps: Ramps
    batch: int
    sequence_length: int
    mixture: dict[str, float]
    epochs: dict[str, float] = Field(default_factory=dict)
    data_digest: str
    data_distance: float | None = None
    documents: int
    separators: int
    adjacent_specials: int
    quarantined: int
    data_read: ReadTimes
    beside: list[str] = Field(default_factory=list)
    world: int | None = None
    seconds: Seconds
    tokens_per_second: float
    mfu: float | None = None
    memory_bytes: int = 0
    health: list[Finding] = Field(default_factory=list)
    segment: int = 0
    host: str = ""
    time: str = ""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def overflow(self) -> bool:
        """Skipped, for a loss scale that was too high."""
        return self.skipped and self.loss_scale is not None

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradients were."""
        return self.not_finite is None and self.grad_norm is not None and math.isfinite(self.loss.mean)

    def to_line(self) -> str:
        """The line of the file, without its end."""
        return json.dumps(self.model_dump(mode="json", by_alias=True))


def parse(line: bytes | str) -> StepRecord | None:
    """The record of a line; None if it is damaged, or of a later schema."""
    try:
        record = StepRecord.model_validate_json(line)
    except ValidationError:
        return None
    return record if record.segment and record.time else None


def number(value: float) -> float | None:
    """A float for the record; None where JSON has no number (NaN, infinity)."""
    return value if math.isfinite(value) else None
