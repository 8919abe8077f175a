"""The sections of a run's configuration: every key with its type, default and meaning.

`docs/config.md` is generated from the docstrings here. What involves several sections is checked in `config`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, model_validator

from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.remote import Url
from fsdp_pretrain.units import BatchSize, Progress, Seconds

from .base import (
    AboveZero,
    Betas,
    FilePath,
    Length,
    NotNegative,
    PathOrUrl,
    Positive,
    Section,
    Seed,
    Share,
    unique_names,
)


class RunSection(Section):
    """What the run is called and where its record lives."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run, used in logs and trackers."""
    dir: FilePath
    """Run directory. Created if missing, resumed if not."""
    seed: Seed = 1234
    """Seed of parameter initialisation and dropout; the data have `data.seed`."""


class BatchRampSection(Section):
    """Growth of the global batch at the start of a run, by consumed samples, as in Megatron."""

    first: BatchSize
    """First batch."""
    by: BatchSize
    """Increment."""
    start: Progress = Progress(0, "sample")
    """Start of the ramp, in samples or tokens."""
    duration: Progress
    """Length of the ramp, in samples or tokens."""

    @model_validator(mode="after")
    def _no_steps(self) -> BatchRampSection:
        for name in ("start", "duration"):
            if getattr(self, name).unit == "step":
                raise ValueError(
                    f"`{name}` cannot be in steps: how long a step is depends on the ramp; use samples or tokens"
                )
        return self


SMALLEST_SCALE = 1.0
"""Smallest scale of the fp16 loss. A run that keeps overflowing at it ends with exit 93."""


class LossScaleSection(Section):
    """Dynamic loss scaling of fp16, see training.md."""

    first: Annotated[float, Field(strict=False, ge=1)] = 65536.0
    """First scale."""
    window: Positive = 2000
    """Steps without overflow after which the scale doubles. tr8-104B used 500, GLM-130B 200."""


class TrainSection(Section):
    """Length of the run and size of a step."""

    duration: Progress
    """Length of the run: `"2T tokens"`, `"300 steps"`, `"1_000_000 samples"`."""
    global_batch: BatchSize
    """Samples or tokens per optimiser step over all ranks: `"256 samples"`, `"4M tokens"`."""
    micro_batch: Positive
    """Samples per rank in one forward pass; gradient accumulation makes up the global batch."""
    batch_ramp: BatchRampSection | None = None
    """Optional growth of the global batch."""
    grad_clip: NotNegative = 1.0
    """Largest global gradient norm; 0: off."""
    z_loss: NotNegative = 0.0
    """Weight of the z-loss, the squared logarithm of the softmax's denominator; 0: off. PaLM used 1e-4."""
    precision: Literal["auto", "bf16", "bf16+fp8", "fp16", "fp32"] = "auto"
    """Precision of computation; parameters and optimiser are fp32. `auto`: bf16 on GPU, fp32 on CPU. `bf16+fp8`: the
    products of the blocks' linear layers in float8; needs torchao."""
    loss_scale: LossScaleSection = LossScaleSection()
    """Loss scaling, only used with fp16."""


OptimizerKind = Literal["adamw", "muon"]


class CodeSection(Section):
    """Packages with parts of your own, see docs/extend.md."""

    packages: list[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]] = []
    """Names of packages, imported before all else is read. Their parts are named `PACKAGE:PART`."""


class ObserverSection(Section):
    """Base of the settings of an observer of your own: `[[observers]]` tables."""

    use: str
    """The observer, as `PACKAGE:PART`."""


class OptimizerGroup(Section):
    """Parameters that are updated in their own way; the first group that matches a parameter counts."""

    match: Annotated[str, Field(min_length=1)]
    """Pattern of parameter names, such as `blocks.*.attention.*`, or `embedding.weight`."""
    kind: str | None = None
    """`adamw`, `muon`, or the run's own, instead of the one that `optimizer.kind` gives them."""
    lr_scale: NotNegative = 1.0
    """Factor of their learning rate."""
    weight_decay: NotNegative | None = None
    """Instead of theirs."""


