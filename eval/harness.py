"""Our models behind lm-eval's interface, read straight from a DCP checkpoint in one process.

Encoding is the training tokenizer's, which adds nothing; a text begins after one document separator, as it did in
training. No request cache is offered: lm-eval's ignores which model filled it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from torch import Tensor
from tqdm import tqdm

from data.tokenizer import Tokenizer
from fsdp_pretrain.models import Decoder

_LOGITS_AT_ONCE = 2**27


class CheckpointLM(TemplateLM):
    """A decoder and its tokenizer as an lm-eval model.

    Args:
        model: on its device, with its values.
        tokenizer: the one it was trained with.
        length: longest input, in tokens.
        batch: sequences per forward pass at most.
    """

    def __init__(self, model: Decoder, tokenizer: Tokenizer, *, length: int, batch: int) -> None:
        super().__init__()
        self._model, self._tokens, self._length, self._batch = model.eval(), tokenizer, length, batch
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
        return self._score(jobs, quiet=bool(kwargs.get("disable_tqdm")))

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, each token predicted once."""
        jobs = [([self.eot_token_id, *self.tok_encode(request.args[0])], 1) for request in requests]
        return [score for score, _ in self._score(jobs, quiet=disable_tqdm)]

    def _score(self, jobs: Sequence[tuple[list[int], int]], *, quiet: bool) -> list[tuple[float, bool]]:
        """(log-likelihood, whether greedy decoding gives it) of tokens[first:], for each (tokens, first)."""
        windows = [
            (job, *window) for job, (tokens, first) in enumerate(jobs) for window in self._windows(tokens, first)
        ]
        windows.sort(key=lambda item: len(item[1]), reverse=True)  # alike lengths together; the largest first
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
        width = max(len(window) for _, window, _ in group)
        tokens = torch.full((len(group), width), self.eot_token_id, dtype=torch.int64)
        wanted = torch.zeros(len(group), width - 1, dtype=torch.bool)
        for row, (_, window, count) in enumerate(group):
            tokens[row, : len(window)] = torch.tensor(window)  # padded on the right: causality hides it
            wanted[row, len(window) - 1 - count : len(window) - 1] = True
        tokens, wanted = tokens.to(self._device), wanted.to(self._device)
        logits = self._model(tokens[:, :-1]).float()
        targets = tokens[:, 1:]
        scores = -torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        hit = (logits.argmax(-1) == targets) | ~wanted
        totals: Tensor = (scores.view_as(targets) * wanted).sum(1)
        return totals.tolist(), hit.all(1).tolist()

    @torch.inference_mode()
    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy continuations up to a stop string; without a cache of keys and values, so meant for short answers."""
        answers = []
        for request in tqdm(requests, desc="generating", disable=True if disable_tqdm else None):
            context, options = request.args
            stops = options.get("until") or []
            stops = [stops] if isinstance(stops, str) else stops
            tokens = self.tok_encode(context) or [self.eot_token_id]
            made: list[int] = []
            for _ in range(int(options.get("max_gen_toks", 128))):
                recent = torch.tensor([(tokens + made)[-self._length :]], device=self._device)
                made.append(int(self._model(recent)[0, -1].argmax()))
                if made[-1] == self.eot_token_id or any(stop in self._tokens.decode(made) for stop in stops):
                    break
            text = self._tokens.decode([token for token in made if token != self.eot_token_id])
            answers.append(min((text.partition(stop)[0] for stop in stops), key=len, default=text))
        return answers
