"""Mutated files for every reader of files from outside: each must answer with an exit code, in bounded time and memory.

    python tests/fuzz.py                                   10,000 files with seed 1: what the slow tests run
    python tests/fuzz.py --seed 7 --cases 2000 --only zst parquet
    python tests/fuzz.py --seed 7 --only zst --case 412    one of them again: its output, and its files are kept

A case copies a small valid input, damages one of its files and runs one command in a forked process. It fails if the
process dies of a signal, prints a traceback, returns a code it may not, takes over 30 s of processor time, grows by more
than 200 MB and twice the size of its files, or if documents disappear without being counted. Exit 0 if no case fails.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import io
import json
import os
import random
import re
import resource
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

PROCESSOR_SECONDS, GROWTH, ADDRESSES = 30, 200 << 20, 1 << 30
EOD = 0
READS, REPORTS = frozenset((0, 78, 93)), frozenset((0, 1, 2, 78, 93))
"""Exit codes of commands that make something, and of commands that report what they found."""
ENVIRONMENT = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",  # does not reserve addresses it may never use
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONSAFEPATH": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
}


@dataclass(frozen=True)
class Kind:
    """One kind of file.

    Attributes:
        share: of all cases.
        make: writes a valid input into an empty folder.
        victims: patterns of the files to damage.
        commands: of which each case runs one, in the folder: module, arguments.
        codes: exit codes they may have.
        lost: what a command that ended with 0 did not count, given the damaged folder; "" if nothing.
    """

    share: int
    make: Callable[[Path], None]
    victims: tuple[str, ...]
    commands: tuple[str, ...]
    codes: frozenset[int]
    lost: Callable[[Path], str] = field(default=lambda folder: "")


@dataclass(frozen=True)
class Case:
    """What one damaged file led to; `problem` is empty if all is well."""

    name: str
    number: int
    command: str
    file: str
    problem: str
    code: int
    output: str


# ------------------------------------------------------------------- damage


def damaged(rng: random.Random, name: str, content: bytes) -> bytes:
    """Content with one to three things done to it."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        content = _damage(rng, name, content)
    return content


def _damage(rng: random.Random, name: str, content: bytes) -> bytes:
    if name.endswith((".json", ".jsonl")) and rng.random() < 0.6:
        return _damage_json(rng, content)
    if not content:
        return rng.randbytes(rng.randint(1, 64))
    at = rng.randrange(len(content))
    if rng.random() < 0.3:  # formats keep what counts at their ends
        at = rng.choice((at % 64, max(0, len(content) - 1 - at % 64)))
    span = rng.choice((1, 2, 4, 8, 64, len(content) // 3 + 1))
    number = rng.choice((0, 1, -1, -2, 127, 255, 65535, 2**31 - 1, -(2**31), 2**32, 2**40, 2**63 - 1, -(2**63)))
    width = rng.choice((1, 2, 4, 8))
    return rng.choice(
        (
            lambda: content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :],
            lambda: content[:at] + rng.randbytes(1) + content[at + 1 :],
            lambda: content[:at],
            lambda: content[:at] + content[at + span :],
            lambda: content[:at] + content[at : at + span] * 2 + content[at + span :],
            lambda: content[:at] + bytes(span) + content[at + span :],
            lambda: content[:at] + rng.randbytes(span) + content[at:],
            lambda: content[:at] + (number % 256**width).to_bytes(width, "little") + content[at + width :],
            lambda: content[at:] + content[:at],
            lambda: content + content,
        )
    )()


def _damage_json(rng: random.Random, content: bytes) -> bytes:
    """Another value in place of one of a JSON file, or of one line of a JSONL file."""
    lines = content.split(b"\n")
    whole = content.lstrip().startswith(b"{\n") or content.lstrip().startswith(b"[")
    at = rng.randrange(len(lines))
    try:
        value = json.loads(content if whole else lines[at])
    except (ValueError, RecursionError):
        return content[: rng.randrange(len(content) + 1)]
    holders = [holder for holder in _holders([value]) if holder]
    holder = rng.choice(holders)
    key = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    odd = (None, True, -1, 0, 10**30, 1.5, float("nan"), "", "x", "\ud800", "../x", [], {}, [[]], {"a": 1}, "9" * 5000)
    if rng.random() < 0.25 and holder is not holders[0]:
        del holder[key]
    elif rng.random() < 0.1 and isinstance(holder, dict):
        holder[rng.choice(("x", key + "x", ""))] = holder.pop(key)
    else:
        holder[key] = rng.choice(odd)
    text = json.dumps(holders[0][0])
    if rng.random() < 0.02:
        text = "[" * 100_000 + "]" * 100_000
    lines[at : at + 1] = [text.encode()]
    return text.encode() if whole else b"\n".join(lines)


def _holders(value: Any) -> Iterator[Any]:
    """Every list and object inside a JSON value, outermost first."""
    if isinstance(value, list | dict):
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _holders(inner)


# ------------------------------------------------------------------- one case


def isolated(act: Callable[[], int], log: Path, size: int) -> tuple[int, int]:
    """Run in a forked process under limits: (exit code, negative for a signal; bytes by which it grew)."""
    pages = [int(number) * resource.getpagesize() for number in Path("/proc/self/statm").read_text().split()[:2]]
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            resource.setrlimit(resource.RLIMIT_AS, (pages[0] + ADDRESSES + 2 * size,) * 2)
            resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_SECONDS,) * 2)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            code = act()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code & 0xFF)
    _, status, usage = os.wait4(pid, 0)
    return os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024 - pages[1]


