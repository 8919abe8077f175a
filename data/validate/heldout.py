"""The held-out documents of a run, for finding them in its training data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from data.corpus.corpus import Corpus
from data.packing.opening import cache_use
from data.text.documents import document_hashes
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.remote import Url

Hashes = npt.NDArray[np.uint64]


def heldout_hashes(run: Config, directory: Path) -> dict[str, Hashes]:
    """Hashes of the documents of each corpus of `eval.loss_on` but `directory`, by name. Raises DataError."""
    here = directory.resolve()
    sources = [source for source in run.eval.loss_on if isinstance(source.path, Url) or source.path.resolve() != here]
    return {source.name: _hashes(Corpus(source.path, cache=cache_use(run))) for source in sources}


def _hashes(corpus: Corpus) -> Hashes:
    found = [np.zeros(0, dtype=np.uint64)]
    for number, tokens in enumerate(corpus.blocks[:, 4].tolist()):
        block = corpus.block(number, 0, tokens)
        starts, lengths = block.starts, block.lengths.astype(np.int64)
        found.append(document_hashes(block.tokens, starts, starts + lengths))
    hashes = np.unique(np.concatenate(found))
    kept: Hashes = hashes[hashes != 0]
    return kept
