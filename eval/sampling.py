"""Continuations of prompts by a model, for people to read. Needs no lm-eval."""

from __future__ import annotations

from collections.abc import Iterator

from fsdp_pretrain.errors import ConfigError

from .checkpoints import EvaluatedModel
from .scorer import Marks, Prompt, Scorer

_TOKENS = 64


def prompt_of(
    evaluated: EvaluatedModel, text: str, *, tokens: int | None = None, temperature: float = 0.8, seed: int = 0
) -> Prompt:
    """A prompt for a model's `Scorer`; a long text is cut on the left. The defaults are those of `eval.prompts`.

    `tokens`: most tokens of the answer; None: `_TOKENS`, or half of what the model reads if that is less. Raises
    ConfigError if so many tokens do not fit behind any prompt.
    """
    tokens = min(_TOKENS, evaluated.length // 2) if tokens is None else tokens
    tokenizer, marks = evaluated.tokenizer, Marks.of(evaluated.objective, evaluated.tokenizer)
    room = evaluated.length - len(marks.before) - tokens
    if room < 1:
        raise ConfigError(
            f"{tokens:_} tokens do not fit: the model reads {evaluated.length:_} in all", remedy="ask for fewer"
        )
    (ids,) = tokenizer.encode([text])
    inputs, prefix = marks.inputs((ids or [tokenizer.eod])[-room:])
    return Prompt(inputs, tokens, prefix=prefix, temperature=temperature, seed=seed)


def continuation(
    evaluated: EvaluatedModel, text: str, *, tokens: int, temperature: float, seed: int, device: str
) -> Iterator[str]:
    """The continuation of a text, piece by piece as it is generated.

    Args:
        tokens: most tokens; it ends earlier with the document.
        temperature: divides the logits before a token is drawn; 0: always the likeliest token.

    Raises:
        UserError: the model or the device cannot be used, or so many tokens do not fit.
    """
    prompt = prompt_of(evaluated, text, tokens=tokens, temperature=temperature, seed=seed)
    model, marks = evaluated.read(device, None), Marks.of(evaluated.objective, evaluated.tokenizer)
    yield from Scorer(model, evaluated.tokenizer, batch=1, ends=marks.ends).stream(prompt)
