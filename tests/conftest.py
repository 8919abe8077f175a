"""Shared laboratory: small real corpora, run configurations, and real processes to train and break."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
WORDS = (
    *"the run writes every checkpoint before it reads a shard and the loss falls while the mesh of ranks sums".split(),
    *"its gradients over replicas def return import class self None True data = ( ) [ ] : . , 0 1 2 3 state".split(),
    "\n",
    "   ",
    "",
)


def make_text(seed: int, words: int) -> str:
    """Repeatable text with white space, code and a little non-ASCII."""
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(words)) + rng.choice(["\n", "", " é", " 文\n"])


def write_jsonl(path: Path, texts: list[str]) -> Path:
    """One `{"text": ...}` per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def write_tokens(path: Path, documents: list[list[int]], tokenizer: Any, dtype: str = "<u2", shards: int = 2) -> Path:
    """A corpus of the given token lists as they are, dealt over its shards in turn."""
    import numpy as np

    from data.corpus import write_corpus
    from data.shards import ShardWriter

    (path / "shards").mkdir(parents=True)
    entries = []
    for number in range(shards):
        with ShardWriter(path / "shards" / f"s{number}", np.dtype(dtype)) as writer:
            for document in documents[number::shards]:
                writer.append(np.array(document, dtype=dtype))
            entries.append(writer.finish())
    write_corpus(path, tokenizer, entries, np.dtype(dtype), {})
    return path


def clean_environment(**extra: str) -> dict[str, str]:
    """The environment of a user's shell: this checkout, no rank variables."""
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC", "PYTEST")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
    environment.update(
        PYTHONPATH=str(ROOT),
        PYTHONSAFEPATH="1",
        OMP_NUM_THREADS="1",
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        TOKENIZERS_PARALLELISM="false",
    )
    return {**environment, **extra}


