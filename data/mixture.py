"""Which source each sample comes from: a pure function of the global sample index.

Samples are dealt in blocks of `BLOCK`. A block gives every source its quota, the difference of the rounded cumulative
shares, so realised shares never drift from the weights by more than one sample; inside the block the sources are
interleaved evenly, so even a small batch is mixed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fsdp_pretrain.errors import DataError

BLOCK = 4096


class Mixture:
    """Maps a global sample index to (source, index within the source).

    Args:
        weights: positive, any scale; one per source.

    Raises:
        DataError: a source would get less than one sample of a block.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        total = sum(weights)
        self._shares = [weight / total for weight in weights]
        if min(self._shares) * BLOCK < 1:
            raise DataError(
                f"the smallest source weight is {min(self._shares):.2g} of the mixture, less than 1 sample in {BLOCK}",
                remedy="raise its weight, or merge the source into another",
            )
        self._block = -1
        self._base: list[int] = []
        self._source: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._number: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def locate(self, index: int) -> tuple[int, int]:
        """(source, index in that source) of sample `index`."""
        if len(self._shares) == 1:
            return 0, index
        block, inside = divmod(index, BLOCK)
        if block != self._block:
            self._open(block)
        source = int(self._source[inside])
        return source, self._base[source] + int(self._number[inside])

    def counts(self, index: int) -> list[int]:
        """Samples of each source among [0, index)."""
        if len(self._shares) == 1:
            return [index]
        block, inside = divmod(index, BLOCK)
        if block != self._block:
            self._open(block)
        taken = np.bincount(self._source[:inside], minlength=len(self._shares))
        return [base + int(count) for base, count in zip(self._base, taken, strict=True)]

    def _cumulative(self, block: int) -> list[int]:
        """Samples of each source in blocks [0, block): largest-remainder rounding of the exact shares."""
        total = block * BLOCK
        exact = [share * total for share in self._shares]
        counts = [int(value) for value in exact]
        by_remainder = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
        for i in by_remainder[: total - sum(counts)]:
            counts[i] += 1
        return counts

    def _open(self, block: int) -> None:
        """Lay out one block: source i's k-th sample sits at the fraction (k + 1/2) / quota of the block."""
        self._block, self._base = block, self._cumulative(block)
        quotas = [b - a for a, b in zip(self._base, self._cumulative(block + 1), strict=True)]
        source = np.repeat(np.arange(len(quotas)), quotas)
        number = np.concatenate([np.arange(quota) for quota in quotas])
        place = (number + 0.5) / np.repeat(quotas, quotas)
        order = np.lexsort((source, place))
        self._source, self._number = source[order], number[order]
