"""The metrics record of one optimiser step, a line of `metrics.jsonl`.

Only this module defines its keys.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from typing import Literal, NamedTuple

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    computed_field,
    model_serializer,
)

from fsdp_pretrain.severity import SeverityName

SCHEMA = 1
LAG = 2
"""Steps between issuing a step and reading its sums on the host, which spares a wait for the device."""
IN_FLIGHT = 1 + LAG
"""Steps without a record when a run dies: the current one, and those whose sums were not read yet."""


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class HealthFinding(_Part):
    """The news that a health incident starts, gets worse, or ends."""

    key: str  # names the incident, `detector/scope` as in an alarm
    severity: SeverityName
    summary: str  # one sentence with its numbers
    resolved: bool = False  # whether it has ended


class LossSum(_Part):
    """A loss as a sum (None if not finite) and a count to divide it by; natural log.

    The count is target tokens, or samples for `loss_sequence`.
    """

    sum: float | None
    count: int

    @property
    def mean(self) -> float:
        """NaN if the sum is not finite or the count 0."""
        return self.sum / self.count if self.sum is not None and self.count else math.nan


class StepSeconds(_Part):
    """Parts of an iteration: from the end of the previous step to the end of this one."""

    iteration: float  # the whole iteration
    data: float  # waiting for the batch
    checkpoint: float  # waiting for a save
    forward_backward: float = 0.0  # on the device, like the next two
    optimizer: float = 0.0
    heldout: float = 0.0  # measuring the held-out loss
    other: float = 0.0
    paused: float = 0.0  # pause by `control pause` before the iteration, not part of it

    @property
    def training(self) -> float:
        """The iteration without the held-out loss: the pace of training."""
        return self.iteration - self.heldout


class Ramps(_Part):
    """Values of the schedules other than learning rate and batch."""

    shares: dict[str, float] = Field(default_factory=dict)  # planned share of each source
    embedding_shrink: float | None = None  # factor of the embedding's gradient, if configured
    lr_scale: float | None = None  # this and the following: if the timeline changes them; `lr` includes it
    weight_decay: float | None = None
    betas: tuple[float, float] | None = None
    grad_clip: float | None = None
    z_loss: float | None = None
    shrink_paths: Literal["input", "both"] | None = None

    @model_serializer(mode="wrap")
    def _configured(self, handler: SerializerFunctionWrapHandler) -> dict[str, object]:
        return {name: value for name, value in handler(self).items() if value is not None}


class ReadSeconds(_Part):
    """Reads of the corpora since the last step, on rank 0; see `fsdp_pretrain.data.corpus.reading.ReadTimes`."""

    reads: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    file: str = ""


class Replicas(_Part):
    """Comparison of the replicas' parameters before the step."""

    digest: str  # digest of the first replica's parameters
    differing: list[int]  # ranks whose shard differs from the majority of replicas; without a majority, all its ranks


class ParameterGroup(_Part):
    """Statistics of a group of parameters in a step; None: not finite."""

    grad_norm: float | None  # unscaled, before clipping
    weight_norm: float | None  # after the step
    second_moment_max: float | None  # of Adam's exp_avg_sq, after the step


class StepRecord(_Part):
    """One optimiser step. `step`, `consumed`, `cursor` and `tokens` are counted after it."""

    schema_version: int = Field(default=SCHEMA, alias="schema", le=SCHEMA)
    step: int
    consumed: int  # samples trained
    cursor: int  # samples read
    tokens: int  # tokens trained
    loss: LossSum  # cross-entropy of all target tokens
    loss_sequence: LossSum | None = None  # sum of the samples' mean losses
    z_loss: LossSum | None = None  # penalty on the squared log-normalisers, if configured
    sources: dict[str, LossSum]  # cross-entropy by source
    heldout: dict[str, LossSum] | None = None  # losses of held-out samples by source, after the step, if due
    grad_norm: float | None  # before clipping, unscaled; None if not finite
    clip: float = 1.0  # factor applied to gradients
    loss_scale: float | None  # if training is in fp16
    skipped: bool  # the update was not applied, because loss or gradients were not finite
    not_finite: Literal["loss", "gradients"] | None
    nonfinite_rank: int | None = None  # the rank whose loss was not finite, if it was a single one
    groups: dict[str, ParameterGroup] | None = None  # by group of parameters, in steps that measure them
    replicas: Replicas | None = None  # in steps that compare them
    lr: float  # learning rate of the step
    ramps: Ramps
    batch: int  # samples of the step
    sequence_length: int  # tokens of a sample (the longest, if they differ)
    step_tokens: int | None = None  # tokens of the step, if its samples differ in length
    mixture: dict[str, float]  # share of each source in the target tokens
    epochs: dict[str, float] = Field(default_factory=dict)  # how often each source was read
    data_digest: str  # digest of the tokens of the global batch, 16 hex digits
    data_distance: float | None = None  # of the batch's tokens from the first steps' tokens, in standard deviations
    documents: int  # this and the next three: in the batch, see `fsdp_pretrain.data.packing.packer`
    separators: int
    adjacent_specials: int
    quarantined: int
    data_read: ReadSeconds
    beside: list[str] = Field(default_factory=list)  # other work on the node during the step
    world: int | None = None  # ranks
    seconds: StepSeconds
    tokens_per_second: float  # of all ranks; like the next, without the time of the held-out loss
    mfu: float | None = None  # model FLOPs utilisation, if the device's peak is known
    memory_bytes: int = 0  # in use on rank 0's device
    energy_joules: float | None = None  # used by all ranks' devices since the step before, if they count it
    observed: dict[str, float | None] = Field(default_factory=dict)  # measures of extensions' observers
    health: list[HealthFinding] = Field(default_factory=list)  # incidents that start, get worse or end with this step
    segment: int = 0  # segment of the start
    host: str = ""  # host of rank 0
    time: str = ""  # when the record was written

    @computed_field  # type: ignore[prop-decorator]
    @property
    def overflow(self) -> bool:
        """Whether the update was skipped because the loss scale was too high."""
        return self.skipped and self.loss_scale is not None

    @property
    def trained(self) -> int:
        """Tokens of the step's samples."""
        return self.batch * self.sequence_length if self.step_tokens is None else self.step_tokens

    @property
    def is_finite(self) -> bool:
        return self.not_finite is None and self.grad_norm is not None and math.isfinite(self.loss.mean)

    def to_line(self) -> str:
        """The JSON line, without a newline."""
        return json.dumps(self.model_dump(mode="json", by_alias=True))


def parse(line: bytes | str) -> StepRecord | None:
    """The record on a line; None if it is damaged or of a later schema."""
    try:
        record = StepRecord.model_validate_json(line)
    except ValidationError:
        return None
    return record if record.segment and record.time else None


def number(value: float) -> float | None:
    """A float for JSON; None for NaN and infinity."""
    return value if math.isfinite(value) else None


class Pace(NamedTuple):
    """Means over steps, without the time of the held-out loss."""

    seconds: float
    tokens_per_second: float
    mfu: float | None


def pace(records: Collection[StepRecord]) -> Pace:
    """The mean pace of these steps."""
    times = [record.seconds.training for record in records]
    tokens = sum(record.tokens_per_second * time for record, time in zip(records, times, strict=True))
    known = [(record.mfu, time) for record, time in zip(records, times, strict=True) if record.mfu is not None]
    mfu = sum(mfu * time for mfu, time in known) / sum(time for _, time in known) if known else None
    return Pace(sum(times) / len(times), tokens / sum(times), mfu)