class OptimizerSection(Section):
    """The optimiser and the learning-rate curve."""

    kind: OptimizerKind = "adamw"
    """The optimiser. `muon`: for the matrices of the blocks; the rest is always AdamW's."""
    lr: AboveZero
    """Peak learning rate."""
    min_lr: NotNegative = 0.0
    """Learning rate at the end of the decay."""
    lr_scale: NotNegative = 1.0
    """Factor of the whole curve, warm-up and `min_lr` included."""
    curve: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape of the decay after the warm-up. `wsd` (warm-up, stable, decay) stays at `lr` until the last
    `decay_length`."""
    warmup: Progress = Progress(0, "step")
    """Length of the warm-up from zero."""
    warmup_shape: Literal["linear", "parabolic"] = "linear"
    """Share of `lr` after a share x of the warm-up: x, or 1 - (1 - x)^2."""
    decay: Length | None = None
    """Where the curve reaches `min_lr`, counted from the start of the run. Default: `train.duration`."""
    decay_length: Length | None = None
    """For `wsd`: length of the decay, which ends at `decay`."""
    decay_shape: Literal["1-sqrt", "linear"] = "1-sqrt"
    """For `wsd`: share of the way to `min_lr` after a share x of the decay: the root of x, or x."""
    groups: list[OptimizerGroup] = []
    """Parameters with a rate, weight decay or kind of their own: `[[optimizer.groups]]` tables."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Muon's momentum."""
    update_scale: Literal["rms", "spectral"] = "rms"
    """Size of Muon's updates. `rms`: 0.2 per element, as AdamW's usually are, so that rates and decay of AdamW carry
    over (arXiv 2502.16982). `spectral`: spectral norm 1, or the root of rows / columns if that is more."""
    betas: Betas = (0.9, 0.95)
    """AdamW betas."""
    eps: AboveZero = 1e-8
    """AdamW epsilon."""
    weight_decay: NotNegative = 0.1
    """Decoupled weight decay of all parameters but biases and the weights of norms."""
    embedding_shrink: Share = 1.0
    """Factor of the gradient of the embedding table; 1: off."""
    shrink_paths: Literal["input", "both"] = "both"
    """Those through the `input` only, or also those through the logits of a tied table."""

    @model_validator(mode="after")
    def _one_curve(self) -> OptimizerSection:
        if (self.curve == "wsd") != (self.decay_length is not None):
            raise ValueError("`decay_length` is needed for curve = wsd, and belongs to no other")
        return self

    @model_validator(mode="after")
    def _kinds_with_settings(self) -> OptimizerSection:
        known = dict.fromkeys([*get_args(OptimizerKind), self.kind])
        if unknown := dict.fromkeys(group.kind for group in self.groups if group.kind not in {None, *known}):
            raise ValueError(
                f"`groups` have the kind {', '.join(map(str, unknown))}, but can have {', '.join(known)}: a rule of "
                "your own takes its settings from this section, so it must be its `kind` too"
            )
        return self


Recompute = Annotated[int, Field(ge=0)] | Literal["feed-forward"]
"""Every n-th block, or the inside of every feed-forward layer."""


