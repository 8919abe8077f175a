"""Commands of this project and ranks of a training job as real processes, forked from one with everything imported."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sight import PATIENCE, until

ROOT = Path(__file__).resolve().parent.parent
CLI, DATA = "fsdp_pretrain.cli", "fsdp_pretrain.data.cli"
COMMANDS = {"fsdp-pretrain": CLI, "fsdp-data": DATA, "fsdp-eval": "fsdp_pretrain.eval.cli"}
"""The modules of the console commands."""
Run = Callable[..., subprocess.CompletedProcess[str]]
"""Type of the fixture `run_command`."""


def python_path(*folders: object) -> str:
    """PYTHONPATH with these folders and this checkout first, then what sets constants; existing entries stay."""
    known = (*folders, ROOT, ROOT / "tests/constants", os.environ.get("PYTHONPATH"))
    return os.pathsep.join(map(str, filter(None, known)))


def clean_environment(**extra: str) -> dict[str, str]:
    """The environment of a user's shell: this checkout, no rank variables. The current test stays, for `mutants.py`."""
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC", "PYTEST_ADDOPTS", "PYTEST_X")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
    environment.update(
        PYTHONPATH=python_path(),
        OMP_NUM_THREADS="1",
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        TOKENIZERS_PARALLELISM="false",
        HF_HUB_OFFLINE="1",
    )
    return {**environment, **extra}


def ended(
    line: Sequence[object], code: int, out: str, err: str, expect: int | None
) -> subprocess.CompletedProcess[str]:
    """The result of a command, which must have ended with `expect` unless that is None."""
    assert expect in (None, code), f"exit {code}, not {expect}: {line}\n{out}\n{err}"
    return subprocess.CompletedProcess([str(part) for part in line], code, out, err)


