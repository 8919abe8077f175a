"""The held-out documents of a run, for finding them in its training data."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from data.corpus.corpus import Corpus
from data.packing.opening import cache_use
from data.text.documents import document_hashes
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.remote import Location, Url

Hashes = npt.NDArray[np.uint64]


def heldout_hashes(run: Config, directory: Location) -> dict[str, Hashes]:
    """Hashes of the documents of each corpus of `eval.loss_on` but `directory`, by name. Raises DataError."""
    sources = [source for source in run.eval.loss_on if _whole(source.path) != _whole(directory)]
    return {source.name: _hashes(Corpus(source.path, cache=cache_use(run))) for source in sources}


def _whole(place: Location) -> Location:
    return place if isinstance(place, Url) else place.resolve()


def _hashes(corpus: Corpus) -> Hashes:
    found = [np.zeros(0, dtype=np.uint64)]
    for number in range(len(corpus.blocks)):
        lengths = corpus.lengths(number).astype(np.int64)
        ends = np.cumsum(lengths)
        found.append(document_hashes(corpus.tokens(number, 0, int(ends[-1])), ends - lengths, ends))
    hashes = np.unique(np.concatenate(found))
    kept: Hashes = hashes[hashes != 0]
    return kept
