"""How unusual the tokens of a step are, as one number: their distance from the tokens of the run's first steps.

The ids of up to 16,384 tokens a step are counted in 1,024 buckets (their lowest ten bits). The Jensen-Shannon
divergence of these counts from those of the run's first steps reveals shifted ids, text of another kind or boilerplate,
which cannot be seen in the loss, the entropy or the number of documents. The run directory keeps the reference and the
spread of the distances, so that the first step after a restart is judged too.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fsdp_pretrain.files import replace_file
from fsdp_pretrain.statistics import spread

BUCKETS = 1024
TOKENS = 16_384
"""Most tokens counted per step."""
LEARN = 50
"""Steps from which the usual tokens of a run are learned; as many more show their variation."""
_LEAST_SPREAD = 0.05
"""Smallest spread of log distances: that of counts drawn from the reference itself."""


class Unigrams:
    """Compares the tokens of steps with those of a run's first steps.

    The first `LEARN` steps are the reference, and as many more give the spread of distances. The JSON file `path` keeps
    both.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._learn = path, LEARN
        self._begin({})
        self._read()

    def _begin(self, plan: dict[str, Any]) -> None:
        self._plan, self._counts, self._steps = plan, np.zeros(BUCKETS, np.int64), 0
        self._logs: list[float] = []
        self._typical: tuple[float, float] | None = None

    def score(self, tokens: Sequence[npt.NDArray[np.int64]], shares: Mapping[str, float]) -> float | None:
        """How many spreads a step's distance is above the typical one; None while that is being learned.

        `tokens` come in parts of any shape. Learning starts again when the planned shares of the sources, or the number
        of tokens, change.
        """
        apart = max(1, sum(part.size for part in tokens) // TOKENS)
        flat = np.concatenate([part.reshape(-1)[::apart] for part in tokens])[:TOKENS]
        counts = np.bincount(flat & (BUCKETS - 1), minlength=BUCKETS)
        plan = {"tokens": len(flat), "shares": {name: round(share, 2) for name, share in shares.items() if share}}
        if plan != self._plan:
            self._begin(plan)
        if self._steps < self._learn:
            self._counts += counts
            self._steps += 1
            return None
        distance = math.log(max(1e-12, jensen_shannon(counts, self._counts)))
        if self._typical is None:
            self._logs.append(distance)
            if len(self._logs) == self._learn:
                middle, deviation = spread(self._logs)
                self._typical = middle, max(_LEAST_SPREAD, deviation)
                self._write()
            return None
        return (distance - self._typical[0]) / self._typical[1]

    def _read(self) -> None:
        try:
            content = json.loads(self._path.read_bytes())
            counts = np.array(content["counts"], dtype=np.int64)
            typical = float(content["typical"]), float(content["spread"])
        except (OSError, ValueError, KeyError, TypeError):  # none yet, or unreadable: learned again
            return
        if counts.shape == (BUCKETS,):
            self._plan, self._counts, self._typical = content["plan"], counts, typical
            self._steps = self._learn

    def _write(self) -> None:
        assert self._typical is not None
        typical, spread = self._typical
        content = {"plan": self._plan, "typical": typical, "spread": spread, "counts": self._counts.tolist()}
        with contextlib.suppress(OSError):  # only an observer: the next start learns again
            replace_file(self._path, json.dumps(content).encode())


def jensen_shannon(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> float:
    """Jensen-Shannon divergence of two histograms, in nats: 0 to log 2."""
    p, q = one / one.sum(), other / other.sum()
    return _entropy((p + q) / 2) - (_entropy(p) + _entropy(q)) / 2


def _entropy(p: npt.NDArray[np.float64]) -> float:
    return -float(p @ np.log(np.maximum(p, 1e-300)))
