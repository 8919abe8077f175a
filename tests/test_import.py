"""`fsdp-data import`: the same documents, however stored, train identically; undeclared content is refused."""

from __future__ import annotations

import functools
import json
import operator
import os
import random
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laboratory import seal
from processes import DATA, Run

from fsdp_pretrain.data.corpus.corpus import Corpus
from fsdp_pretrain.data.corpus.formats import Format, open_file, token_files
from fsdp_pretrain.data.corpus.manifest import Vocabulary, read_manifest
from fsdp_pretrain.data.corpus.shards import Shard, ShardWriter
from fsdp_pretrain.data.packing.packer import Packer
from fsdp_pretrain.data.prepare.import_corpus import ImportOptions, ingest
from fsdp_pretrain.data.prepare.jobs import Job
from fsdp_pretrain.data.text.tokenizer import Tokenizer
from fsdp_pretrain.data.validate.findings import CATALOGUE
from fsdp_pretrain.data.validate.validate import validate
from fsdp_pretrain.errors import DataError

# ruff: noqa: A002 (`format` is what it is)
pytestmark = pytest.mark.quick
EOD = 0
Documents = list[list[int]]


def documents(count: int = 120, seed: int = 4) -> Documents:
    rng = random.Random(seed)
    return [[rng.randrange(1, 420) for _ in range(rng.choice([1, 2, 9, 70]))] for _ in range(count)]


def carry(docs: Documents, separators: str) -> Documents:
    if separators == "trailing":
        return [[*doc, EOD] for doc in docs]
    return [[EOD, *doc] for doc in docs] if separators == "leading" else docs


def megatron(prefix: Path, docs: Documents, dtype: str = "<u2") -> None:
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with ShardWriter(prefix, np.dtype(dtype)) as writer:
        for doc in docs:
            writer.append(np.array(doc, dtype=dtype))
        writer.finish()


