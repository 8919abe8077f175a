"""The kinds of files that `fuzz.py` damages: how to make a valid one, which commands read it, what they must count."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import zstandard

ROOT = Path(__file__).resolve().parent.parent
PROCESSOR_SECONDS, ADDRESSES = 30, 1 << 30
EOD = 0
READS, REPORTS = frozenset((0, 78, 93)), frozenset((0, 1, 2, 78, 93))
"""Exit codes of commands that make something, and of commands that report findings."""


@dataclass(frozen=True)
class Kind:
    """One kind of file."""

    share: int  # of all cases
    make: Callable[[Path], object]  # writes a valid input into an empty folder
    victims: tuple[str, ...]  # patterns of the files to damage
    commands: tuple[str, ...]  # module and arguments; each case runs one, in the folder
    codes: frozenset[int]  # allowed exit codes
    # what a command that exited with 0 did not count, given the damaged folder; "" if nothing
    lost: Callable[[Path], str] = lambda folder: ""


def isolated(act: Callable[[], int], log: Path, size: int) -> tuple[int, int]:
    """Run in a forked process under limits: (exit code, negative for a signal; growth in bytes)."""
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


def call(*arguments: object) -> None:
    """Run a command of this project that must succeed."""
    line = [sys.executable, "-m", *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True, cwd="/", env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr


def texts() -> list[str]:
    """Documents of several lengths, one of them without text."""
    rng = random.Random(5)
    words = "the run reads a shard and é 文 the loss of step 12 falls while ranks sum".split()
    return [" ".join(rng.choices(words, k=length)) for length in (1, 3, 40, 0, 200, 7, 90, 15)]


def jsonl() -> bytes:
    return "".join(json.dumps({"text": text, "id": at}) + "\n" for at, text in enumerate(texts())).encode()


def uncounted(folder: Path, unpack: Callable[[bytes], bytes]) -> str:
    """What `prepare` did not count of the records of the JSONL file in a folder, according to another reader."""
    (path,) = folder.glob("a.*")
    try:  # `prepare` counts what it repairs
        lines = [line for line in unpack(path.read_bytes()).decode("utf-8", "replace").split("\n") if line.strip()]
    except (OSError, EOFError, zlib.error) as error:
        return f"a file that cannot be read: {error}"
    manifest = json.loads((folder / "out/manifest.json").read_text())
    kept, numbers = manifest["documents"], manifest["statistics"]
    if numbers["read"] != len(lines) or kept + numbers["empty"] + numbers["quarantined"] != len(lines):
        return f"{kept} documents kept, {numbers['read']} read, of {len(lines)}"
    return ""


def make_kinds(shared: Path) -> dict[str, Kind]:
    """All kinds of files; `shared` gets the tokenizer and the runs they need."""
    shared.mkdir()
    train, tokenizer, corpus = shared / "train.jsonl", shared / "tokenizer", shared / "corpus"
    train.write_bytes(jsonl() * 20)
    call("fsdp_pretrain.data.cli", "train-tokenizer", train, "--kind", "bpe", "--vocab-size", 300, "--out", tokenizer)
    call("fsdp_pretrain.data.cli", "prepare", train, "--tokenizer", tokenizer, "--out", corpus, "--workers", 1)
    _make_runs(shared)
    return {**_text_kinds(tokenizer), **_token_kinds(tokenizer), **_directory_kinds(shared)}


def _text_kinds(tokenizer: Path) -> dict[str, Kind]:
    def kind(name: str, content: bytes, unpack: Callable[[bytes], bytes] | None = None) -> Kind:
        command = f"fsdp_pretrain.data.cli prepare {name} --tokenizer {tokenizer} --out out --workers 1"
        lost = (lambda folder: uncounted(folder, unpack)) if unpack else (lambda folder: "")
        return Kind(8, lambda folder: (folder / name).write_bytes(content), (name,), (command,), READS, lost)

    import pyarrow
    from pyarrow import parquet

    table = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": texts(), "n": list(range(8))}), table, row_group_size=3)
    return {
        "jsonl": kind("a.jsonl", jsonl(), bytes),
        "gz": kind("a.jsonl.gz", gzip.compress(jsonl()) * 2, gzip.decompress),
        "zst": kind("a.jsonl.zst", zstandard.compress(jsonl()) * 2),
        "parquet": kind("a.parquet", table.getvalue()),
    }


def _token_kinds(tokenizer: Path) -> dict[str, Kind]:
    def kind(make: Callable[[Path], object], *victims: str) -> Kind:
        name, common = victims[0], f"--tokenizer {tokenizer} --workers 1"
        commands = (
            f"fsdp_pretrain.data.cli validate . --vocab-size 300 --eod {EOD} --separators trailing --workers 1",
            f"fsdp_pretrain.data.cli validate {name} {common} --json",
            f"fsdp_pretrain.data.cli import {name} {common} --separators trailing --out out",
        )
        return Kind(9, make, victims, commands, REPORTS)

    documents = [[5, 9, 11, EOD], [7, EOD], [*range(20, 220), EOD]] * 4
    flat = np.array([token for document in documents for token in document], dtype=np.uint16)
    return {
        "arrow": kind(lambda folder: _make_arrow(folder, documents), "a.arrow"),
        "npy": kind(lambda folder: np.save(folder / "a.npy", flat), "a.npy"),
        "megatron": kind(lambda folder: _make_megatron(folder, documents), "a.idx", "a.idx", "a.bin"),
    }


def _directory_kinds(shared: Path) -> dict[str, Kind]:
    """Corpora, Hugging Face folders, and run directories: read, and resumed."""

    def kind(share: int, name: str, victims: str, *commands: str, codes: frozenset[int] = REPORTS) -> Kind:
        def make(folder: Path) -> None:
            shutil.copytree(shared / name, folder / name, symlinks=True)

        return Kind(share, make, tuple(f"{name}/{victim}" for victim in victims.split()), commands, codes)

    resume = kind(
        4,
        "run",
        "* segments/*/*.json checkpoints/*/* checkpoints/*/.metadata",
        f"fsdp_pretrain.train {shared}/run.toml run.dir={{folder}}/run 'train.duration=8 steps'",
        codes=READS,
    )
    return {
        "corpus": kind(
            8,
            "corpus",
            "* shards/* tokenizer/*",
            "fsdp_pretrain.data.cli validate corpus --workers 1",
            "fsdp_pretrain.data.cli inspect corpus --doc 3",
        ),
        "hugging face": kind(
            8,
            "hf",
            "*",
            "fsdp_pretrain.cli checkpoints new import hf --show-model",
            f"fsdp_pretrain.cli checkpoints {{folder}}/new import hf --config {shared}/run.toml run.dir={{folder}}/new",
            codes=READS,
        ),
        "checkpoint": kind(
            4,
            "run",
            "checkpoints/*/* checkpoints/*/.metadata",
            "fsdp_pretrain.cli checkpoints run verify",
            "fsdp_pretrain.cli checkpoints run list --json",
            "fsdp_pretrain.cli checkpoints run export 4 out",
            "fsdp_pretrain.eval.cli run run --tasks heldout_choice --limit 1",
        ),
        "run directory": kind(
            10,
            "run",
            "* segments/*/* checkpoints/*/*.json checkpoints/*/config.toml */*.json*",
            "fsdp_pretrain.cli status run",
            "fsdp_pretrain.cli journal run",
            "fsdp_pretrain.cli goodput run",
            "fsdp_pretrain.cli where run --step 5",
            "fsdp_pretrain.cli note run text",
            "fsdp_pretrain.cli rollback run --to 4 --dry-run",
            "fsdp_pretrain.cli fork run --at 4 new",
            "fsdp_pretrain.eval.cli report run",
        ),
        "resume": replace(resume, lost=lambda folder: _changed_curve(folder / "run", shared / "untouched")),
    }


def _make_arrow(folder: Path, documents: list[list[int]]) -> None:
    import pyarrow

    table = pyarrow.table({"tokens": pyarrow.array(documents, pyarrow.list_(pyarrow.int32()))})
    with pyarrow.OSFile(str(folder / "a.arrow"), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)


def _make_megatron(folder: Path, documents: list[list[int]]) -> None:
    from fsdp_pretrain.data.corpus.shards import ShardWriter

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
    """A rolled-back run that can be resumed, one that was resumed, and its Hugging Face folder."""
    run, config = shared / "run", shared / "run.toml"
    config.write_text(RUN.format(run=run, corpus=shared / "corpus", heldout=shared / "train.jsonl"))
    call("fsdp_pretrain.train", config)
    call("fsdp_pretrain.cli", "rollback", run, "--to", 4, "--reason", "fuzz")
    call("fsdp_pretrain.train", config)
    call("fsdp_pretrain.cli", "checkpoints", run, "export", 6, shared / "hf")
    shutil.copytree(run, shared / "untouched")
    call("fsdp_pretrain.train", config, f"run.dir={shared}/untouched", "train.duration=8 steps")


def _changed_curve(run: Path, untouched: Path) -> str:
    """Which steps of a resumed run differ from a run with undamaged files."""
    from fsdp_pretrain.run.files import RunDir
    from fsdp_pretrain.run.metrics import read_metrics

    ours, theirs = (
        {r.step: (r.loss.sum, r.data_digest, r.lr) for r in read_metrics(RunDir(path))} for path in (run, untouched)
    )
    wrong = [step for step in theirs if step > 6 and ours.get(step) != theirs[step]]
    return f"steps {wrong} are not those of an untouched run" if wrong else ""
