"""The sections of a run's configuration: every key with its type, default and meaning.

`docs/config.md` is generated from the docstrings here. What concerns several sections is checked in `config`.
"""

from __future__ import annotations

import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from .section import Positive, Section, Share
from .units import BatchSize, Progress, SampleRange, Seconds

Rate = Annotated[float, Field(strict=False, ge=0, allow_inf_nan=False)]


def _absolute(path: Path) -> Path:
    return Path(os.path.normpath(Path.cwd() / path.expanduser()))  # symbolic links stay as written


FilePath = Annotated[Path, Field(strict=False), AfterValidator(_absolute)]


class RunSection(Section):
    """What the run is called and where its record lives."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run, used in logs and trackers."""
    dir: FilePath
    """Run directory. Holds checkpoints, metrics, journal, evals; created if absent, resumed if not."""
    seed: int = 1234
    """Seed of parameter initialisation and dropout. The data order has its own, `data.seed`."""


def _in_samples(value: Progress) -> Progress:
    if value.unit == "step":
        raise ValueError("a place in the data is counted in samples or tokens, not in steps")
    return value


Place = Annotated[Progress, AfterValidator(_in_samples)]
Weighting = Annotated[float, Field(strict=False, ge=0, allow_inf_nan=False)]


class WeightPoint(Section):
    """A point of a weight that changes; linear between points, two at one place are a jump."""

    at: Place
    """Where in the data, in samples or tokens read since the beginning of the run."""
    value: Weighting
    """The weight there."""


class Source(Section):
    """One corpus of the training mixture."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Identity of the source: keys its shuffle and its column in the metrics. Renaming it reshuffles it."""
    path: FilePath
    """Corpus directory, as written by `fsdp-data prepare`."""
    mirror: FilePath | None = None
    """Directory with a copy of the corpus, read when a file of `path` cannot be, or hangs. Changes no sample."""
    weight: Weighting | Annotated[list[WeightPoint], Field(min_length=1)] = 1.0
    """Share of the samples, relative to the other sources' weights: a number, or points of a ramp."""
    start: Place = Progress(0, "sample")
    """Before this place in the data the source is not used: for adding it to a run that is under way."""
    stop: Place | None = None
    """From this place in the data on the source is not used: for dropping it from a run that is under way."""
    max_epochs: Annotated[float, Field(strict=False, gt=0, allow_inf_nan=False)] | None = None
    """How often the source may be read; the other sources share its weight afterwards. Default: without limit."""

    @model_validator(mode="after")
    def _ordered(self) -> Source:
        points = self.weight if isinstance(self.weight, list) else []
        if any(a.at.unit == b.at.unit and a.at.value > b.at.value for a, b in pairwise(points)):
            raise ValueError("the points of `weight` are not in order")
        if self.stop is not None and self.stop.unit == self.start.unit and self.stop.value <= self.start.value:
            raise ValueError(f"`stop` = {self.stop} is not after `start` = {self.start}")
        return self


class CausalObjective(Section):
    """Predict every next token."""

    kind: Literal["causal"] = "causal"
    """Objective."""


class GLMObjective(Section):
    """Blank infilling as in GLM-130B: short blanks ([MASK]) and long endings ([gMASK]), predicted token by token."""

    kind: Literal["glm"]
    """Objective."""
    row: Positive
    """Tokens of text per sample, separators included; the rest of `data.sequence_length` is room for special tokens."""
    slots: Positive = 4
    """A [MASK] sample is so many independent pieces of row / slots tokens, a multi-task sample so many prompts, each in
    a slot of its own."""
    mask_share: Share = 0.3
    """Share of samples with [MASK] blanks; the others have one [gMASK] ending."""
    mask_budget: Annotated[float, Field(strict=False, ge=0, le=0.5)] = 0.15
    """Share of a piece's tokens that its blanks hold, at least."""
    span_mean: Annotated[float, Field(strict=False, gt=0)] = 3.0
    """Mean of the Poisson distribution of a blank's length, before it is limited to 1..39."""
    single_span: Share = 0.02
    """Share of [MASK] pieces with exactly one blank."""
    short: Share = 0.02
    """Share of [MASK] pieces that are cut to a random length of at least 32 tokens."""
    ending_min: Share = 0.2
    """Shortest [gMASK] ending, as a share of the row; the longest is the whole row."""
    overflow: Literal["truncate", "shrink"] = "shrink"
    """When blanks make a piece longer than its slot: `truncate` loses its last targets, as GLM-130B did (about 36% of
    them), `shrink` shortens the text of the piece beforehand."""
    positions: Literal["glm1d", "glm2d"] = "glm1d"
    """Scheme of position ids, see docs/data.md. `glm2d` needs a model with two-dimensional positions."""
    multitask_positions: Literal["arange", "mask", "unified"] = "arange"
    """`glm1d` positions of answers: in sequence (as trained), all at the mask, or from the mask on."""
    loss_norm: Literal["sequence", "tokens"] = "sequence"
    """`sequence`: every sample counts alike, however many targets it has (as GLM-130B); `tokens`: every target."""
    first_special: Annotated[int, Field(ge=0)] | None = None
    """Id of [MASK]; [gMASK], [sMASK], eod, sop, eop follow. Default: right after the tokenizer's vocabulary."""


