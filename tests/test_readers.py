"""Input files that are truncated, damaged, inconsistent or misnamed: an error that names them, never less data."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from processes import Run

from fsdp_pretrain.data.text.files import find_files
from fsdp_pretrain.data.text.inputs import plan_shards, read_documents
from fsdp_pretrain.errors import DataError

pytestmark = pytest.mark.quick
TEXTS = [f"text {number} " * (1 + number % 7) for number in range(40)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
SKIPPABLE = struct.pack("<II", 0x184D2A50, 4) + b"skip"


def texts(path: Path, size: int = 300, field: str = "text") -> list[str]:
    units = [unit for shard in plan_shards(find_files([str(path)]), size, lines=False) for unit in shard]
    return [document.text for unit in units for document in read_documents(unit, field, lines=False)]


def zst(raw: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(raw)


PACK = {".gz": gzip.compress, ".zst": zst}


def put(path: Path, raw: bytes) -> Path:
    path.write_bytes(raw)
    return path


# ---------------------------------------------------------------------- packed files


@pytest.mark.parametrize("suffix", PACK)
def test_several_members_or_frames_are_one_file(tmp_path: Path, suffix: str) -> None:
    parts = [LINES[:700], LINES[700:701], b"", LINES[701:]]
    packed = [PACK[suffix](part) for part in parts]
    extra = SKIPPABLE if suffix == ".zst" else b""
    path = put(tmp_path / f"a.jsonl{suffix}", extra.join([b"", *packed, b""]))
    assert texts(path) == TEXTS


@pytest.mark.parametrize("suffix", PACK)
def test_a_packed_file_cut_anywhere_is_an_error(tmp_path: Path, suffix: str) -> None:
    """At every byte except between two members, where it cannot be detected."""
    halves = [PACK[suffix](half) for half in (LINES[:500], LINES[500:])]
    whole = b"".join(halves)
    for stop in range(len(whole)):
        if stop != len(halves[0]):
            path = put(tmp_path / f"a.txt{suffix}", whole[:stop])
            with pytest.raises(DataError, match=rf"a\.txt\{suffix}"):
                texts(path)


@pytest.mark.parametrize(
    ("suffix", "damage"),
    [
        (".gz", lambda raw: raw + b"garbage"),
        (".zst", lambda raw: raw + b"garbage"),
        (".gz", lambda raw: raw[: len(raw) // 2] + bytes(20) + raw[len(raw) // 2 + 20 :]),
        (".zst", lambda raw: raw[: len(raw) // 2] + bytes(20) + raw[len(raw) // 2 + 20 :]),
        (".gz", lambda raw: b""),
        (".zst", lambda raw: LINES),
    ],
)
def test_a_damaged_packed_file_is_refused(tmp_path: Path, suffix: str, damage: Any) -> None:
    path = put(tmp_path / f"a.jsonl{suffix}", damage(PACK[suffix](LINES)))
    with pytest.raises(DataError, match=re.escape(str(path))):
        texts(path)


def memory_of(code: str, *arguments: object) -> tuple[str, int]:
    """(standard output, peak memory in MB) of a Python process."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]
    )  # fmt: skip
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return output, usage.ru_maxrss // 1024


READ = """
import sys
from pathlib import Path
import pyarrow.parquet
from fsdp_pretrain.data.text.inputs import plan_shards, read_documents
from fsdp_pretrain.errors import DataError
count = 0
try:
    for shard in plan_shards([Path(name) for name in sys.argv[1:]], None, lines=False):
        for unit in shard:
            count += sum(1 for _ in read_documents(unit, "text", lines=False))
except DataError as error:
    print(error.cause)
print(count)
"""


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.txt.zst", b" "), ("a.jsonl.gz", b'{"text": "%s"}\n' % (b"x" * 9000)), ("b.jsonl.gz", b"[")],
)
def test_what_unpacks_to_much_is_read_piece_by_piece(tmp_path: Path, name: str, content: bytes) -> None:
    """A file of some kB that holds 150 MB."""
    count = 150_000_000 // len(content)
    path = put(tmp_path / name, PACK[Path(name).suffix](content * count))
    output, memory = memory_of(READ, path)
    _, base = memory_of(READ)
    assert memory - base < 200, f"{memory - base} MB more"
    assert output == f"{count}\n" if name[0] == "a" and content[0] == 123 else "unpacks to a document" in output


