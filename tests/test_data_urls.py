"""`fsdp-data` on URLs: the same bytes as on local disk, seen whole or not at all, through kills and faults."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from object_store import Faults, ObjectStore
from processes import Run, spawn
from sight import PATIENCE, until

from data.corpus.manifest import read_manifest
from data.corpus.shards import ShardWriter
from data.text.files import find_files
from fsdp_pretrain.errors import DataError

pytestmark = pytest.mark.quick
SMALL = ("--shard-size", "20KB", "--block-tokens", 3000)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory, helpers: Any) -> Path:
    """A folder of every format, with names whose order by character is not that of folders."""
    folder, rng = tmp_path_factory.mktemp("input") / "text", random.Random(5)
    rows = [[helpers.text(100 * n + m, rng.choice([3, 40, 200])) for m in range(60)] for n in range(4)]
    for name, texts in zip(("a-b/0.jsonl", "a/1.jsonl", "b.jsonl.zst", "c.parquet"), rows, strict=True):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = "".join(json.dumps({"text": each}) + "\n" for each in texts).encode()
        if name.endswith(".parquet"):
            pq.write_table(pa.table({"text": texts}), path, row_group_size=20)
        else:
            path.write_bytes(zstandard.ZstdCompressor().compress(content) if name.endswith(".zst") else content)
    (folder / ".cache").mkdir()
    (folder / ".cache/x.jsonl").write_text("no record\n")
    return folder


@pytest.fixture(scope="module")
def local(text: Path, tmp_path_factory: pytest.TempPathFactory, run_command: Run, shared_corpus: Path) -> Path:
    """The corpus of that folder on local disk."""
    out = tmp_path_factory.mktemp("local") / "corpus"
    done = run_command("data.cli", *prepare(text, out, shared_corpus))
    assert done.returncode == 0, done.stderr
    return out


def prepare(source: object, out: object, shared: Path, *more: object) -> list[object]:
    arguments = ["prepare", source, "--tokenizer", shared / "tokenizer", "--out", out, "--workers", 1, *SMALL]
    return [*arguments, "--quiet", *more]


def facts(manifest: bytes) -> dict[str, Any]:
    """A manifest without the time it was made at."""
    found: dict[str, Any] = json.loads(manifest)
    del found["statistics"]["made"]
    return found


def require_same(local: Path, names: list[str], get: Callable[[str], bytes]) -> None:
    """What is at a URL is the local corpus, and nothing else."""
    expected = sorted(str(path.relative_to(local)) for path in local.rglob("*") if path.is_file())
    assert sorted(names) == expected
    for name in expected:
        if name.endswith((".bin", ".idx", ".npy", "tokenizer.json")):
            assert get(name) == (local / name).read_bytes(), name
    assert facts(get("manifest.json")) == facts((local / "manifest.json").read_bytes())


def test_parts_make_at_a_url_what_one_job_makes_on_disk(
    tmp_path: Path, text: Path, local: Path, run_command: Run, shared_corpus: Path
) -> None:
    """And nothing is left in the scratch directory, not even what a killed process left there."""
    out, scratch = tmp_path / "out", tmp_path / "scratch"
    (scratch / "fsdp-data-killed/shards").mkdir(parents=True)
    for part in ("2/2", "1/2"):
        command = prepare(f"file://{text}", f"file://{out}", shared_corpus, "--scratch", scratch, "--part", part)
        done = run_command("data.cli", *command)
        assert done.returncode == 0, done.stderr
        assert (out / "manifest.json").exists() == (part == "1/2")
    names = [str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()]
    require_same(local, names, lambda name: (out / name).read_bytes())
    assert not list(scratch.iterdir())


def test_urls_name_files_as_paths_do(text: Path) -> None:
    def found(*inputs: str) -> list[str]:
        return [str(file).removeprefix("file://") for file in find_files(inputs)]

    assert found(f"file://{text}") == found(str(text)) and len(found(str(text))) == 4
    assert found(f"file://{text}/*/?.jsonl") == found(str(text / "a"), str(text / "a-b"))
    assert found(f"file://{text}/a/1.jsonl", f"file://{text}/a") == [str(text / "a/1.jsonl")]
    for wrong in ("file:///nowhere/at/all", f"file://{text}/*.md", "ftp://host/x", "s3://key:secret@bucket/x"):
        with pytest.raises(DataError):
            found(wrong)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("split URL --holdout 1% --out URL/held", "this is written to a local directory"),
        ("prepare URL/b.jsonl.zst --tokenizer T --out https://host/x", "can be read, but not written to"),
        ("prepare URL/none --tokenizer T --out OUT", "there is no input file:///"),
        ("prepare URL/b.jsonl.zst --tokenizer T --out s3://key:secret@bucket/x", "must not hold credentials"),
        ("import LOCAL/shards --tokenizer T --separators none --out URL/new", "not in the same storage"),
        ("validate URL --vocab-size 512 --eod 0", "holds text, not tokens"),
        ("inspect URL", "text is not a corpus: it has no manifest.json"),
        ("prepare LOCAL --tokenizer URL/t --out OUT", "copy the tokenizer from there"),
    ],
)
def test_what_cannot_be_done_says_so(
    tmp_path: Path, text: Path, local: Path, run_command: Run, shared_corpus: Path, arguments: str, message: str
) -> None:
    places = {"URL": f"file://{text}", "LOCAL": local, "OUT": tmp_path / "out", "T": shared_corpus / "tokenizer"}
    line = re.sub(r"\b(URL|LOCAL|OUT|T)\b", lambda name: str(places[name[1]]), arguments)
    done = run_command("data.cli", *line.split())
    assert done.returncode == 78 and message in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and "secret" not in done.stderr.replace("key:secret@bucket", "", 2)


def test_all_that_is_done_with_a_corpus_is_done_by_url(tmp_path: Path, local: Path, run_command: Run) -> None:
    url = f"file://{local}"

    def run(*arguments: object) -> str:
        done = run_command("data.cli", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    for verb in (("validate", "--json"), ("inspect", "--doc", 77), ("inspect", "--json")):
        assert run(verb[0], url, *verb[1:]).replace("file://", "") == run(verb[0], local, *verb[1:])
    adopted = tmp_path / "adopted"
    tokenizer = local / "tokenizer.json"
    run("import", f"{url}/shards", "--tokenizer", tokenizer, "--separators", "none", "--out", f"file://{adopted}")
    assert {entry.path for entry in read_manifest(adopted).shards} == {
        f"{url}/shards/{entry.name}" for entry in read_manifest(local).shards
    }
    assert run("inspect", f"file://{adopted}", "--doc", 77) == run("inspect", local, "--doc", 77)


# ---------------------------------------------------------------- a real S3 server


def start(log: Path, *arguments: object) -> subprocess.Popen[bytes]:
    return spawn((sys.executable, "-m", "data.cli", *arguments), log, TQDM_DISABLE="1")


def kill(process: subprocess.Popen[bytes]) -> bool:
    """Whether it still ran."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait(PATIENCE) == -signal.SIGKILL


