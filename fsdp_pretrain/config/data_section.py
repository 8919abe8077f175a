"""`[data]` of a run's configuration: sources, objective, stages. See `sections` for the other sections."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

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
    """Name of the source in the metrics. Its shuffle depends on it: renaming a source reshuffles it."""
    path: PathOrUrl
    """Corpus directory, as written by `fsdp-data prepare`: a path, or a URL (`s3://bucket/corpus`), see storage.md."""
    mirror: PathOrUrl | None = None
    """Path or URL of a copy of the corpus, used when a file of `path` cannot be read or hangs. Changes no sample."""
    weight: NotNegative | Annotated[list[WeightPoint], Field(min_length=1)] = 1.0
    """Share of the samples, relative to the weights of the other sources: a number, or points of a ramp."""
    start: Place = Progress(0, "sample")
    """The source is not used before this place in the data: for adding a source to a running run."""
    stop: Place | None = None
    """The source is not used from this place in the data on: for dropping a source from a running run."""
    max_epochs: AboveZero | None = None
    """How many times the source may be read; then the other sources share its weight. Default: no limit."""

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
    """Directory on a local disk of every node, for one run at a time. It may be lost between two starts."""
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
    """Tokens of text per sample, including separators; the rest of `data.sequence_length` is for special tokens."""
    slots: Positive = 4
    """Slots of a sample. A [MASK] sample has one independent piece of row / slots tokens in each, a multi-task sample
    one prompt."""
    mask_share: Share = 0.3
    """Share of samples with [MASK] blanks; the others have one [gMASK] ending."""
    mask_budget: Annotated[float, Field(strict=False, ge=0, le=0.5)] = 0.15
    """Least share of a piece's tokens that is blanked."""
    span_mean: AboveZero = 3.0
    """Mean of the Poisson distribution of a blank's length, before that is limited to 1 to 39 tokens."""
    single_span: Share = 0.02
    """Share of [MASK] pieces with exactly one blank."""
    short: Share = 0.02
    """Share of [MASK] pieces that are cut to a random length of at least 32 tokens."""
    ending_min: Share = 0.2
    """Shortest [gMASK] ending, as a share of the row; the longest is the whole row."""
    overflow: Literal["truncate", "shrink"] = "shrink"
    """What happens when blanks make a piece longer than its slot. `truncate`: its last targets (about 36% of them) are
    lost, as in GLM-130B. `shrink`: its text is shortened beforehand."""
    positions: Literal["glm1d", "glm2d"] = "glm1d"
    """Scheme of position ids, see data.md. `glm2d` needs a model with two-dimensional positions."""
    multitask_positions: Literal["arange", "mask", "unified"] = "arange"
    """Positions of answers with `glm1d`: `arange` continues the sequence (as in training), `mask` puts all at the mask,
    `unified` counts from the mask on."""
    loss_norm: Literal["sequence", "tokens"] = "sequence"
    """What counts equally in the loss. `sequence`: every sample, regardless of its number of targets, as in GLM-130B;
    `tokens`: every target."""
    first_special: Annotated[int, Field(ge=0)] | None = None
    """Id of [MASK]; [gMASK], [sMASK], eod, sop and eop follow. Default: the first id after the tokenizer's
    vocabulary."""


AnyObjective = CausalObjective | GLMObjective
Objective = Annotated[AnyObjective, Field(discriminator="kind")]


class SequenceStage(Section):
    """A stage of shorter samples."""

    length: Positive
    """Tokens per sample; it divides `data.sequence_length`."""
    until: Place
    """End of the stage: samples or tokens read since the beginning of the run, rounded up to whole samples of
    `data.sequence_length` tokens."""


class DataSection(Section):
    """The training data and its order."""

    sequence_length: Positive
    """Tokens per sample."""
    stages: list[SequenceStage] = []
    """Stages of shorter samples at the start of the run: one `[[data.stages]]` table each, see data.md."""
    sources: Annotated[list[SourceSection], Field(min_length=1), AfterValidator(unique_names)]
    """The mixture: one `[[data.sources]]` table per source."""
    seed: Seed = 1234
    """Seed of the data order, independent of `run.seed`."""
    cache: CacheSection | None = None
    """Where blocks of sources by URL are kept: a `[data.cache]` table. Required if there are any."""
    lanes: Positive = 256
    """Number of places in an epoch from which consecutive samples come in turn. Changing it reshuffles the data."""
    attention: Literal["causal", "document"] = "causal"
    """Attention across the documents packed into a sample: `causal` allows it, `document` masks other documents."""
    positions: Literal["sample", "document"] = "sample"
    """Where positions are counted from: the start of the `sample`, or of each `document` in it."""
    loss_across_documents: bool = True
    """Learn to predict the first token of a document from the separator before it. Off: such targets do not count."""
    objective: Objective = CausalObjective()
    """Training objective: a `[data.objective]` table."""
    skip: list[SampleRange] = []
    """Samples that are not trained: `["1200:1332 samples"]`. All other samples stay in place."""
    reshuffle: list[Place] = []
    """Places in the data from which the rest of every source comes in another order."""
    exclude: FilePath | None = None
    """File of documents that stay in place but are not learned: one line `SOURCE SHARD DOCUMENT` each."""
    prefetch: Annotated[int, Field(ge=0)] = 4
    """Steps that the background thread prepares in advance."""
    read_timeout: Seconds | None = None
    """How long a read from a corpus may take before it counts as hanging; then the mirror is used, or the run ends with
    exit 75. Default: a third of `parallel.timeout`, because the other ranks wait."""
    max_quarantined: Share = 1e-4
    """Share of documents (counted as stretches in samples) that may fail the checks of the packer, which leaves them
    out of the loss. Beyond it, the run ends with exit 78."""

    @property
    def sequence_stages(self) -> SequenceStages:
        """The length of every sample, counted in samples read. Raises ValueError if the stages are not valid."""
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
        """Whether every sample counts equally in the loss; otherwise every target does."""
        return isinstance(self.objective, GLMObjective) and self.objective.loss_norm == "sequence"