AnyObjective = CausalObjective | GLMObjective
Objective = Annotated[AnyObjective, Field(discriminator="kind")]


class DataSection(Section):
    """What the model reads, and in which order."""

    sequence_length: Positive
    """Tokens per sample."""
    sources: Annotated[list[Source], Field(min_length=1)]
    """The mixture. One `[[data.sources]]` table each."""
    seed: int = 1234
    """Seed of the data order, independent of `run.seed`."""
    lanes: Positive = 256
    """Places of an epoch that consecutive samples come from in turn. Part of the data order: changing it reshuffles."""
    attention: Literal["causal", "document"] = "causal"
    """`causal` attends across the documents packed into a sample, `document` masks other documents."""
    positions: Literal["sample", "document"] = "sample"
    """`sample` counts positions from the start of the sample, `document` starts again at each document in it."""
    loss_across_documents: bool = True
    """Learn to predict the first token of a document from the separator before it. Off: such labels do not count."""
    objective: Objective = CausalObjective()
    """What is learned from the text. A `[data.objective]` table."""
    skip: list[SampleRange] = []
    """Samples that are read past and not trained: `["1200:1332 samples"]`. Nothing else moves."""
    reshuffle: list[Place] = []
    """Places in the data from which on the rest of every source comes in another order."""
    exclude: FilePath | None = None
    """File with documents that keep their places and are not learned; a line each: SOURCE SHARD DOCUMENT."""
    prefetch: Annotated[int, Field(ge=0)] = 4
    """Steps the background thread prepares ahead."""
    read_timeout: Seconds | None = None
    """How long a read from a corpus may take before it counts as hanging: then the mirror is used, or the run ends with
    exit 75. Default a third of `parallel.timeout`, since the other ranks wait meanwhile."""
    max_quarantined: Annotated[float, Field(strict=False, ge=0, le=1)] = 1e-4
    """Share of documents (of their stretches in the samples) that may fail the inline checks, and so be left out of the
    loss, before the run is refused."""

    @property
    def row(self) -> int:
        """Tokens of text that the packer puts into a sample."""
        return self.objective.row if isinstance(self.objective, GLMObjective) else self.sequence_length

    @property
    def uses_lengths(self) -> bool:
        """Whether the model must be told the document lengths of its samples."""
        return "document" in (self.attention, self.positions)

    @property
    def by_sequence(self) -> bool:
        """Whether every sample counts alike in the loss, however many targets it has; else every target does."""
        return isinstance(self.objective, GLMObjective) and self.objective.loss_norm == "sequence"

    @field_validator("sources")
    @classmethod
    def _unique_names(cls, sources: list[Source]) -> list[Source]:
        names = [source.name for source in sources]
        if len(set(names)) < len(names):
            raise ValueError(f"source names must differ, got {names}")
        return sources


class BatchRampSection(Section):
    """Growth of the global batch at the start of a run (Megatron's law, in samples consumed)."""

    first: BatchSize
    """Batch at the beginning."""
    by: BatchSize
    """Increment."""
    start: Progress = Progress(0, "sample")
    """Where the ramp starts, in samples or tokens."""
    end: Progress | None = None
    """Where it ends, in samples or tokens. Give this or `duration`."""
    duration: Progress | None = None
    """How long it takes, in samples or tokens. Give this or `end`."""

    @model_validator(mode="after")
    def _one_end(self) -> BatchRampSection:
        if (self.end is None) == (self.duration is None):
            raise ValueError("give either `end` or `duration`, not both or neither")
        for name in ("start", "end", "duration"):
            value = getattr(self, name)
            if value is not None and value.unit == "step":
                raise ValueError(
                    f"`{name}` cannot be in steps: how long a step is depends on the ramp; use samples or tokens"
                )
        return self


