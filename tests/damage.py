"""Damaged blocks of corpora, in caches and in files, live and between starts: no batch may be another one.

    python tests/damage.py                         100 cases with seed 1: what the slow tests run
    python tests/damage.py --seed 7 --cases 2000
    python tests/damage.py --seed 7 --case 41      repeat one case

A case copies a small corpus, or a cache that holds all of one by URL, and reads it with the real loader over more than an
epoch. On the way, or before, it damages what is read: flips a bit, writes zeros over the last page or everything, cuts a
file, exchanges two blocks, or changes a length. Every batch must have the digest of the undamaged corpus. Through a
cache all batches come. From files the loader may end with an error that names the file, and once that is whole again,
the rest comes. Exit 0 if no case fails; the last line is a summary as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import mmap
import os
import random
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from corpora import synthetic_corpus  # noqa: E402

from fsdp_pretrain.config.schedule import BatchSchedule  # noqa: E402
from fsdp_pretrain.data.corpus.cached import CacheUse  # noqa: E402
from fsdp_pretrain.data.corpus.corpus import Corpus  # noqa: E402
from fsdp_pretrain.data.packing.loader import Loader  # noqa: E402
from fsdp_pretrain.data.packing.packer import Packer  # noqa: E402
from fsdp_pretrain.data.packing.position import Position  # noqa: E402
from fsdp_pretrain.errors import DataError  # noqa: E402
from fsdp_pretrain.remote import Url  # noqa: E402

TOKENS, BLOCK, LENGTH, BATCH, STEPS = 80_000, 6_000, 64, 64, 26
PLACES = ("cache", "files")
KINDS = ("flip", "zero the last page", "zero all", "truncate", "exchange", "length")


@dataclass
class Case:
    """What one case did."""

    number: int
    place: str
    kind: str
    live: bool
    wrong: int = 0  # batches with another digest
    seen: bool = False  # whether the damage was told, as a warning or an error
    problem: str = ""  # empty if all is well


class Reader:
    """Reads batches from a place; opened again, as a start does, it goes on."""

    def __init__(self, corpus: Path | Url, case: Case, expected: list[int], prefetch: int, **places: Any) -> None:
        self._corpus, self._case, self._expected, self._prefetch = corpus, case, expected, prefetch
        self._places, self._position, self._loader = places, Position(), None

    def start(self) -> None:
        """As a new process does. Raises DataError."""
        packer = Packer([("text", self._corpus, 1.0)], LENGTH, seed=1, lanes=8, **self._places)
        self._loader = Loader(
            packer,
            BatchSchedule(BATCH),
            rank=0,
            world=1,
            micro_batch=8,
            start=self._position,
            prefetch=self._prefetch,
        )

    def read(self, until: int) -> None:
        """Read to a step and compare. Raises DataError."""
        assert self._loader is not None
        while self._position.step < until:
            batch = next(self._loader)
            self._case.wrong += batch.digest != self._expected[self._position.step]
            self._position = batch.position


def digests(corpus: Path) -> list[int]:
    """Of the batches of an undamaged corpus."""
    packer = Packer([("text", corpus, 1.0)], LENGTH, seed=1, lanes=8)
    loader = Loader(packer, BatchSchedule(BATCH), rank=0, world=1, micro_batch=8, prefetch=0)
    return [next(loader).digest for _ in range(STEPS)]


def make(folder: Path) -> list[int]:
    """A corpus, and a cache that holds it; the digests of its batches."""
    (folder / "corpus").mkdir(parents=True)
    synthetic_corpus(folder / "corpus", TOKENS, block_tokens=BLOCK)
    cache = CacheUse(folder / "cache")
    far = Corpus(Url(f"file://{folder / 'corpus'}"), cache=cache)
    for block in range(len(far.blocks)):
        far.block(block)
    return digests(folder / "corpus")


def write(path: Path, at: int, content: bytes) -> None:
    """Overwrite bytes in place, as a failing disk or a stray process does: whoever has the file open sees it."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


def flip(path: Path, at: int, rng: random.Random) -> None:
    content = path.read_bytes()
    write(path, at, bytes([content[at] ^ 1 << rng.randrange(8)]))


def damage_cache(cache: Path, kind: str, live: bool, rng: random.Random) -> None:
    blocks = sorted(cache.glob("*/blocks/*"))
    others = [path for path in cache.glob("*/*") if path.is_file() and path.suffix in (".npy", ".json", "")]
    chosen = rng.sample(blocks, rng.choice([2, 2, 4, len(blocks)]))
    if not live and kind not in ("exchange", "length") and rng.random() < 0.3:
        chosen = [rng.choice([path for path in others if path.stat().st_size])]
    if kind == "exchange":
        for one, other in zip(chosen[::2], chosen[1::2], strict=False):
            if live:
                content = one.read_bytes(), other.read_bytes()
                with contextlib.suppress(FileNotFoundError):  # a reader has found the first, and dropped the second
                    for path, new in zip((other, one), content, strict=True):
                        write(path, 0, new)
                        os.truncate(path, len(new))
            else:
                one.rename(cache / "aside")
                other.rename(one)
                (cache / "aside").rename(other)
        return
    for path in chosen:
        size = path.stat().st_size
        if kind in ("flip", "length"):  # a file in the cache begins with the lengths
            flip(path, rng.randrange(size if kind == "flip" else 40), rng)
        else:
            spoil(path, kind, rng)