@pytest.mark.slow
def test_parts_that_are_killed_in_their_uploads_end_with_the_same_corpus(
    tmp_path: Path, text: Path, local: Path, object_store: ObjectStore, shared_corpus: Path
) -> None:
    """Three at once, killed again and again, with failing, cut and corrupted answers. The manifest comes last."""
    source = object_store.put_folder(text, "text")
    object_store.faults = Faults(objects="out/", failing=0.1, cut=0.05, corrupt=0.05)
    out, log = object_store.url / "out", tmp_path / "log"
    shards = [f"out/shards/{entry.name}" for entry in read_manifest(local).shards]

    def part(number: int) -> subprocess.Popen[bytes]:
        more = ("--part", f"{number}/3", "--scratch", tmp_path / "scratch")
        return start(log, *prepare(source, out, shared_corpus, *more))

    def whole_or_not_there() -> bool:
        names = object_store.names("out/")
        whole = all(f"{shard}{end}" in names for shard in shards for end in (".bin", ".idx", ".json"))
        assert whole or "out/manifest.json" not in names
        return "out/manifest.json" in names

    killed = 0
    for attempt in range(3):
        before = len(object_store.requests("out/shards", "PUT"))
        parts = [part(number) for number in (1, 2, 3)]
        for number, process in enumerate(parts):
            enough = before + 2 + 2 * number + attempt
            until(
                lambda e=enough, p=process: (
                    len(object_store.requests("out/shards", "PUT")) >= e or p.poll() is not None or whole_or_not_there()
                ),
                what=lambda: log.read_text(),
            )
            killed += kill(process)
            whole_or_not_there()
    assert killed >= 3
    ends = [(part(number), number) for number in (1, 2, 3)]
    for process, number in ends:
        assert process.wait(PATIENCE) == 0, (number, log.read_text())
    assert whole_or_not_there()
    object_store.faults = Faults()
    names = [name.removeprefix("out/") for name in object_store.names("out/")]
    require_same(local, names, lambda name: object_store.get(f"out/{name}"))
    assert not list((tmp_path / "scratch").iterdir())
    # Which answers are cut or corrupted depends on what was asked for before each kill.
    assert "failing" in {request.fault for request in object_store.log}