def run_command(folder: Path, command: str) -> int:
    """What `python -m MODULE ARGUMENTS` does in a folder."""
    module, *arguments = shlex.split(command.format(folder=folder))
    os.chdir(folder)
    sys.argv = [module, *arguments]
    return int(importlib.import_module(module).main())


def run_case(kinds: dict[str, Kind], name: str, number: int, seed: int, inputs: Path, scratch: Path) -> Case:
    """One damaged file, read once; `scratch` holds it afterwards."""
    kind, rng = kinds[name], random.Random(f"{seed}/{name}/{number}")
    folder, log = scratch / "case", scratch / "log"
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(inputs / name, folder, symlinks=True)
    victim = rng.choice(sorted(path for pattern in kind.victims for path in folder.glob(pattern) if path.is_file()))
    victim.write_bytes(damaged(rng, victim.name, victim.read_bytes()))
    command = rng.choice(kind.commands)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    code, grown = isolated(lambda: run_command(folder, command), log, size)
    output = log.read_text(errors="replace")
    if code < 0:
        problem = f"died of {signal.Signals(-code).name}"
    elif "Traceback (most recent call last)" in output or "panicked at" in output:
        problem = "traceback"
    elif code not in kind.codes:
        problem = f"exit code {code}"
    elif grown > GROWTH + 2 * size:
        problem = f"grew by {grown >> 20} MB"
    else:
        problem = kind.lost(folder) if code == 0 else "" if output.strip() else "no word"
    return Case(name, number, command, str(victim.relative_to(folder)), problem, code, output)


# ------------------------------------------------------------------- kinds of files