def python(
    *arguments: object, expect: int | None = 0, cwd: Path = Path("/"), timeout: float | None = None, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run a fresh Python to its end and capture its output; it must end with `expect` unless that is None."""
    line, environment = [sys.executable, *map(str, arguments)], clean_environment(**extra)
    done = subprocess.run(line, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)
    return ended(line, done.returncode, done.stdout, done.stderr, expect)


SET_CONSTANTS = f"import runpy; runpy.run_path({str(ROOT / 'tests/constants/sitecustomize.py')!r})\n"
"""First line of another `sitecustomize`, which hides that of `constants/`."""


@contextlib.contextmanager
def constants(module: str, **values: Any) -> Iterator[None]:
    """Other values of constants of a module in all processes that are started meanwhile, see `constants/`."""
    before = os.environ.get("CONSTANTS")
    known = json.loads(before or "{}")
    known[module] = {**known.get(module, {}), **values}
    os.environ["CONSTANTS"] = json.dumps(known)
    try:
        yield
    finally:
        del os.environ["CONSTANTS"]
        os.environ.update({} if before is None else {"CONSTANTS": before})


def as_rank(rank: int, ranks: int, local: int, port: int) -> dict[str, str]:
    """The environment of a rank among `ranks`, `local` on each node, that meet at `port`."""
    return clean_environment(
        RANK=str(rank),
        LOCAL_RANK=str(rank % local),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(local),
        GROUP_RANK=str(rank // local),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )


def scripted(steps: dict[int, list[tuple[str, dict[str, Any]]]], held: Sequence[object] = ()) -> dict[str, str]:
    """Variables with which rank 0 gets requests at given steps, and while it is held; see `scripted.py`."""
    script = {"steps": steps, "held": list(held)}
    return {"EXECUTE_FIRST": str(ROOT / "tests/scripted.py"), "SCRIPT": json.dumps(script)}


_HELD: list[socket.socket] = []


def free_port() -> int:
    """A free TCP port, which is given to no other process while this one lives; a server may listen on it."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    _HELD.append(held)
    return int(held.getsockname()[1])


TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
LAUNCH = (sys.executable, "-m", "fsdp_pretrain.cli", "launch")


def spawn(line: Sequence[object], log: Path, **variables: str) -> subprocess.Popen[bytes]:
    """Start a command as a user's shell does, in its own session; both outputs are appended to a log."""
    with log.open("ab") as out:
        return subprocess.Popen(
            [str(part) for part in line],
            cwd="/",
            env=clean_environment(**variables),
            stdout=out,
            stderr=out,
            start_new_session=True,
        )


# What a zygote imports before it forks the first command of a package, with the environment that those imports read:
# also what the handlers of commands import.
IMPORTS = {
    "data": [
        *(
            "fsdp_pretrain.data.cli",
            "fsdp_pretrain.data.prepare.import_corpus",
            "fsdp_pretrain.data.prepare.quickstart",
            "fsdp_pretrain.data.prepare.train_tokenizer",
        ),
        *("fsdp_pretrain.data.validate.validate", "numpy.ma", "sentencepiece", "tokenizers"),
    ],
    "rest": [
        *("fsdp_pretrain.bench.main", "fsdp_pretrain.hf.layout", "fsdp_pretrain.checkpoint.listing"),
        *("fsdp_pretrain.cli.main", "fsdp_pretrain.config.reference", "fsdp_pretrain.launch.launcher"),
        *("fsdp_pretrain.lineage.fork", "fsdp_pretrain.job.main", "fsdp_pretrain.views.status"),
        *("numpy.ma", "tokenizers", "torch._dynamo", "torch.utils.serialization"),
    ],
    "eval": [
        *(
            "datasets",
            "fsdp_pretrain.eval.attempt",
            "fsdp_pretrain.eval.checkpoints",
            "fsdp_pretrain.eval.cli",
            "fsdp_pretrain.eval.evaluation",
            "fsdp_pretrain.eval.exported",
        ),
        *(
            "fsdp_pretrain.eval.harness",
            "fsdp_pretrain.eval.jobs",
            "fsdp_pretrain.eval.ranks",
            "fsdp_pretrain.eval.samples",
            "fsdp_pretrain.eval.separators",
            "fsdp_pretrain.eval.tasks",
        ),
        *("lm_eval.evaluator", "lm_eval.tasks", "numpy.ma", "torch._dynamo"),
    ],
}
QUIET = {"TQDM_DISABLE": "1"}


class Process:
    """A command of this project, forked from a zygote."""

    def __init__(self, pid: int, files: Path) -> None:
        self.pid, self._files = pid, files

    def poll(self) -> int | None:
        """Exit code, or None while it runs."""
        exit_code = self._files.with_suffix(".exit")
        return int(exit_code.read_text()) if exit_code.exists() else None

    def wait(self, timeout: float = PATIENCE) -> int:
        until(lambda: self.poll() is not None, timeout, f"the end of process {self.pid}", every=0.01)
        return int(self.poll() or 0)

    def signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def output(self) -> tuple[str, str]:
        """Its standard output and standard error up to now."""
        out, err = (self._files.with_suffix(end).read_text() for end in (".out", ".err"))
        return out, err


class Zygotes:
    """Starts `python -m MODULE` by forking a process that has already imported it; see `zygote.py`.

    One zygote for data, one for evaluation and one for all else, each started when it is first needed.
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
        zygote = self._zygote(next((name for name in IMPORTS if module.startswith(f"fsdp_pretrain.{name}.")), "rest"))
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
        self,
        module: str,
        *arguments: object,
        expect: int | None = None,
        timeout: float = PATIENCE,
        cwd: Path = Path("/"),
        **extra: str,
    ) -> subprocess.CompletedProcess[str]:
        """Run a module to its end and capture its output; with `expect`, it must end with that code."""
        process = self.start(module, *arguments, environment=clean_environment(**extra), cwd=cwd)
        try:
            code = process.wait(timeout)
        finally:
            process.signal(signal.SIGKILL)
        return ended([module, *arguments], code, *process.output(), expect)

    def close(self) -> None:
        for zygote in self._zygotes.values():
            assert zygote.stdin is not None
            zygote.stdin.close()
            zygote.wait(60)


class Job:
    """The ranks of one training job, started without torchrun so that survivors can be watched."""

    def __init__(self, ranks: list[Process], log: Path) -> None:
        self.ranks, self.log = ranks, log

    def wait(self, timeout: float = PATIENCE) -> list[int]:
        try:
            until(lambda: None not in self.codes(), timeout, lambda: f"the end of the job\n{self.output()}", every=0.01)
        finally:
            self.kill()
        return [code for code in self.codes() if code is not None]

    def wait_or_kill(self, seconds: float) -> list[int]:
        """The exit codes; ranks that have not ended after `seconds` are killed, as torchrun would do at once.

        A rank whose peer dies while gloo connects them may wait without end: there gloo has no time limit.
        """
        with contextlib.suppress(AssertionError):
            until(lambda: None not in self.codes(), seconds, every=0.01)
        self.kill()
        return self.wait()

    def codes(self) -> list[int | None]:
        """Exit code of each rank, None while it runs."""
        return [process.poll() for process in self.ranks]

    def kill(self, rank: int | None = None, number: int = signal.SIGKILL) -> None:
        """Signal one rank, or all that are alive."""
        for process in self.ranks if rank is None else [self.ranks[rank]]:
            process.signal(number)

    def output(self) -> str:
        return self.log.read_text(errors="replace")