class ParallelSection(Section):
    """How the model is distributed over the ranks."""

    shard: Positive | Literal["node"] = "node"
    """Number of ranks that share one copy of the parameters (HSDP). `node`: the ranks of one node."""
    reshard_after_forward: bool = True
    """Free a block's parameters after its forward pass and gather them again for the backward pass: less memory, more
    communication."""
    reduce: Literal["fp32", "bf16"] = "fp32"
    """dtype in which ranks exchange and add up gradients. `bf16` halves what they send, but each addition rounds, so
    that the curve depends on the mesh. Replicas then exchange after every micro-batch, whose gradients are added in
    fp32."""
    recompute: Recompute = 0
    """Recompute every n-th block in the backward pass. 0: off. `feed-forward`: only the inside of every feed-forward
    layer, in a 7B Llama 57% of what blocks keep for 38% of their work."""
    attention: Literal["auto", "sdpa", "flex"] = "auto"
    """Kernels of masked attention. `sdpa` uses dense masks and works everywhere; `flex` skips masked blocks and needs a
    GPU; `auto` is `flex` where possible."""
    compile: bool | Literal["auto"] = "auto"
    """Compile blocks and loss (torch.compile): the first step takes a minute longer, all others less time and memory.
    `auto`: on a GPU, unless `model.scores` makes every layer another graph."""
    timeout: Seconds = Seconds(600)
    """Time limit of a collective operation, after which the rank ends."""

    def shard_size(self, world: int, local_world: int) -> int:
        """Ranks per replica, of `world` ranks with `local_world` on a node. Raises ConfigError if it does not divide
        the world size."""
        size = local_world if self.shard == "node" else self.shard
        if world % size:
            raise ConfigError(
                f"parallel.shard = {size} does not divide the world size {world}",
                remedy=f"use a divisor of {world}, or start a multiple of {size} ranks",
            )
        return size


def _mirror_url(text: str) -> str:
    if (url := Url(text)).scheme in ("http", "https"):
        raise ValueError(f"{text!r} cannot be written to; a mirror is s3://, gs://, az:// or file://")
    return str(url)


class CheckpointSection(Section):
    """When checkpoints are written and which are kept."""

    every: Length
    """Interval between checkpoints, counted from the start of the run. Saved as well: what completes an interval of
    `checkpoint.keep_every` or `eval.every`, and the last step."""
    keep_last: Annotated[int, Field(ge=2)] = 3
    """Newest checkpoints to keep: at least two, since one may turn out to be bad. When the next one does not fit, only
    two are kept."""
    keep_every: Length | list[Length] | None = None
    """Keep, permanently, a checkpoint whenever this interval, or one of several, is complete."""
    mirror: Annotated[str, AfterValidator(_mirror_url)] | None = None
    """URL of a directory in object storage, such as `"s3://bucket/runs"`, to which checkpoints and the record are
    copied, see storage.md."""
    background: bool = True
    """Write while training continues, from a copy in host memory as large as a rank's share of the checkpoint."""
    max_failures: Annotated[int, Field(ge=1)] = 3
    """Consecutive failed saves after which the run stops with exit 93."""
    retry: Seconds = Seconds(10)
    """Pause before a failed save is retried; doubles with every further failure."""
    max_age: Seconds | None = None
    """How long training may continue without a new verified checkpoint; then exit 93. Default: no limit."""

    @property
    def kept_intervals(self) -> list[Progress]:
        """`keep_every` as a list."""
        every = self.keep_every or []
        return every if isinstance(every, list) else [every]


def _count_or_share(value: float) -> float:
    if value < 1:
        return value
    if value != int(value):
        raise ValueError("must be a whole number of documents, or a share of them below 1")
    return int(value)


Limit = Annotated[float, Field(gt=0), AfterValidator(_count_or_share)]


class HeldOutSource(Section):
    """A corpus of held-out documents, whose loss is measured during training."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name in the metrics. Which of its samples are measured depends on it."""
    path: PathOrUrl
    """Path or URL of a corpus with the tokenizer of the training data."""


class MergeSection(Section):
    """Which checkpoints to merge, see models.md."""

    last: Length
    """Those less than this before the newest."""
    every: Length | None = None
    """Of these only those that complete this interval, for which checkpoints are saved."""
    weights: Literal["uniform", "decay"] = "uniform"
    """How they count: as under a learning rate that falls linearly, or as 1 - sqrt(x)."""


BUNDLED, PROBE = ("heldout_bpb", "heldout_choice"), "separator_probe"
"""The tasks of our own, and the probe, which are made from the held-out documents."""