def call(*arguments: object) -> None:
    """A command of this project that must succeed."""
    line = [sys.executable, "-m", *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True, cwd="/", env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr


def texts() -> list[str]:
    """Documents of several lengths, one of them without text."""
    rng = random.Random(5)
    words = "the run reads a shard and é 文 the loss of step 12 falls while ranks sum".split()
    return [" ".join(rng.choices(words, k=length)) for length in (1, 3, 40, 0, 200, 7, 90, 15)]


def jsonl() -> bytes:
    """The same as JSONL."""
    return "".join(json.dumps({"text": text, "id": at}) + "\n" for at, text in enumerate(texts())).encode()


def counted(folder: Path, documents: int | None) -> str:
    """What `prepare` or `import` did not count of so many documents; None: the input has no meaning."""
    manifest = json.loads((folder / "out/manifest.json").read_text())
    kept, numbers = manifest["documents"], manifest["statistics"]
    read = numbers.get("read", kept)
    if documents is None:
        return f"{read} documents of an input that cannot be read as a whole"
    if read != documents or kept + numbers.get("empty", 0) + numbers.get("quarantined", 0) != read:
        return f"{kept} documents kept, {read} read, of {documents}"
    return ""


def lines_of(content: bytes | None) -> int | None:
    """Records of JSONL, or None if one is none."""
    if content is None:
        return None
    try:
        lines = [line.decode("utf-8", "replace") for line in content.split(b"\n")]  # `prepare` counts what it repairs
        records = [json.loads(line) for line in lines if line.strip()]
    except (ValueError, RecursionError):
        return None
    return len(records) if all(isinstance(r, dict) and isinstance(r.get("text"), str) for r in records) else None


def gunzipped(content: bytes) -> bytes | None:
    """What a gzip file holds, or None if it is damaged."""
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error):
        return None


def unzstd(content: bytes) -> bytes | None:
    """What the frames of a zstd file hold, or None if one is damaged or unfinished."""
    out = b""
    try:
        while content:
            frame = zstandard.ZstdDecompressor().decompressobj()
            out += frame.decompress(content)
            if not frame.eof:
                return None
            content = frame.unused_data
    except zstandard.ZstdError:
        return None
    return out


def documents_by(reference: Callable[[Path], int | None]) -> Callable[[Path], str]:
    """A check of the number of documents against another reader, run where it may crash."""

    def lost(folder: Path) -> str:
        if not (folder / "out").exists():
            return ""
        answer = folder / "reference.json"

        def act() -> int:
            answer.write_text(json.dumps(reference(folder)))
            return 0

        code, _ = isolated(act, folder / "reference.log", 1 << 20)
        return counted(folder, json.loads(answer.read_text()) if code == 0 else None)

    return lost


def arrow_rows(folder: Path) -> int:
    import pyarrow

    content = (folder / "a.arrow").read_bytes()
    if content.startswith(b"ARROW1"):  # a file is a stream with a footer that says the same once more
        content = content[8:]
    table = pyarrow.ipc.open_stream(pyarrow.py_buffer(content)).read_all()
    table.validate(full=True)
    return int(table.num_rows)


def parquet_rows(folder: Path) -> int | None:
    import pyarrow
    from pyarrow import parquet

    # Only the column that is read, and its bytes as they are: `prepare` counts what it repairs.
    column = parquet.read_table(folder / "a.parquet", columns=["text"], use_threads=False)["text"]
    return len(column) if pyarrow.types.is_string(column.type) and not column.null_count else None


def megatron_documents(folder: Path) -> int:
    (count,) = struct.unpack_from("<Q", (folder / "a.idx").read_bytes(), 18)
    return int(count)


