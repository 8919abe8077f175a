"""Energy counters of ranks without GPUs, in place of `EnergyCounter`; `EXECUTE_FIRST` names this file, see `zygote.py`.

Before step N rank R has used 1000 * N * (R + 1) mJ; before step 3 rank 1 cannot tell.
"""

from __future__ import annotations

import itertools
import os

from fsdp_pretrain.train.device_timing import EnergyCounter

_rank, _steps = int(os.environ["RANK"]), itertools.count(1)


def _take(self: EnergyCounter) -> int | None:
    step = next(_steps)
    return None if (step, _rank) == (3, 1) else 1000 * step * (_rank + 1)


EnergyCounter.take = _take  # type: ignore[method-assign]
