"""Checks a validated corpus against a run's configuration: `fsdp-data validate --against CONFIG`.

Also the texts that the run is evaluated on, and the list of documents that it does not learn (`data.exclude`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.data_section import GLMObjective
from fsdp_pretrain.data.corpus.corpus import Corpus
from fsdp_pretrain.data.packing.objectives import Specials
from fsdp_pretrain.data.packing.opening import cache_use, read_exclusions
from fsdp_pretrain.data.text.documents import document_hashes
from fsdp_pretrain.data.text.inputs import read_texts
from fsdp_pretrain.errors import DataError
from fsdp_pretrain.files import replace_file

from .findings import Findings
from .protected import Protection, protect
from .report import ValidationReport
from .totals import Hashes


def check_against(report: ValidationReport, run: Config) -> Findings:
    """Findings about whether a run can train on the validated corpus together with its other sources.

    The run's `model.vocab` must have room for the vocabulary and the objective's special tokens, and its sources must
    have the same tokenizer.
    """
    findings, size, objective = Findings(), report.vocabulary.size, run.data.objective
    needed = max(size, Specials.behind(size).eop + 1) if isinstance(objective, GLMObjective) else size
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
    sources = [source for source in run.eval.loss_on if not _is_at(source.path, directory)]
    return {source.name: _hashes(Corpus(source.path, cache=cache_use(run))) for source in sources}


def _hashes(corpus: Corpus) -> Hashes:
    """The distinct `document_hashes` of a corpus, without their separators, and without the 0 of documents that are too
    short to compare."""
    by_block = [np.zeros(0, dtype=np.uint64)]
    leading, trailing = (int(corpus.manifest.separators == where) for where in ("leading", "trailing"))
    for block in range(len(corpus.blocks)):
        lengths = corpus.lengths(block).astype(np.int64)
        ends = np.cumsum(lengths)
        tokens = corpus.tokens(block, 0, int(ends[-1]))
        by_block.append(document_hashes(tokens, ends - lengths + leading, ends - trailing))
    hashes = np.unique(np.concatenate(by_block))
    nonzero: Hashes = hashes[hashes != 0]
    return nonzero


def is_held_out(run: Config, directory: Path) -> bool:
    """Whether the corpus in `directory` is one of `eval.loss_on`."""
    return any(_is_at(source.path, directory) for source in run.eval.loss_on)


def protect_evaluation(run: Config | None, more: Sequence[Path], *, quiet: bool = False) -> Protection:
    """Protect the documents of `eval.heldout`, those of the corpora in `eval.loss_on`, and the texts in more files.
    Raises DataError if one of them cannot be read."""
    counts: list[tuple[str, int]] = []
    named = list(_evaluation_texts(run, quiet=quiet) if run is not None else ())
    named += [(str(path), read_texts(path)) for path in more]

    def all_texts() -> Iterator[str]:
        for name, texts in named:
            count = 0
            for text in texts:
                yield text
                count += 1
            counts.append((name, count))

    texts, missing = protect(all_texts()), ""
    if run is not None and not more and (others := set(run.eval.tasks) - set(run.eval.bundled_tasks)):
        missing = f"not with the tasks {', '.join(sorted(others))}: `fsdp-eval texts` writes a FILE for --protect"
    return Protection(texts, counts, missing)


def _evaluation_texts(run: Config, *, quiet: bool) -> Iterator[tuple[str, Iterator[str]]]:
    if run.eval.heldout is not None:
        if not run.eval.heldout.is_file():
            raise DataError(
                f"there is no file {run.eval.heldout} (eval.heldout)",
                effect="copies of what the run is evaluated on would stay in the corpus unseen",
                remedy="copy it to this machine, or correct the path",
            )
        yield str(run.eval.heldout), read_texts(run.eval.heldout)
    for source in run.eval.loss_on:
        yield f"the held-out corpus {source.name!r}", _texts(Corpus(source.path, cache=cache_use(run)), quiet=quiet)


def _texts(corpus: Corpus, *, quiet: bool) -> Iterator[str]:
    """The documents of a corpus, decoded."""
    tokenizer = corpus.tokenizer()
    for block in tqdm(range(len(corpus.blocks)), unit="block", desc="held out", disable=quiet or None):
        ends = np.cumsum(corpus.lengths(block).astype(np.int64))
        tokens = corpus.tokens(block, 0, int(ends[-1]))
        for document in np.split(tokens, ends[:-1]):
            yield tokenizer.decode(document.tolist())


def source_names(run: Config, directory: Path) -> list[str]:
    """The names of the run's sources that are in `directory`."""
    return [source.name for source in run.data.sources if _is_at(source.path, directory)]


def check_sources(run: Config | None, directories: Sequence[Path]) -> None:
    """Raise DataError unless all directories are sources of the run, or held out: `data.exclude` needs their names."""
    others = [
        str(path) for path in directories if run is None or not (source_names(run, path) or is_held_out(run, path))
    ]
    if others:
        raise DataError(
            f"--contamination LIST names documents by their source, and {', '.join(others)} is no source of a run",
            remedy="name the run with --against CONFIG, and validate the corpora of its data.sources",
        )


def excluded_documents(run: Config, directory: Path) -> set[tuple[str, int]]:
    """(shard, document) of what `data.exclude` of the run names in the corpus in `directory`, for all sources that are
    there. Raises DataError."""
    if run.data.exclude is None:
        return set()
    names, named = source_names(run, directory), read_exclusions(run.data.exclude)
    of_each = [{(shard, document) for source, shard, document in named if source == name} for name in names]
    return set.intersection(*of_each) if of_each else set()


def write_exclusions(path: Path, run: Config, reports: Sequence[ValidationReport]) -> None:
    """Write a list for `data.exclude`: what the run's list has, then the contaminated documents of the reports."""
    lines = run.data.exclude.read_text(encoding="utf-8").splitlines() if run.data.exclude is not None else []
    for report in reports:
        names = source_names(run, Path(report.directory))
        for place in report.contaminated:
            lines += [f"# {place}", *(f"{name} {place.shard} {place.document}" for name in names)]
    replace_file(path, "".join(line + "\n" for line in lines))


def _is_at(path: object, directory: Path) -> bool:
    return os.path.realpath(str(path)) == os.path.realpath(directory)
