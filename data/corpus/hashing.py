"""Random permutations and draws that depend only on a key, in every later version of this program.

A run's data is a pure function of its seed, so nothing here may ever change. NumPy's generators may. Each counter is
hashed with the finaliser of splitmix64.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash


def key_of(*parts: object) -> int:
    """A 64-bit key of the parts' string forms."""
    return xxhash.xxh3_64_intdigest("/".join(str(part) for part in parts).encode())


def hashes(key: int, size: int) -> npt.NDArray[np.uint64]:
    """Hashes of 0 to size - 1 under `key`: uint64 [size]."""
    x = np.arange(1, size + 1, dtype=np.uint64)
    x *= np.uint64(0x9E3779B97F4A7C15)
    x += np.uint64(key)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def uniforms(key: int, size: int) -> npt.NDArray[np.float64]:
    """Independent draws from [0, 1) under `key`, multiples of 2^-53: float64 [size]."""
    return (hashes(key, size) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(key: int, size: int) -> npt.NDArray[np.int64]:
    """A permutation of range(size) under `key`.

    The indices are sorted by their hashes; the index fills the low bits of its own sort key, so there are no ties and
    any sorting algorithm gives the same order.
    """
    low = np.uint64((1 << max(1, (size - 1).bit_length())) - 1)
    x = (hashes(key, size) & ~low) | np.arange(size, dtype=np.uint64)
    x.sort()
    return (x & low).astype(np.int64)