# ---------------------------------------------------------------------- JSONL


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not JSON (it is nested too deeply)"),
        (b'{"text": null}', "field 'text' is null, not a string"),
        (b'{"text": ["a"]}', "field 'text' is a list, not a string"),
        (b'{"body": "a", "n": 1}', 'no field \'text\' (the record has "body", "n")'),
        (b"7", "7 is not a JSON object"),
        (b'{"text": "cut o', "not JSON"),
    ],
)
def test_a_bad_line_is_named_by_its_number_in_the_file(tmp_path: Path, line: bytes, expected: str) -> None:
    """Whichever unit it falls into."""
    path = put(tmp_path / "a.jsonl", LINES + line)
    with pytest.raises(DataError) as refused:
        texts(path, size=100)
    assert f"a.jsonl, line {len(TEXTS) + 1}, byte {len(LINES)}: {expected}" in str(refused.value)


# ---------------------------------------------------------------------- parquet


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"text": [["a"], ["b"]]}, "column 'text' holds no texts (it is of type list<"),
        ({"text": [1, 2]}, "column 'text' holds no texts (it is of type int64)"),
        ({"text": [{"a": 1}]}, "column 'text' holds no texts (it is of type struct"),
        ({"text": ["a", None]}, "row 2: no text in column 'text' (null)"),
        ({"body": ["a"]}, "has no column 'text' (it has body)"),
        (pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["text", "text"]), "has 2 columns 'text'"),
    ],
)
def test_columns_that_hold_no_text(tmp_path: Path, columns: Any, expected: str) -> None:
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(DataError) as refused:
        texts(tmp_path / "a.parquet")
    assert "a.parquet" in str(refused.value) and expected in str(refused.value)


@pytest.mark.parametrize(
    "column",
    [
        pa.array([b"ab", "é".encode(), b"\xff"], pa.binary()).view(pa.string()),  # what is no UTF-8 is repaired
        pa.array([b"ab", "é".encode(), b"\xff"], pa.large_binary()),
        pa.array(["ab", "é", "\ufffd"]).dictionary_encode(),
    ],
)
def test_columns_that_hold_text(tmp_path: Path, column: Any) -> None:
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet") == ["ab", "é", "\ufffd"]


def test_a_parquet_file_cut_anywhere_is_an_error(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"text": TEXTS}), buffer, row_group_size=15)
    whole = buffer.getvalue()
    for stop in range(0, len(whole), 7):
        with pytest.raises(DataError, match=r"a\.parquet"):
            texts(put(tmp_path / "a.parquet", whole[:stop]))


# ---------------------------------------------------------------------- names and places


def test_a_pipe_is_refused_with_the_way_to_say_the_format(
    tmp_path: Path, shared_corpus: Path, helpers: Any, run_command: Run
) -> None:
    os.mkfifo(tmp_path / "pipe")
    arguments = ["--tokenizer", shared_corpus / "tokenizer", "--out", tmp_path / "out"]
    for name in (tmp_path / "pipe", tmp_path):
        if name == tmp_path:
            (tmp_path / "pipe").rename(tmp_path / "pipe.jsonl")
        refused = run_command("fsdp_pretrain.data.cli", "prepare", name, *arguments)
        assert refused.returncode == 78 and "is a directory, a pipe or a device" in refused.stderr, refused.stderr
        assert ".jsonl" in refused.stderr and not (tmp_path / "out").exists()
    command = [sys.executable, "-m", "fsdp_pretrain.data.cli", "prepare", "/dev/stdin", *map(str, arguments)]
    done = subprocess.run(command, cwd="/", env=helpers.environment(), input=LINES, capture_output=True)
    assert done.returncode == 78 and b"/dev/stdin is a directory, a pipe" in done.stderr
    with put(tmp_path / "a.jsonl", LINES).open("rb") as file:
        done = subprocess.run(command, cwd="/", env=helpers.environment(), stdin=file, capture_output=True)
    assert done.returncode == 78 and b"the name of /dev/stdin does not say its format" in done.stderr


@pytest.mark.parametrize("name", ["a", "a.json", "a.jsonl.bak", "a.md", "a.zst"])
def test_a_name_says_the_format(tmp_path: Path, name: str) -> None:
    """Or a link does, or the option for plain text; nothing is guessed from the content."""
    path = put(tmp_path / name, LINES)
    with pytest.raises(DataError, match="does not say its format") as refused:
        find_files([str(path)])
    assert "symbolic link" in refused.value.remedy
    (tmp_path / "link.jsonl").symlink_to(path)
    assert texts(tmp_path / "link.jsonl") == TEXTS
    assert find_files([str(tmp_path / "a.md")] if name == "a.md" else [str(tmp_path)], (".md", ".jsonl"))


