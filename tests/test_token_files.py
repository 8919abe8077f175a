"""Token files, manifests and tokenizers of any origin: an error that names them, never other or fewer tokens."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from processes import Run

from fsdp_pretrain.data.corpus.formats import open_file
from fsdp_pretrain.data.corpus.shards import Shard
from fsdp_pretrain.data.packing.packer import Packer
from fsdp_pretrain.data.text.tokenizer import Tokenizer
from fsdp_pretrain.errors import DataError

pytestmark = pytest.mark.quick
DOCUMENTS = [[1 + number % 300] * (number % 5) + [0] for number in range(30)]


def put(path: Path, raw: bytes) -> Path:
    path.write_bytes(raw)
    return path


def arrow(make: Any, column: Any) -> bytes:
    buffer = io.BytesIO()
    with make(buffer, pa.schema([pa.field("tokens", column.type)])) as writer:
        for begin in range(0, len(column), 7):
            writer.write(pa.record_batch([column[begin : begin + 7]], ["tokens"]))
    return buffer.getvalue()


LISTS = pa.array(DOCUMENTS, pa.list_(pa.int32()))


def documents(path: Path) -> list[list[int]]:
    found = []
    for run in open_file(path, "arrow", 0).runs():
        found += [part.tolist() for part in np.split(run.tokens, np.cumsum(run.lengths)[:-1])]
    return found


@pytest.mark.parametrize("make", [pa.ipc.new_stream, pa.ipc.new_file])
def test_an_arrow_file_cut_anywhere_is_an_error(tmp_path: Path, make: Any) -> None:
    """Also a stream without its end marker: what came after its last batch is unknown."""
    whole = arrow(make, LISTS)
    path = put(tmp_path / "a.arrow", whole)
    assert documents(path) == DOCUMENTS
    for stop in [*range(0, len(whole), 13), *range(len(whole) - 20, len(whole))]:
        with pytest.raises(DataError, match=r"a\.arrow"):
            documents(put(path, whole[:stop]))
    with pytest.raises(DataError, match=r"a\.arrow"):
        documents(put(path, whole + whole))


def test_a_file_is_read_as_far_as_its_documents_are_wanted(tmp_path: Path) -> None:
    """Not whole: its end is missing here, which is told when it is reached."""
    runs = open_file(put(tmp_path / "a.arrow", arrow(pa.ipc.new_stream, LISTS)[:-40]), "arrow", 0).runs(8)
    assert next(runs).lengths.tolist() == [*map(len, DOCUMENTS[:3])]
    with pytest.raises(DataError, match=r"a\.arrow"):
        list(runs)


def with_offsets(raw: bytes, offsets: list[int]) -> bytes:
    """The file with other offsets in its first record batch."""
    old = np.cumsum([0, *map(len, DOCUMENTS[:7])]).astype("<i4").tobytes()
    assert raw.count(old) == 1
    return raw.replace(old, np.array(offsets, "<i4").tobytes())


@pytest.mark.parametrize(
    ("make", "offsets"),
    [
        (pa.ipc.new_stream, [0, -(10**6), 3, 6, 10, 15, 16, 18]),
        (pa.ipc.new_file, [0, 1, 3, 6, 10, 15, 16, 2**31 - 1]),
        (pa.ipc.new_stream, [0, 1, 3, 2, 10, 15, 16, 18]),
    ],
)
def test_offsets_that_lead_outside_or_backwards(
    tmp_path: Path, run_command: Run, shared_corpus: Path, make: Any, offsets: list[int]
) -> None:
    path = put(tmp_path / "a.arrow", with_offsets(arrow(make, LISTS), offsets))
    tokenizer = ["--tokenizer", shared_corpus / "tokenizer"]
    found = run_command("fsdp_pretrain.data.cli", "validate", path, *tokenizer, "--json", expect=2)
    (finding,) = [f for f in json.loads(found.stdout)["corpora"][0]["findings"] if f["code"] == "unreadable"]
    assert finding["count"] == 1 and "offset" in finding["examples"][0]["note"]
    refused = run_command(
        "fsdp_pretrain.data.cli", "import", path, *tokenizer, "--separators", "trailing", "--out", tmp_path / "o"
    )
    assert refused.returncode == 78 and str(path) in refused.stderr and "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    "raw",
    [
        b"\x93NUMPY\x01\x00v\x00{'descr': '<u2', 'fortran_order': False, 'shape': (4,), }".ljust(127) + b"\n" + bytes(10),
        b"\x93NUMPY\x01\x00v\x00{'descr': '<u2', 'fortran_order': False, 'shape': (((".ljust(127) + b"\n" + bytes(8),
        b"\x93NUMPY\x01\x00v\x00{'descr': '<u2', 'fortran_order': False, 'shape': (-4,), }".ljust(127) + b"\n" + bytes(8),
        b"\x93NUMPY\x01\x00v\x00{'descr': '<u2', 'fortran_order': False, 'shape': (9" .ljust(127, b"9") + b"\n" + bytes(8),
        b"PK\x03\x04 no archive",
    ],
)  # fmt: skip
def test_arrays_whose_header_is_wrong(tmp_path: Path, raw: bytes) -> None:
    with pytest.raises(DataError, match=r"a\.npy"):
        open_file(put(tmp_path / "a.npy", raw), "npy", 0)


def test_no_change_of_an_index_gives_other_tokens(tmp_path: Path, helpers: Any, shared_corpus: Path) -> None:
    """Every bit of the lengths and pointers of a shard; its size stays, so opening it does not detect this."""
    plain = [[1 + n] * (1 + n % 4) for n in range(4)]
    corpus = helpers.corpus(tmp_path / "c", plain, Tokenizer.load(shared_corpus / "tokenizer"), shards=1)
    index = corpus / "shards/s0.idx"
    raw = index.read_bytes()
    expected = Packer([("a", corpus, 1.0)], 6, seed=3, lanes=2).pack(0, 5).tokens
    assert len(expected) * 6 > sum(map(len, plain)) + len(plain)  # all documents
    for bit in range(34 * 8, (34 + 12 * len(plain)) * 8):
        changed = bytearray(raw)
        changed[bit // 8] ^= 1 << bit % 8
        put(index, bytes(changed))
        with pytest.raises(DataError, match="s0"):
            Packer([("a", corpus, 1.0)], 6, seed=3, lanes=2).pack(0, 5)
        with pytest.raises(DataError, match="s0"):
            shard = Shard(corpus / "shards/s0")
            [shard.document(number) for number in range(shard.documents)]


@pytest.mark.parametrize(
    ("place", "key", "value"),
    [
        ("tokenizer", "vocab_size", 10**12),
        ("tokenizer", "vocab_size", 10**6),
        ("tokenizer", "specials", {"7": "x"}),
        ("tokenizer", "file", "\x00"),
        ("shards", "name", ".."),
        ("shards", "path", "/"),
        ("shards", "documents", -1),
    ],
)
def test_a_manifest_that_lies(
    tmp_path: Path, helpers: Any, shared_corpus: Path, run_command: Run, place: str, key: str, value: Any
) -> None:
    """About its tokenizer, or with shards that cannot be files."""
    plain = [document[:-1] for document in DOCUMENTS]
    corpus = helpers.corpus(tmp_path / "c", plain, Tokenizer.load(shared_corpus / "tokenizer"))
    manifest = json.loads((corpus / "manifest.json").read_text())
    (manifest["shards"][0] if place == "shards" else manifest["tokenizer"])[key] = value
    (corpus / "manifest.json").write_text(json.dumps(manifest))
    done = run_command("fsdp_pretrain.data.cli", "validate", corpus)
    assert done.returncode in (2, 78) and "Traceback" not in done.stderr
    assert "manifest" in (done.stdout + done.stderr)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[" * 10_000, b'{"model": {"type": "BPE", "vocab": {}, "merges": [7]}}']
)
def test_a_tokenizer_that_is_none(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DataError, match="cannot load the tokenizer"):
        Tokenizer.load(put(tmp_path / "tokenizer.json", content))


def test_a_tokenizer_over_which_its_library_panics(tmp_path: Path, shared_corpus: Path) -> None:
    """A panic is not an Exception: merges of tokens that the vocabulary has only as prefixes."""
    stored = json.loads((shared_corpus / "tokenizer/tokenizer.json").read_text())
    stored["model"]["continuing_subword_prefix"] = "a prefix that is longer than the tokens"
    with pytest.raises(DataError, match="cannot load the tokenizer"):
        Tokenizer.load(put(tmp_path / "tokenizer.json", json.dumps(stored).encode()))


def test_a_tokenizer_configuration_that_is_damaged(tmp_path: Path, shared_corpus: Path) -> None:
    put(tmp_path / "tokenizer.json", (shared_corpus / "tokenizer/tokenizer.json").read_bytes())
    for content in (b"{", b"[" * 100_000, b"\xff"):
        put(tmp_path / "tokenizer_config.json", content)
        with pytest.raises(DataError, match=r"tokenizer_config\.json"):
            Tokenizer.load(tmp_path)
    for content in (b"[]", b'{"eos_token": 7}', b'{"eos_token": {"content": null}}'):
        put(tmp_path / "tokenizer_config.json", content)
        assert Tokenizer.load(tmp_path).eod == 0