@pytest.mark.slow
def test_input_that_fails_now_and_then_is_read_whole(
    tmp_path: Path, text: Path, local: Path, object_store: ObjectStore, run_command: Run, shared_corpus: Path
) -> None:
    source = object_store.put_folder(text, "text")
    object_store.faults = Faults(objects="text/", failing=0.2, cut=0.2)
    done = run_command("data.cli", *prepare(source, tmp_path / "out", shared_corpus))
    assert done.returncode == 0, done.stderr
    assert read_manifest(tmp_path / "out").fingerprint == read_manifest(local).fingerprint
    object_store.faults = Faults(objects="text/c.parquet", expired=403)
    done = run_command("data.cli", *prepare(source, tmp_path / "other", shared_corpus))
    assert done.returncode == 78 and f"no access to {source}/c.parquet" in done.stderr


@pytest.mark.slow
def test_input_that_changed_is_refused(
    tmp_path: Path, text: Path, object_store: ObjectStore, run_command: Run, shared_corpus: Path
) -> None:
    """Between the starts of two parts, and while it is read."""
    source, out = object_store.put_folder(text, "text"), object_store.url / "out"
    assert run_command("data.cli", *prepare(source, out, shared_corpus, "--part", "1/2")).returncode == 0
    changed = (text / "a/1.jsonl").read_bytes().replace(b"the", b"THE", 1)
    object_store.put("text/a/1.jsonl", changed)
    done = run_command("data.cli", *prepare(source, out, shared_corpus, "--part", "2/2"))
    assert done.returncode == 78 and "made from other inputs" in done.stderr, done.stderr
    object_store.faults = Faults(objects="new/shards/shard-00001", hang=True)
    log = tmp_path / "log"
    process = start(log, *prepare(source, object_store.url / "new", shared_corpus))
    until(lambda: "new/shards/shard-00000.json" in object_store.names("new/"), what=lambda: log.read_text())
    object_store.put("text/a/1.jsonl", changed.replace(b"THE", b"the", 1))
    object_store.faults = Faults()
    assert process.wait(PATIENCE) == 78
    assert f"{source}/a/1.jsonl changed while it was read" in log.read_text()
    assert "new/manifest.json" not in object_store.names("new/")


@pytest.mark.slow
def test_validate_finds_damage_in_the_bucket_and_only_there(
    local: Path, object_store: ObjectStore, run_command: Run
) -> None:
    url = object_store.put_folder(local, "corpus")
    first, second, third = (entry.name for entry in read_manifest(local).shards[:3])
    object_store.faults = Faults(objects="corpus/shards", failing=0.1, cut=0.05, corrupt=0.05)
    sound = run_command("data.cli", "validate", url, "--json")
    assert sound.returncode == 0, sound.stdout
    assert "corrupt" in {request.fault for request in object_store.log}
    object_store.faults = Faults()
    wrong = bytearray(object_store.get(f"corpus/shards/{first}.bin"))
    wrong[2 * 11 : 2 * 12] = b"\0\0"  # a separator
    object_store.put(f"corpus/shards/{first}.bin", bytes(wrong))
    object_store.delete(f"corpus/shards/{second}.bin")
    object_store.put(f"corpus/shards/{third}.idx", object_store.get(f"corpus/shards/{third}.idx")[:-5])
    done = run_command("data.cli", "validate", url, "--json")
    assert done.returncode == 2, done.stderr
    found = json.loads(done.stdout)["corpora"][0]["findings"]
    places = {(finding["code"], example["place"]) for finding in found for example in finding["examples"]}
    assert ("checksum", f"{first}.bin") in {(code, place.partition(":")[0]) for code, place in places}
    assert any(code.startswith("separator-") and place.startswith(f"{first}, document ") for code, place in places)
    assert any(code == "unreadable" and f"{url}/shards/{second}.bin does not exist" in place for code, place in places)
    assert any(code == "unreadable" and place.startswith(f"{third}:") for code, place in places)