class LossScaleSection(Section):
    """Dynamic loss scaling of fp16, see docs/training.md."""

    first: Annotated[float, Field(strict=False, gt=0, allow_inf_nan=False)] = 65536.0
    """Scale at the beginning. tr8-104B used 4096, GLM-130B 65536."""
    window: Positive = 2000
    """Steps without overflow after which the scale doubles. tr8-104B used 500, GLM-130B 200 (its paper says 2000)."""
    hysteresis: Positive = 2
    """Overflows of a window that are needed to halve the scale for the first time; further ones halve it each. The
    published runs used 2."""
    min: Annotated[float, Field(strict=False, gt=0, allow_inf_nan=False)] = 1.0
    """Smallest scale. A run that goes on overflowing there is stopped."""

    @model_validator(mode="after")
    def _ordered(self) -> LossScaleSection:
        if self.min > self.first:
            raise ValueError(f"min = {self.min} is above first = {self.first}")
        return self


class TrainSection(Section):
    """Length of the run and size of a step."""

    duration: Progress
    """Length of the run: `"2T tokens"`, `"300 steps"`, `"1_000_000 samples"`."""
    global_batch: BatchSize
    """Samples or tokens per optimiser step, over all ranks, however many: `"256 samples"`, `"4M tokens"`."""
    micro_batch: Positive
    """Samples per rank in one forward pass; the rest of the global batch is gradient accumulation."""
    batch_ramp: BatchRampSection | None = None
    """Optional growth of the global batch."""
    grad_clip: Rate = 1.0
    """Clip the global gradient norm to this; 0 is off."""
    z_loss: Rate = 0.0
    """Weight of an additional loss, the squared logarithm of the softmax's denominator; 0 is off, PaLM used 1e-4."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Precision of compute; the rest is always fp32. `auto`: bf16 on GPU, fp32 on CPU. fp16 needs loss scaling."""
    loss_scale: LossScaleSection = LossScaleSection()
    """Loss scaling of fp16; without effect on the others."""


class ShrinkPoint(Section):
    """A point of the embedding-gradient shrink; linear between points, two at one place are a jump."""

    at: Progress
    """Where in training, in steps, samples or tokens since the beginning of the run."""
    value: Share
    """What the embedding's gradient is multiplied by there."""


class OptimizerSection(Section):
    """AdamW and the learning-rate curve."""

    lr: Annotated[float, Field(strict=False, gt=0)]
    """Peak learning rate."""
    min_lr: Rate = 0.0
    """Learning rate at the end of the decay."""
    curve: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape after the warm-up."""
    warmup: Progress = Progress(0, "step")
    """Linear warm-up from zero."""
    decay: Progress | None = None
    """Where the curve reaches `min_lr`, counted from the start of the run; default `train.duration`."""
    betas: tuple[float, float] = Field(default=(0.9, 0.95), strict=False)
    """AdamW betas."""
    eps: Annotated[float, Field(strict=False, gt=0)] = 1e-8
    """AdamW epsilon."""
    weight_decay: Rate = 0.1
    """Decoupled weight decay, for the parameters that decay."""
    embedding_shrink: list[ShrinkPoint] = []
    """Embedding-gradient shrink (GLM-130B): a factor for the gradient of the embedding table; empty is off."""
    shrink_paths: Literal["input", "both"] = "both"
    """`both` also shrinks the gradient that reaches a tied table through the logits."""
    no_decay: list[str] = ["bias$", "norm.*\\.weight$"]
    """Regular expressions searched in parameter names; matches form the group without weight decay."""

    @field_validator("no_decay")
    @classmethod
    def _compiles(cls, patterns: list[str]) -> list[str]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
        return patterns


class ParallelSection(Section):
    """How the model is spread over the ranks."""

    shard: Positive | Literal["node"] = "node"
    """Ranks that share one copy of the parameters, replicated over the rest (HSDP). `node`: the ranks of one node."""
    reshard_after_forward: bool = True
    """Free a block's parameters after its forward and gather them again for its backward: less memory, more traffic."""
    recompute: Annotated[int, Field(ge=0)] = 0
    """Activation checkpointing: recompute every n-th block in the backward pass; 0 is off, 1 is every block."""
    attention: Literal["auto", "sdpa", "flex"] = "auto"
    """Kernels of masked attention. `sdpa` takes dense masks and works everywhere, `flex` skips what is masked and needs
    a GPU; `auto` is flex where it can serve, else sdpa. Plain causal attention is PyTorch's fused kernel either way."""
    compile: bool = False
    """Compile each block with torch.compile."""
    timeout: Seconds = Seconds(600)
    """How long a collective may take before the rank gives up."""


