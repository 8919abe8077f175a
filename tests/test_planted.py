"""Corpora of real text with one defect each: `validate` finds exactly that one, with its name and rate.

Two tokenizers are trained here, one of each library.
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fsdp_pretrain.data.corpus.manifest import Vocabulary
from fsdp_pretrain.data.prepare.prepare import PrepareOptions
from fsdp_pretrain.data.prepare.train_tokenizer import train_tokenizer
from fsdp_pretrain.data.text.tokenizer import Tokenizer
from fsdp_pretrain.data.validate.validate import validate

Docs = list[list[int]]
COUNT = 120


@dataclass
class Bench:
    """Documents of one tokenizer, and what defects are made from."""

    tokenizer: Tokenizer
    docs: Docs
    foreign: Docs
    eod: int = field(init=False)
    bos: int = field(init=False)

    def __post_init__(self) -> None:
        self.eod = self.tokenizer.eod
        self.bos = min(set(self.tokenizer.specials) - {self.eod})

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode([text])[0]

    def long(self, passage: str) -> list[int]:
        """The passage repeated, to about 4000 tokens."""
        ids = self.encode(passage * 2000)
        return self.encode(passage * int(2000 * 4000 / len(ids)))

    @property
    def dtype(self) -> str:
        return "<u2" if self.tokenizer.vocab_size < 65_500 else "<i4"


def texts() -> list[str]:
    """Pieces of standard-library sources, 300 to 3500 characters."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    rng = random.Random(4)
    pieces = []
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="ignore")
        if len(text) > 5000:
            begin = rng.randrange(500, 1500)
            pieces.append(text[begin : begin + rng.randrange(300, 3500)])
    assert len(pieces) >= COUNT
    return pieces[:COUNT]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, helpers: Any) -> dict[str, Tokenizer]:
    from tokenizers import Tokenizer as Model

    path = tmp_path_factory.mktemp("tokenizers")
    source = str(helpers.jsonl(path / "text.jsonl", texts()))
    for kind in ("bpe", "sentencepiece"):
        train_tokenizer([source], path / kind, kind=kind, vocab_size=600, options=PrepareOptions(), max_bytes=10**9)
    model = Model.from_file(str(path / "bpe/tokenizer.json"))
    model.add_special_tokens(["<|begin|>"])
    model.save(str(path / "bpe/tokenizer.json"))
    return {kind: Tokenizer.load(path / kind) for kind in ("bpe", "sentencepiece")}


@pytest.fixture(scope="module", params=["bpe", "sentencepiece"])
def bench(request: pytest.FixtureRequest, trained: Any) -> Bench:
    name = request.param
    tokenizer = trained[name]
    other = trained["bpe" if name == "sentencepiece" else "sentencepiece"]
    reserved = {tokenizer.eod, *tokenizer.specials}
    foreign = [[i for i in ids if i < tokenizer.vocab_size and i not in reserved] for ids in other.encode(texts())]
    return Bench(tokenizer, tokenizer.encode(texts()), foreign)


@dataclass
class Plant:
    """One defect."""

    make: Callable[[Docs, Bench], Docs]  # adds the defect to the clean documents
    found: dict[str, int]  # {finding: count}
    separators: str = "none"  # what the corpus declares; anything but `none` is a directory without a manifest
    unit: str = "documents"  # what the rates are shares of
    shards: int = 2
    tokenizer: bool = True
    dtype: str | None = None


def trailing(docs: Docs, b: Bench) -> Docs:
    return [[*d, b.eod] for d in docs]


def leading(docs: Docs, b: Bench) -> Docs:
    return [[b.eod, *d] for d in docs]


def every(n: int, change: Callable[[list[int]], list[int]], docs: Docs) -> Docs:
    return [change(d) if k % n == 0 else d for k, d in enumerate(docs)]


def in_last_shard(change: Callable[[list[int]], list[int]], docs: Docs, shards: int) -> Docs:
    return [change(d) if k % shards == shards - 1 else d for k, d in enumerate(docs)]


def shifted_ids(docs: Docs, b: Bench) -> Docs:
    reserved = {b.eod, *b.tokenizer.specials, b.tokenizer.vocab_size}
    return in_last_shard(lambda d: [i + 1 for i in d if i + 1 not in reserved], docs, 2)