def make_kinds(shared: Path) -> dict[str, Kind]:
    """All kinds of files; `shared` gets the tokenizer and the runs that they refer to."""
    shared.mkdir()
    (shared / "train.jsonl").write_bytes(jsonl() * 20)
    tokenizer, corpus = shared / "tokenizer", shared / "corpus"
    call(
        "data.cli", "train-tokenizer", shared / "train.jsonl", "--kind", "bpe", "--vocab-size", 300, "--out", tokenizer
    )
    call("data.cli", "prepare", shared / "train.jsonl", "--tokenizer", tokenizer, "--out", corpus, "--workers", 1)
    _make_runs(shared)

    def prepare(name: str, *more: str) -> tuple[str, ...]:
        return (" ".join(["data.cli prepare", name, "--tokenizer", str(tokenizer), "--out out --workers 1", *more]),)

    def tokens(name: str) -> tuple[str, ...]:
        common = f"--tokenizer {tokenizer} --workers 1"
        return (
            f"data.cli validate . --vocab-size 300 --eod {EOD} --separators trailing --workers 1",
            f"data.cli validate {name} {common} --json",
            f"data.cli import {name} {common} --separators trailing --out out",
        )

    def text_kind(name: str, content: bytes, unpack: Callable[[bytes], bytes | None], lines: bool = True) -> Kind:
        def reference(folder: Path) -> int | None:
            held = unpack((folder / name).read_bytes())
            return lines_of(held) if lines else None if held is None else 1

        return Kind(
            8 if lines else 4,
            lambda folder: void((folder / name).write_bytes(content)),
            (name,),
            prepare(name),
            READS,
            documents_by(reference),
        )

    documents = [[5, 9, 11, EOD], [7, EOD], [*range(20, 220), EOD]] * 4
    flat = np.array([token for document in documents for token in document], dtype=np.uint16)
    two_frames = zstandard.compress(jsonl()) + zstandard.compress(jsonl())
    plain = "\n".join(texts()).encode()
    run = shared / "run"
    return {
        "text": text_kind("a.txt", plain, bytes, lines=False),
        "jsonl": text_kind("a.jsonl", jsonl(), bytes),
        "gz": text_kind("a.jsonl.gz", gzip.compress(jsonl()) + gzip.compress(jsonl()), gunzipped),
        "text.gz": text_kind("a.txt.gz", gzip.compress(plain), gunzipped, lines=False),
        "zst": text_kind("a.jsonl.zst", two_frames, unzstd),
        "text.zst": text_kind("a.txt.zst", zstandard.compress(plain), unzstd, lines=False),
        "parquet": Kind(
            10,
            _make_parquet,
            ("a.parquet",),
            (*prepare("a.parquet"), f"data.cli validate a.parquet --format text --tokenizer {tokenizer} --workers 1"),
            REPORTS,
            documents_by(parquet_rows),
        ),
        "arrow": Kind(
            10,
            lambda folder: _make_arrow(folder, documents, stream=False),
            ("a.arrow",),
            tokens("a.arrow"),
            REPORTS,
            documents_by(arrow_rows),
        ),
        "arrow stream": Kind(
            8,
            lambda folder: _make_arrow(folder, documents, stream=True),
            ("a.arrow",),
            tokens("a.arrow"),
            REPORTS,
            documents_by(arrow_rows),
        ),
        "npy": Kind(
            8,
            lambda folder: np.save(folder / "a.npy", flat),
            ("a.npy",),
            tokens("a.npy"),
            REPORTS,
        ),
        "megatron": Kind(
            10,
            lambda folder: _make_megatron(folder, documents),
            ("a.idx", "a.idx", "a.bin"),
            tokens("a.idx"),
            REPORTS,
            documents_by(megatron_documents),
        ),
        "corpus": Kind(
            8,
            lambda folder: void(shutil.copytree(corpus, folder / "corpus")),
            ("corpus/*", "corpus/shards/*", "corpus/tokenizer/*"),
            (
                "data.cli validate corpus --workers 1",
                "data.cli inspect corpus",
                "data.cli inspect corpus --doc 3",
                "data.cli bench corpus --sequence-length 64 --seconds 0.01",
            ),
            REPORTS,
        ),
        "hugging face": Kind(
            8,
            lambda folder: void(shutil.copytree(shared / "hf", folder / "hf")),
            ("hf/*",),
            (
                "fsdp_pretrain.cli checkpoints new import hf --show-model",
                f"fsdp_pretrain.cli checkpoints {{folder}}/new import hf --config {shared}/run.toml run.dir={{folder}}/new",
            ),
            READS,
        ),
        "checkpoint": Kind(
            4,
            lambda folder: void(shutil.copytree(run, folder / "run", symlinks=True)),
            ("run/checkpoints/*/*", "run/checkpoints/*/.metadata"),
            (
                "fsdp_pretrain.cli checkpoints run verify",
                "fsdp_pretrain.cli checkpoints run list --json",
                "fsdp_pretrain.cli checkpoints run export 4 out",
                "eval.cli run run --tasks heldout_choice --limit 1",
            ),
            REPORTS,
        ),
        "run directory": Kind(
            10,
            lambda folder: void(shutil.copytree(run, folder / "run", symlinks=True)),
            ("run/*", "run/segments/*/*", "run/checkpoints/*/*.json", "run/checkpoints/*/config.toml", "run/*/*.json*"),
            (
                "fsdp_pretrain.cli status run",
                "fsdp_pretrain.cli journal run",
                "fsdp_pretrain.cli goodput run",
                "fsdp_pretrain.cli alarms run",
                "fsdp_pretrain.cli checkpoints run list",
                "fsdp_pretrain.cli where run --step 5",
                "fsdp_pretrain.cli note run text",
                "fsdp_pretrain.cli rollback run --to 4 --dry-run",
                "fsdp_pretrain.cli fork run --at 4 new",
                "eval.cli report run",
            ),
            REPORTS,
        ),
        "resume": Kind(
            4,
            lambda folder: void(shutil.copytree(run, folder / "run", symlinks=True)),
            ("run/*", "run/segments/*/*.json", "run/checkpoints/*/*", "run/checkpoints/*/.metadata"),
            (f"fsdp_pretrain.train {shared}/run.toml run.dir={{folder}}/run 'train.duration=8 steps'",),
            READS,
            lambda folder: _changed_curve(folder / "run", shared / "untouched"),
        ),
    }


