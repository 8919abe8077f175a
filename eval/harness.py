"""A checkpoint's model behind lm-eval's interface.

Texts are encoded as in training; nothing is added. A document separator stands only before an empty context, and before
a text whose rolling likelihood is asked for. There is no request cache, since lm-eval's ignores which model filled it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs

from fsdp_pretrain.config.data_section import AnyObjective
from fsdp_pretrain.data.text.tokenizer import Tokenizer
from fsdp_pretrain.models import Decoder
from fsdp_pretrain.parallel.mesh import World

from .results import RefusedError
from .scorer import Marks, Prompt, Query, Scorer

_OF_SAMPLING = ("temperature", "top_p", "top_k", "seed")
"""Options that have no effect on greedy decoding."""
_NEUTRAL: dict[str, object] = {"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1}
"""Other options, with the values at which they have no effect."""


class CheckpointLM(TemplateLM):
    """A decoder and its tokenizer as an lm-eval model.

    Args:
        length: longest input, in tokens.
        batch: most sequences per forward pass.
        objective: the objective that the model was trained with. A GLM model reads a context as a whole, and the text
            after it as the filling of a `[gMASK]`.
        world: the ranks that `model` is sharded over, see `Scorer`.

    Attributes:
        scorer: runs the model.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        *,
        length: int,
        batch: int,
        objective: AnyObjective | None = None,
        world: World | None = None,
    ) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self._marks = Marks.of(objective, tokenizer)
        self._length = length - len(self._marks.before)
        self.scorer = Scorer(model, tokenizer, batch=batch, ends=self._marks.ends, world=world)

    @property
    def eot_token_id(self) -> int:
        """The document separator, also the context of an empty prompt."""
        return self.tokenizer.eod

    @property
    def max_length(self) -> int:
        """Most tokens of a context and its continuation together."""
        return self._length

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids of a text, without any special token."""
        del add_special_tokens, kwargs
        return self.tokenizer.encode([string])[0]

    # ------------------------------------------------------------------ likelihoods

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-likelihood, whether greedy decoding gives it) of each continuation, given its context. Raises
        RefusedError if a continuation has no token of its own."""
        pairs = [request.args for request in requests]
        encoded = [self._encode_pair(*pair) if pair[0] else ([], self.tok_encode(pair[1])) for pair in pairs]
        return self._loglikelihood_tokens(
            [
                (pair, context or [self.eot_token_id], targets)
                for pair, (context, targets) in zip(pairs, encoded, strict=True)
            ],
            disable_tqdm=disable_tqdm,
        )

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        for (context, continuation), _, targets in requests:
            if not targets:
                raise RefusedError(
                    f"a task asks for the likelihood of {continuation!r} after {context[-40:]!r}, but it has no token "
                    "of its own: it is empty, or the tokenizer joins it to the end of the context",
                    effect="its likelihood would be 1, better than any other answer (lm-eval's adapters fail here too)",
                    remedy="leave the task out, or change its answers or its target_delimiter in a copy of it",
                )
        jobs = [([*context, *continuation], len(context)) for _, context, continuation in requests]
        return self.score_tokens(jobs, quiet=bool(kwargs.get("disable_tqdm")))

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, each token predicted once."""
        texts = self.tokenizer.encode([request.args[0] for request in requests])
        jobs = [([self.eot_token_id, *tokens], 1) for tokens in texts]
        return [score for score, _ in self.score_tokens(jobs, quiet=disable_tqdm)]

    def score_tokens(self, jobs: Sequence[tuple[list[int], int]], *, quiet: bool = True) -> list[tuple[float, bool]]:
        """(log-likelihood, whether greedy decoding gives it) of tokens[first:], for each (tokens, first)."""
        owners, queries = [], []
        for number, (tokens, first) in enumerate(jobs):
            for window, count in self._windows(tokens, first):
                owners.append(number)
                queries.append(self._query(window, count))
        totals, greedy = [0.0] * len(jobs), [True] * len(jobs)
        for number, score in zip(owners, self.scorer.scores(queries, quiet=quiet), strict=True):
            totals[number] += score.likelihood
            greedy[number] &= score.greedy
        return list(zip(totals, greedy, strict=True))

    def _windows(self, tokens: list[int], first: int) -> Iterator[tuple[list[int], int]]:
        """Cut tokens into (window, how many of its last tokens to predict) so that tokens[first:] are predicted once.

        The window has at most `length` inputs. A text that fits is one window with all its context. A longer text is
        cut so that each window but the last has a single token of context (lm-eval's disjoint rolling windows).
        """
        at = first
        while at < len(tokens):
            stop = min(len(tokens), at + self._length)
            yield tokens[max(0, stop - 1 - self._length) : stop], stop - at
            at = stop

    def _query(self, window: list[int], count: int) -> Query:
        context, targets = window[:-count], window[-count:]
        inputs, prefix = self._marks.inputs(context)
        return Query([*inputs, *targets[:-1]], targets, prefix)

    # ------------------------------------------------------------------ answers

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate answers up to a stop string. A long prompt is cut on the left, so that the longest answer fits.
        Raises RefusedError if a request needs an unsupported way of decoding, or the model has no room for its
        answer."""
        texts = self.tokenizer.encode([request.args[0] for request in requests])
        prompts = []
        for request, tokens in zip(requests, texts, strict=True):
            try:
                stops, most = answer_limits(request.args[1], self._length)
            except ValueError as error:
                raise RefusedError(f"a task asks for {error}") from None
            inputs, prefix = self._marks.inputs((tokens or [self.eot_token_id])[most - self._length :])
            prompts.append(Prompt(inputs, most, stops, prefix))
        return self.scorer.answers(prompts, quiet=disable_tqdm)


def answer_limits(options: Mapping[str, Any], length: int) -> tuple[tuple[str, ...], int]:
    """(stop strings, most tokens) of a task's `generation_kwargs`, as lm-eval reads them.

    Args:
        length: most tokens that the model can read.

    Raises:
        ValueError: the options ask for anything but greedy decoding, or for more tokens; names all such options.
    """
    try:
        given = dict(normalize_gen_kwargs({name: value for name, value in options.items() if value is not None}))
    except TypeError as error:
        raise ValueError(f"{dict(options)}: {error}") from None
    stops, tokens, samples = given.pop("until"), given.pop("max_gen_toks"), given.pop("do_sample")
    left = {name: value for name, value in given.items() if name not in _OF_SAMPLING}
    refused = [f"{name}={value}" for name, value in left.items() if _NEUTRAL.get(name, _NEUTRAL) != value]
    refused += [f"do_sample={samples}, temperature={given.get('temperature')}"] if samples else []
    problems = [f"{', '.join(refused)}: not supported"] if refused else []
    if not 0 < tokens < length:
        problems.append(f"answers of {tokens} tokens, but the model reads {length} in all")
    if problems:
        raise ValueError("; ".join(problems))
    return tuple(stop for stop in stops if stop), tokens
