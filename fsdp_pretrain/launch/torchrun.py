"""One torchrun child process: its command line, its environment, its ranks, and the guarantee that all of them end.

torchrun and each of its ranks have sessions of their own, so no process-group signal reaches them all: ranks are found
as children of torchrun, and every process asks the kernel to be killed when its parent dies.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from fsdp_pretrain.errors import ConfigError, Exit, UserError
from fsdp_pretrain.processes import die_with_parent, process_start
from fsdp_pretrain.run import state_files
from fsdp_pretrain.run.exit_intent import ExitIntent
from fsdp_pretrain.run.lock import this_process
from fsdp_pretrain.units import human_time
from fsdp_pretrain.watchdog.hang.rank_client import AGENT, root

LAUNCHER, NOTE, SEEN = "FSDP_PRETRAIN_LAUNCHER", "FSDP_PRETRAIN_EXIT_NOTE", "FSDP_PRETRAIN_SEEN"
"""Environment variables of ranks: process id of the launcher; file for an exit code decided before there is a segment;
file for what its starts have seen of the run, see `run.run_id.LauncherMemory`."""

WRONG_OPTIONS = 2
"""Exit code of a torchrun that does not know one of its options."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Requests to stop. Whoever sends one may send it to every process of the job; only launcher and ranks act on it."""

_OTHERS_SECONDS = 10.0
"""Seconds for which a rank leaves an error common to all to the rank that says it."""
_PORT = "29400"
_RENDEZVOUS_LIMITS = "close_timeout=30,read_timeout=60"


def command(
    args: argparse.Namespace, rest: Sequence[str], module: str, arguments: Sequence[str], *, join: float = 300.0
) -> list[str]:
    """The torchrun command line. `rest`: further torchrun options; `join`: rendezvous timeout in seconds. Raises
    ConfigError if there are several nodes and no first node; UserError as `is_first`."""
    if args.rdzv_endpoint is None and most_nodes(args.nnodes) > 1:
        raise ConfigError(
            f"--nnodes {args.nnodes} without --rdzv-endpoint: the nodes cannot find each other",
            remedy="name the first node, the same on every node: --rdzv-endpoint HOST:29400",
        )
    if args.rdzv_endpoint is None:
        rendezvous = ["--standalone"]
    else:
        host, port = _endpoint(args.rdzv_endpoint)
        endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        defaults = f"is_host={str(is_first(args, join)).lower()},join_timeout={max(1, int(join))},{_RENDEZVOUS_LIMITS}"
        conf = ",".join(f"{key}={value}" for key, value in {**_settings(defaults), **_settings(args.rdzv_conf)}.items())
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
        rendezvous += ["--rdzv-id", args.rdzv_id, "--rdzv-conf", conf]
    return [
        *(sys.executable, "-m", "fsdp_pretrain.launch.elastic_agent", "--signals-to-handle", "SIGHUP,SIGQUIT"),
        *("--nnodes", args.nnodes, "--nproc-per-node", args.nproc_per_node, "--max-restarts", "0", *rendezvous, *rest),
        *("-m", module, *arguments),
    ]


def most_nodes(nnodes: str) -> int:
    """The larger number of `--nnodes N` or `MIN:MAX`. Raises ConfigError."""
    match = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", nnodes)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise ConfigError(f"--nnodes {nnodes} is neither a number of nodes nor MIN:MAX")
    return int(match[2] or match[1])


def _settings(conf: str) -> dict[str, str]:
    """The settings in a value of --rdzv-conf. Raises ConfigError."""
    parts = [part.partition("=") for part in conf.split(",") if part.strip()]
    if wrong := [key for key, equals, value in parts if not (key.strip() and equals and value.strip())]:
        raise ConfigError(f"--rdzv-conf {conf}: {wrong[0]!r} has no value", remedy="write KEY=VALUE,KEY=VALUE")
    return {key.strip(): value.strip() for key, _, value in parts}


def _endpoint(text: str) -> tuple[str, str]:
    """Host and port of a value of --rdzv-endpoint: HOST, HOST:PORT, or an IPv6 address, in brackets if with a port."""
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        return host, rest.removeprefix(":") or _PORT
    host, _, port = text.partition(":") if text.count(":") == 1 else (text, "", "")
    return host, port or _PORT


def is_first(args: argparse.Namespace, patience: float) -> bool:
    """Whether this node hosts the rendezvous: `is_host` of --rdzv-conf if set, else whether the endpoint's host
    is this machine. Raises UserError, with exit code 75, if its name does not resolve for `patience` seconds.

    torchrun compares the name with this machine's host name, which fails on every node for an address or an alias.
    """
    if args.rdzv_endpoint is None:
        return True
    if (is_host := _settings(args.rdzv_conf).get("is_host")) is not None:
        return is_host.lower() in ("1", "true", "t", "yes", "y")
    host, _ = _endpoint(args.rdzv_endpoint)
    own_addresses = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    host_addresses = _resolve(host, patience)
    # Many systems give a node's own name an address of the loopback that no interface has: 127.0.1.1.
    return any(address.startswith("127.") for address in host_addresses) or bool(own_addresses & host_addresses)


