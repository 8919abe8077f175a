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
from typing import Any, NamedTuple

import pytest
import sight
from endpoint import SECRET, Endpoint
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
# Zygotes and tests fork, so neither pyarrow's allocator nor a progress bar shall start a thread.
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
tqdm.monitor_interval = 0
WORDS = (
    *"the run writes every checkpoint before it reads a shard and the loss falls while the mesh of ranks sums".split(),
    *"its gradients over replicas def return import class self None True data = ( ) [ ] : . , 0 1 2 3 state".split(),
    "\n",
    "   ",
    "",
)


# Files that take longest, longest first: workers that begin with them end together.
LONG = "docs training interventions launch hangs checkpoints eval saves kills prepare aim".split()


def pytest_configure(config: pytest.Config) -> None:
    """What is slow is not quick, also in a file that is. Ctrl-C reaches what tests start."""
    if config.option.markexpr == "quick":
        config.option.markexpr = "quick and not slow"
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, and all they start, ignore it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take longest first."""
    order = {f"test_{name}": place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.stem, len(LONG)))


# An lm-eval task that never gets its documents.
DEADLOCK = """
import threading

def load(**_):
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
"""
DEADLOCK_TASK = """
task: deadlock
custom_dataset: !function deadlock.load
output_type: loglikelihood_rolling
validation_split: validation
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}]
"""


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


def python_path(*folders: object) -> str:
    """PYTHONPATH with these folders and this checkout first; the packages that it carries already stay."""
    return os.pathsep.join(map(str, filter(None, (*folders, ROOT, os.environ.get("PYTHONPATH")))))


def clean_environment(**extra: str) -> dict[str, str]:
    """The environment of a user's shell: this checkout, no rank variables."""
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC", "PYTEST")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
    environment.update(
        PYTHONPATH=python_path(),
        PYTHONSAFEPATH="1",
        OMP_NUM_THREADS="1",
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        TOKENIZERS_PARALLELISM="false",
    )
    return {**environment, **extra}


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# What a zygote imports before it forks the first command of a package. Its environment has what those imports read.
IMPORTS = {
    "data": ["data.cli", "tokenizers", "sentencepiece"],
    "fsdp_pretrain": ["fsdp_pretrain.train", "fsdp_pretrain.cli", "fsdp_pretrain.bench", "tokenizers", "torch._dynamo"],
    "eval": ["eval.cli", "eval.checkpoints", "eval.harness", "eval.samples", "eval.tasks", "datasets", "torch._dynamo"],
}
QUIET = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}


class Process:
    """A command of this project that was forked from a zygote."""

    def __init__(self, pid: int, files: Path) -> None:
        self.pid, self._files = pid, files

    def poll(self) -> int | None:
        """Exit code, or None while it runs."""
        exit_code = self._files.with_suffix(".exit")
        return int(exit_code.read_text()) if exit_code.exists() else None

    def wait(self, timeout: float = sight.PATIENCE) -> int:
        """Exit code; raises TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.01)
        return code

    def signal(self, number: int) -> None:
        """Send a signal if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def output(self) -> tuple[str, str]:
        """What it wrote to standard output and standard error so far."""
        out, err = (self._files.with_suffix(end).read_text() for end in (".out", ".err"))
        return out, err


class Zygotes:
    """Starts `python -m MODULE` by forking a process that has already imported it; see `zygote.py`.

    One zygote per package, started when it is first needed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._started = folder, 0
        self._zygotes: dict[str, subprocess.Popen[str]] = {}

    def start(
        self,
        module: str,
        *arguments: object,
        environment: dict[str, str] | None = None,
        log: Path | None = None,
        cwd: Path = Path("/"),
    ) -> Process:
        """Run a module; with `log`, both outputs are appended there."""
        zygote = self._zygote(module.partition(".")[0])
        self._started += 1
        files = self._folder / str(self._started)
        request = {
            "module": module,
            "arguments": [str(argument) for argument in arguments],
            "environment": clean_environment() if environment is None else environment,
            "out": str(log or files.with_suffix(".out")),
            "err": str(log or files.with_suffix(".err")),
            "exit": str(files.with_suffix(".exit")),
            "cwd": str(cwd),
        }
        assert zygote.stdin is not None and zygote.stdout is not None
        zygote.stdin.write(json.dumps(request) + "\n")
        zygote.stdin.flush()
        return Process(int(zygote.stdout.readline()), files)

    def _zygote(self, package: str) -> subprocess.Popen[str]:
        if package not in self._zygotes:
            started = subprocess.Popen(
                [sys.executable, str(ROOT / "tests/zygote.py"), *IMPORTS[package]],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd="/",
                env=clean_environment(**(QUIET if package == "eval" else {})),
            )
            assert started.stdout is not None and started.stdout.readline() == "ready\n"
            self._zygotes[package] = started
        return self._zygotes[package]

    def run(
        self, module: str, *arguments: object, timeout: float = sight.PATIENCE, cwd: Path = Path("/"), **extra: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a module to its end and capture what it says."""
        process = self.start(module, *arguments, environment=clean_environment(**extra), cwd=cwd)
        try:
            code = process.wait(timeout)
        finally:
            process.signal(signal.SIGKILL)
        return subprocess.CompletedProcess([module, *map(str, arguments)], code, *process.output())

    def close(self) -> None:
        """End the zygotes."""
        for zygote in self._zygotes.values():
            assert zygote.stdin is not None
            zygote.stdin.close()
            zygote.wait(60)


