"""The packer: a pure function of the sample index that returns every token exactly once per epoch."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from laboratory import write_tokens

from fsdp_pretrain.data.corpus.hashing import permutation
from fsdp_pretrain.data.corpus.manifest import read_manifest
from fsdp_pretrain.data.corpus.shards import Shard
from fsdp_pretrain.data.corpus.writing import ShardBlocks, build_blocks
from fsdp_pretrain.data.packing.packer import Packer
from fsdp_pretrain.data.packing.source import STRETCH
from fsdp_pretrain.data.text.tokenizer import Tokenizer
from fsdp_pretrain.errors import DataError

pytestmark = pytest.mark.quick
VOCAB, EOD = 512, 0


def unique_documents(count: int, seed: int, longest: int = 60) -> list[list[int]]:
    """Documents identified by their first two tokens; the others give their position."""
    rng = random.Random(seed)
    lengths = [rng.choice([2, 3, 5, 17, longest]) for _ in range(count)]
    return [
        [1 + n % 500, 1 + n // 500, *[1 + (k % 500) for k in range(length - 2)]] for n, length in enumerate(lengths)
    ]


def line(packer: Packer, first: int, count: int) -> list[list[int]]:
    return packer.pack(first, count).tokens.tolist()


def test_permutation_is_the_one_of_every_other_version() -> None:
    # Golden values: the order of data is part of a run's identity and must never change silently.
    assert permutation(0, 8).tolist() == [2, 4, 6, 5, 1, 7, 0, 3]
    assert permutation(2**63 + 5, 5).tolist() == [1, 3, 2, 0, 4]
    assert permutation(1, 1).tolist() == [0]
    for size in (2, 255, 256, 257, 10_000):
        assert sorted(permutation(size, size).tolist()) == list(range(size))


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 120),
    length=st.integers(3, 70),
    lanes=st.integers(1, 40),
    shards=st.integers(1, 3),
    block=st.integers(5, 400),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
@pytest.mark.promise("every-token-once")
def test_every_document_once_per_epoch(
    tmp_path_factory: Any,
    tokenizer: Tokenizer,
    count: int,
    length: int,
    lanes: int,
    shards: int,
    block: int,
    seed: int,
    data: Any,
) -> None:
    """Over any two epochs, whatever the lanes, blocks and shards: every token predicted exactly once per epoch."""
    path = tmp_path_factory.mktemp("corpus")
    documents = unique_documents(count, seed)
    empties = data.draw(st.lists(st.integers(0, count), max_size=3))
    for at in empties:
        documents.insert(at, [])
    write_tokens(path, documents, tokenizer, shards=min(shards, len(documents)))
    packer = with_blocks(path, length, seed, lanes, block)
    full = [document for document in documents if document]
    total = sum(len(document) + 1 for document in full)

    # Put the windows back in stream order: start_of() gives the start of each sample.
    source = packer._sources[0]
    samples = -(-2 * total // length)
    order = sorted(range(samples), key=lambda i: (lambda e, o: e * total + o)(*source.start_of(i)))
    starts = [(lambda e, o: e * total + o)(*source.start_of(i)) for i in order]
    assert starts == [k * length for k in range(samples)]  # windows tile the stream
    tokens = [packer.pack(i, 1).tokens[0].tolist() for i in order]
    for a, b in pairwise(tokens):
        assert a[-1] == b[0]  # and overlap by exactly the label
    stream = [token for row in tokens for token in row[:-1]]
    for epoch in range(2):
        part = stream[epoch * total : (epoch + 1) * total]
        seen, document = [], []
        for token in part:
            if token == EOD:
                seen.append(tuple(document))
                document = []
            else:
                document.append(token)
        assert not document  # an epoch ends with a separator
        assert Counter(seen) == Counter(map(tuple, full))


def with_blocks(path: Path, length: int, seed: int, lanes: int, block: int) -> Packer:
    """A packer on a corpus cut into blocks of another size than the default 4M tokens."""
    packer = Packer([("a", path, 1.0)], length, seed=seed, lanes=lanes)
    source = packer._sources[0]
    shards = [Shard(path / "shards" / entry.name) for entry in source.corpus.manifest.shards]
    cut = [ShardBlocks.of(shard, block, 0, pairs=False) for shard in shards]
    source.corpus.blocks = build_blocks(shards, block)
    source.corpus.checksums = np.concatenate([own.checksums for own in cut])
    source.block_lengths = source.corpus.blocks[:, 4] + source.corpus.blocks[:, 3]
    return packer


@pytest.mark.promise("data-order")
def test_the_order_of_samples_is_the_one_of_every_other_version(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Over two epochs of many blocks and stretches, with two reshuffles; a run that another version resumes goes on with
    the samples that it would have had."""
    path = write_tokens(tmp_path / "c", unique_documents(2000, 1), tokenizer)
    packer = with_blocks(path, 4, 7, 2, 1500)
    source = packer._sources[0]
    source.reshuffles += [1000, 9000]
    windows = int(2 * packer.epoch_samples["a"])
    assert windows // 4 > STRETCH and len(source.block_lengths) > 10  # lanes of several stretches
    starts = np.array([source.start_of(number) for number in range(windows)])
    assert xxhash.xxh3_64_hexdigest(starts.astype("<i8").tobytes()) == "5f145d59dd3238a1"
    tokens = packer.pack(0, 3000).tokens
    assert xxhash.xxh3_64_hexdigest(tokens.astype("<i8").tobytes()) == "8dbd7bbbc5bae523"