@pytest.mark.slow
def test_an_interrupt_ends_validate_while_the_storage_hangs(tmp_path: Path, object_store: ObjectStore) -> None:
    """Its processes too, each of which waits for a file, and nothing is left in the scratch directory."""
    (tmp_path / "megatron").mkdir()
    for number in range(2):
        with ShardWriter(tmp_path / f"megatron/shard-{number}", np.dtype("<u2")) as writer:
            for _ in range(35):
                writer.append(np.full(250_000, 7, "<u2"))
            writer.finish()
    url, scratch, log = (
        object_store.put_folder(tmp_path / "megatron", "megatron"),
        tmp_path / "scratch",
        tmp_path / "log",
    )
    object_store.faults = Faults(objects="megatron/.*bin", methods=("GET",), hang=True)
    vocabulary = ("--vocab-size", 10, "--eod", 0, "--separators", "none")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the tests run in the background
    process = start(log, "validate", url, *vocabulary, "--workers", 2, "--scratch", scratch)
    signal.signal(signal.SIGINT, before)
    until(lambda: len(list(scratch.rglob("*.bin"))) == 2, what=lambda: log.read_text())
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 130 and log.read_text() == "interrupted\n"
    assert not list(scratch.iterdir())
    object_store.faults = Faults()
    until(lambda: object_store.requests("megatron/.*bin"))
    assert len(object_store.requests("megatron/.*bin")) <= 2  # nobody waited until a request was given up and repeated


@pytest.mark.slow
def test_shards_in_a_bucket_are_adopted_where_they_are(
    tmp_path: Path, local: Path, object_store: ObjectStore, run_command: Run
) -> None:
    """A manifest and tables beside them; `--copy` makes a corpus of its own, here or there."""
    url, tokenizer = object_store.put_folder(local / "shards", "megatron"), local / "tokenizer.json"
    fingerprints = []
    for out, more in (
        (object_store.url / "adopted", ()),
        (object_store.url / "copied", ("--copy",)),
        (tmp_path / "copied", ("--copy",)),
    ):
        command = ("import", url, "--tokenizer", tokenizer, "--separators", "none", "--out", out, "--workers", 1, *more)
        done = run_command("data.cli", *command)
        assert done.returncode == 0, done.stderr
        shown = run_command("data.cli", "inspect", out)
        fingerprints += re.findall(r"fingerprint +(\w+)", shown.stdout)
        assert run_command("data.cli", "validate", out).returncode == 0
    assert len(fingerprints) == 3 and len(set(fingerprints)) == 1
    assert not [name for name in object_store.names("adopted/") if name.endswith((".bin", ".idx"))]


@pytest.mark.slow
def test_inspect_fetches_only_what_it_shows(local: Path, object_store: ObjectStore, run_command: Run) -> None:
    url = object_store.put_folder(local, "corpus")
    assert run_command("data.cli", "inspect", url).returncode == 0
    assert object_store.bytes_read("corpus/shards") == 0
    shown = run_command("data.cli", "inspect", url, "--doc", 77)
    assert shown.stdout == run_command("data.cli", "inspect", local, "--doc", 77).stdout
    assert 0 < object_store.bytes_read("corpus/shards") < 2 * 2 * 3000
    assert len(object_store.requests("corpus/shards")) == 2