def void(_: object) -> None:
    """For functions whose value nobody needs."""


def _make_parquet(folder: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": texts(), "n": list(range(8))}), folder / "a.parquet", row_group_size=3)


def _make_arrow(folder: Path, documents: list[list[int]], *, stream: bool) -> None:
    import pyarrow

    table = pyarrow.table({"tokens": pyarrow.array(documents, pyarrow.list_(pyarrow.int32()))})
    make = pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
    with pyarrow.OSFile(str(folder / "a.arrow"), "wb") as sink, make(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)


def _make_megatron(folder: Path, documents: list[list[int]]) -> None:
    from data.shards import ShardWriter

    with ShardWriter(folder / "a", np.dtype("<u2")) as writer:
        for document in documents:
            writer.append(np.array(document, dtype="<u2"))
        writer.finish()


RUN = """
[run]
name = "run"
dir = "{run}"
[model]
family = "llama"
layers = 1
hidden = 16
heads = 2
ffn = 32
vocab = 320
[data]
sequence_length = 32
lanes = 4
[[data.sources]]
name = "text"
path = "{corpus}"
[train]
duration = "6 steps"
global_batch = "4 samples"
micro_batch = 2
[optimizer]
lr = 1e-2
warmup = "2 steps"
decay = "8 steps"
[checkpoint]
every = "2 steps"
keep_last = 9
[eval]
heldout = "{heldout}"
[record]
aim = false
[watchdog]
enabled = false
"""


def _make_runs(shared: Path) -> None:
    """A run that went back once and can go on, one that did go on, and its Hugging Face folder."""
    run, config = shared / "run", shared / "run.toml"
    config.write_text(RUN.format(run=run, corpus=shared / "corpus", heldout=shared / "train.jsonl"))
    call("fsdp_pretrain.train", config)
    call("fsdp_pretrain.cli", "rollback", run, "--to", 4, "--reason", "fuzz")
    call("fsdp_pretrain.train", config)
    call("fsdp_pretrain.cli", "checkpoints", run, "export", 6, shared / "hf")
    shutil.copytree(run, shared / "untouched")
    call("fsdp_pretrain.train", config, f"run.dir={shared}/untouched", "train.duration=8 steps")


def _changed_curve(run: Path, untouched: Path) -> str:
    """Which steps of a resumed run are not those of a run whose files nobody touched."""
    from fsdp_pretrain.record.files import RunDir
    from fsdp_pretrain.record.metrics import read_metrics

    ours, theirs = (
        {r.step: (r.loss.sum, r.data_digest, r.lr) for r in read_metrics(RunDir(path))} for path in (run, untouched)
    )
    wrong = [step for step in theirs if step > 6 and ours.get(step) != theirs[step]]
    return f"steps {wrong} are not those of an untouched run" if wrong else ""


# ------------------------------------------------------------------- all of them


def plan(kinds: dict[str, Kind], cases: int, only: list[str]) -> list[tuple[str, int]]:
    """(kind, number) of every case."""
    chosen = {name: kind for name, kind in kinds.items() if not only or name in only}
    total = sum(kind.share for kind in chosen.values())
    return [(name, number) for name, kind in chosen.items() for number in range(-(-cases * kind.share // total))]


def main() -> int:
    """Run the cases; 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=10_000, help="how many files, over all kinds (default: 10000)")
    parser.add_argument("--only", nargs="+", default=[], metavar="KIND", help="only these kinds of files")
    parser.add_argument("--case", type=int, help="only this case of the kind named by --only; its files are kept")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--show", type=int, default=40, help="kinds of failures to show at most (default: 40)")
    args = parser.parse_args()
    if any(os.environ.get(key) != value for key, value in ENVIRONMENT.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ENVIRONMENT})
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    kinds = make_kinds(folder / "shared")
    for name, kind in kinds.items():
        (folder / "inputs" / name).mkdir(parents=True)
        kind.make(folder / "inputs" / name)
    for module in ("data.cli", "fsdp_pretrain.cli", "fsdp_pretrain.train", "eval.cli", "tokenizers", "pyarrow.parquet"):
        importlib.import_module(module)
    if args.case is not None:
        case = run_case(kinds, args.only[0], args.case, args.seed, folder / "inputs", folder / "kept")
        print(f"{case.command}\n{case.file}: exit {case.code}, {case.problem or 'as it should be'}\n{case.output}")
        print(f"its files: {folder / 'kept/case'}")
        return int(bool(case.problem))
    failed = run_all(kinds, plan(kinds, args.cases, args.only), args, folder)
    shutil.rmtree(folder)
    return int(failed)


def run_all(kinds: dict[str, Kind], cases: list[tuple[str, int]], args: argparse.Namespace, folder: Path) -> bool:
    """Share the cases among forked workers, and say what failed."""
    begun, found = time.monotonic(), []
    readers = []
    for worker in range(args.workers):
        ours, theirs = os.pipe()
        if os.fork() == 0:
            os.close(ours)
            with os.fdopen(theirs, "w") as out:
                for name, number in cases[worker :: args.workers]:
                    case = run_case(kinds, name, number, args.seed, folder / "inputs", folder / str(worker))
                    out.write(json.dumps(vars(case)) + "\n")
                    out.flush()
            os._exit(0)
        os.close(theirs)
        readers.append(os.fdopen(ours))
    bar = tqdm(total=len(cases), unit=" files", disable=not sys.stderr.isatty())

    def collect(reader: io.TextIOBase) -> None:
        for line in reader:
            found.append(Case(**json.loads(line)))
            bar.update()

    with ThreadPoolExecutor(args.workers) as pool:
        list(pool.map(collect, readers))
    failures = [case for case in found if case.problem]
    alike: dict[tuple[str, str, str], list[Case]] = {}
    for case in failures:
        last = (case.output.strip().splitlines() or [""])[-1][:300]
        alike.setdefault((case.name, case.problem, re.sub(r"\d+", "N", last)), []).append(case)
    for (name, problem, last), cases_alike in list(alike.items())[: args.show]:
        case = cases_alike[0]
        print(f"{len(cases_alike)} x {name}, case {case.number} ({case.file}): {problem}; {case.command}\n    {last}")
    for name in dict(cases):
        mine = [case for case in found if case.name == name]
        codes = ", ".join(f"{count} x {code}" for code, count in sorted(Counter(case.code for case in mine).items()))
        print(f"{name:15} {len(mine):6} files: exit {codes}; {sum(bool(case.problem) for case in mine)} failed")
    print(f"{len(found)} files in {time.monotonic() - begun:.0f} s with seed {args.seed}, {len(failures)} failed")
    return bool(failures) or len(found) < len(cases)


if __name__ == "__main__":
    sys.exit(main())