class Job:
    """The ranks of one training job, started without torchrun so that survivors can be watched."""

    def __init__(
        self,
        zygotes: Zygotes,
        config: Path,
        overrides: tuple[str, ...],
        ranks: int,
        log: Path,
        flags: tuple[str, ...],
        nodes: int = 1,
    ) -> None:
        port, local = free_port(), ranks // nodes
        self.log = log
        self.ranks = [
            zygotes.start(
                "fsdp_pretrain.train",
                config,
                *overrides,
                *flags,
                environment=clean_environment(
                    RANK=str(rank),
                    LOCAL_RANK=str(rank % local),
                    WORLD_SIZE=str(ranks),
                    LOCAL_WORLD_SIZE=str(local),
                    GROUP_RANK=str(rank // local),
                    MASTER_ADDR="127.0.0.1",
                    MASTER_PORT=str(port),
                ),
                log=log,
            )
            for rank in range(ranks)
        ]

    def wait(self, timeout: float = sight.PATIENCE) -> list[int]:
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

    def __init__(self, path: Path, shared: Path, zygotes: Zygotes) -> None:
        self.path, self._zygotes = path, zygotes
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
            "watchdog": {"enabled": False},  # a process more for every run: tests of the watchdog turn it on
        }
        for section, changes in sections.items():
            values[section] = {**values.get(section, {}), **changes}
            values[section] = {key: value for key, value in values[section].items() if value is not None}
        path = self.path / f"{name}.toml"
        path.write_text(tomli_w.dumps(values))
        return path

    def start(self, config: Path, *overrides: str, ranks: int = 1, flags: tuple[str, ...] = (), nodes: int = 1) -> Job:
        """Start a training job, as if on so many nodes (their host names: `hostname.py`)."""
        job = Job(self._zygotes, config, overrides, ranks, self.path / f"log-{len(self._jobs)}", flags, nodes)
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
def shared_corpus(tmp_path_factory: pytest.TempPathFactory, zygotes: Zygotes) -> Path:
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
        done = zygotes.run("data.cli", *arguments)
        assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="session")
def zygotes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygotes]:
    """What commands and ranks are forked from."""
    started = Zygotes(tmp_path_factory.mktemp("processes"))
    yield started
    started.close()


@pytest.fixture
def lab(tmp_path: Path, shared_corpus: Path, zygotes: Zygotes) -> Iterator[Lab]:
    """A fresh laboratory for one test."""
    laboratory = Lab(tmp_path, shared_corpus, zygotes)
    yield laboratory
    laboratory.close()


@pytest.fixture(scope="module")
def module_lab(tmp_path_factory: pytest.TempPathFactory, shared_corpus: Path, zygotes: Zygotes) -> Iterator[Lab]:
    """A laboratory whose runs the tests of one module share."""
    laboratory = Lab(tmp_path_factory.mktemp("lab"), shared_corpus, zygotes)
    yield laboratory
    laboratory.close()


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[Path]]:
    """`gates(5, 9)`: runs that start from now on wait before these steps until the files that it returns exist, so that
    they do not end before the test has done something to them. `gates()`: they do not wait any more."""
    made: list[Path] = []

    def make(*steps: int) -> list[Path]:
        new = [tmp_path / f"gate-{len(made) + number}" for number in range(len(steps))]
        made.extend(new)
        faults = [
            {"rank": "all", "step": step, "kind": "await_file", "path": str(path)}
            for step, path in zip(steps, new, strict=True)
        ]
        monkeypatch.setenv("EXECUTE_FIRST", str(ROOT / "tests/faults.py"))
        monkeypatch.setenv("FAULT", json.dumps(faults))
        return new

    return make


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


class Removable:
    """A mounted file system that goes away under those who use it, and comes back with all that was on it.

    Args:
        path: where it is mounted.
        kept: a second place, by which it outlives being unmounted from the first.
    """

    def __init__(self, path: Path, kept: Path) -> None:
        self.path, self._kept = path, kept
        for place in (path, kept):
            place.mkdir(parents=True, exist_ok=True)
        if subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(kept)], capture_output=True
        ).returncode:
            pytest.skip("mounting a tmpfs needs root")
        self.bring_back()

    def take_away(self) -> None:
        """Unmount it as busy as it is: an empty directory is left."""
        subprocess.run(["umount", "-l", str(self.path)], check=True)

    def bring_back(self) -> None:
        """Mount it again."""
        subprocess.run(["mount", "--bind", str(self._kept), str(self.path)], check=True)

    def close(self) -> None:
        """Unmount it everywhere."""
        for place in (self.path, self._kept):
            while subprocess.run(["umount", "-l", str(place)], capture_output=True).returncode == 0:
                pass


