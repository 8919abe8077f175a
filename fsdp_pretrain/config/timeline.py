"""`[[timeline]]`: what changes in the course of a run, so that its whole history is one configuration.

`schedule` turns the entries into numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, Literal, Self, TypeVar

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from fsdp_pretrain.units import Progress

from .base import AboveZero, Betas, Length, NotNegative, Section, Share

T = TypeVar("T")


class Change(Section, Generic[T]):
    """A new value, or a linear ramp to it: `4e-5` is the same as `{ to = 4e-5 }`."""

    from_: T | None = Field(default=None, alias="from")
    """Value at the beginning of the ramp. Default: the value there."""
    to: T
    """Value from then on, or at the end of the ramp."""
    over: Length | None = None
    """Length of the ramp. Default: the value changes at once."""

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        return value if isinstance(value, dict | cls) else {"to": value}

    @model_validator(mode="after")
    def _one_meaning(self) -> Self:
        if self.from_ is not None and self.over is None:
            raise ValueError("`from` is the beginning of a ramp; give its length as `over`, or leave it out")
        return self

    @model_serializer(mode="wrap")
    def _by_alias(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values = handler(self).items()
        return {"from" if name == "from_" else name: value for name, value in values if value is not None}


# Named classes, because rank 0 sends entries to the other ranks, and `Change[NotNegative]` cannot be pickled.


class AmountChange(Change[NotNegative]):
    """A change of a value that is 0 or more."""


class PositiveChange(Change[AboveZero]):
    """A change of a value above 0."""


class ShareChange(Change[Share]):
    """A change of a value from 0 to 1."""


class OptimizerTimeline(Section):
    """Keys of `[optimizer]` that an entry can change."""

    lr: PositiveChange | None = None
    """Peak of the curve."""
    min_lr: AmountChange | None = None
    """End of the curve."""
    lr_scale: AmountChange | None = None
    """Factor of the learning rate. `{ from = 0, to = 1, over = "2000 steps" }` warms up again."""
    weight_decay: AmountChange | None = None
    """Decoupled weight decay."""
    betas: Betas | None = None
    """AdamW betas, at once; the moments are kept."""
    embedding_shrink: ShareChange | None = None
    """Factor of the embedding's gradient."""
    shrink_paths: Literal["input", "both"] | None = None
    """Gradients that are shrunk."""


class TrainTimeline(Section):
    """Keys of `[train]` that an entry can change."""

    grad_clip: AmountChange | None = None
    """Largest global gradient norm; 0: off."""
    z_loss: AmountChange | None = None
    """Weight of the z-loss; 0: off."""


class CheckpointTimeline(Section):
    """Keys of `[checkpoint]` that an entry can change."""

    every: Length | None = None
    """Interval between checkpoints."""


class TimelineEntry(Section):
    """A change in the course of the run. It counts for the steps after `at`, as a restart from the checkpoint of that
    place with other settings would, and it is the same at every restart."""

    at: Progress
    """Place in training: steps, samples or tokens since the beginning."""
    reason: str = ""
    """Why, for the journal."""
    optimizer: OptimizerTimeline = OptimizerTimeline()
    """New values of `[optimizer]`, as `optimizer.lr = 4e-5` or `optimizer.lr = { to = 4e-5, over = "500 steps" }`."""
    train: TrainTimeline = TrainTimeline()
    """New values of `[train]`."""
    checkpoint: CheckpointTimeline = CheckpointTimeline()
    """New values of `[checkpoint]`."""

    @model_validator(mode="after")
    def _means_something(self) -> TimelineEntry:
        if not any(True for _ in self.changes()):
            raise ValueError("the entry changes nothing: give it a key, such as `optimizer.lr = 4e-5`")
        return self

    @model_serializer(mode="wrap")
    def _without_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        given = {}
        for key, value in handler(self).items():
            if isinstance(value, dict):
                value = {k: v for k, v in value.items() if v is not None}
            if value:
                given[key] = value
        return given

    def changes(self) -> Iterator[tuple[str, Any]]:
        """(dotted key, `Change` or plain value) of everything that is set, in the order of the schema."""
        for name in ("optimizer", "train", "checkpoint"):
            section = getattr(self, name)
            for key in type(section).model_fields:
                if (value := getattr(section, key)) is not None:
                    yield f"{name}.{key}", value

    def lengths(self) -> Iterator[Progress]:
        """All amounts of training in the entry: its place, and the lengths of its ramps."""
        yield self.at
        yield from (change.over for _, change in self.changes() if isinstance(change, Change) and change.over)

    def keys(self) -> str:
        """The changes as text: `optimizer.lr = 4e-05, train.z_loss = 0.0001`."""
        return ", ".join(f"{key} = {_short(value)}" for key, value in self.changes())

    def __str__(self) -> str:
        """The entry as text: `at 26_000 steps: optimizer.lr = 4e-05`."""
        return f"at {self.at}: {self.keys()}"


def _short(value: Any) -> str:
    if not isinstance(value, Change):
        return str(value)
    if value.over is None:
        return str(value.to)
    return f"{'' if value.from_ is None else f'{value.from_} '}to {value.to} over {value.over}"