@pytest.mark.parametrize("epochs", [0.5, 1.0, 2.3])
def test_a_source_is_read_as_often_as_it_may(tmp_path: Path, tokenizer: Tokenizer, epochs: float) -> None:
    """Whole samples of so many epochs, and none that begins or ends beyond."""
    path = write_tokens(tmp_path / "c", unique_documents(100, 1), tokenizer)
    packer = Packer([("a", path, 1.0)], 8, seed=7, lanes=4, max_epochs={"a": epochs})
    per_epoch = read_manifest(path).tokens + 100  # a separator after each document
    assert packer.capacity == int(epochs * per_epoch) // 8
    packer.pack(packer.capacity - 1, 1)
    with pytest.raises(DataError, match=f"ends after {packer.capacity} samples"):
        packer.pack(packer.capacity, 1)


@pytest.mark.promise("data-order")
def test_a_sample_does_not_depend_on_how_it_is_asked_for(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Order of requests, batch sizes, restarts: the same index is the same sample."""
    path = write_tokens(tmp_path / "c", unique_documents(200, 1), tokenizer)
    first = with_blocks(path, 32, 7, 8, 300)
    expected = line(first, 0, 300)
    indices = list(range(300))
    random.Random(0).shuffle(indices)
    again = with_blocks(path, 32, 7, 8, 300)
    for index in indices:
        assert line(again, index, 1)[0] == expected[index]
    assert [row for start in range(0, 300, 7) for row in line(again, start, min(7, 300 - start))] == expected


def test_lengths_are_the_documents_of_the_inputs(tmp_path: Path, tokenizer: Tokenizer) -> None:
    packer = Packer(
        [("a", write_tokens(tmp_path / "c", unique_documents(150, 3), tokenizer), 1.0)], 48, seed=1, lanes=4
    )
    packed = packer.pack(0, 120)
    ended = 0
    for row, lengths in zip(packed.tokens, packed.lengths, strict=True):
        inputs = row[:-1].tolist()
        assert lengths.sum() == 48 and (lengths >= 0).all()
        expected, last = [], -1
        for at, token in enumerate(inputs):
            if token == EOD:
                expected.append(at - last)
                last = at
        expected += [47 - last] if last < 47 else []
        assert lengths[lengths > 0].tolist() == expected
        ended += int((row == EOD).sum())
    assert packed.documents == ended


@pytest.mark.promise("batch-digest")
def test_provenance_names_the_very_tokens(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_tokens(tmp_path / "c", unique_documents(150, 3), tokenizer)
    packer = Packer([("a", path, 1.0)], 48, seed=1, lanes=4)
    for index in (0, 5, 77, 300):
        tokens = [token for token in packer.pack(index, 1).tokens[0].tolist() if token != EOD]
        found = []
        for before, piece in enumerate(packer.provenance(index)):
            assert piece.position == len(found) + before  # a separator after each
            assert piece.length == len(Shard(path / "shards" / piece.shard).document(piece.document))
            found += Shard(path / "shards" / piece.shard).document(piece.document)[piece.start : piece.stop].tolist()
        assert found == tokens


@pytest.mark.parametrize("bad", [[7, EOD, 9], [7, 511, 9]])
@pytest.mark.promise("bad-documents")
def test_bad_documents_leave_the_loss_and_nothing_else(tmp_path: Path, tokenizer: Tokenizer, bad: list[int]) -> None:
    """A separator inside a document, or an id outside the vocabulary: quarantined, counted, order unchanged."""
    tokenizer = Tokenizer.load(tokenizer.path)
    tokenizer.vocab_size = 511  # so that 511 is outside
    good = unique_documents(60, 5)
    clean = Packer(
        [("a", write_tokens(tmp_path / "clean", [*good, [7, 8, 9]], tokenizer, shards=1), 1.0)], 40, seed=3, lanes=3
    )
    dirty = Packer(
        [("a", write_tokens(tmp_path / "dirty", [*good, bad], tokenizer, shards=1), 1.0)], 40, seed=3, lanes=3
    )
    samples = int(clean.epoch_samples["a"])
    a, b = clean.pack(0, samples), dirty.pack(0, samples)
    assert not a.ignore and not a.quarantined
    assert {(piece.document, piece.source) for piece in b.quarantined} == {(60, "a")}
    spans = {
        (row, piece.position, piece.position + piece.stop - piece.start)
        for (row, _, _), piece in zip(b.ignore, b.quarantined, strict=True)
    }
    assert spans == set(b.ignore)
    assert (b.lengths == a.lengths).all()
    ignored = np.zeros_like(b.tokens, dtype=bool)
    for row, start, stop in b.ignore:
        ignored[row, start:stop] = True
    assert (a.tokens[~ignored] == b.tokens[~ignored]).all()
    assert 3 <= ignored.sum() <= 4  # the document, twice where two samples overlap
    assert b.tokens.max() < 511


@pytest.mark.parametrize("dtype", ["<u2", "<i4"])
def test_negative_and_large_ids(tmp_path: Path, tokenizer: Tokenizer, dtype: str) -> None:
    value = 40_000 if dtype == "<u2" else -5
    path = write_tokens(tmp_path / "c", [*unique_documents(20, 5), [3, value]], tokenizer, dtype, 1)
    packed = Packer([("a", path, 1.0)], 16, seed=3, lanes=3).pack(0, 200)
    assert packed.quarantined and packed.tokens.min() >= 0 and packed.tokens.max() < 512


def test_different_tokenizers_do_not_mix(tmp_path: Path, tokenizer: Tokenizer) -> None:
    a = write_tokens(tmp_path / "a", unique_documents(20, 5), tokenizer)
    other = tmp_path / "tokenizer.json"
    other.write_text(tokenizer.path.read_text() + " ")
    b = write_tokens(tmp_path / "b", unique_documents(20, 5), Tokenizer.load(other))
    with pytest.raises(DataError, match="different tokenizers"):
        Packer([("a", a, 1.0), ("b", b, 1.0)], 16, seed=1, lanes=2)


def test_a_changed_block_table_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_tokens(tmp_path / "c", unique_documents(20, 5), tokenizer)
    table = np.load(path / "blocks.npy")
    table[0, 4] += 1
    np.save(path / "blocks.npy", table)
    with pytest.raises(DataError, match=r"blocks\.npy is not the one that manifest\.json names"):
        Packer([("a", path, 1.0)], 16, seed=1, lanes=2)
