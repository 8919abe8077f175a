"""Documents that share passages with the evaluation of a run, whatever their case, white space and punctuation.

Documents are decoded and their n-grams looked up. A passage counts as found in a document that holds half of its
n-grams. It is no evidence if many documents hold it, such as a licence: see `contaminated`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fsdp_pretrain.data.corpus.formats import Run
from fsdp_pretrain.data.text.ngrams import Numbers, ngram_hashes
from fsdp_pretrain.data.text.tokenizer import Tokenizer

from .protected import ProtectedTexts, Protection

RARE_DOCUMENTS, RARE_SHARE = 10, 0.001
"""See `contaminated`."""
_BATCH_TOKENS, _OVERLAP_TOKENS = 32_768, 64
"""Longer documents are decoded in pieces, which overlap so that no n-gram is lost."""


class Shared(NamedTuple):
    """Passages found in the documents of a file, in columns with one entry per document and passage."""

    document: Numbers  # number within the file
    passage: Numbers  # number among the protected passages
    share: npt.NDArray[np.float64]  # share of the n-grams of the passage's text that are in the document


@dataclass(frozen=True)
class Contaminated:
    """A document that holds passages of a protected text."""

    shard: str  # this and the next: its file, and its number in the file
    document: int
    text: str  # the place of the text
    share: float  # share of the text's n-grams that the document holds

    def __str__(self) -> str:
        return f"holds {self.share:.0%} of {self.text}"


def shared_passages(run: Run, tokenizer: Tokenizer, protected: ProtectedTexts) -> Shared:
    """The protected passages in the documents of a run."""
    documents, grams = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for owners, texts in _decoded(run, tokenizer):
        hashes, text = ngram_hashes(texts)
        places, numbers = protected.find(hashes)
        documents.append(owners[text[places]])
        grams.append(numbers)
    size = len(protected.hashes)
    document, gram = np.divmod(np.unique(np.concatenate(documents) * size + np.concatenate(grams)), size)
    passages = len(protected.needed)
    pairs, found = np.unique(document * passages + protected.passage[gram], return_counts=True)
    document, passage = np.divmod(pairs, passages)
    text = protected.text[passage]
    _, group = np.unique(document * len(protected.sizes) + text, return_inverse=True)
    share = np.bincount(group, weights=found)[group] / protected.sizes[text]
    enough = found >= protected.needed[passage]
    return Shared(document[enough] + run.first, passage[enough], share[enough])


def contaminated(found: Mapping[str, Sequence[Shared]], protection: Protection, documents: int) -> list[Contaminated]:
    """The contaminated documents in order, each with the text of which it holds the largest share.

    A passage is evidence if at most `RARE_DOCUMENTS` documents hold it; against a document that holds half of the whole
    text, if at most `RARE_SHARE` of all documents do.

    Args:
        found: what was found in each file.
        documents: documents of the corpus.
    """
    passages = [np.zeros(0, np.int64), *(part.passage for parts in found.values() for part in parts)]
    holders = np.bincount(np.concatenate(passages), minlength=len(protection.texts.needed))
    most = max(RARE_DOCUMENTS, int(RARE_SHARE * documents))
    kept: list[Contaminated] = []
    for shard, parts in found.items():
        for part in parts:
            rare = holders[part.passage] <= np.where(part.share >= 0.5, most, RARE_DOCUMENTS)
            at = np.flatnonzero(rare)
            at = at[np.lexsort((-part.share[at], part.document[at]))]
            for n in at[np.unique(part.document[at], return_index=True)[1]].tolist():
                text = protection.name(int(protection.texts.text[part.passage[n]]))
                kept.append(Contaminated(shard, int(part.document[n]), text, float(part.share[n])))
    return kept


def _decoded(run: Run, tokenizer: Tokenizer) -> Iterator[tuple[Numbers, list[str]]]:
    """The documents of a run as texts, in batches, each text with the number of its document in the run."""
    outside = (run.tokens < 0) | (run.tokens >= tokenizer.vocab_size)
    # In int64: the separator may not fit into the dtype of ids that are wrong.
    tokens = np.where(outside, tokenizer.eod, run.tokens.astype(np.int64)) if outside.any() else run.tokens
    owners, texts, size = list[int](), list[str](), 0
    for number, (start, end) in enumerate(zip(run.starts.tolist(), run.ends.tolist(), strict=True)):
        for begin in range(start, end, _BATCH_TOKENS):
            piece = tokens[begin : min(end, begin + _BATCH_TOKENS + _OVERLAP_TOKENS)]
            owners.append(number)
            texts.append(tokenizer.decode(piece.tolist()))
            size += len(piece)
            if size >= _BATCH_TOKENS:
                yield np.array(owners), texts
                owners, texts, size = [], [], 0
    if texts:
        yield np.array(owners), texts