@pytest.fixture
def removable(tmp_path: Path) -> Iterator[Callable[[Path], Removable]]:
    """`removable(path)` mounts a file system there that can be taken away."""
    made: list[Removable] = []

    def mount(path: Path) -> Removable:
        made.append(Removable(path, tmp_path / f"kept-{len(made)}"))
        return made[-1]

    yield mount
    for one in made:
        one.close()


class Node(NamedTuple):
    """One of two nodes that share a cable and this machine's files.

    Attributes:
        prefix: what to put before a command to run it there.
        options: of the launcher.
        environment: what its ranks need.
    """

    prefix: list[str]
    options: list[str]
    environment: dict[str, str]

    @property
    def name(self) -> str:
        """Host name."""
        return self.prefix[3]

    def cable(self, state: str) -> None:
        """Pull it (`down`) or plug it in (`up`)."""
        end = self.environment["GLOO_SOCKET_IFNAME"]
        subprocess.run(["ip", "-n", self.name, "link", "set", end, state], check=True)


@pytest.fixture
def two_nodes() -> Iterator[Callable[..., list[Node]]]:
    """`two_nodes()` makes two network namespaces joined by a cable; `nnodes` and `ranks` per node for the launcher."""
    names, hosts = [f"fsdp{os.getpid()}{end}" for end in "ab"], ["10.77.0.1", "10.77.0.2"]
    cable = [f"fp{os.getpid() % 10**6}{end}" for end in "ab"]

    def ip(*arguments: str) -> int:
        return subprocess.run(["ip", *arguments], capture_output=True).returncode

    if ip("netns", "add", names[0]):
        pytest.skip("network namespaces need root and iproute2")

    def make(*, nnodes: str = "2", ranks: int = 2) -> list[Node]:
        ip("netns", "add", names[1])
        assert ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1]) == 0
        for name, host, end in zip(names, hosts, cable, strict=True):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"{host}/24", "dev", end)
            assert ip("-n", name, "link", "set", end, "up") == ip("-n", name, "link", "set", "lo", "up") == 0
        common = ["--nnodes", nnodes, "--nproc-per-node", str(ranks), "--rdzv-endpoint", hosts[0]]
        return [
            Node(
                ["ip", "netns", "exec", name, "unshare", "-u", "sh", "-c", f'hostname {name}; exec "$@"', "sh"],
                [*common, "--local-addr", host],
                {"GLOO_SOCKET_IFNAME": end},
            )
            for name, host, end in zip(names, hosts, cable, strict=True)
        ]

    try:
        yield make
    finally:
        for name in names:
            ip("netns", "del", name)


@pytest.fixture(scope="session")
def run_command(zygotes: Zygotes) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`run_command("data.cli", "validate", path)` runs `python -m ...` and captures its output."""
    return zygotes.run


@pytest.fixture(scope="session")
def start_command(zygotes: Zygotes) -> Callable[..., Process]:
    """`start_command("eval.cli", "watch", run)` starts `python -m ...` and returns at once."""
    return zygotes.start


@pytest.fixture(scope="session")
def helpers() -> Any:
    """Functions of this file for tests (which cannot import it: `tests` is no package)."""

    class Helpers:
        root = ROOT
        text = staticmethod(make_text)
        jsonl = staticmethod(write_jsonl)
        corpus = staticmethod(write_tokens)
        environment = staticmethod(clean_environment)
        python_path = staticmethod(python_path)
        port = staticmethod(free_port)

        @staticmethod
        def metrics(run: Path) -> list[dict[str, Any]]:
            """The kept line of a run: the values of its records."""
            from fsdp_pretrain.record.files import RunDir
            from fsdp_pretrain.record.metrics import read_metrics

            return [json.loads(record.to_line()) for record in read_metrics(RunDir(run))]

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

        wait_for = staticmethod(sight.until)
        alarms, agents, intent = staticmethod(sight.alarms), staticmethod(sight.agents), staticmethod(sight.intent)

        @staticmethod
        def deadlock_task(folder: Path) -> None:
            """Make a folder for `eval.include` with a task `deadlock` that hangs for ever."""
            folder.mkdir()
            (folder / "deadlock.py").write_text(DEADLOCK)
            (folder / "deadlock.yaml").write_text(DEADLOCK_TASK)

    return Helpers


@pytest.fixture
def endpoint(helpers: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    """Where the webhook `[watchdog.notify.webhook]` of a test's runs goes; down until `up` is called."""
    for variable in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    served = Endpoint(helpers.port())
    monkeypatch.setenv("ALARM_WEBHOOK_URL", f"http://127.0.0.1:{served.port}/{SECRET}")
    yield served
    served.down()