def arrow(path: Path, docs: Documents, layout: str = "batches") -> None:
    """`batches`: an integer column with a record batch per document; `rows`, `stream`: a list column."""
    if layout == "batches":
        schema = pa.schema([pa.field("tokens", pa.uint32())])
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for doc in docs:
                writer.write(pa.record_batch([pa.array(doc, pa.uint32())], schema))
        return
    table = pa.table({"tokens": pa.array(docs, pa.list_(pa.int32())), "source": ["x"] * len(docs)})
    make = pa.ipc.new_stream if layout == "stream" else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as sink, make(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def store(folder: Path, name: str, docs: Documents, format: str, dtype: str = "<u2") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    flat = np.array([token for doc in docs for token in doc], dtype=dtype)
    if format == "megatron":
        megatron(folder / name, docs, dtype)
    elif format == "npy":
        np.save(folder / f"{name}.npy", flat)
    else:
        arrow(folder / f"{name}.arrow", docs, format)


def adopt(source: Path, tokenizer: Tokenizer, out: Path, separators: Any = "none", *, copy: bool = False) -> None:
    ingest([source], tokenizer, Job(out, quiet=True), ImportOptions(None, separators, copy))


def samples(path: Path, count: int = 150) -> Any:
    packer = Packer([("a", path, 1.0)], 24, seed=7, lanes=5)
    packed = packer.pack(0, count)
    assert packer.measure(packed) == (packed.documents, 0) and not packed.quarantined
    return packed


# ---------------------------------------------------------------- one stream, however stored


@settings(max_examples=12, deadline=None)
@given(
    count=st.integers(1, 60), empty=st.integers(0, 3), seed=st.integers(0, 999), dtype=st.sampled_from(["<u2", "<i4"])
)
def test_storage_does_not_show_in_the_samples(
    tmp_path_factory: Any, tokenizer: Tokenizer, count: int, empty: int, seed: int, dtype: str
) -> None:
    """None, trailing, leading, with empty documents among them: block table and samples are bitwise equal."""
    docs = documents(count, seed)
    for _ in range(empty):
        docs.insert(random.Random(seed).randint(0, len(docs)), [])
    packed = []
    for separators in ("none", "trailing", "leading"):
        path = tmp_path_factory.mktemp(separators)
        halves = [docs[: len(docs) // 2], docs[len(docs) // 2 :]]
        for number, half in enumerate(halves):
            megatron(path / f"in/s{number}", carry(half, separators), dtype)
        adopt(path / "in", tokenizer, path / "out", separators)
        packed.append((Corpus(path / "out").blocks.tolist(), samples(path / "out", 40).tokens.tolist()))
    assert packed[0] == packed[1] == packed[2]


@pytest.mark.parametrize(
    ("format", "separators"),
    [
        *product(["megatron", "copy", "batches", "rows", "stream"], ["trailing", "leading", "none"]),
        *product(["npy"], ["trailing", "leading"]),
    ],
)
def test_every_format_gives_the_same_samples(
    tmp_path: Path, tokenizer: Tokenizer, separators: str, format: str
) -> None:
    docs = documents()
    for number in range(2):
        megatron(tmp_path / f"plain/s{number}", docs[number::2])
        stored = carry(docs[number::2], separators)
        store(tmp_path / "in", f"s{number}", stored, "megatron" if format == "copy" else format)
    for name, declared, copy in (("plain", "none", False), ("in", separators, format == "copy")):
        adopt(tmp_path / name, tokenizer, tmp_path / f"{name}-out", declared, copy=copy)
    expected, got = samples(tmp_path / "plain-out"), samples(tmp_path / "in-out")
    assert (got.tokens == expected.tokens).all() and (got.lengths == expected.lengths).all()
    manifest = read_manifest(tmp_path / "in-out")
    in_place = format == "megatron"
    assert manifest.separators == (separators if in_place else "none") and manifest.documents == len(docs)
    assert bool(list((tmp_path / "in-out/shards").glob("*.bin"))) != in_place
    packers = [Packer([("a", tmp_path / out, 1.0)], 24, seed=7, lanes=5) for out in ("plain-out", "in-out")]
    assert all(packers[0].provenance(index) == packers[1].provenance(index) for index in (0, 33, 149))


def test_adopted_shards_are_not_touched_and_the_manifest_tells_the_truth(
    tmp_path: Path, run_command: Run, tokenizer: Tokenizer
) -> None:
    """On the command line, with workers; prepare's own shards serve as the foreign ones; validate agrees."""
    docs = documents()
    for number, name in enumerate(["x/part", "y/part", "y/other"]):
        megatron(tmp_path / name, docs[number::3])
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")}
    arguments = ["import", tmp_path / "x", tmp_path / "y/part.bin", tmp_path / "y/other", "--separators", "none"]
    done = run_command(
        DATA, *arguments, "--tokenizer", tokenizer.path, "--out", tmp_path / "out", "--workers", 2, expect=0
    )
    assert f"{len(docs)} documents" in done.stdout and "in place" in done.stdout
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())
    manifest = read_manifest(tmp_path / "out")
    assert len({entry.name for entry in manifest.shards}) == 3 and manifest.documents == len(docs)
    checked = run_command(DATA, "validate", tmp_path / "out", "--tokenizer", tokenizer.path, "--json")
    codes = {finding["code"] for finding in json.loads(checked.stdout)["corpora"][0]["findings"]}
    random_ids = {"foreign-tokens"}  # no tokenizer would encode text to these
    assert codes <= {"one-token-documents"} | random_ids, checked.stdout
    assert manifest.tokenizer.fingerprint == tokenizer.fingerprint
    shown = run_command(DATA, "inspect", tmp_path / "out")
    assert "with each document: none" in shown.stdout and str(tmp_path / "y/other") in shown.stdout


# ---------------------------------------------------------------- measured, not trusted


def both(docs: Documents) -> Documents:
    return carry(carry(docs, "leading"), "trailing")


def some(docs: Documents, change: Callable[[Documents], Documents], every: int = 10) -> Documents:
    return [change([doc])[0] if n % every == 0 else doc for n, doc in enumerate(docs)]


@pytest.mark.parametrize(
    ("plant", "declared", "format", "said"),
    [
        (lambda d: carry(d, "trailing"), "none", "megatron", ["120 of 120 documents (100.000%)", "declare that", "`--separators trailing`"]),
        (lambda d: carry(d, "leading"), "trailing", "batches", ["120 of 120", "`--separators leading`: declare that"]),
        (lambda d: d, "trailing", "rows", ["separator-missing: 120 of 120", "`--separators none`: declare that"]),
        (lambda d: [[*x, EOD, EOD] for x in d], "trailing", "megatron", ["separator-doubled: 120 of 120", "separators are doubled"]),
        (lambda d: [[*x, EOD, EOD] for x in d], "trailing", "npy", ["separator-doubled: 120 of 240 documents"]),
        (lambda d: some(carry(d, "trailing"), lambda x: carry(x, "trailing")), "trailing", "npy", ["12 of 132 documents (9.091%)", "doubled"]),
        (lambda d: carry(d, "leading"), "trailing", "npy", ["separator-doubled: 1 of", "begins with a separator", "`--separators leading`: declare that"]),
        (lambda d: carry(d, "trailing"), "leading", "npy", ["ends with a separator", "`--separators trailing`: declare that"]),
        (both, "trailing", "megatron", ["separator-at-start: 120 of 120", "separators are doubled"]),
        (both, "leading", "rows", ["120 of 120", "separators are doubled"]),
        (lambda d: some(carry(d, "trailing"), lambda x: [x[0][:-1]]), "trailing", "megatron", ["12 of 120 documents (10.000%)", "no declaration fits all"]),
        (lambda d: [[*d[0], EOD, *d[1], EOD], *carry(d[2:], "trailing")], "trailing", "stream", ["separator-inside: 1 of 119", "document 0, token"]),
        (lambda d: [*carry(d, "trailing"), [5, 600, 7, EOD]], "trailing", "npy", ["outside-vocabulary: 1 of ", "tokens", "id 600"]),
        (lambda d: [*carry(d, "trailing"), [5, 40_000, EOD]], "trailing", "megatron", ["outside-vocabulary: 1 of", "document 120, token 1: id 40000"]),
    ],
)  # fmt: skip
def test_anything_but_what_was_declared_is_refused(
    tmp_path: Path, tokenizer: Tokenizer, plant: Any, declared: str, format: str, said: list[str]
) -> None:
    docs = [[*doc, 9, 9] for doc in documents()]
    store(tmp_path / "in", "s", plant(docs), format)
    with pytest.raises(DataError) as refused:
        adopt(tmp_path / "in", tokenizer, tmp_path / "out", declared)
    assert refused.value.exit == 78
    for text in said:
        assert text in str(refused.value), str(refused.value)
    assert not (tmp_path / "out/manifest.json").exists() and not list((tmp_path / "out").rglob("*.partial"))


@settings(max_examples=60, deadline=None)
@given(
    docs=st.lists(st.lists(st.sampled_from([EOD, EOD, 9, 9, 301, 500]), max_size=3), max_size=4),
    declared=st.sampled_from(["none", "trailing", "leading"]),
    format=st.sampled_from(["megatron", "npy"]),
)
def test_import_refuses_exactly_what_validate_calls_an_error(
    tmp_path_factory: Any, tokenizer: Tokenizer, docs: Documents, declared: Any, format: str
) -> None:
    tokenizer = Tokenizer.load(tokenizer.path)
    tokenizer.specials[301] = "<planted>"
    path = tmp_path_factory.mktemp("judged")
    store(path / "in", "s", [*carry([[9, 9]], declared), *docs], format)
    report = validate(path / "in", vocabulary=Vocabulary.of(tokenizer), separators=declared, quiet=True)
    refused = False
    try:
        adopt(path / "in", tokenizer, path / "out", declared)
    except DataError as error:
        refused = all(
            f"\n  {code}: " in str(error) or CATALOGUE[code].severity == "warning" for code in report.findings.by_code
        )
    assert refused == (report.findings.exit_code == 2)


def test_the_clean_twin_of_a_refused_import_is_adopted_at_once(
    tmp_path: Path, run_command: Run, tokenizer: Tokenizer
) -> None:
    """Exit 78 with decoded places; the corrected command needs no --overwrite."""
    store(tmp_path / "in", "s", carry(documents(), "trailing"), "megatron")
    arguments = ["import", tmp_path / "in", "--tokenizer", tokenizer.path, "--out", tmp_path / "out", "--separators"]
    refused = run_command(DATA, *arguments, "leading")
    assert refused.returncode == 78 and "<|endoftext|>" in refused.stderr and "Traceback" not in refused.stderr
    assert "remedy: all documents fit `--separators trailing`" in refused.stderr
    run_command(DATA, *arguments, "trailing", expect=0)


def test_flat_files_may_begin_or_end_inside_a_document(tmp_path: Path, run_command: Run, tokenizer: Tokenizer) -> None:
    """Shards of equal size cut documents in two: the parts are kept, and counted."""
    flat = np.array([token for doc in carry(documents(), "leading") for token in doc], dtype="<u2")[1:]
    for number, part in enumerate(np.array_split(flat, 3)):
        np.save(tmp_path / f"p{number}.npy", part)
    arguments = [*sorted(tmp_path.glob("p*.npy")), "--tokenizer", tokenizer.path, "--separators", "leading"]
    done = run_command(DATA, "import", *arguments, "--out", tmp_path / "out", expect=0)
    assert "files begin or end inside a document" in done.stdout
    stored = [Shard(tmp_path / "out/shards" / entry.name).tokens for entry in read_manifest(tmp_path / "out").shards]
    assert np.concatenate(stored).tolist() == flat[flat != EOD].tolist()


# ---------------------------------------------------------------- files and their faults


def sequences(prefix: Path, indices: list[int]) -> None:
    """Rewrite the document index of a shard."""
    index = prefix.with_suffix(".idx")
    raw = bytearray(index.read_bytes())
    count = int.from_bytes(raw[18:26], "little")
    raw[26:34] = len(indices).to_bytes(8, "little")
    index.write_bytes(bytes(raw[: 34 + 12 * count]) + np.array(indices, dtype="<i8").tobytes())


def test_documents_of_several_sequences(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Refused in place, joined by --copy."""
    docs = documents(30)
    megatron(tmp_path / "in/s", docs)
    sequences(tmp_path / "in/s", [0, 3, 4, 30])
    with pytest.raises(DataError, match="documents of several sequences") as refused:
        adopt(tmp_path / "in", tokenizer, tmp_path / "out")
    assert "--copy" in refused.value.remedy
    adopt(tmp_path / "in", tokenizer, tmp_path / "out", copy=True)
    shard = Shard(tmp_path / "out/shards/s")
    joined = [functools.reduce(operator.iadd, docs[a:b], []) for a, b in ((0, 3), (3, 4), (4, 30))]
    assert [shard.document(n).tolist() for n in range(shard.documents)] == joined


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-201])


@pytest.mark.parametrize(
    ("format", "damage", "expected"),
    [
        ("megatron", lambda f: truncate(f / "s.bin"), "truncated"),
        ("megatron", lambda f: truncate(f / "s.idx"), "truncated"),
        ("megatron", lambda f: (f / "s.bin").unlink(), "cannot open"),
        ("megatron", lambda f: (f / "s.bin").open("ab").write(b"1234"), "holds more than the documents of its index"),
        ("megatron", lambda f: sequences(f / "s", [0, 5, 2, 120]), "documents of several sequences"),
        ("copy", lambda f: sequences(f / "s", [0, 5, 2, 120]), "do not cover its sequences"),
        ("batches", lambda f: truncate(f / "s.arrow"), "is cut off"),
        ("stream", lambda f: truncate(f / "s.arrow"), "cannot read"),
        ("rows", lambda f: (f / "s.arrow").write_bytes(b"ARROW1 not really"), "cannot read"),
        ("npy", lambda f: truncate(f / "s.npy"), "as a NumPy array"),
        ("npy", lambda f: np.save(f / "s.npy", np.ones((3, 4), dtype="<u2")), "shape (3, 4)"),
        ("npy", lambda f: np.save(f / "s.npy", np.ones(9)), "float64"),
        ("npy", lambda f: np.save(f / "s.npy", np.ones(0, dtype="<u2")), "no documents"),
        ("npy", lambda f: megatron(f / "t", [[1]]), "several formats"),
        ("npy", lambda f: (f / "s.npy").rename(f / "s.dat"), "holds no token files"),
    ],
)  # fmt: skip
def test_damaged_and_foreign_files_are_named(
    tmp_path: Path, tokenizer: Tokenizer, format: str, damage: Any, expected: str
) -> None:
    copy = format == "copy"
    store(tmp_path / "in", "s", carry(documents(), "trailing"), "megatron" if copy else format)
    damage(tmp_path / "in")
    with pytest.raises(DataError) as refused:
        adopt(tmp_path / "in", tokenizer, tmp_path / "out", "trailing", copy=copy)
    assert expected in str(refused.value)
    assert not (tmp_path / "out/manifest.json").exists()


def test_columns_of_other_names_and_types(tmp_path: Path) -> None:
    for number, table in enumerate(
        [pa.table({"n": [1], "text": ["a"]}), pa.table({"tokens": [[1.5]]}), pa.table({"tokens": [[1], None]})]
    ):
        path = tmp_path / f"{number}.arrow"
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        with pytest.raises(DataError, match=f"{number}.arrow has (no column|nulls)"):
            list(open_file(path, "arrow", EOD).runs())


@pytest.mark.parametrize("size", [1, 5, 64, 10**6])
@pytest.mark.parametrize("format", ["megatron", "batches", "rows", "npy"])
def test_runs_are_whole_documents_of_about_the_size_asked(
    tmp_path: Path, tokenizer: Tokenizer, format: str, size: int
) -> None:
    docs = carry(documents(), "trailing")
    store(tmp_path, "s", docs, format)
    (path,) = token_files(tmp_path)
    kind: Format = {"batches": "arrow", "rows": "arrow"}.get(format, format)  # type: ignore[assignment]
    seen: Documents = []
    longest = max(map(len, docs))
    for run in open_file(path, kind, tokenizer.eod).runs(size):
        assert run.first == len(seen) and run.lengths.sum() == len(run.tokens) <= size + longest
        seen += [part.tolist() for part in np.split(run.tokens, np.cumsum(run.lengths)[:-1])]
    assert seen == docs


# ---------------------------------------------------------------- changed, killed, continued


@pytest.mark.parametrize("separators", ["trailing", "leading"])
@pytest.mark.parametrize("sealed", [False, True])
def test_a_shard_changed_after_import_is_an_error_that_names_it(
    tmp_path: Path, tokenizer: Tokenizer, separators: str, sealed: bool
) -> None:
    """By its checksums; if somebody made them again, by its separators."""
    docs = documents()
    megatron(tmp_path / "in/s", carry(docs, separators))
    adopt(tmp_path / "in", tokenizer, tmp_path / "out", separators)
    changed = carry(docs, separators)
    changed[17] = [7] * len(changed[17])
    megatron(tmp_path / "in/s", changed)
    expected = r"in/s\.bin or \.idx is damaged in the block of documents 0 to 119"
    if sealed:
        seal(tmp_path / "out")
        expected = rf"in/s.bin, document 17: no {separators} separator .* \(1 of the 120"
    with pytest.raises(DataError, match=expected):
        samples(tmp_path / "out")


@pytest.mark.parametrize("copy", [False, True])
def test_an_index_that_was_corrected_is_read_again(tmp_path: Path, tokenizer: Tokenizer, copy: bool) -> None:
    docs = documents()
    whole = [token for document in docs for token in document]
    megatron(tmp_path / "in/s", [whole[:5], whole[5:]])
    adopt(tmp_path / "in", tokenizer, tmp_path / "out", copy=copy)
    tokens = (tmp_path / "in/s.bin").stat().st_mtime_ns
    megatron(tmp_path / "in/s", docs)
    os.utime(tmp_path / "in/s.bin", ns=(tokens, tokens))
    with pytest.raises(DataError, match="made from other inputs"):
        adopt(tmp_path / "in", tokenizer, tmp_path / "out", copy=copy)


def test_a_corpus_of_other_files_is_not_replaced_unasked(tmp_path: Path, tokenizer: Tokenizer) -> None:
    megatron(tmp_path / "in/s", documents())
    adopt(tmp_path / "in", tokenizer, tmp_path / "out")
    with pytest.raises(DataError, match="made from other inputs"):
        adopt(tmp_path / "in", tokenizer, tmp_path / "out", copy=True)
    with pytest.raises(DataError, match="is inside the output directory"):
        adopt(tmp_path / "in", tokenizer, tmp_path)
    megatron(tmp_path / "in/t", documents(), "<i4")
    with pytest.raises(DataError, match="is of int32"):
        adopt(tmp_path / "in", tokenizer, tmp_path / "o")


# ---------------------------------------------------------------- in training


@pytest.mark.promise("one-separator")
def test_records_prove_one_separator_per_document(lab: Any, helpers: Any, tokenizer: Tokenizer) -> None:
    """Two ranks on an adopted corpus with leading separators: counts summed over ranks, as the packer gives them."""
    plain = Corpus(lab.corpus)
    shard = plain.shard(0)
    docs = [shard.document(n).tolist() for n in range(shard.documents)]
    megatron(lab.path / "in/s", carry(docs, "leading"))
    adopt(lab.path / "in", tokenizer, lab.path / "out", "leading")
    sources = [{"name": "text", "path": str(lab.path / "out")}]
    lab.train(lab.config("led", data={"sources": sources}, train={"duration": "6 steps"}), ranks=2)
    records = helpers.metrics(lab.path / "led")
    packer = Packer([("text", lab.path / "out", 1.0)], 32, seed=1234, lanes=8)
    for number, record in enumerate(records):
        tokens = packer.pack(8 * number, 8).tokens
        expected = int((tokens == EOD).sum())
        assert (record["documents"], record["separators"], record["adjacent_specials"]) == (expected, expected, 0)
    assert len(records) == 6 and sum(record["separators"] for record in records) > 5


def test_adjacent_specials_are_counted_from_the_tokens(tmp_path: Path, tokenizer: Tokenizer, helpers: Any) -> None:
    """The check sees what the packer would never write."""
    write = helpers.corpus(tmp_path / "c", documents(), tokenizer)
    packer = Packer([("a", write, 1.0)], 24, seed=7, lanes=5)
    packed = packer.pack(0, 4)
    packed.tokens[:] = 5
    packed.tokens[0, [3, 4, 5, 9]] = EOD
    packed.tokens[1, -1] = packed.tokens[2, 0] = EOD  # of different samples: not adjacent
    assert packer.measure(packed) == (6, 2)