@pytest.mark.parametrize("folder", [True, False], ids=["folder", "file"])
def test_a_packed_parquet_file_is_refused(tmp_path: Path, folder: bool) -> None:
    put(tmp_path / "a.jsonl", LINES), put(tmp_path / "b.parquet.gz", b"")
    with pytest.raises(DataError, match=r"b\.parquet\.gz is a packed parquet file"):
        find_files([str(tmp_path if folder else tmp_path / "b.parquet.gz")])


def test_all_files_below_a_directory_are_found(tmp_path: Path) -> None:
    """Behind links to directories too, each once; a link to nothing is an error."""
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "in/sub").mkdir(parents=True)
    elsewhere.mkdir()
    put(elsewhere / "b.txt", b"b"), put(tmp_path / "in/sub/a.txt", b"a")
    (tmp_path / "in/one").symlink_to(elsewhere)
    (tmp_path / "in/two").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(tmp_path / "in")
    assert [path.name for path in find_files([str(tmp_path / "in")])] == ["b.txt", "a.txt"]
    (tmp_path / "in/gone.txt").symlink_to(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"gone\.txt is a broken symbolic link"):
        find_files([str(tmp_path / "in")])


def test_input_without_any_text(tmp_path: Path, run_command: Run, shared_corpus: Path) -> None:
    path = put(tmp_path / "a.jsonl", b"")
    arguments = ["--tokenizer", shared_corpus / "tokenizer", "--out", tmp_path / "out"]
    refused = run_command("fsdp_pretrain.data.cli", "prepare", path, *arguments)
    assert refused.returncode == 78 and "holds no text: 1 files, all of them empty" in refused.stderr
    assert not (tmp_path / "out").exists()
    put(path, b'{"body": "x"}\n')
    assert "--text-field" in run_command("fsdp_pretrain.data.cli", "prepare", path, *arguments).stderr
    for verb in (["import", path, *arguments, "--separators", "none"], ["validate", path, *arguments[:2]]):
        refused = run_command("fsdp_pretrain.data.cli", *verb, expect=78)
        assert "holds text, not tokens\n  remedy: make a corpus of it with `fsdp-data prepare`" in refused.stderr


def test_paths_that_do_not_exist_are_said_not_to(tmp_path: Path, run_command: Run, shared_corpus: Path) -> None:
    names = [tmp_path / "nope", tmp_path / "neither"]
    refused = run_command("fsdp_pretrain.data.cli", "validate", *names, shared_corpus / "corpus")
    assert refused.returncode == 78 and f"there is no {names[0]}, {names[1]}" in refused.stderr
    assert "--format" not in refused.stderr and refused.stdout == ""
    out = ["--tokenizer", shared_corpus / "tokenizer", "--out", tmp_path / "out"]
    refused = run_command("fsdp_pretrain.data.cli", "import", names[0], *out, "--separators", "none")
    assert refused.returncode == 78 and "there is no file" in refused.stderr and "--format" not in refused.stderr
    assert (
        f"there is no input {names[0]}, {names[1]}"
        in run_command("fsdp_pretrain.data.cli", "prepare", *names, *out).stderr
    )


def test_output_that_cannot_be_written(tmp_path: Path, run_command: Run, shared_corpus: Path) -> None:
    path, below = put(tmp_path / "a.txt", b"text"), tmp_path / "a.txt/out"
    refused = run_command(
        "fsdp_pretrain.data.cli", "prepare", path, "--tokenizer", shared_corpus / "tokenizer", "--out", below
    )
    assert refused.returncode == 78 and "Not a directory\n  remedy: look for a mistake" in refused.stderr
    assert f"cannot use {below}" in refused.stderr and "Traceback" not in refused.stderr


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_keeps_what_was_finished(
    small_disk: Any, tmp_path: Path, run_command: Run, shared_corpus: Path, workers: int
) -> None:
    """Exit 93, the file named, nothing half-written; with more space the same command continues."""
    disk = small_disk("1m")
    lines = (shared_corpus / "train.jsonl").read_bytes()
    path = put(tmp_path / "a.jsonl", lines * (4_000_000 // len(lines)))
    arguments = ["prepare", path, "--tokenizer", shared_corpus / "tokenizer", "--out", disk / "out"]
    arguments += ["--shard-size", "500KB", "--workers", workers]
    full = run_command("fsdp_pretrain.data.cli", *arguments)
    assert full.returncode == 93 and f"cannot use {disk}/out" in full.stderr, full.stderr
    assert "No space left on device\n  remedy: free space" in full.stderr and "Traceback" not in full.stderr
    assert workers > 1 or not list(disk.rglob("*.partial"))
    assert list(disk.rglob("*.json"))
    subprocess.run(["mount", "-o", "remount,size=50m", disk], check=True)
    run_command("fsdp_pretrain.data.cli", *arguments, expect=0)