class EvalSection(Section):
    """Scheduled evaluation of checkpoints by lm-eval, in separate processes, and the held-out loss during training."""

    every: Length | None = None
    """Save and evaluate a checkpoint whenever this interval is complete, and the last one. Absent: none."""
    tasks: list[str] = ["heldout_bpb", "heldout_choice", "separator_probe"]
    """lm-eval task names, patterns of them (`mmlu_*`), and three bundled ones, made from `eval.heldout`."""
    offline: bool = False
    """Take the data of tasks from the cache of Hugging Face only, as for a machine without a network."""
    heldout: FilePath | None = None
    """JSONL file of held-out documents (field `text`) for the bundled tasks."""
    include: list[FilePath] = []
    """Directories with more lm-eval task files."""
    limit: Limit | None = None
    """Documents per task, or the share of them if below 1. Absent: all."""
    num_fewshot: Annotated[int, Field(ge=0)] | None = None
    """Solved examples before each question, except where tasks set 0. Absent: as the tasks say."""
    gen_kwargs: dict[str, Any] = {}
    """Options of generating answers, such as `{max_gen_toks = 64}`, which replace those of the tasks."""
    merge: MergeSection | None = None
    """Also evaluate the mean of the last checkpoints: `merge = { last = "20B tokens", every = "1B tokens" }`. Its
    scores are those of `TASK@merge`; there are none while fewer than two are there."""
    prompts: list[str] = []
    """Texts that the model continues at each evaluation, for the report."""
    log_samples: bool = False
    """Keep documents, prompts and responses beside the results, not only hashes and metrics."""
    batch: Positive = 16
    """Sequences per forward pass."""
    device: str = "cpu"
    """Device of the evaluation process, such as `cuda`. Under torchrun each rank uses its own GPU."""
    launch: bool = True
    """Let the trainer start the evaluation on its first node. Off: only `fsdp-eval watch` evaluates."""
    attempts: Positive = 3
    """Attempts per checkpoint; then it is given up, with an alarm, until `fsdp-eval retry`."""
    retry: Seconds = Seconds(300)
    """Pause after the first failed attempt at a checkpoint; four times longer after each further one."""
    command: str | None = None
    """Shell command that evaluates a due checkpoint elsewhere, for example with `sbatch --wait`. Its environment has
    `EVAL_CHECKPOINT`, `EVAL_STEP`, `EVAL_TASKS`, `EVAL_INCLUDE`, `EVAL_RUN`, and `EVAL_RESULTS`, where the results
    must be when it ends: `fsdp-eval run "$EVAL_CHECKPOINT" --out "$EVAL_RESULTS"`."""
    deadline: Seconds = Seconds(3 * 3600)
    """An attempt that takes longer has failed; its stack is kept."""
    overdue: Seconds = Seconds(2 * 3600)
    """An alarm if a due checkpoint has waited this long for a worker."""
    loss_on: Annotated[list[HeldOutSource], AfterValidator(unique_names)] = []
    """Held-out samples whose loss is measured during training: one `[[eval.loss_on]]` table per source."""
    loss_every: Length | None = None
    """Interval between measurements of the held-out loss. N samples cost what training N / 3 does. Default: 500 full
    global batches."""
    loss_samples: Positive | None = None
    """Held-out samples of each source. Default: four full global batches, shared among the sources."""

    @property
    def bundled_tasks(self) -> list[str]:
        """The tasks that are made from `heldout`."""
        return [task for task in self.tasks if task in (*BUNDLED, PROBE)]


class RecordSection(Section):
    """Output for people and trackers. The metrics record and the journal are always written."""

    console_every: Positive = 10
    """Steps between console lines."""
    statistics_every: Progress = Progress(100, "step")
    """Interval between statistics of groups of parameters in the record; `"0 steps"`: never."""
    aim: bool = False
    """Mirror the record into Aim during training (extra `aim`)."""
    aim_repo: FilePath | None = None
    """Aim repository. Default: `aim/` in the run directory."""
    tensorboard: bool = False
    """Mirror the record into TensorBoard files in `RUN/tensorboard/` (extra `tensorboard`)."""
    wandb: bool = False
    """Mirror the record into an offline run of Weights & Biases in `RUN/wandb/` (extra `wandb`)."""
    details: bool = False
    """Trackers also show the statistics of groups, the parts of a step's time and the standard errors of scores."""
    tags: list[str] = []
    """Tags of the run in trackers."""
