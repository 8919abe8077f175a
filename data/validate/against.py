"""Whether a run can train on a validated corpus: `fsdp-data validate --against CONFIG`."""

from __future__ import annotations

from data.corpus.corpus import Corpus
from data.packing.objectives import Specials
from data.packing.opening import cache_use
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.errors import DataError

from .findings import Findings
from .report import ValidationReport


def check_against(report: ValidationReport, run: Config) -> Findings:
    """Whether a run can train on the validated corpus together with its other sources.

    The run's `model.vocab` must hold the vocabulary and the objective's special tokens, and its sources must share the
    tokenizer.
    """
    findings, size, objective = Findings(), report.vocabulary.size, run.data.objective
    needed = size if objective.kind == "causal" else max(size, Specials.behind(size).eop + 1)
    if run.model.vocab < needed:
        note = f"model.vocab = {run.model.vocab}, tokenizer {size}"
        note += f", with the objective's special tokens {needed}" if needed > size else ""
        findings.note("vocabulary-too-small", "", note)
    for source in run.data.sources:
        try:
            entry = Corpus(source.path, cache=cache_use(run)).manifest.tokenizer
        except DataError as error:
            findings.note("unreadable", source.name, error.cause)
            continue
        held: tuple[object, object] = (report.fingerprint, entry.fingerprint)
        if report.fingerprint is None:
            held = ((report.vocabulary.size, report.vocabulary.eod), (entry.vocab_size, entry.eod))
        if held[0] != held[1]:
            findings.note("tokenizer", "", f"source {source.name} of the run ({source.path}) was made with another")
    return findings
