"""`[data]` of a run's configuration: sources, objective, stages. See `sections` for the other sections."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    SerializeAsAny,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from fsdp_pretrain import extensions
from fsdp_pretrain.units import Bytes, Progress, SampleRange, Seconds

from .base import AboveZero, FilePath, NotNegative, PathOrUrl, Positive, Section, Seed, Share, unique_names
from .sequence_stages import SequenceStages


def _in_samples(value: Progress) -> Progress:
    if value.unit == "step":
        raise ValueError("a place in the data is counted in samples or tokens, not in steps")
    return value


Place = Annotated[Progress, AfterValidator(_in_samples)]


class WeightPoint(Section):
    """A point of a weight that changes: linear between points; two points at one place are a jump."""

    at: Place
    """Place in the data: samples or tokens read since the beginning of the run."""
    value: NotNegative
    """Weight at that place."""


class SourceSection(Section):
    """One corpus of the training mixture."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name in the metrics. The source's shuffle depends on it."""
    path: PathOrUrl
    """Path or URL of a corpus, as written by `fsdp-data prepare`, see storage.md."""
    weight: NotNegative | Annotated[list[WeightPoint], Field(min_length=1)] = 1.0
    """Share of the samples, relative to the other sources: a number, or points of a ramp."""
    start: Place = Progress(0, "sample")
    """Not used before this place in the data."""
    stop: Place | None = None
    """Not used from this place in the data on."""
    max_epochs: AboveZero | None = None
    """How often it may be read; then the others share its weight. Default: no limit."""

    @model_validator(mode="after")
    def _ordered(self) -> SourceSection:
        points = self.weight if isinstance(self.weight, list) else []
        if any(a.at.unit == b.at.unit and a.at.value > b.at.value for a, b in pairwise(points)):
            raise ValueError("the points of `weight` are not in order")
        begins = self.start.value if self.stop is not None and self.stop.unit == self.start.unit else 0
        if self.stop is not None and self.stop.value <= begins:
            raise ValueError(f"`stop` = {self.stop} is not after `start` = {self.start}")
        return self


class CacheSection(Section):
    """Local disk for blocks of corpora by URL, shared by the ranks of a node."""

    dir: FilePath
    """Directory on a local disk of every node, for one run at a time."""
    size: Bytes
    """How much it may hold, such as `"200GB"`."""


class CausalObjective(Section):
    """Predict every next token."""

    kind: Literal["causal"] = "causal"
    """Name of the objective."""


class GLMObjective(Section):
    """Blank infilling as in GLM-130B: short blanks ([MASK]) and long endings ([gMASK]), predicted token by token."""

    kind: Literal["glm"]
    """Name of the objective."""
    row: Positive
    """Tokens of text per sample; the rest of `data.sequence_length` is for special tokens."""
    slots: Positive = 4
    """Slots of a sample: each has an independent piece of row / slots tokens, or a prompt."""
    mask_share: Share = 0.3
    """Share of samples with [MASK] blanks; the others have one [gMASK] ending."""
    overflow: Literal["truncate", "shrink"] = "shrink"
    """When blanks make a piece longer than its slot, `truncate` loses its last targets (36%), as GLM-130B did; `shrink`
    shortens its text beforehand."""


AnyObjective = CausalObjective | GLMObjective


def _of_an_extension(value: Any, check: ValidatorFunctionWrapHandler) -> AnyObjective:
    name = value.get("kind") if isinstance(value, dict) else None
    part = extensions.parts("objectives").get(str(name))
    checked: AnyObjective = check(value) if part is None else part.settings.model_validate(value)  # type: ignore[assignment]
    return checked


Objective = Annotated[AnyObjective, Field(discriminator="kind"), WrapValidator(_of_an_extension)]


class SequenceStage(Section):
    """A stage of shorter samples."""

    length: Positive
    """Tokens per sample; it divides `data.sequence_length`."""
    until: Place
    """End of the stage: samples or tokens read since the beginning of the run."""


class DataSection(Section):
    """The training data and its order."""

    sequence_length: Positive
    """Tokens per sample."""
    stages: list[SequenceStage] = []
    """Stages of shorter samples at the start: `[[data.stages]]` tables, see data.md."""
    sources: Annotated[list[SourceSection], Field(min_length=1), AfterValidator(unique_names)]
    """The mixture: `[[data.sources]]` tables."""
    seed: Seed = 1234
    """Seed of the data order, independent of `run.seed`."""
    cache: CacheSection | None = None
    """Where blocks of sources by URL are kept: a `[data.cache]` table."""
    lanes: Positive = 256
    """Places in an epoch from which consecutive samples come in turn."""
    attention: Literal["causal", "document"] = "causal"
    """`causal` allows attention across the documents packed into a sample, `document` masks it."""
    positions: Literal["sample", "document"] = "sample"
    """Where positions begin: with the `sample`, or with each `document` in it."""
    loss_across_documents: bool = True
    """Learn to predict the first token of a document from the separator before it."""
    objective: SerializeAsAny[Objective] = CausalObjective()
    """Training objective: a `[data.objective]` table."""
    skip: list[SampleRange] = []
    """Samples that are not trained: `["1200:1332 samples"]`. All other samples stay in place."""
    reshuffle: list[Place] = []
    """Places in the data from which the rest comes in another order."""
    exclude: FilePath | None = None
    """File of documents that are not learned: one line `SOURCE SHARD DOCUMENT` each."""
    prefetch: Annotated[int, Field(ge=0)] = 4
    """Steps that a thread prepares in advance."""
    read_timeout: Seconds | None = None
    """Time limit of a read from a corpus; then the run ends with exit 75. Default: a third of
    `parallel.timeout`."""
    max_quarantined: Share = 1e-4
    """Share of documents that may fail the checks of the packer, which leaves them out of the loss. Beyond it, exit
    78."""

    @property
    def sequence_stages(self) -> SequenceStages:
        """The length of every sample, by samples read. Raises ValueError if the stages are not valid."""
        return SequenceStages.of([(stage.length, stage.until) for stage in self.stages], self.sequence_length)

    @property
    def row(self) -> int:
        return self.objective.row if isinstance(self.objective, GLMObjective) else self.sequence_length

    @property
    def uses_lengths(self) -> bool:
        """Whether the model needs the document lengths of its samples."""
        return "document" in (self.attention, self.positions)

    @property
    def by_sequence(self) -> bool:
        """Whether every sample counts equally in the loss, as in GLM-130B; otherwise every target does."""
        return isinstance(self.objective, GLMObjective)
