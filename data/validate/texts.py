"""Decodes stored tokens: a document for `fsdp-data inspect`, and the text around the examples of findings."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from fsdp_pretrain.data.corpus.corpus import Corpus
from fsdp_pretrain.data.corpus.formats import MEASURED_TOKENS, Run, TokenFile
from fsdp_pretrain.data.text.tokenizer import Tokenizer
from fsdp_pretrain.errors import DataError

from .findings import Example

_TOKENS_AROUND = 12
_BOUNDARY = " ‖ "


def document(corpus: Corpus, wanted: int) -> tuple[str, str]:
    """The place and the text of document number `wanted`, counted over all shards. Only its block is read. Raises
    DataError if the corpus has no document of this number, or is damaged."""
    shards, table = corpus.manifest.shards, corpus.blocks
    ends = np.cumsum([shard.documents for shard in shards])
    if not 0 <= wanted < sum(shard.documents for shard in shards):
        raise DataError(f"there is no document {wanted}: the corpus has {sum(shard.documents for shard in shards)}")
    index = int(ends.searchsorted(wanted, "right"))
    number = wanted - (int(ends[index]) - shards[index].documents)
    inside = (table[:, 0] == index) & (table[:, 1] <= number) & (number < table[:, 1] + table[:, 2])
    ids = list[int]()  # a document that is in no block is empty
    for block in np.flatnonzero(inside).tolist():
        lengths, at = corpus.lengths(block).astype(np.int64), number - int(table[block, 1])
        begin = int(lengths[:at].sum())
        ids = corpus.tokens(block, begin, begin + int(lengths[at])).tolist()
    place = f"{shards[index].name}, document {number}: {len(ids)} tokens"
    return place, _decode(ids, corpus.tokenizer())


def add_texts(examples: Iterable[Example], name: str, file: TokenFile, tokenizer: Tokenizer) -> None:
    """Add the decoded text to the examples in documents of the file `name`; reads it again up to the last one."""
    waiting = [example for example in examples if example.file == name and example.document is not None]
    for run in file.runs(MEASURED_TOKENS) if waiting else ():
        in_run = [e for e in waiting if run.first <= (e.document or 0) < run.first + len(run.lengths)]
        for example in in_run:
            example.text = _around(example, run, tokenizer)
            waiting.remove(example)
        if not waiting:
            break


def _around(example: Example, run: Run, tokenizer: Tokenizer) -> str:
    """The text from 12 tokens before to 12 after the example's token, or of the first 24 tokens of its document."""
    n, ends = (example.document or 0) - run.first, run.ends
    start, end = int(run.starts[n]), int(ends[n])
    at = start + (example.token or 0)
    whole = example.token is None and end > start
    low, high = max(0, at - _TOKENS_AROUND), at + _TOKENS_AROUND
    if whole:
        low, high = start, min(end, start + 2 * _TOKENS_AROUND)
    high = min(high, len(run.tokens))
    cuts = [low, *(int(e) for e in ends[(ends > low) & (ends < high)]), high]
    return _BOUNDARY.join(_decode(run.tokens[a:b].tolist(), tokenizer) for a, b in pairwise(cuts))


def _decode(ids: list[int], tokenizer: Tokenizer) -> str:
    """The text of ids; an id outside the vocabulary is shown as `<id 70000>`."""
    parts: list[str] = []
    pending: list[int] = []
    for number in ids:
        if 0 <= number < tokenizer.vocab_size:
            pending.append(number)
        else:
            parts += [tokenizer.decode(pending), f"<id {number}>"]
            pending = []
    return "".join([*parts, tokenizer.decode(pending)])