class CheckpointSection(Section):
    """When checkpoints are written and which are kept."""

    every: Progress
    """Interval between checkpoints. The last step is always saved."""
    keep_last: Annotated[int, Field(ge=2)] = 3
    """Newest checkpoints to keep. At least two: one may turn out bad."""
    keep_every: Progress | list[Progress] | None = None
    """Also keep, for ever, the checkpoints that complete this interval, or any of several."""
    prune: bool = True
    """When the next checkpoint does not fit, keep only the two newest verified ones, and those that are pinned, due for
    evaluation or named by `keep_every`. Off: nothing is deleted beyond the policy."""
    ballast: bool = True
    """Hold back a little space (a tenth of a checkpoint, at most 2% of the file system) that is let go when a save
    would not fit otherwise."""
    fallback_dir: FilePath | None = None
    """Directory on other storage that takes the checkpoints while the run directory cannot."""
    on_commit: str | None = None
    """Shell command run for every new checkpoint, for copies elsewhere: `'rsync -a "$1" backup:ckpt/'`. `$1` is the
    checkpoint's path and `$2` its step; the environment has them as `CHECKPOINT_PATH` and `CHECKPOINT_STEP`. Runs
    beside training, which neither waits for it nor fails with it; meanwhile the checkpoint is not deleted."""
    background: bool = True
    """Write while training goes on, from a copy in host memory (as large as a rank's share of the checkpoint). The last
    save of a start, and the one after a failure, are made while training waits."""
    verify: bool = True
    """Read a checkpoint back and compare checksums before it counts as verified and older ones may be deleted. Off:
    none counts as verified, so none is ever deleted."""
    max_failures: Annotated[int, Field(ge=1)] = 3
    """Consecutive failed saves after which the run stops with exit 93."""
    retry: Seconds = Seconds(10)
    """Pause before a failed save is tried again; doubles with every further failure, up to 5 minutes."""
    max_age: Seconds | None = None
    """How long training may go on without a new verified checkpoint before the run stops with exit 93. Default: without
    limit."""

    @property
    def kept_intervals(self) -> list[Progress]:
        """`keep_every` as a list."""
        every = self.keep_every
        return every if isinstance(every, list) else [] if every is None else [every]


class EvalSection(Section):
    """Scheduled evaluation of checkpoints by lm-eval, in processes of its own."""

    every: Progress | None = None
    """Evaluate checkpoints that complete this interval, and the last one. Absent: no scheduled evaluation."""
    tasks: list[str] = ["heldout_bpb", "heldout_choice"]
    """lm-eval task names. `heldout_*` are made from `eval.heldout`; others need their data at hand."""
    heldout: FilePath | None = None
    """JSONL of held-out documents (field `text`) for the bundled tasks."""
    include: list[FilePath] = []
    """Directories with further lm-eval task files."""
    limit: Positive | None = None
    """Documents per task; absent: all."""
    batch: Positive = 16
    """Sequences per forward pass."""
    device: str = "cpu"
    """Device of the evaluation process, for example `cpu` or `cuda`."""
    launch: bool = True
    """Let the trainer start the evaluation on its first node. Off: only `fsdp-eval watch` (cron, Slurm) evaluates."""
    threads: Positive = 1
    """CPU threads of a process the trainer starts."""
    attempts: Positive = 3
    """Tries per checkpoint before it is given up with an alarm in the journal."""
    deadline: Seconds = Seconds(3600)
    """An evaluation that takes longer (and longer than three times the median of earlier ones) is told of by the
    watchdog, with its stack; after three times as long it is ended, which is one of its tries."""


class RecordSection(Section):
    """What is written for people and trackers. The metrics record and the journal are always written."""

    console_every: Positive = 10
    """Steps between console lines."""
    aim: bool = False
    """Mirror the record into Aim while training (needs the extra `aim`). Never affects training."""
    aim_repo: FilePath | None = None
    """Aim repository; default `aim/` in the run directory."""
