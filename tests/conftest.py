"""Fixtures: processes, laboratories, broken machines, and a webhook endpoint."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import processes
import pytest
import sight
from endpoint import SECRET, Endpoint
from laboratory import Lab, make_text, write_jsonl, write_tokens
from machines import Node, Removable, joined_nodes, tmpfs
from object_store import ObjectStore, s3_server
from processes import ROOT, Process, Zygotes, clean_environment, free_port, python_path
from skips import pytest_make_collect_report, pytest_runtest_makereport  # noqa: F401  (hooks)
from tqdm import tqdm

from fsdp_pretrain.run import journal
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.metrics import read_metrics

gc.disable()  # until the tests are imported: looking for garbage would take a fifth of that time
pytest.register_assert_rewrite("watch")
# Zygotes and tests fork, so neither pyarrow's allocator nor a progress bar may start a thread.
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
tqdm.monitor_interval = 0
# The slowest files first, of the default suite and of the slow one, so that parallel workers finish at the same time.
LONG = (
    *"docs launch extensions eval sequences soak nodes fake_step mirror_runs elsewhere fuzz kills quickstart".split(),
    *"training hangs compile report interventions checkpoints trackers mirror_damage ladder sweep saves aim".split(),
)


def pytest_configure(config: pytest.Config) -> None:
    """Slow tests are not quick, even in a quick file; only GPU tests see GPUs; Ctrl-C reaches what tests start."""
    if config.option.markexpr == "quick":
        config.option.markexpr = "quick and not slow"
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, and all they start, ignore it


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the slowest files first; no collection of garbage looks at what was imported."""
    gc.freeze()
    gc.enable()
    order = {f"test_{name}": place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.stem, len(LONG)))


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
        zygotes.run("fsdp_pretrain.data.cli", *arguments, expect=0)
    return path


@pytest.fixture(scope="session")
def tokenizer(shared_corpus: Path) -> Any:
    """The tokenizer of the shared corpus."""
    from fsdp_pretrain.data.text.tokenizer import Tokenizer

    return Tokenizer.load(shared_corpus / "tokenizer")


@pytest.fixture(scope="session")
def zygotes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygotes]:
    """Processes that commands and ranks are forked from."""
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


@pytest.fixture(scope="session", autouse=True)
def _often() -> Iterator[None]:
    """Watchdogs make five passes a second."""
    with processes.constants("fsdp_pretrain.watchdog.pass_runner", INTERVAL=0.2, _ALLOWED=5.0):
        yield


@pytest.fixture
def constants() -> Iterator[Callable[..., None]]:
    """`constants("module", NAME=value)`: other values in all processes that the test starts from now on."""
    with contextlib.ExitStack() as changed:
        yield lambda module, **values: changed.enter_context(processes.constants(module, **values))


@pytest.fixture
def watched(
    lab: Lab, helpers: Any, run_command: Any, monkeypatch: pytest.MonkeyPatch, constants: Callable[..., None]
) -> Any:
    """A run under a fast watchdog, which checks storage five times a second."""
    from watch import Watched

    constants("fsdp_pretrain.checkpoint.upcoming", CHECK_SECONDS=0.2)
    constants("fsdp_pretrain.watchdog.detectors.periodic", AUDIT_SECONDS=1.0)

    return Watched(lab, helpers, run_command, monkeypatch)


@pytest.fixture
def watch(tmp_path: Path) -> Any:
    """Detectors on a clock of the test."""
    from watch import Watch

    return Watch(tmp_path)


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[Path]]:
    """`gates(5, 9)`: runs started from now on wait before these steps until the returned files exist, so that they do
    not end before the test has acted on them. `gates()`: they no longer wait."""
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
    with contextlib.ExitStack() as mounted:
        numbers = itertools.count()
        yield lambda size: mounted.enter_context(tmpfs(tmp_path / f"disk-{next(numbers)}", f"size={size}"))


@pytest.fixture
def removable(tmp_path: Path) -> Iterator[Callable[[Path], Removable]]:
    """`removable(path)` mounts a file system that can be taken away."""
    with contextlib.ExitStack() as mounted:
        numbers = itertools.count()

        def mount(path: Path) -> Removable:
            made = Removable(path, tmp_path / f"kept-{next(numbers)}")
            mounted.callback(made.close)
            return made

        yield mount


@pytest.fixture
def two_nodes() -> Iterator[Callable[..., list[Node]]]:
    """`two_nodes(nnodes="2", ranks=2)` makes two nodes joined by a cable."""
    with joined_nodes() as make:
        yield make


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`fault(kind, rank=1, steps=[7])` breaks the following runs, with `on=True` in all later steps too; without
    arguments they run without faults again. See `faults.py`."""

    def set_(kind: str = "", *, rank: int | str = 0, steps: Sequence[int] = (), on: bool = False) -> None:
        if kind:
            monkeypatch.setenv("EXECUTE_FIRST", str(ROOT / "tests/faults.py"))
            made = [{"kind": kind, "rank": rank, "step": step, "on": on} for step in steps]
            monkeypatch.setenv("FAULT", json.dumps(made))
        else:
            monkeypatch.delenv("EXECUTE_FIRST")

    return set_


@pytest.fixture(scope="session")
def s3_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Where a real S3 server listens."""
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as port:
        yield port


@pytest.fixture
def object_store(s3_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """A fresh bucket behind a proxy with faults; commands started by the test find it."""
    store = ObjectStore(s3_port)
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    yield store
    store.close()


@pytest.fixture(scope="session")
def run_command(zygotes: Zygotes) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`run_command("fsdp_pretrain.data.cli", "validate", path)` runs `python -m ...` and captures its output."""
    return zygotes.run


@pytest.fixture(scope="session")
def start_command(zygotes: Zygotes) -> Callable[..., Process]:
    """`start_command("fsdp_pretrain.eval.cli", "watch", run)` starts `python -m ...` and returns at once."""
    return zygotes.start


@pytest.fixture(scope="session")
def helpers() -> Any:
    """Functions for tests, mainly to inspect a run."""

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
            return [json.loads(record.to_line()) for record in read_metrics(RunDir(run))]

        @staticmethod
        def losses(run: Path) -> list[tuple[int, float, float]]:
            """(step, loss sum, gradient norm) of a run, unrounded."""
            return [(r["step"], r["loss"]["sum"], r["grad_norm"]) for r in Helpers.metrics(run)]

        @staticmethod
        def journal(run: Path, kind: str | None = None) -> list[dict[str, Any]]:
            return [entry for entry in journal.read(RunDir(run)) if kind in (None, entry["kind"])]

        wait_for = staticmethod(sight.until)
        alarms, agents, intent = staticmethod(sight.alarms), staticmethod(sight.agents), staticmethod(sight.intent)

    return Helpers


@pytest.fixture
def endpoint(helpers: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    """Target of the webhook `[watchdog.notify.webhook]` of a test's runs; down until `up` is called."""
    for variable in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    served = Endpoint(helpers.port())
    monkeypatch.setenv("ALARM_WEBHOOK_URL", f"http://127.0.0.1:{served.port}/{SECRET}")
    yield served
    served.down()
