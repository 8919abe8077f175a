"""The observer that judges every step with `Health` and writes the findings into the journal."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, islice
from typing import Any

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.schedule import share_of
from fsdp_pretrain.data.packing.opening import open_packer, open_skips
from fsdp_pretrain.run.recorder import Recorder
from fsdp_pretrain.run.step_record import StepRecord
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.train.observer import Observer, Verdict

from .monitor import Health

Provenance = Callable[[StepRecord], dict[str, Any]]
"""Record of a step -> journal facts that name its samples and documents."""


class HealthObserver(Observer):
    """Judges the steps of a start, and records the findings.

    `provenance`: names the documents of a step that was skipped.
    """

    def __init__(self, health: Health, recorder: Recorder, provenance: Provenance) -> None:
        self._health, self._recorder, self._provenance = health, recorder, provenance

    def judge(self, record: StepRecord) -> Verdict:
        return self._health.step(record)

    def recorded(self, record: StepRecord, verdict: Verdict) -> None:
        _record_findings(self._recorder, record, verdict, self._provenance)

    def reconfigured(self, config: Config) -> None:
        self._health.reconfigure(config)


def _record_findings(recorder: Recorder, record: StepRecord, verdict: Verdict, provenance: Provenance) -> None:
    """Write the findings of a step, and that it was skipped, into the journal.

    Documents are named only once per incident, since training waits for the lookup.
    """
    step = record.step
    for finding in verdict.findings:
        if finding.severity > Severity.INFO:
            text = f"{'over' if finding.resolved else finding.severity.name}: {finding.key}: {finding.summary}"
            recorder.event("health", text, step=step, **finding.model_dump())
    if record.skipped and not record.overflow:
        facts: dict[str, Any] = {"cursor": record.cursor, "batch": record.batch}
        if any(finding.key == "loss/nonfinite" for finding in verdict.findings):
            facts |= provenance(record)
        recorder.event(
            "health-skip",
            f"step {step} was not trained, {record.not_finite} not finite: the {record.batch} samples before "
            f"sample {record.cursor:_}",
            step=step,
            reason=record.not_finite,
            rank=record.nonfinite_rank,
            shares={name: round(share, 4) for name, share in record.mixture.items() if share},
            data_digest=record.data_digest,
            **facts,
        )


def provenance(config: Config, ranks: int) -> Provenance:
    """A `Provenance` that names up to 100 documents of a batch over `ranks` ranks, or of one rank if only its loss was
    not finite."""

    def name(record: StepRecord) -> dict[str, Any]:
        samples, rank = open_skips(config).take_back(record.cursor, record.batch), record.nonfinite_rank
        if rank is not None:
            share = share_of(0, len(samples), rank, ranks)
            samples = samples[share.start : share.stop]
        packer = open_packer(config)  # the loader thread uses the other one
        pieces = chain.from_iterable(packer.provenance(sample) for sample in samples)
        named = dict.fromkeys(f"{piece.source} {piece.shard} {piece.document}" for piece in islice(pieces, 100))
        return {"samples": [samples[0], samples[-1]], "documents": list(named)}

    return name