ALL, TENTH = COUNT, COUNT // 10
PLANTS: dict[str, Plant] = {
    "every document ends with the separator": Plant(trailing, {"separator-at-end": ALL}),
    "every document begins with it": Plant(leading, {"separator-at-start": ALL}),
    "tokenizer and loader each add one": Plant(
        lambda docs, b: [[*d, b.eod, b.eod] for d in docs], {"separator-doubled": ALL}, "trailing"
    ),
    "doubled at the front": Plant(
        lambda docs, b: [[b.eod, b.eod, *d] for d in docs],
        {"separator-doubled": ALL, "separator-at-start": 0},
        "leading",
    ),
    "a template puts it in front as well": Plant(
        lambda docs, b: leading(trailing(docs, b), b), {"separator-at-start": ALL}, "trailing"
    ),
    "documents joined by it": Plant(
        lambda docs, b: [[*docs[k], b.eod, *docs[k + 1]] for k in range(0, 12, 2)] + docs[12:], {"separator-inside": 6}
    ),
    "one in ten lacks the trailing one": Plant(
        lambda docs, b: every(10, lambda d: d[:-1], trailing(docs, b)), {"separator-missing": TENTH}, "trailing"
    ),
    "one in ten lacks the leading one": Plant(
        lambda docs, b: every(10, lambda d: d[1:], leading(docs, b)), {"separator-missing": TENTH}, "leading"
    ),
    "most carry one, by measurement": Plant(
        lambda docs, b: every(10, lambda d: d[:-1], trailing(docs, b)), {"separator-missing": TENTH}, "auto"
    ),
    "a beginning-of-sequence token in front": Plant(
        lambda docs, b: [[b.bos, *d] for d in docs], {"special-token": ALL}
    ),
    "documents of control tokens alone": Plant(
        lambda docs, b: [*docs, [b.bos, b.bos], [b.bos], [b.eod, b.eod]], {"special-only-documents": 3}
    ),
    "empty documents": Plant(lambda docs, b: [*docs[:5], [], *docs[5:], [], []], {"empty-documents": 3}),
    "one-token documents": Plant(lambda docs, b: [*docs, docs[0][5:6], docs[1][5:6]], {"one-token-documents": 2}),
    "a giant document": Plant(
        lambda docs, b: [*docs, [i for _ in range(3) for d in docs for i in d]], {"giant-documents": 1}
    ),
    "documents given twice": Plant(lambda docs, b: [*docs, *docs[:7]], {"duplicate-documents": 7}),
    "documents of one line, or of backslashes, over and over": Plant(
        lambda docs, b: [*docs, b.long("All work and no play.\n"), b.long("\\")],
        {"degenerate-documents": 2},
    ),
    "ids beyond the vocabulary": Plant(
        lambda docs, b: [*docs, [*docs[0][:40], b.tokenizer.vocab_size, 65_000 + b.tokenizer.vocab_size]],
        {"outside-vocabulary": 2},
        unit="tokens",
        dtype="<i4",
    ),
    "negative ids": Plant(
        lambda docs, b: [[*docs[0], -1, *docs[1], -2], *docs[2:]], {"outside-vocabulary": 2}, unit="tokens", dtype="<i4"
    ),
    "a shard of another tokenizer": Plant(
        lambda docs, b: [b.foreign[k] if k % 2 else d for k, d in enumerate(docs)], {"foreign-tokens": 1}, unit="files"
    ),
    "a shard with shifted ids": Plant(shifted_ids, {"foreign-tokens": 1}, unit="files"),
}


def measure(path: Path, b: Bench, docs: Docs, plant: Plant, helpers: Any) -> Any:
    """Store documents as the plant says and validate them."""
    corpus = helpers.corpus(path, docs, b.tokenizer, plant.dtype or b.dtype, plant.shards)
    if plant.separators == "none" and plant.tokenizer:
        return validate(corpus, quiet=True)
    return validate(
        corpus / "shards",
        tokenizer=b.tokenizer if plant.tokenizer else None,
        vocabulary=Vocabulary(b.tokenizer.vocab_size, b.eod, frozenset(b.tokenizer.specials)),
        separators=None if plant.separators == "auto" else plant.separators,  # type: ignore[arg-type]
        quiet=True,
    )


@pytest.mark.shows("C4", "D10", "F42")
@pytest.mark.parametrize("name", PLANTS)
@pytest.mark.promise("separators-measured")
def test_planted_defects_are_found(tmp_path: Path, bench: Bench, helpers: Any, name: str) -> None:
    plant = PLANTS[name]
    docs = plant.make(bench.docs, bench)
    report = measure(tmp_path / "c", bench, docs, plant, helpers)
    expected = {code: count for code, count in plant.found.items() if count}
    assert {code: f.count for code, f in report.findings.by_code.items()} == expected
    total = {"documents": len(docs), "tokens": sum(map(len, docs)), "files": plant.shards}[plant.unit]
    for finding in report.findings.by_code.values():
        assert report.rate(finding) == finding.count / total
        assert len(finding.examples) == min(3, finding.count)
        assert all(example.file for example in finding.examples)
        if plant.tokenizer and plant.unit != "files":
            assert all(example.text for example in finding.examples)
    if plant.separators == "auto":
        assert report.separators[0] == ("trailing" if plant.tokenizer else "none")


@pytest.mark.parametrize(
    ("clean", "separators", "tokenizer", "shards"),
    [
        (lambda docs, b: docs, "none", True, 2),
        (trailing, "trailing", True, 2),
        (leading, "leading", True, 2),
        (trailing, "auto", True, 1),
        (leading, "auto", True, 1),
        (lambda docs, b: docs, "auto", False, 4),
    ],
)
@pytest.mark.promise("separators-measured")
def test_clean_twins_are_clean(
    tmp_path: Path, bench: Bench, helpers: Any, clean: Any, separators: str, tokenizer: bool, shards: int
) -> None:
    plant = Plant(clean, {}, separators, shards=shards, tokenizer=tokenizer)
    report = measure(tmp_path / "c", bench, clean(bench.docs, bench), plant, helpers)
    assert report.findings.by_code == {} and report.findings.exit_code == 0
    assert report.lengths["max"] == max(map(len, clean(bench.docs, bench)))