def _resolve(host: str, patience: float) -> set[str]:
    """The addresses of a host. Its name may come with its container, seconds after this one. Raises UserError."""
    until, told = time.monotonic() + patience, False
    while True:
        try:
            return {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
        except OSError as error:
            if time.monotonic() >= until:
                unknown = UserError(
                    f"--rdzv-endpoint {host} does not resolve on this node: {error}",
                    remedy="look for a mistake in the name; or start again, when the first node is there",
                )
                unknown.exit = Exit.RESUME
                raise unknown from None
            if not told:
                print(f"waiting up to {human_time(patience)} for the name {host}: {error}", file=sys.stderr, flush=True)
                told = True
            time.sleep(1.0)


def environment(base: Mapping[str, str], note: Path | None = None, seen: Path | None = None) -> dict[str, str]:
    """The environment of torchrun and its ranks: `base`, trainer defaults, the files for `leave_note` and
    `seen_note`."""
    return {
        "OMP_NUM_THREADS": "1",
        **base,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # torchrun's restarts do not recover without it
        LAUNCHER: str(os.getpid()),
        **{name: str(path) for name, path in ((NOTE, note), (SEEN, seen)) if path is not None},
    }


def die_with_launcher() -> None:
    """`die_with_parent` for a rank that torchrun started; other processes are left alone."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    die_with_parent()
    launcher = os.environ.get(LAUNCHER)
    if launcher is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            if str(psutil.Process(os.getppid()).ppid()) == launcher:
                return
        os._exit(1)  # torchrun died while this rank was importing


def wait_to_be_ended() -> None:
    """Wait until torchrun asks for the end, at most some seconds: it ends all ranks once one has ended, and the one
    that says why may be slower than this."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    asked = threading.Event()
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: asked.set())
    asked.wait(_OTHERS_SECONDS)


def end_as_agreed(outcome: Exit) -> int:
    """The exit code of a rank that ends as all ranks agreed; from now on it ignores requests to stop.

    With a launcher, which reads the outcome from the record, it is 0: torchrun takes any other for a failure, ends the
    ranks that still run, and prints a report. Slurm may repeat its requests until the job is gone.
    """
    ignore_requests()
    return int(Exit.COMPLETE if LAUNCHER in os.environ else outcome)


def ignore_requests() -> None:
    """Ignore requests to stop, also while the interpreter shuts down and Python's handlers no longer run."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def leave_note(code: int, reason: str) -> bool:
    """Called by a rank: leave the launcher of this node an exit code that no segment has. False without a launcher."""
    path = os.environ.get(NOTE)
    if path is None:
        return False
    with contextlib.suppress(OSError):
        state_files.create(Path(path), {"code": code, "reason": reason})
    return True


def seen_note() -> Path | None:
    """For a rank: the file in which starts under one launcher (or one torchrun) note what they have seen.

    None if this process was not started by either.
    """
    if SEEN in os.environ:
        return Path(os.environ[SEEN])
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    agent, namespace = os.getppid(), re.sub(r"\D", "", str(this_process()["namespace"]))
    for note in root().glob(f"torchrun-{namespace}-*.json"):  # left by agents that have ended
        pid, started = (int(part) for part in note.stem.split("-")[2:])
        if round(process_start(pid) or 0) != started:
            note.unlink(missing_ok=True)
    return root() / f"torchrun-{namespace}-{agent}-{process_start(agent) or 0:.0f}.json"


class Torchrun(subprocess.Popen[bytes]):
    """A running torchrun: `elastic_agent` in a process that dies with this one, and leaves requests to stop to it.

    Create it in the main thread: its parent-death signal fires when that thread ends.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._ranks: dict[int, psutil.Process] = {}
        self._most_alive = 0
        # The child inherits the mask, and unblocks these signals once it has its handlers.
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            super().__init__(command, env=environment, start_new_session=True)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)

    def ranks(self) -> list[psutil.Process]:
        """The ranks that are alive."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.pid).children():
                self._ranks.setdefault(child.pid, child)
        living = [rank for rank in self._ranks.values() if _is_alive(rank)]
        self._most_alive = max(self._most_alive, len(living))
        return living

    @property
    def had_ranks(self) -> bool:
        """Whether there ever were ranks: torchrun starts them after the rendezvous."""
        return self._most_alive > 0

    @property
    def has_lost_ranks(self) -> bool:
        """Whether fewer ranks are alive than once were."""
        return len(self.ranks()) < self._most_alive

    def ask_to_stop(self, number: int) -> bool:
        """Signal the ranks, and torchrun, which takes note (see `elastic_agent`); returns whether there were ranks."""
        ranks = self.ranks()
        self.send_signal(number)
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.send_signal(number)
        return bool(ranks)

    def kill(self) -> None:
        """SIGKILL torchrun and its ranks; waits for torchrun to exit."""
        ranks = self.ranks()
        super().kill()
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()
        self.wait()

    def wait_for_ranks(self, seconds: float) -> bool:
        """Wait for ranks that outlive torchrun; returns whether all are gone."""
        return not psutil.wait_procs(self.ranks(), timeout=seconds)[1]


def wait_for_watchdog(run: Path, seconds: float) -> None:
    """Wait until the watchdog of a run has ended on this machine, at most `seconds`: it tells why the ranks ended."""
    agents = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if {AGENT, str(run)} <= {*process.cmdline()}:
                agents.append(process)
    psutil.wait_procs(agents, timeout=seconds)


def run_once(command: Sequence[str]) -> int:
    """Run a torchrun command to its end, however it ends. Returns the exit code that the ranks agreed on."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="fsdp-pretrain-") as notes:
        note = Path(notes) / "exit.json"
        child = Torchrun(command, environment(os.environ, note))
        try:
            code = child.wait()
        finally:
            if child.poll() is None:
                child.kill()
        noted = state_files.view(note, ExitIntent)
    if noted is not None:
        return noted.code
    if code == WRONG_OPTIONS:
        return int(Exit.REFUSED)
    return int(Exit.UNEXPECTED if code else Exit.COMPLETE)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
