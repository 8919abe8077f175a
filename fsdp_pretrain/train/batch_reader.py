"""Reads a rank's batches, and ends the run on unreadable data or too many documents that fail the packer's checks."""

from __future__ import annotations

from typing import Protocol

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.data.packing.loader import StepBatch
from fsdp_pretrain.data.packing.position import Position
from fsdp_pretrain.errors import DataError
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.run.recorder import Recorder
from fsdp_pretrain.run.step_record import StepRecord

_QUARANTINE_BASE = 100_000
"""Smallest denominator of the quarantined share, so that one early bad document does not stop a run."""


class DataStream(Protocol):
    """Source of batches; see `fsdp_pretrain.data.packing.loader.Loader`."""

    def __next__(self) -> StepBatch: ...

    def blank(self, before: Position) -> StepBatch:
        """A batch of the shape due at this position, without targets."""


class BatchReader:
    """Reads this rank's batches from `stream`."""

    def __init__(self, stream: DataStream, config: Config, world: World, recorder: Recorder) -> None:
        self.stream = stream
        self._config, self._world, self._recorder = config, world, recorder
        self._stretches = 0
        self._quarantined = 0
        self._error: DataError | None = None

    @property
    def failed(self) -> bool:
        """Whether this rank could not read its data."""
        return self._error is not None

    def read(self, before: Position) -> StepBatch:
        """This rank's next batch, or a blank one if its data cannot be read.

        The blank one keeps the ranks in step until all of them learn of the error, from the sums of a step. Raises
        DataError if the data cannot be read, and there are no other ranks.
        """
        batch = None
        if self._error is None:
            try:
                batch = next(self.stream)
            except DataError as error:
                if self._world.size == 1:
                    raise
                self._error = error
        batch = self.stream.blank(before) if batch is None else batch
        for text in batch.notices:
            self._recorder.note("data-read", f"rank {self._world.rank}: {text}")
        for piece in batch.quarantined:
            self._recorder.say(f"quarantined: {piece}")
        return batch

    def raise_read_error(self) -> None:
        """Raise, on every rank, the DataError of the lowest rank that could not read its data. Collective."""
        self._world.together(self._raise_own)

    def _raise_own(self) -> None:
        if self._error is not None:
            raise self._error

    def check(self, record: StepRecord) -> None:
        """Count a step's documents; raise DataError, on every rank, if too many fail the packer's checks."""
        self._stretches += record.documents + record.batch  # a document may span several samples
        self._quarantined += record.quarantined
        if self._quarantined > self._config.data.max_quarantined * max(self._stretches, _QUARANTINE_BASE):
            raise DataError(
                f"{self._quarantined} of {self._stretches} stretches of documents failed the packer's checks "
                f"by step {record.step}",
                effect="the corpus is not what its manifest says; training on would waste tokens",
                remedy="run `fsdp-data validate` on the sources; the log names the documents",
            ).on_all_ranks()
