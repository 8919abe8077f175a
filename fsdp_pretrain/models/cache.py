"""Keys and values of tokens already seen, so that decoding computes each token once."""

from __future__ import annotations

from torch import Tensor


class LayerCache:
    """The keys and values of one layer.

    Args:
        capacity: room for this many tokens per sequence.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity, self._length = capacity, 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values of new tokens, [B, heads, S, d].

        Returns:
            Keys and values of all tokens so far, [B, heads, T, d]: views, to which the next call writes.
        """
        if self._keys is None or self._values is None:
            shape = (*key.shape[:2], self._capacity, key.shape[3])
            self._keys, self._values = key.new_empty(shape), value.new_empty(shape)
        stop = self._length + key.shape[2]
        self._keys[:, :, self._length : stop] = key
        self._values[:, :, self._length : stop] = value
        self._length = stop
        return self._keys[:, :, :stop], self._values[:, :, :stop]
