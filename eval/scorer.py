"""Runs a model over token sequences: log-likelihoods, and generated answers. Needs no lm-eval.

The model may be sharded over the ranks of a torchrun job. Then rank 0 leads: the other ranks wait in `serve` and repeat
its calls, and the batches of a call are dealt out to all ranks. Batches depend only on the queries, so results do not
depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from fsdp_pretrain.config.data_section import AnyObjective, GLMObjective
from fsdp_pretrain.data.packing.objectives import Specials
from fsdp_pretrain.data.text.tokenizer import Tokenizer
from fsdp_pretrain.models import Decoder
from fsdp_pretrain.models.masks import Visible
from fsdp_pretrain.parallel.mesh import World

T = TypeVar("T")
_LOGITS_AT_ONCE = 2**25
"""Logits computed at a time: 128 MiB in fp32."""
_HALF = "\ufffd"
"""What half a character is decoded to."""


@dataclass(frozen=True)
class Score:
    """Log-likelihood of a query's targets (natural log), and whether greedy decoding gives them."""

    likelihood: float
    greedy: bool


@dataclass(frozen=True)
class Query:
    """Tokens to score."""

    inputs: list[int]  # the tokens that the model reads
    targets: list[int]  # the tokens that its last outputs should predict; at most as many as inputs
    prefix: int = 0  # number of first inputs that all inputs attend to (GLM); 0 is causal


@dataclass(frozen=True)
class Prompt:
    """A prompt, whose answer is generated."""

    inputs: list[int]  # the tokens that the model reads; with the answer they must fit into its length
    tokens: int  # most tokens of the answer
    stops: tuple[str, ...] = ()  # texts that end the answer and are not part of it
    prefix: int = 0  # see `Query`
    temperature: float = 0.0  # divides the logits before a token is drawn; 0: always the likeliest token
    seed: int = 0  # of the draws


@dataclass(frozen=True)
class Marks:
    """Special tokens of an objective around an answer: those between context and answer, and those that end it."""

    before: tuple[int, ...]
    ends: frozenset[int]

    @classmethod
    def of(cls, objective: AnyObjective | None, tokenizer: Tokenizer) -> Marks:
        """A GLM model fills a `[gMASK]` after the context; others continue the text."""
        if not isinstance(objective, GLMObjective):
            return cls((), frozenset({tokenizer.eod}))
        ids = Specials.behind(tokenizer.vocab_size)
        return cls((ids.gmask, ids.sop), frozenset({tokenizer.eod, ids.eop}))

    def inputs(self, context: list[int]) -> tuple[list[int], int]:
        """The inputs before an answer, and how many of them all tokens attend to (the prefix of GLM)."""
        return [*context, *self.before], len(context) + 1 if self.before else 0


@dataclass
class _Row:
    """A row of a batch: inputs that are computed once for all queries that share them; `queries` are their numbers."""

    inputs: list[int]
    prefix: int
    queries: list[int]


