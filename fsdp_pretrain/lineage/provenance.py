"""Which text a step was trained on: step -> samples -> documents -> text, from the run directory alone.

The record of a step gives the data position, the configuration of its start gives the order, and the packer is a pure
function. So a batch can be recomputed, and its digest proves that it is the one that was trained.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from pydantic import BaseModel
from tqdm import tqdm

from fsdp_pretrain.checkpoint.state import identity
from fsdp_pretrain.checkpoint.store import Store
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.resume_rules import differences, load_recorded
from fsdp_pretrain.data.corpus.corpus import Corpus
from fsdp_pretrain.data.packing.opening import cache_use, open_packer, open_skips
from fsdp_pretrain.data.packing.packer import Packed, Packer
from fsdp_pretrain.data.packing.position import Position
from fsdp_pretrain.data.text.tokenizer import Tokenizer
from fsdp_pretrain.errors import ConfigError, DataError
from fsdp_pretrain.remote import Location
from fsdp_pretrain.run import environment, lineage, state_files
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.metrics import find_step, last_records, read_metrics
from fsdp_pretrain.run.step_record import IN_FLIGHT, StepRecord


@dataclass(frozen=True)
class StepInFlight:
    """An unrecorded step that was being trained when its segment ended: its samples, and the cursor after it."""

    segment: int
    batch: int
    cursor: int


@dataclass(frozen=True)
class TrainedStep:
    """A recorded step and what is needed to recompute its batch."""

    number: int
    record: StepRecord | StepInFlight
    replaced_by: int | None  # number of the later segment that rolled back before this step; None if the step is kept
    config: Config  # this and the next two: configuration, packer and number of ranks of the segment that trained it
    packer: Packer
    world: int

    @functools.cached_property
    def indices(self) -> Sequence[int]:
        """The samples of the global batch, in the order in which ranks take their slices."""
        return open_skips(self.config).take_back(self.record.cursor, self.record.batch)

    def samples(self) -> Iterator[Packed]:
        """Every sample of the global batch, packed, with a progress bar. Raises DataError."""
        title = f"step {self.number}"
        for index in tqdm(self.indices, desc=title, unit="samples", delay=2, disable=None):
            yield self.packer.pack(index, 1)


class ShownPiece(BaseModel):
    """Tokens `start` to `stop` of a document of `length`, placed at `position` of the sample."""

    shard: str
    document: int
    start: int
    stop: int
    length: int
    position: int
    quarantined: bool
    text: str = ""

    def lines(self) -> list[str]:
        """The piece as lines, with its text if set."""
        place = f"  at {self.position:<6} {self.shard} document {self.document}, "
        place += f"tokens {self.start} to {self.stop} of {self.length}"
        place += ", quarantined: not learned" if self.quarantined else ""
        text = self.text.split("\n") if "text" in self.model_fields_set else []
        return [place, *(f"    | {line}" for line in text)]


class ShownSample(BaseModel):
    """A sample of a step: `length` tokens; `micro_batch` is that of its rank, `ids` are its `length` + 1 tokens."""

    index: int
    length: int
    rank: int
    micro_batch: int
    source: str
    epoch: int
    pieces: list[ShownPiece]
    ids: list[int] = []


class ShownStep(BaseModel):
    """A step and its samples, as shown by `fsdp-pretrain where --json`; `text` and `ids` are set only on request.

    `sequence_length` is that of the longest sample.
    """

    step: int
    segment: int
    replaced_by: int | None
    cursor: int
    batch: int
    sequence_length: int
    world: int
    data_digest: str | None
    samples: list[ShownSample]


def trained_step(run: RunDir, step: int, segment: int | None = None) -> TrainedStep:
    """Find a step in the record and prove that its batch can be recomputed.

    Args:
        segment: number of the segment to take the step from; None: the one whose step was kept.

    Raises:
        ConfigError: the step is not in the record, nor among the few in flight after the last one, or was replaced by
            a later segment.
        DataError: the corpora cannot be read, or give a different batch than the recorded one.
        DamagedFileError: the record of the segment cannot be read.
    """
    record, replaced_by = _choose(run, step, segment)
    config = settings_of(run, record.segment)  # the digest proves that it means the same
    packer = open_packer(config)
    recorded = environment.read(run, record.segment)
    world = recorded.world.size if recorded is not None and recorded.world is not None else 1
    trained = TrainedStep(step, record, replaced_by, config, packer, world)
    if isinstance(record, StepInFlight):
        _check_corpora(run, trained)
        return trained
    digest = f"{sum(packed.digest for packed in trained.samples()) % 2**64:016x}"
    if digest != record.data_digest:
        changed = _changes(run, config, packer)
        raise DataError(
            f"step {step} was trained on a batch with digest {record.data_digest}; computed again it has {digest}",
            effect="what would be shown is not what was trained",
            remedy="changed since: " + "; ".join(changed)
            if changed
            else "the corpora, or config.toml of the segment, were changed since; "
            "`fsdp-data validate` compares every file of a corpus with its checksum",
        )
    return trained


def settings_of(run: RunDir, segment: int) -> Config:
    """The configuration of a segment, with corpora and cache where the run has them now: they may have been moved.

    A source keeps its path if another corpus has its name now, and its own is still there. Raises ConfigError.
    """
    config = load_recorded(run.segment(segment) / "config.toml")
    if not run.config.exists():
        return config
    present, recorded = load_recorded(run.config).data, _fingerprints(run, segment)
    paths = {source.name: source.path for source in present.sources}
    data = config.data.model_copy(update={"cache": present.cache or config.data.cache})
    config = config.model_copy(update={"data": data})
    sources = []
    for old in data.sources:
        path, fingerprint = paths.get(old.name, old.path), recorded.get(old.name)
        if path != old.path and not _is_at(path, fingerprint, config):
            path = old.path if fingerprint is None or _is_at(old.path, fingerprint, config) else path
        sources.append(old.model_copy(update={"path": path}))
    return config.model_copy(update={"data": data.model_copy(update={"sources": sources})})


def _fingerprints(run: RunDir, segment: int) -> dict[str, str]:
    """Fingerprint of every corpus of a segment; empty if it is not recorded."""
    recorded = state_files.view(run.segment(segment) / environment.CORPORA, environment.Corpora)
    return {} if recorded is None else recorded.corpora


def _is_at(path: Location, fingerprint: str | None, config: Config) -> bool:
    """Whether the corpus with this fingerprint can be opened there."""
    try:
        corpus = Corpus(path, read_timeout=config.read_timeout, cache=cache_use(config))
    except DataError:  # opening the packer tells it
        return False
    return corpus.manifest.fingerprint == fingerprint


def _check_corpora(run: RunDir, step: TrainedStep) -> None:
    """Raise DataError if the corpora are not those of the step's segment: a step in flight has no digest."""
    recorded = _fingerprints(run, step.record.segment)
    current = {name: corpus.manifest.fingerprint for name, corpus in step.packer.corpora.items()}
    changed = differences({name: recorded.get(name, now) for name, now in current.items()}, current, "corpora")
    if changed:
        raise DataError(
            f"the corpora of segment {step.record.segment} are not those that it read: {'; '.join(changed)}",
            effect=f"what would be shown is not what was due in step {step.number}",
            remedy="put the corpora back to where config.toml of the segment names them",
        )


