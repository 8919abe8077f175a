"""Token sequences that begin alike, merged into trees, so that a model computes what they share once. No torch.

The choices of a question share its text, and the questions of a few-shot task their examples. A row of a batch holds a
tree in depth-first order: each token attends to its ancestors, which are the tokens before it whose subtree has not
ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_LEAST_SHARED = 0.25
"""Sequences are merged if their common beginning is at least this part of the next one; else attention costs more."""


@dataclass(frozen=True)
class Query:
    """Tokens to score.

    Attributes:
        inputs: what the model reads.
        targets: what its last outputs should predict; at most as many as inputs.
        prefix: the first inputs, which all inputs attend to (GLM); 0 is causal.
    """

    inputs: list[int]
    targets: list[int]
    prefix: int = 0


@dataclass
class Tree:
    """A tree of queries.

    Attributes:
        tokens: in depth-first order.
        depths: by token, its position in the queries it belongs to.
        ends: by token, where its subtree ends: the tokens before that attend to it.
        prefix: of its queries.
        reads: by query, its number and the tokens whose outputs predict its targets.
    """

    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    prefix: int = 0
    reads: list[tuple[int, list[int]]] = field(default_factory=list)

    @property
    def branches(self) -> bool:
        """Whether any token does not attend to all before it."""
        return self.prefix > 0 or self.depths[-1] + 1 < len(self.tokens)


def plant(queries: Sequence[Query], capacity: int) -> list[Tree]:
    """Rows of all queries, each once, of at most `capacity` tokens unless a single query is longer.

    A function of the queries alone, whatever their order or the number of ranks.
    """
    order = sorted(range(len(queries)), key=lambda number: (queries[number].prefix, queries[number].inputs, number))
    rows: list[Tree] = []
    path: list[int] = []  # of the last query: its tokens' places in the row
    last: Query | None = None
    for number in order:
        query = queries[number]
        shared = 0 if last is None else _shared(last, query)
        added = len(query.inputs) - shared
        if not rows or shared < _LEAST_SHARED * len(query.inputs) or len(rows[-1].tokens) + added > capacity:
            rows.append(Tree(prefix=query.prefix))
            shared, path = 0, []
        row = rows[-1]
        start = len(row.tokens)
        for place in path[shared:]:
            row.ends[place] = start
        path = path[:shared] + list(range(start, start + len(query.inputs) - shared))
        row.tokens += query.inputs[shared:]
        row.depths += range(shared, len(query.inputs))
        row.ends += [-1] * (len(query.inputs) - shared)
        row.reads.append((number, path[len(path) - len(query.targets) :]))
        last = query
    for row in rows:
        row.ends = [len(row.tokens) if end < 0 else end for end in row.ends]
    return rows


def _shared(a: Query, b: Query) -> int:
    """Number of inputs at the start that both have and that are computed alike: all of the prefix, or nothing."""
    shared = 0
    for one, other in zip(a.inputs, b.inputs, strict=False):
        if one != other:
            break
        shared += 1
    return shared if a.prefix == b.prefix and shared >= a.prefix else 0
