"""A checkpoint's model behind lm-eval's interface, read from DCP in one process.

Encoding is the training tokenizer's: nothing is added; a separator stands only before an empty context or whole text.
No request cache is offered: lm-eval's ignores which model filled it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from lm_eval.api.model import TemplateLM
from torch import Tensor
from tqdm import tqdm

from data.packing.objectives import IGNORE, Specials
from data.text.tokenizer import Tokenizer
from fsdp_pretrain.config.sections import AnyObjective, GLMObjective
from fsdp_pretrain.models import Decoder
from fsdp_pretrain.models.masks import Slots

from .attempt import RefusedError
from .generation import Greedy

_LOGITS_AT_ONCE = 2**27


class CheckpointLM(TemplateLM):
    """A decoder and its tokenizer as an lm-eval model.

    Args:
        length: longest input, in tokens.
        batch: sequences per forward pass at most.
        objective: what the model was trained with.
    """

    def __init__(
        self, model: Decoder, tokenizer: Tokenizer, *, length: int, batch: int, objective: AnyObjective | None = None
    ) -> None:
        super().__init__()
        self._model, self._tokens, self._batch = model.eval(), tokenizer, batch
        self._ids: Specials | None = None
        if isinstance(objective, GLMObjective):
            self._ids = Specials.behind(objective, tokenizer.vocab_size)
            self._two_dimensions = objective.positions == "glm2d"
        self._between = 0 if self._ids is None else 2
        self._length = length - self._between
        self._device = next(model.parameters()).device

    @property
    def eot_token_id(self) -> int:
        """The document separator, also the context of an empty prompt."""
        return self._tokens.eod

    @property
    def tokenizer_name(self) -> str:
        """Identity of the tokenizer for lm-eval's bookkeeping."""
        return f"{self._tokens.path.name}@{self._tokens.fingerprint[:12]}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids of a text, nothing added."""
        del add_special_tokens, kwargs
        return self._tokens.encode([string])[0]

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-likelihood of continuations given contexts, and whether greedy decoding gives them."""
        scored: list[tuple[float, bool]] = super().loglikelihood(
            requests, disable_tqdm=disable_tqdm or not sys.stderr.isatty()
        )
        return scored

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        jobs = []
        for _, context, continuation in requests:
            tokens = (context or [self.eot_token_id]) + continuation
            jobs.append((tokens, len(tokens) - len(continuation)))
        return self.score_tokens(jobs, quiet=bool(kwargs.get("disable_tqdm")))

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, each token predicted once."""
        jobs = [([self.eot_token_id, *self.tok_encode(request.args[0])], 1) for request in requests]
        return [score for score, _ in self.score_tokens(jobs, quiet=disable_tqdm)]

    def score_tokens(self, jobs: Sequence[tuple[list[int], int]], *, quiet: bool = True) -> list[tuple[float, bool]]:
        """(log-likelihood, whether greedy decoding gives it) of tokens[first:], for each (tokens, first)."""
        windows = [
            (job, *window) for job, (tokens, first) in enumerate(jobs) for window in self._windows(tokens, first)
        ]
        windows.sort(key=lambda item: len(item[1]), reverse=True)  # similar lengths together; the largest first
        totals, greedy = [0.0] * len(jobs), [True] * len(jobs)
        bar = tqdm(total=len(windows), desc="scoring", unit="seq", disable=True if quiet else None)
        with bar:
            for group in self._groups(windows):
                for (job, _, _), score, same in zip(group, *self._forward(group), strict=True):
                    totals[job] += score
                    greedy[job] &= same
                bar.update(len(group))
        return list(zip(totals, greedy, strict=True))

    def _windows(self, tokens: list[int], first: int) -> Iterable[tuple[list[int], int]]:
        """Cut tokens into (window, how many of its last tokens to predict) so that tokens[first:] are predicted once.

        The window has at most `length` inputs. A text that fits is one window with all its context; of a longer one
        each window but the last has a single token of context (lm-eval's disjoint rolling windows).
        """
        at = first
        while at < len(tokens):
            stop = min(len(tokens), at + self._length)
            yield tokens[max(0, stop - 1 - self._length) : stop], stop - at
            at = stop

    def _groups(self, windows: list[tuple[int, list[int], int]]) -> Iterable[list[tuple[int, list[int], int]]]:
        vocabulary = self._model.embedding.weight.shape[0]
        start = 0
        while start < len(windows):
            fit = max(1, _LOGITS_AT_ONCE // (len(windows[start][1]) * vocabulary))
            yield windows[start : start + min(self._batch, fit)]
            start += min(self._batch, fit)

    @torch.inference_mode()
    def _forward(self, group: list[tuple[int, list[int], int]]) -> tuple[list[float], list[bool]]:
        """Log-likelihood, and whether greedy decoding gives it, of the last tokens of each (_, tokens, how many)."""
        split = [(window[:-count], window[-count:]) for _, window, count in group]
        logits = self._logits([(context, rest[:-1]) for context, rest in split])
        targets = torch.full(logits.shape[:2], IGNORE)
        for row, (context, rest) in enumerate(split):
            end = len(context) + self._between + len(rest) - 1
            targets[row, end - len(rest) : end] = torch.tensor(rest)
        targets = targets.to(self._device)
        scores = -F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none")
        hit = (logits.argmax(-1) == targets) | (targets == IGNORE)
        totals: Tensor = scores.view_as(targets).sum(1)
        return totals.tolist(), hit.all(1).tolist()

    def _logits(self, texts: list[tuple[list[int], list[int]]]) -> Tensor:
        """fp32 [n, width, V] for (context, continuation); rows are padded on the right, which does not affect them.

        Under the GLM objective the context is a prefix that ends in `[gMASK]`, and `sop` begins the continuation.
        """
        between = [] if self._ids is None else [self._ids.gmask, self._ids.sop]
        rows = [[*context, *between, *said] for context, said in texts]
        tokens = torch.full((len(rows), max(map(len, rows))), self.eot_token_id, dtype=torch.int64)
        for row, values in enumerate(rows):
            tokens[row, : len(values)] = torch.tensor(values)
        slots = positions = None
        if self._ids is not None:
            prefix = torch.tensor([[len(context) + 1] for context, _ in texts], device=self._device)
            slots = Slots(torch.full_like(prefix, tokens.shape[1]), prefix)
            if self._two_dimensions:
                line = torch.arange(tokens.shape[1], device=self._device).expand(len(rows), -1)
                place = line.minimum(prefix - 1)
                positions = torch.stack((place, line - place), 1)
        logits: Tensor = self._model(tokens.to(self._device), None, slots, positions)
        return logits.float()

    @torch.inference_mode()
    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy continuations up to a stop string; without a KV cache, so meant for short answers.

        Raises:
            RefusedError: a request needs another way of decoding.
        """
        try:
            asked = [(context, Greedy.read(options)) for context, options in (request.args for request in requests)]
        except ValueError as error:
            raise RefusedError(f"a task asks for {error}") from None
        answers = []
        for prompt, greedy in tqdm(asked, desc="generating", disable=True if disable_tqdm else None):
            tokens = self.tok_encode(prompt) or [self.eot_token_id]
            made: list[int] = []
            for _ in range(greedy.tokens):
                context = tokens[max(0, len(tokens) + len(made) - self._length) :]
                made.append(int(self._logits([(context, made[-self._length :])])[0, -1].argmax()))
                if made[-1] == self.eot_token_id or any(stop in self._tokens.decode(made) for stop in greedy.stops):
                    break
            text = self._tokens.decode([token for token in made if token != self.eot_token_id])
            answers.append(min((text.partition(stop)[0] for stop in greedy.stops), key=len, default=text))
        return answers
