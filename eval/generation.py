"""A task's options for generating answers, of which greedy decoding is supported. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_DEFAULT_TOKENS = 256
"""The default of lm-eval's adapter for transformers."""
_OF_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "seed")
"""Without effect on greedy decoding."""
_NEUTRAL: dict[str, object] = {
    "do_sample": False,
    "num_beams": 1,
    "num_return_sequences": 1,
    "repetition_penalty": 1,
    "length_penalty": 1,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
}
"""Values that leave greedy decoding as it is."""


@dataclass(frozen=True)
class Greedy:
    """A greedy continuation of at most `tokens` tokens; the texts in `stops` end it and are not part of it."""

    stops: tuple[str, ...]
    tokens: int

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> Greedy:
        """Read a task's `generation_kwargs`, with lm-eval's defaults and its names for the number of tokens.

        Raises:
            ValueError: they ask for anything but greedy decoding; names the options that do.
        """
        given = {name: value for name, value in options.items() if value is not None}
        until = given.pop("until", [])
        sizes = [given.pop(name) for name in _TOKENS if name in given]
        sampling = given.get("do_sample", bool(given.get("temperature")))
        neutral = _NEUTRAL if sampling else {**_NEUTRAL, **{name: given.get(name) for name in _OF_SAMPLING}}
        refused = [f"{name}={value}" for name, value in given.items() if name not in neutral or neutral[name] != value]
        if refused:
            raise ValueError(f"{', '.join(refused)}: not supported, answers are generated greedily")
        stops = [until] if isinstance(until, str) else until
        return cls(tuple(stop for stop in stops if stop), int(sizes[0]) if sizes else _DEFAULT_TOKENS)
