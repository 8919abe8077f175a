"""The held-out documents of a run, for finding them in its training data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from data.corpus.corpus import Corpus
from data.text.documents import document_hashes
from fsdp_pretrain.config.config import Config

Hashes = npt.NDArray[np.uint64]


def heldout_hashes(run: Config, directory: Path) -> dict[str, Hashes]:
    """Hashes of the documents of each corpus of `eval.loss_on` but `directory`, by name. Raises DataError."""
    sources = [source for source in run.eval.loss_on if source.path.resolve() != directory.resolve()]
    return {source.name: _hashes(Corpus(source.path)) for source in sources}


def _hashes(corpus: Corpus) -> Hashes:
    found = [np.zeros(0, dtype=np.uint64)]
    for number in range(len(corpus.manifest.shards)):
        shard = corpus.shard(number)
        for document in map(shard.document, range(shard.documents)):
            found.append(document_hashes(document, np.zeros(1, np.int64), np.array([len(document)])))
    hashes = np.unique(np.concatenate(found))
    kept: Hashes = hashes[hashes != 0]
    return kept
