"""The learning rate's warm-up and decay in closed form, as pure functions of the samples consumed."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LearningRateCurve:
    """A learning rate that rises from 0 to a peak at `warmup` and falls to a floor at `end`, by samples consumed c.

    Warm-up: `linear`, peak c/w; or `parabolic`, peak (1 - (1 - c/w)^2) (the published Llama-style 7B run).

    Shapes, with x from 0 at the end of the warm-up (`wsd`: at `start`) to 1 at `end`:

    - `cosine`: floor + (peak - floor) (1 + cos(pi x)) / 2 (SGDR, arXiv 1608.03983; Megatron-LM);
    - `linear`: peak + (floor - peak) x;
    - `constant`: peak;
    - `wsd`: peak until `start`, then floor + (peak - floor) f with f = 1 - sqrt(x) or 1 - x (`decay_shape`; warm-up,
      stable, decay: MiniCPM, arXiv 2404.06395; shapes: arXiv 2405.18392).
    """

    shape: str
    warmup: int
    end: int
    start: int = 0
    warmup_shape: str = "linear"
    decay_shape: str = "1-sqrt"

    def lr(self, consumed: int, peak: float, floor: float) -> float:
        """The learning rate at `consumed`."""
        warmup = self.warmup
        if warmup and consumed <= warmup:
            if self.warmup_shape == "linear":
                return peak * consumed / warmup
            return peak * (1 - (1 - consumed / warmup) ** 2)
        if self.shape == "constant":
            return peak
        start = max(warmup, self.start)
        if self.shape == "wsd" and consumed <= start:
            return peak
        if consumed >= self.end:
            return floor
        passed, length = consumed - start, self.end - start
        if self.shape == "linear":
            return peak + (floor - peak) * passed / length
        if self.shape == "wsd":
            x = passed / length
            return floor + (peak - floor) * (1 - (math.sqrt(x) if self.decay_shape == "1-sqrt" else x))
        return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * (passed / length)))
