"""The Aim mirror: a copy of the local record whose failures never affect training.

Training never imports aim. A follower process (`python -m fsdp_pretrain.record.aim RUN`) tails the metrics and the
journal and writes one Aim run; any error ends the follower with one journal entry. `fsdp-pretrain aim RUN` rebuilds the
Aim run from the record at any time.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import os
import select
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from fsdp_pretrain.child_process import start_module
from fsdp_pretrain.errors import ConfigError, UserError

from . import journal, lineage, run_id, state_files
from .files import RunDir
from .metrics import METRICS, records
from .state_files import StateFile
from .step_record import StepRecord

T = TypeVar("T")
_POLL_SECONDS, _STUCK_SECONDS, _FINISH_SECONDS = 2.0, 120.0, 20.0
_PLAIN = ("grad_norm", "lr", "tokens_per_second", "mfu", "memory_bytes", "loss_scale", "consumed", "tokens", "batch")


def check_installed() -> None:
    """Raise ConfigError if aim is not installed."""
    if importlib.util.find_spec("aim") is None:
        raise ConfigError(
            "aim is not installed",
            remedy="in the checkout: pip install -e '.[aim]' (Python 3.11 or 3.12); or train with record.aim=false and "
            "build the same view later, wherever aim is, with `fsdp-pretrain aim RUN`",
        )


def repository(run: RunDir) -> Path:
    """The Aim repository in a run's configuration."""
    config = tomllib.loads(run.config.read_text(encoding="utf-8"))
    return Path(config.get("record", {}).get("aim_repo", run.path / "aim"))


class _Known(StateFile):
    """`RUN/aim.json`: the current Aim run, and the head segment of the line in it."""

    repo: str = ""
    hash: str = ""
    segment: int = 0


class AimMirror:
    """Writes the kept line of a run's record to Aim. After a rollback, the old Aim run is archived.

    Raises any error of aim, also if another process writes the same Aim run.
    """

    def __init__(self, run: RunDir) -> None:
        aim: Any = importlib.import_module("aim")
        self._run, self._repo = run, repository(run)
        self._repo.mkdir(parents=True, exist_ok=True)
        note = run.path / "aim.json"
        known = state_files.view(note, _Known) or _Known()
        same = known.repo == str(self._repo) and (self._repo / ".aim").is_dir()
        nodes = lineage.nodes(run)
        self._line = lineage.line(nodes)
        if same and any(node.kind in lineage.LEAVING and node.segment > known.segment for node in nodes):
            left = aim.Repo(str(self._repo)).request_props(known.hash, read_only=False)
            left.name, left.archived = f"{left.name} (left by a rollback)", True
            same = False  # points cannot be removed from an Aim run
        self._aim = aim.Run(
            run_hash=known.hash if same else None,
            repo=str(self._repo),
            system_tracking_interval=None,
            log_system_params=False,
            capture_terminal_logs=False,
        )
        config = tomllib.loads(run.config.read_text(encoding="utf-8"))
        self._aim.name = config["run"]["name"]
        self._aim["config"] = config
        head = self._line[-1].segment if self._line else 0
        facts = {"repo": str(self._repo), "hash": self._aim.hash, "segment": max(head, known.segment)}
        state_files.write(note, facts)
        self._identity = (self._repo / ".aim").stat().st_ino
        self._offsets: dict[Path, int] = {}

    def sync(self) -> int:
        """Track records added since the last call. Returns their number. Raises OSError if the repository is gone."""
        if (self._repo / ".aim").stat().st_ino != self._identity:
            raise OSError(f"{self._repo} was replaced")
        count = 0
        for part in self._line:
            for record in self._new(self._run.segment(part.segment) / METRICS, records):
                if part.after < record.step <= part.until:
                    self._track_step(record)
                    count += 1
        for entry in journal.of_kind(lineage.drop_abandoned(self._new(self._run.journal, journal.entries)), "eval"):
            self._track_eval(entry)
            count += 1
        return count

    def _new(self, path: Path, read: Callable[[Path, int], Iterator[tuple[T, int]]]) -> list[T]:
        found = []
        for line, offset in read(path, self._offsets.get(path, 0)):
            found.append(line)
            self._offsets[path] = offset
        return found

    def _track_step(self, record: StepRecord) -> None:
        step = record.step
        for name in _PLAIN:
            if (value := getattr(record, name)) is not None:
                self._aim.track(value, name=name, step=step)
        for part, seconds in record.seconds:
            self._aim.track(seconds, name="seconds", step=step, context={"part": part})
        losses = {"all": record.loss, **(record.sources if len(record.sources) > 1 else {})}
        for source, loss in losses.items():
            if math.isfinite(loss.mean):
                self._aim.track(loss.mean, name="loss", step=step, context={"source": source})
        for source, loss in (record.heldout or {}).items():
            if math.isfinite(loss.mean):
                self._aim.track(loss.mean, name="loss", step=step, context={"source": source, "subset": "heldout"})

    def _track_eval(self, entry: dict[str, Any]) -> None:
        for task, metrics in entry["scores"].items():
            for metric, value in metrics.items():
                self._aim.track(value, name=f"eval/{metric}", step=entry["step"], context={"task": task})

    def close(self) -> None:
        """Finish the Aim run and index it for Aim's queries."""
        from aim.sdk.index_manager import RepoIndexManager
        from aim.sdk.repo import Repo

        self._aim.close()
        RepoIndexManager(Repo(str(self._repo))).index(self._aim.hash)