def command(*arguments: object, timeout: float = 120, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m ARGUMENTS` from outside the checkout and capture what it says."""
    return subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd="/",
        env=clean_environment(**extra),
    )


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Zygote:
    """Starts training ranks by forking a process that has already imported torch; see `zygote.py`."""

    def __init__(self, exits: Path) -> None:
        self.exits = exits
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/zygote.py"), str(exits)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            env=clean_environment(),
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def start(self, arguments: list[str], environment: dict[str, str], log: Path) -> Rank:
        """A new rank."""
        request = {"arguments": arguments, "environment": environment, "log": str(log)}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Rank(int(self._process.stdout.readline()), self.exits)

    def close(self) -> None:
        """End the zygote."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


class Rank:
    """One process of a training job."""

    def __init__(self, pid: int, exits: Path) -> None:
        self.pid, self._exit = pid, exits / str(pid)

    def poll(self) -> int | None:
        """Exit code, or None while it runs."""
        return int(self._exit.read_text()) if self._exit.exists() else None

    def wait(self, timeout: float) -> int:
        """Exit code; raises TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"rank process {self.pid}", timeout)
            time.sleep(0.01)
        return code

    def signal(self, number: int) -> None:
        """Send a signal if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Job:
    """The ranks of one training job, started without torchrun so that survivors can be watched."""

    def __init__(
        self, zygote: Zygote, config: Path, overrides: tuple[str, ...], ranks: int, log: Path, flags: tuple[str, ...]
    ) -> None:
        port = free_port()
        self.log = log
        self.ranks = [
            zygote.start(
                [str(config), *overrides, *flags],
                clean_environment(
                    RANK=str(rank),
                    LOCAL_RANK=str(rank),
                    WORLD_SIZE=str(ranks),
                    LOCAL_WORLD_SIZE=str(ranks),
                    MASTER_ADDR="127.0.0.1",
                    MASTER_PORT=str(port),
                ),
                log,
            )
            for rank in range(ranks)
        ]

    def wait(self, timeout: float = 150) -> list[int]:
        """Exit codes of all ranks."""
        deadline = time.monotonic() + timeout
        try:
            return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.ranks]
        finally:
            self.kill()

    def kill(self, rank: int | None = None, number: int = signal.SIGKILL) -> None:
        """Signal one rank, or all that are alive."""
        for process in self.ranks if rank is None else [self.ranks[rank]]:
            process.signal(number)

    def output(self) -> str:
        """What the ranks printed."""
        return self.log.read_text(errors="replace")


class Lab:
    """A directory with a corpus, and the means to train on it.

    Attributes:
        path: of the laboratory.
        corpus: a prepared corpus with a 512-token tokenizer.
        tokenizer: its tokenizer directory.
        heldout: held-out JSONL.
    """

    def __init__(self, path: Path, shared: Path, zygote: Zygote) -> None:
        self.path, self._zygote = path, zygote
        self.corpus, self.tokenizer, self.heldout = shared / "corpus", shared / "tokenizer", shared / "heldout.jsonl"
        self._jobs: list[Job] = []

    def config(self, name: str = "run", **sections: dict[str, Any]) -> Path:
        """A run configuration of a tiny Llama; keyword arguments replace values of its sections."""
        import tomli_w

        values: dict[str, Any] = {
            "run": {"name": name, "dir": str(self.path / name)},
            "model": {"family": "llama", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "vocab": 512},
            "data": {
                "sequence_length": 32,
                "lanes": 8,
                "sources": [{"name": "text", "path": str(self.corpus)}],
            },
            "train": {"duration": "20 steps", "global_batch": "8 samples", "micro_batch": 2},
            "optimizer": {"lr": 1e-2, "min_lr": 1e-3, "warmup": "4 steps"},
            "parallel": {"timeout": "60 s"},
            "checkpoint": {"every": "10 steps"},
            "record": {"console_every": 5},
        }
        for section, changes in sections.items():
            values[section] = {**values.get(section, {}), **changes}
            values[section] = {key: value for key, value in values[section].items() if value is not None}
        path = self.path / f"{name}.toml"
        path.write_text(tomli_w.dumps(values))
        return path

    def start(self, config: Path, *overrides: str, ranks: int = 1, flags: tuple[str, ...] = ()) -> Job:
        """Start a training job."""
        job = Job(self._zygote, config, overrides, ranks, self.path / f"log-{len(self._jobs)}", flags)
        self._jobs.append(job)
        return job

    def train(self, config: Path, *overrides: str, ranks: int = 1, expect: int = 0, flags: tuple[str, ...] = ()) -> str:
        """Run a training job to its end; what it printed. Fails the test if its exit code is another."""
        job = self.start(config, *overrides, ranks=ranks, flags=flags)
        codes = job.wait()
        assert codes == [expect] * ranks, f"exit codes {codes}\n{job.output()}"
        return job.output()

    def close(self) -> None:
        """End what is still running."""
        for job in self._jobs:
            job.kill()


@pytest.fixture(scope="session")
def shared_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 documents of 5 to 300 words, tokenised with a tokenizer of their own; a held-out file."""
    path = tmp_path_factory.mktemp("shared")
    rng = random.Random(1)
    texts = [make_text(n, rng.choice([5, 20, 60, 300])) for n in range(300)]
    train = write_jsonl(path / "train.jsonl", texts)
    write_jsonl(path / "heldout.jsonl", [make_text(1000 + n, 400) for n in range(12)])
    for arguments in (
        ["train-tokenizer", train, "--kind", "bpe", "--vocab-size", 512, "--out", path / "tokenizer"],
        ["prepare", train, "--tokenizer", path / "tokenizer", "--out", path / "corpus", "--quiet", "--workers", 1],
    ):
        done = command("data.cli", *arguments)
        assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """The process that ranks are forked from."""
    started = Zygote(tmp_path_factory.mktemp("exits"))
    yield started
    started.close()


@pytest.fixture
def lab(tmp_path: Path, shared_corpus: Path, zygote: Zygote) -> Iterator[Lab]:
    """A fresh laboratory for one test."""
    laboratory = Lab(tmp_path, shared_corpus, zygote)
    yield laboratory
    laboratory.close()


@pytest.fixture(scope="module")
def module_lab(tmp_path_factory: pytest.TempPathFactory, shared_corpus: Path, zygote: Zygote) -> Iterator[Lab]:
    """A laboratory whose runs the tests of one module share."""
    laboratory = Lab(tmp_path_factory.mktemp("lab"), shared_corpus, zygote)
    yield laboratory
    laboratory.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """`small_disk("4m")` mounts a real file system of that size."""
    mounted = []

    def mount(size: str) -> Path:
        path = tmp_path / f"disk-{len(mounted)}"
        path.mkdir()
        if subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True
        ).returncode:
            pytest.skip("mounting a tmpfs needs root")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture(scope="session")
def run_command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`run_command("data.cli", "validate", path)` runs `python -m ...` and captures its output."""
    return command


@pytest.fixture(scope="session")
def helpers() -> Any:
    """Functions of this file for tests (which cannot import it: `tests` is no package)."""

    class Helpers:
        root = ROOT
        text = staticmethod(make_text)
        jsonl = staticmethod(write_jsonl)
        corpus = staticmethod(write_tokens)
        environment = staticmethod(clean_environment)
        port = staticmethod(free_port)

        @staticmethod
        def metrics(run: Path) -> list[dict[str, Any]]:
            """The kept metrics line of a run."""
            from fsdp_pretrain.record.files import RunDir
            from fsdp_pretrain.record.metrics import read_metrics

            return list(read_metrics(RunDir(run)))

        @staticmethod
        def losses(run: Path) -> list[tuple[int, float, float]]:
            """(step, loss sum, gradient norm) of a run, unrounded."""
            return [(r["step"], r["loss"]["sum"], r["grad_norm"]) for r in Helpers.metrics(run)]

        @staticmethod
        def journal(run: Path, kind: str | None = None) -> list[dict[str, Any]]:
            """Journal entries of a run."""
            from fsdp_pretrain.record.files import RunDir
            from fsdp_pretrain.record.journal import read

            return [entry for entry in read(RunDir(run)) if kind in (None, entry["kind"])]

        @staticmethod
        def wait_for(condition: Callable[[], Any], timeout: float = 60, what: str = "") -> Any:
            """Poll until a condition holds; its value."""
            deadline = time.monotonic() + timeout
            while time.monotonic() < deadline:
                if value := condition():
                    return value
                time.sleep(0.02)
            raise AssertionError(f"not within {timeout}s: {what}")

    return Helpers