class Scorer:
    """Scores queries and answers prompts with a model and its tokenizer.

    Args:
        batch: most rows of a forward pass.
        ends: ids that end an answer; None: the separator.
        world: the ranks that `model` is sharded over; None: this process has all of it.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        *,
        batch: int,
        ends: Collection[int] | None = None,
        world: World | None = None,
    ) -> None:
        self._model, self._tokenizer, self._batch = model.eval(), tokenizer, batch
        self._ends = {tokenizer.eod} if ends is None else {*ends}
        self._world = world
        self._device = next(model.parameters()).device

    # ------------------------------------------------------------------ ranks

    def serve(self) -> None:
        """On ranks other than 0: repeat the calls of rank 0, until it calls `close`."""
        assert self._world is not None
        while (call := self._world.decide(lambda: None)) is not None:
            method, items = call
            getattr(self, method)(items, quiet=True)

    def close(self) -> None:
        """On rank 0: let the other ranks return from `serve`."""
        if self._world is not None:
            self._world.decide(lambda: None)

    def _call(self, method: str, items: Sequence[Any]) -> None:
        if self._world is not None and self._world.is_main:
            self._world.decide(lambda: (method, items))

    def _share(self, batches: Sequence[T], run: Callable[[T], list[tuple[int, Any]]], quiet: bool) -> dict[int, Any]:
        """Run every `world.size`-th batch on this rank. Returns the results of all ranks by query number."""
        first, step = (0, 1) if self._world is None else (self._world.rank, self._world.size)
        results: list[tuple[int, Any]] = []
        for batch in tqdm(batches[first::step], desc="evaluating", unit="batch", disable=True if quiet else None):
            results += run(batch)
        if self._world is None:
            return dict(results)
        while self._any(working=False):  # the others' passes need this rank's part of the model
            self._model(torch.zeros(1, 1, dtype=torch.int64, device=self._device), read=_nothing)
        return dict(pair for pairs in self._world.gather(results) for pair in pairs)

    def _any(self, *, working: bool) -> bool:
        """Whether any rank still has work. Collective, before each pass."""
        assert self._world is not None
        flag = torch.tensor(int(working))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._world.host_group)
        return bool(flag)

    def _forward(self, tokens: Tensor, visible: Visible | None, positions: Tensor | None, read: Any) -> Tensor:
        if self._world is not None:
            self._any(working=True)
        out: Tensor = self._model(tokens, None, visible, positions, read=read)
        return out

    # ------------------------------------------------------------------ likelihoods

    @torch.no_grad()
    def scores(self, queries: Sequence[Query], *, quiet: bool = False) -> list[Score]:
        """Scores of all queries, in their order."""
        self._call("scores", queries)
        rows: dict[tuple[int, tuple[int, ...]], _Row] = {}
        for number, query in enumerate(queries):  # choices of one token have the same inputs
            row = rows.setdefault((query.prefix, tuple(query.inputs)), _Row(query.inputs, query.prefix, []))
            row.queries.append(number)
        order = sorted(rows.values(), key=lambda row: (-len(row.inputs), row.queries))
        batches = [order[start : start + self._batch] for start in range(0, len(order), self._batch)]
        results = self._share(batches, lambda batch: self._score(batch, queries), quiet)
        return [results[number] for number in range(len(queries))]

    def _score(self, rows: list[_Row], queries: Sequence[Query]) -> list[tuple[int, Score]]:
        width = max(len(row.inputs) for row in rows)
        tokens = torch.tensor([[*row.inputs, *[0] * (width - len(row.inputs))] for row in rows], device=self._device)
        visible = positions = None
        if any(row.prefix for row in rows):
            place = torch.arange(width, device=self._device)
            prefix = torch.tensor([[row.prefix] for row in rows], device=self._device)
            keys = (place.unsqueeze(1) >= place) | (place < prefix).unsqueeze(1)
            depths = place.expand(len(rows), -1)
            visible, positions = Visible(keys, depths, depths), self._positions(depths, prefix)
        ends = [(number, at * width + len(row.inputs)) for at, row in enumerate(rows) for number in row.queries]
        wanted = [place for number, end in ends for place in range(end - len(queries[number].targets), end)]
        targets = [target for number, _ in ends for target in queries[number].targets]
        read = _Targets(torch.tensor(wanted, device=self._device), torch.tensor(targets, device=self._device))
        likelihoods, greedy = self._forward(tokens, visible, positions, read).tolist()
        scored, start = [], 0
        for number, _ in ends:
            stop = start + len(queries[number].targets)
            scored.append((number, Score(sum(likelihoods[start:stop]), all(greedy[start:stop]))))
            start = stop
        return scored

    def _positions(self, depths: Tensor, prefix: Tensor) -> Tensor:
        """Positions for the model from those in the sequences, [B, S]; `prefix` [B, 1]."""
        if not self._model.two_dimensions:  # else (place in the prefix, place in the blank), as in GLM
            return depths
        place = depths.minimum((prefix - 1).clamp(min=0))
        return torch.stack((place, depths - place), 1)

    # ------------------------------------------------------------------ answers

    @torch.no_grad()
    def answers(self, prompts: Sequence[Prompt], *, quiet: bool = False) -> list[str]:
        """Generated answers, in the order of the prompts."""
        self._call("answers", prompts)
        order = sorted(range(len(prompts)), key=lambda at: (-len(prompts[at].inputs) - prompts[at].tokens, at))
        batches = [order[start : start + self._batch] for start in range(0, len(order), self._batch)]
        results = self._share(
            batches, lambda batch: list(zip(batch, self._generate([prompts[at] for at in batch]), strict=True)), quiet
        )
        return [results[number] for number in range(len(prompts))]

    @torch.no_grad()
    def stream(self, prompt: Prompt) -> Iterator[str]:
        """The answer to one prompt, piece by piece as it is generated; of a model that is not sharded."""
        answer, shown = _Answer(prompt, self._tokenizer, self._ends), ""
        for (token,) in self._tokens([prompt]):
            unfinished = answer.add(token)
            text = answer.text()
            if not unfinished or not text.endswith(_HALF):  # the token may end within a character
                yield text[len(shown) :]
                shown = text
            if not unfinished:
                return

    def _generate(self, prompts: list[Prompt]) -> list[str]:
        """Answers of one batch."""
        answers = [_Answer(prompt, self._tokenizer, self._ends) for prompt in prompts]
        for drawn in self._tokens(prompts):
            unfinished = [answer.add(token) for answer, token in zip(answers, drawn, strict=True)]
            if not any(unfinished):
                break
        return [answer.text() for answer in answers]

    def _tokens(self, prompts: list[Prompt]) -> Iterator[list[int]]:
        """The next token of every prompt, again and again, until the longest answer is complete.

        Rows are padded on the left, so that all have their next token at the same place.
        """
        width = max(len(prompt.inputs) for prompt in prompts)
        steps = max(prompt.tokens for prompt in prompts)
        generators = [torch.Generator().manual_seed(prompt.seed) for prompt in prompts]
        pad = torch.tensor([[width - len(prompt.inputs)] for prompt in prompts], device=self._device)
        last = torch.tensor([[len(prompt.inputs) + prompt.tokens - 1] for prompt in prompts], device=self._device)
        prefix = torch.tensor([[prompt.prefix] for prompt in prompts], device=self._device)
        tokens = torch.tensor([[0] * (width - len(p.inputs)) + p.inputs for p in prompts], device=self._device)
        places = torch.arange(width + steps, device=self._device)
        seen = places >= pad  # [B, all places]
        row = places[:width]
        keys = (row.unsqueeze(1) >= row) | (row < pad + prefix).unsqueeze(1)
        keys = keys & seen[:, :width].unsqueeze(1) | torch.eye(width, dtype=torch.bool, device=self._device)
        with self._model.caching(width + steps):
            for step in range(steps):
                total = width + step
                depths = (places[:total] - pad).clamp(min=0).minimum(last)  # those of answers that are done stay there
                visible = Visible(keys, depths[:, -tokens.shape[1] :], depths)
                positions = self._positions(visible.query_positions, prefix)
                logits = self._forward(tokens, visible, positions, _last)
                self._silence(logits)
                drawn = _draw(logits, prompts, generators)
                yield drawn
                tokens = torch.tensor(drawn, device=self._device).unsqueeze(1)
                keys = seen[:, : total + 1].unsqueeze(1)

    def _silence(self, logits: Tensor) -> None:
        """Set the logits [B, V] of ids that are neither text nor ends to -inf: padding of the table, marks of GLM."""
        behind = [end for end in self._ends if end >= self._tokenizer.vocab_size]
        kept = logits[:, behind]
        logits[:, self._tokenizer.vocab_size :] = -torch.inf
        logits[:, behind] = kept


def _draw(logits: Tensor, prompts: list[Prompt], generators: list[torch.Generator]) -> list[int]:
    """The next id of every prompt from the logits [B, V]; the likeliest where they are not finite."""
    drawn: list[int] = logits.argmax(1).tolist()
    for row, (prompt, generator) in enumerate(zip(prompts, generators, strict=True)):
        if prompt.temperature:
            shares = (logits[row].cpu() / prompt.temperature).softmax(0)
            if shares.isfinite().all():
                drawn[row] = int(torch.multinomial(shares, 1, generator=generator))
    return drawn


class _Targets:
    """A `Reader` of log-probabilities of targets: fp32 [2, N], the second row 1 where a target is the likeliest token.

    Args:
        wanted: int64 [N], places in the flattened batch.
        targets: int64 [N], ids.
    """

    def __init__(self, wanted: Tensor, targets: Tensor) -> None:
        self._wanted, self._targets = wanted, targets

    def __call__(self, hidden: Tensor, weight: Tensor) -> Tensor:
        rows, out = hidden.flatten(0, 1), torch.empty(2, len(self._targets), device=hidden.device)
        size = max(1, _LOGITS_AT_ONCE // len(weight))
        for start in range(0, len(self._targets), size):
            part = slice(start, start + size)
            targets = self._targets[part]
            logits = F.linear(rows[self._wanted[part]], weight).float()
            out[0, part] = -F.cross_entropy(logits, targets, reduction="none")
            out[1, part] = logits.argmax(1) == targets
        return out


def _last(hidden: Tensor, weight: Tensor) -> Tensor:
    """A `Reader` of the logits at the last place: fp32 [B, V]."""
    return F.linear(hidden[:, -1], weight).float()


def _nothing(hidden: Tensor, weight: Tensor) -> Tensor:
    del weight
    return hidden[:, :0]


class _Answer:
    """An answer while it is generated."""

    def __init__(self, prompt: Prompt, tokenizer: Tokenizer, ends: Collection[int]) -> None:
        self._prompt, self._tokenizer, self._ends = prompt, tokenizer, ends
        self._made: list[int] = []
        self._done = False
        self._tail = max((len(stop.encode()) for stop in prompt.stops), default=0) + 4

    def add(self, token: int) -> bool:
        """Append a token, unless the answer has ended. Returns whether the answer is still unfinished."""
        if self._done:
            return False
        if token in self._ends:
            self._done = True
            return False
        self._made.append(token)
        tail = self._tokenizer.decode(self._made[-self._tail :])
        self._done = len(self._made) == self._prompt.tokens or any(stop in tail for stop in self._prompt.stops)
        return not self._done

    def text(self) -> str:
        """The answer up to the first stop."""
        text = self._tokenizer.decode(self._made)
        return min((text.partition(stop)[0] for stop in self._prompt.stops), key=len, default=text)
