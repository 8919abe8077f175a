"""Checks a validated corpus against a run's configuration: `fsdp-data validate --against CONFIG`."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.data.corpus.corpus import Corpus
from fsdp_pretrain.data.packing.objectives import Specials
from fsdp_pretrain.data.packing.opening import cache_use
from fsdp_pretrain.data.text.documents import document_hashes
from fsdp_pretrain.errors import DataError

from .findings import Findings
from .report import ValidationReport
from .totals import Hashes


def check_against(report: ValidationReport, run: Config) -> Findings:
    """Findings about whether a run can train on the validated corpus together with its other sources.

    The run's `model.vocab` must have room for the vocabulary and the objective's special tokens, and its sources must
    have the same tokenizer.
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
            findings.unreadable(source.name, error)
            continue
        validated: object = report.fingerprint
        other: object = entry.fingerprint
        if report.fingerprint is None:
            validated, other = (report.vocabulary.size, report.vocabulary.eod), (entry.vocab_size, entry.eod)
        if validated != other:
            findings.note("tokenizer", "", f"source {source.name} of the run ({source.path}) was made with another")
    return findings


def heldout_hashes(run: Config, directory: Path) -> dict[str, Hashes]:
    """Document hashes of each corpus in `eval.loss_on`, except the one in `directory`, by name. Raises DataError."""
    here = os.path.realpath(directory)
    sources = [source for source in run.eval.loss_on if os.path.realpath(source.path) != here]
    return {source.name: _hashes(Corpus(source.path, cache=cache_use(run))) for source in sources}


def _hashes(corpus: Corpus) -> Hashes:
    """The distinct `document_hashes` of a corpus, without the 0 of documents that are too short to compare."""
    by_block = [np.zeros(0, dtype=np.uint64)]
    for block in range(len(corpus.blocks)):
        lengths = corpus.lengths(block).astype(np.int64)
        ends = np.cumsum(lengths)
        by_block.append(document_hashes(corpus.tokens(block, 0, int(ends[-1])), ends - lengths, ends))
    hashes = np.unique(np.concatenate(by_block))
    nonzero: Hashes = hashes[hashes != 0]
    return nonzero
