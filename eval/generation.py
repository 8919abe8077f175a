"""A task's options for generating answers, as lm-eval's adapter for transformers understands them. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_DEFAULT_TOKENS = 256
"""The default of lm-eval's adapter for transformers."""
_TOP_K = 50
"""The default of transformers."""
_OF_SAMPLING = ("temperature", "top_p", "top_k", "seed")
"""Without effect on greedy decoding."""
_NEUTRAL: dict[str, object] = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "repetition_penalty": 1,
    "length_penalty": 1,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "min_p": 0,
    "typical_p": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
}
"""Other options, and the values that change nothing."""


@dataclass(frozen=True)
class Sampling:
    """Draw the next token at random: from the `top_k` likeliest (0: all), of these the fewest with probability `top_p`.

    `seed`, together with the number of the request, determines the draws.
    """

    temperature: float
    top_p: float = 1.0
    top_k: int = _TOP_K
    seed: int = 0


@dataclass(frozen=True)
class Decoding:
    """How an answer is generated: at most `tokens` tokens; the texts in `stops` end it and are not part of it.

    `sampling` None takes the likeliest token each time.
    """

    stops: tuple[str, ...]
    tokens: int
    sampling: Sampling | None = None

    @classmethod
    def read(cls, options: Mapping[str, Any], length: int) -> Decoding:
        """Read a task's `generation_kwargs`, with lm-eval's defaults and its names for the number of tokens.

        Args:
            length: tokens that the model reads in all.

        Raises:
            ValueError: they ask for something that is not supported, or make no sense; names all such options.
        """
        given = {name: value for name, value in options.items() if value is not None}
        until = given.pop("until", [])
        sizes = [given.pop(name) for name in _TOKENS if name in given]
        asked = {name: given.pop(name) for name in _OF_SAMPLING if name in given}
        samples = given.pop("do_sample", bool(asked.get("temperature")))
        refused = [f"{name}={value}" for name, value in given.items() if _NEUTRAL.get(name, _NEUTRAL) != value]
        problems = [f"{', '.join(refused)}: not supported"] if refused else []
        sampling = None
        if samples:
            try:
                sampling = _sampling(**asked)
            except (TypeError, ValueError) as error:
                problems.append(f"do_sample={samples}: {error}")
        tokens = int(sizes[0]) if sizes else _DEFAULT_TOKENS
        if not 0 < tokens < length:
            problems.append(f"answers of {tokens} tokens, but the model reads {length} in all")
        if problems:
            raise ValueError("; ".join(problems))
        stops = [until] if isinstance(until, str) else until
        return cls(tuple(stop for stop in stops if stop), tokens, sampling)


def _sampling(temperature: float = 0.0, top_p: float = 1.0, top_k: int = _TOP_K, seed: int = 0) -> Sampling:
    """Raises ValueError, TypeError."""
    found = Sampling(float(temperature), float(top_p), int(top_k), int(seed))
    wrong = []
    if found.temperature <= 0:
        wrong.append(f"needs temperature > 0, not {temperature}")
    if not 0 < found.top_p <= 1:
        wrong.append(f"top_p={top_p} is not in (0, 1]")
    if found.top_k < 0:
        wrong.append(f"top_k={top_k} is negative")
    if wrong:
        raise ValueError(", ".join(wrong))
    return found