def rebuild(run: RunDir) -> tuple[Path, int]:
    """Build or update the Aim run of a record. Returns the repository and the number of records tracked.

    Raises:
        ConfigError: aim is not installed, the run was never started, or the repository cannot be written.
    """
    check_installed()
    if not run.config.is_file():
        raise ConfigError(f"there is nothing to show: {run.path} was never started")
    try:
        mirror = AimMirror(run)
        count = mirror.sync()
        mirror.close()
    except Exception as error:
        raise ConfigError(
            f"cannot write the Aim repository {repository(run)}: {type(error).__name__}: {error}",
            remedy="a running mirror holds it, or it is damaged: stop the run, or move the repository away",
        ) from None
    return repository(run), count


def start_follower(run: RunDir) -> subprocess.Popen[bytes] | None:
    """Start a live run's follower, which ends when its stdin closes. On failure, a journal entry and None."""
    try:
        with (run.path / "aim.log").open("ab") as log:
            return start_module(__name__, str(run.path), nice=10, stdin=subprocess.PIPE, stdout=log, stderr=log)
    except OSError as error:
        _log_stop(run, f"could not be started: {error}")
        return None


def finish_follower(run: RunDir, follower: subprocess.Popen[bytes]) -> None:
    """Let the follower catch up and end; leave it running if that takes too long. Records a death by signal."""
    if follower.stdin is not None:
        with contextlib.suppress(OSError):
            follower.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = follower.wait(_FINISH_SECONDS)
        if code < 0:  # a killed follower could not record it
            _log_stop(run, f"killed by signal {-code}")


def _follow(run: RunDir) -> NoReturn:
    """Mirror until standard input closes, or until aim fails or hangs."""
    alive = time.monotonic()

    def watch() -> None:
        while time.monotonic() - alive < _STUCK_SECONDS:
            time.sleep(1.0)
        _log_stop(run, f"aim did not answer for {_STUCK_SECONDS:.0f}s")
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        mirror = AimMirror(run)
        ended = False
        while not ended:
            ended = bool(select.select([sys.stdin], [], [], _POLL_SECONDS)[0])
            mirror.sync()
            alive = time.monotonic()
        mirror.close()
    except Exception as error:  # aim raises anything, RocksDB errors among them
        _log_stop(run, f"{type(error).__name__}: {error}".splitlines()[0])
        os._exit(1)  # aim's destructors may wait for the broken repository
    os._exit(0)  # aim's threads could keep a finished follower alive


def _log_stop(run: RunDir, reason: str) -> None:
    with contextlib.suppress(UserError):
        text = f"the Aim mirror stopped, training goes on: {reason}; rebuild it with `fsdp-pretrain aim`"
        journal.add(run, "aim-stopped", text)


if __name__ == "__main__":
    _run = RunDir(Path(sys.argv[1]))
    run_id.bind(_run.path, run_id.read(_run.path))
    _follow(_run)