def _choose(run: RunDir, step: int, segment: int | None) -> tuple[StepRecord | StepInFlight, int | None]:
    """The record of a step, and the segment that replaced it. Raises ConfigError."""
    candidates = find_step(run, step)
    if segment is not None:
        for record, replaced_by in candidates:
            if record.segment == segment:
                return record, replaced_by
        if ahead := _ahead(run, segment, step):
            return ahead, None
        others = ", ".join(str(record.segment) for record, _ in candidates)
        raise ConfigError(f"segment {segment} has no record of step {step}; segments that have: {others or 'none'}")
    if kept := next((record for record, left_by in candidates if left_by is None), None):
        return kept, None
    if candidates:
        segments, (record, replaced_by) = [record.segment for record, _ in candidates], candidates[-1]
        raise ConfigError(
            f"step {step} is not part of the run as it stands: segment {record.segment} trained it, but segment "
            f"{replaced_by} went back to an earlier checkpoint and has not trained it again",
            remedy=f"look at the replaced step with --segment {segments[-1]}",
        )
    first = next(read_metrics(run), None)
    if first is None:
        raise ConfigError(f"{run.path} has no record of any step yet")
    (last,) = deque(read_metrics(run), maxlen=1)
    head = max((node.segment for node in lineage.nodes(run)), default=last.segment)
    if ahead := _ahead(run, head, step):
        return ahead, None
    raise ConfigError(f"step {step} is not in the record of {run.path}, which has steps {first.step} to {last.step}")


def batches_after(config: Config, at: Position, count: int) -> list[dict[str, int]]:
    """The `count` batches after a position: `first` is the cursor before each, the rest is its `Position`."""
    skips = open_skips(config)
    batches = list[dict[str, int]]()
    while len(batches) < count and at.consumed < config.schedule.end:
        first, at = at.cursor, at.advance(config.schedule.batch, skips)
        batches.append({**vars(at), "first": first})
    return batches