def spoil(path: Path, kind: str, rng: random.Random) -> None:
    size = path.stat().st_size
    if kind == "truncate":
        os.truncate(path, rng.choice([0, size - 1, rng.randrange(size)]))
    else:
        start = 0 if kind == "zero all" else (size - 1) // mmap.PAGESIZE * mmap.PAGESIZE
        write(path, start, bytes(size - start))


def damage_files(corpus: Path, kind: str, live: bool, rng: random.Random) -> None:
    shards = sorted((corpus / "shards").glob("*.bin"))
    path, index = rng.choice(shards), rng.choice(sorted((corpus / "shards").glob("*.idx")))
    if kind == "exchange":
        shard, table = shards.index(path), np.load(corpus / "blocks.npy")
        sizes = table[table[:, 0] == shard, 4] * 2
        one, other = rng.sample(range(len(sizes)), 2)
        ends, least = np.cumsum(sizes), int(min(sizes[one], sizes[other]))
        first, second = (int(ends[block] - sizes[block]) for block in (one, other))
        content = path.read_bytes()
        write(path, first, content[second : second + least])
        write(path, second, content[first : first + least])
    elif kind == "length":
        flip(index, 34 + rng.randrange(40), rng)
    else:
        tables = [corpus / "blocks.npy", corpus / "checksums.npy", corpus / "tokenizer.json"]
        if live or rng.random() < 0.7:
            tables = [path, path, index]
        path = rng.choice(tables)
        if kind == "flip":
            flip(path, rng.randrange(path.stat().st_size), rng)
        else:
            spoil(path, kind, rng)


def run(number: int, seed: int, made: Path, expected: list[int], folder: Path) -> Case:
    """One case, in `folder`."""
    rng = random.Random(f"{seed}/{number}")
    case = Case(number, PLACES[number % len(PLACES)], rng.choice(KINDS), rng.random() < 0.6)
    prefetch = rng.choice([0, 2])
    damage: Callable[[], None]
    if case.place == "cache":
        shutil.copytree(made / "cache", folder / "cache")
        corpus = Url(f"file://{made / 'corpus'}")
        reader = Reader(corpus, case, expected, prefetch, cache=CacheUse(folder / "cache"))
        damage = lambda: damage_cache(folder / "cache", case.kind, case.live, rng)  # noqa: E731
    else:
        shutil.copytree(made / "corpus", folder / "corpus")
        reader = Reader(folder / "corpus", case, expected, prefetch)
        damage = lambda: damage_files(folder / "corpus", case.kind, case.live, rng)  # noqa: E731
    try:
        if case.live:
            reader.start()
            reader.read(rng.randrange(1, STEPS - 2))
        damage()
        try:
            if not case.live:
                reader.start()
            reader.read(STEPS)
        except DataError as error:
            case.seen = True
            if case.place != "files" or str(folder / "corpus") not in error.cause or not error.remedy:
                raise
            shutil.copytree(made / "corpus", folder / "corpus", dirs_exist_ok=True)
            reader.start()
            reader.read(STEPS)
    except Exception:
        case.problem = traceback.format_exc()
    return case


def run_apart(number: int, seed: int, made: Path, expected: list[int]) -> Case:
    """One case in a folder of its own."""
    folder_of_case = tempfile.TemporaryDirectory(prefix="damage-", ignore_cleanup_errors=True)  # a loader reads ahead
    with folder_of_case as folder, redirect_stderr(io.StringIO()) as said:
        case = run(number, seed, made, expected, Path(folder))
        case.seen |= "warning:" in said.getvalue()
        if "Traceback" in said.getvalue():
            case.problem += said.getvalue()
    return case


def main() -> int:
    """Run the cases, each in a process of its own, and print what failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, help="only this one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="damage-") as folder, get_context("fork").Pool(2, None, (), 1) as pool:
        made = Path(folder)
        one = partial(run_apart, seed=args.seed, made=made, expected=make(made))
        cases = pool.map(one, range(args.cases) if args.case is None else [args.case], chunksize=1)
    failed = [case for case in cases if case.wrong or case.problem]
    for case in failed[:20] if args.case is None else cases:
        print(case, case.problem, sep="\n")
    told, wrong = sum(case.seen for case in cases), sum(case.wrong for case in cases)
    found = {"cases": len(cases), "wrong": wrong, "problems": sum(bool(case.problem) for case in cases), "told": told}
    print(json.dumps(found))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