def _ahead(run: RunDir, segment: int, step: int) -> StepInFlight | None:
    """The step if it was in flight after the last record of a segment, or after its beginning if it has none."""
    newest = last_records(run.segment(segment))
    begun = next((node for node in lineage.nodes(run) if node.segment == segment), None)
    last = newest[-1] if newest else begun
    if last is None or last.consumed is None or last.cursor is None or not 0 < step - last.step <= IN_FLIGHT:
        return None
    config = load_recorded(run.segment(segment) / "config.toml")
    for batch in batches_after(config, Position(last.step, last.consumed, last.cursor), IN_FLIGHT):
        if batch["step"] == step:
            return StepInFlight(segment, batch["batch"], batch["cursor"])
    return None


def _changes(run: RunDir, config: Config, packer: Packer) -> list[str]:
    """What differs between the data now and as recorded in the newest checkpoint."""
    valid = [checkpoint for checkpoint in Store(run.checkpoints).scan() if checkpoint.problem is None]
    if not valid:
        return []
    current = identity(config, packer)
    return differences(valid[-1].train_state().identity.model_dump(), current.model_dump())


def describe_sample(
    step: TrainedStep, position: int, *, tokenizer: Tokenizer | None = None, ids: bool = False
) -> ShownSample:
    """The sample at a position of the global batch; with text if there is a tokenizer."""
    index, share = step.indices[position], len(step.indices) // step.world
    packed = step.packer.pack(index, 1)
    pieces = []
    for piece in step.packer.provenance(index):
        shown = ShownPiece(**asdict(piece), quarantined=piece in packed.quarantined)
        if tokenizer is not None:
            tokens = packed.tokens[0, piece.position : piece.position + piece.stop - piece.start]
            shown.text = tokenizer.decode(tokens.tolist())
        pieces.append(shown)
    rank, inside = divmod(position, share)
    return ShownSample(
        index=index,
        length=step.packer.length_of([index]),
        rank=rank,
        micro_batch=inside // step.config.train.micro_batch,
        source=step.config.data.sources[int(packed.sources[0])].name,
        epoch=step.packer.epoch_of(index),
        pieces=pieces,
        **({"ids": packed.tokens[0].tolist()} if ids else {}),
    )


def describe_step(step: TrainedStep, *, rank: int | None = None, text: bool = False, ids: bool = False) -> ShownStep:
    """A step and its samples.

    Args:
        rank: show only the samples of this rank.
        text, ids: add the text of every piece, the token ids of every sample.

    Raises:
        ConfigError: the step has no such rank.
    """
    record, indices = step.record, step.indices
    number, size, world = step.number, len(indices), step.world
    if rank is not None and not 0 <= rank < world:
        raise ConfigError(f"there is no rank {rank}: step {number} is split over ranks 0 to {world - 1}")
    share = size // world
    chosen = range(size) if rank is None else range(rank * share, (rank + 1) * share)
    tokenizer = next(iter(step.packer.corpora.values())).tokenizer() if text else None
    return ShownStep(
        step=number,
        segment=record.segment,
        replaced_by=step.replaced_by,
        cursor=record.cursor,
        batch=size,
        sequence_length=step.packer.length_of(indices),
        world=world,
        data_digest=record.data_digest if isinstance(record, StepRecord) else None,
        samples=[describe_sample(step, at, tokenizer=tokenizer, ids=ids) for at in chosen],
    )


def render(shown: ShownStep) -> str:
    """The step as text."""
    replaced = f", replaced by segment {shown.replaced_by}" if shown.replaced_by else ""
    digest = shown.data_digest
    proof = f"computed again, the batch has the recorded digest {digest}"
    if digest is None:
        proof = "not recorded: what was due next"
    mixed = "up to " if any(sample.length < shown.sequence_length for sample in shown.samples) else ""
    lines = [
        f"step {shown.step} of segment {shown.segment}{replaced}: {shown.batch} samples of {mixed}"
        f"{shown.sequence_length} tokens over {shown.world} ranks; {proof}"
    ]
    for sample in shown.samples:
        lines.append(
            f"sample {sample.index}: rank {sample.rank}, micro-batch {sample.micro_batch}, "
            f"source {sample.source}, epoch {sample.epoch}"
        )
        lines += [line for piece in sample.pieces for line in piece.lines()]
        if sample.ids:
            lines.append("  ids " + " ".join(map(str, sample.ids)))
    return "\n".join(lines)
