"""One look at a run from outside, from its record alone: works on any machine that sees the run directory."""

from __future__ import annotations

import contextlib
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from pydantic import ConfigDict

from .changes import load_recorded
from .checkpoint.expected import missing
from .checkpoint.manifest import Manifest
from .checkpoint.stores import stores
from .errors import UserError
from .record import goodput, lineage, state_files
from .record.attempts import unread_bytes
from .record.claim import Held
from .record.environment import ENVIRONMENT, Environment
from .record.exit_intent import EXIT_INTENT, ExitIntent
from .record.files import RunDir, age, now
from .record.lock import is_held
from .record.state_files import StateFile
from .record.status import Status
from .severity import Severity
from .units import human_bytes, human_count, human_time
from .watchdog.alarms import read_alarms
from .watchdog.desk import alarms_file, snapshot_file

OK, WARN, ALERT = 0, 1, 2
_ENDED = ("complete", "incomplete", "stopped", "failed")
_SILENT_AT_LEAST = 120.0
_LAST_LOOK = "status-last-look.json"
_LARGEST_RECORD = 32 * 2**20
"""Bytes of new metrics that are read for one line: a second or two."""


class _LastLook(StateFile):
    """When somebody last asked, and at which step the run was."""

    step: int
    time: str


class _Seen(StateFile):
    """What is shown of the watchdog's snapshot."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    time: str | None = None
    step_drift: float | None = None
    disk_full_in: float | None = None


@dataclass
class Report:
    """What `status` found.

    Attributes:
        state: starting, running, saving, complete, incomplete (it was complete, and its last checkpoint is missing),
            stopped, failed, or unknown.
        running: whether a job seems to be alive.
        level: 0 ok, 1 warning, 2 alert.
        problems: (level, text).
        facts: everything shown, JSON values.
    """

    state: str
    running: bool
    problems: list[tuple[int, str]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def level(self) -> int:
        """The worst problem's level."""
        return max((level for level, _ in self.problems), default=OK)

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        problems = [{"level": level, "text": text} for level, text in self.problems]
        return {
            **self.facts,
            "state": self.state,
            "running": self.running,
            "level": self.level,
            "problems": problems,
        }


def inspect(run: RunDir) -> Report:
    """Look at a run directory."""
    report, status = Report("unknown", False), Status()
    try:
        found = state_files.read(run.status, Status)
        if found is None:
            text = f"{run.status} is missing: no job was started here, or none came far"
            report.problems.append((ALERT, text))
        else:
            status, report = found, Report(found.state, False, facts=found.said())
            _look_at_life(report, status)
    except UserError as error:
        report.running = is_held(run)
        report.problems.append((WARN, f"{error.cause}; a job that runs writes it again"))
    if run.rollback.exists():
        report.problems.append((WARN, "a rollback is under way; if it was killed, repeat it or start training"))
    _look_at_checkpoints(report, run, status)
    _look_at_progress(report, run, status)
    _look_at_alarms(report, run)
    _look_at_watchdog(report, run)
    _look_at_goodput(report, run)
    _look_at_files(report, run)
    return report


def _look_at_life(report: Report, status: Status) -> None:
    silent = age(status.heartbeat)
    report.facts["heartbeat_age_seconds"] = round(silent, 1)
    if report.state in _ENDED:
        code, reason = (status.exit_intent.code, status.exit_intent.reason) if status.exit_intent else (None, None)
        if report.state == "failed":
            report.problems.append((ALERT, f"ended with exit {code}: {reason}"))
        elif report.state == "stopped":
            report.problems.append((WARN, f"stopped before its end: {reason}"))
        return
    if status.host == socket.gethostname() and not psutil.pid_exists(status.pid or -1):
        report.problems.append((ALERT, f"its process {status.pid} is gone without saying why"))
        return
    report.running = True
    allowed = max(_SILENT_AT_LEAST, 10 * (status.iteration_seconds or 0.0))
    if silent > 3 * allowed:
        report.running = False
        report.problems.append((ALERT, f"no sign of life for {human_time(silent)}"))
    elif silent > allowed:
        report.problems.append((WARN, f"no sign of life for {human_time(silent)}"))


def _look_at_checkpoints(report: Report, run: RunDir, status: Status) -> None:
    found = stores(run)
    try:
        lost = None if run.rollback.exists() else missing(run)
        checkpoints = found.scan()
    except UserError as error:
        report.problems.append((ALERT, error.cause))
        return
    if lost is not None:
        report.state = "incomplete" if report.state == "complete" else report.state
        report.problems.append((ALERT, f"{lost.text}: is a mount missing, or were checkpoints deleted?"))
    good = [checkpoint for checkpoint in checkpoints if checkpoint.problem is None and checkpoint.verified]
    for checkpoint in checkpoints:
        if checkpoint.problem is not None:
            report.problems.append((WARN, f"{checkpoint.path.name} is damaged: {checkpoint.problem}"))
    if not good:
        report.facts["verified_checkpoint"] = None
        return
    manifest = good[-1].manifest()
    size = sum(entry.bytes for entry in manifest.files)
    free = shutil.disk_usage(run.path).free
    report.facts["verified_checkpoint"] = {
        "step": good[-1].step,
        "age_seconds": round(age(manifest.committed), 1),
        "steps_behind": (status.step or 0) - good[-1].step,
        "bytes": size,
        "path": str(good[-1].path),
    }
    if found.elsewhere(good[-1]):
        report.problems.append((WARN, f"the newest verified checkpoint is in the fallback, {good[-1].path.parent}"))
    report.facts["disk_free_bytes"] = free
    report.facts["checkpoints_that_fit"] = int(free // max(1, size))
    if report.state not in _ENDED:
        if free < 1.05 * size:
            report.problems.append(
                (ALERT, f"the next checkpoint ({human_bytes(size)}) does not fit: {human_bytes(free)} free")
            )
        elif free < 3 * 1.05 * size:
            report.problems.append((WARN, f"fewer than three checkpoints fit: {human_bytes(free)} free"))
        _look_at_interval(report, run, manifest, status)


def _look_at_interval(report: Report, run: RunDir, manifest: Manifest, status: Status) -> None:
    """Whether the newest verified checkpoint is older than the configured interval allows."""
    try:
        config, _ = load_recorded(run.config)
    except UserError as error:
        report.problems.append((WARN, f"{run.config} cannot be read: {error.cause.splitlines()[0]}"))
        return
    interval = config.schedule.samples(config.checkpoint.every)
    behind = (status.consumed or 0) - manifest.consumed
    if behind > 2.5 * interval:
        report.problems.append(
            (ALERT, f"{behind:_} samples since the last verified checkpoint, the interval is {interval:_}")
        )
    elif behind > 1.5 * interval:
        report.problems.append(
            (WARN, f"{behind:_} samples since the last verified checkpoint, the interval is {interval:_}")
        )


def _look_at_alarms(report: Report, run: RunDir) -> None:
    """What the watchdog has found and is not over."""
    open_ = [alarm for alarm in read_alarms(alarms_file(run)) if alarm.state != "resolved"]
    report.facts["alarms"] = [alarm.to_json() for alarm in open_]
    for alarm in open_:
        if alarm.severity is not Severity.INFO:
            known = alarm.state == "acknowledged"
            level = ALERT if alarm.severity is Severity.CRIT and not known else WARN
            since = f"since {human_time(age(alarm.opened))}{', acknowledged' if known else ''}"
            report.problems.append((level, f"{alarm.key}: {alarm.summary} ({since})"))


def _look_at_watchdog(report: Report, run: RunDir) -> None:
    """Whether anybody watches, and what was seen last."""
    seen = state_files.view(snapshot_file(run), _Seen)
    if seen is not None:
        report.facts["watchdog"] = {**seen.model_dump(exclude_unset=True), "age_seconds": round(age(seen.time), 1)}
    if not report.running or age(report.facts.get("started")) < _SILENT_AT_LEAST:
        return
    try:
        wanted = load_recorded(run.config)[0].watchdog.enabled
    except UserError:
        return  # said elsewhere
    silent = age(seen.time) if seen is not None else float("inf")
    if wanted and silent > _SILENT_AT_LEAST:
        ago = f"has not looked for {human_time(silent)}" if seen is not None else "has never looked"
        report.problems.append((WARN, f"the watchdog {ago}: see {run.path / 'watchdog/agent.log'}"))


def _look_at_progress(report: Report, run: RunDir, status: Status) -> None:
    """Steps since the last time somebody asked."""
    last, step = state_files.view(run.path / _LAST_LOOK, _LastLook), status.step or 0
    if last is not None:
        report.facts["since_last_look"] = {"steps": step - last.step, "seconds": round(age(last.time), 1)}
    with contextlib.suppress(OSError):  # looking must work on a full or read-only disk too
        state_files.write(run.path / _LAST_LOOK, {"step": step, "time": now()})


def _look_at_goodput(report: Report, run: RunDir) -> None:
    """Where the time went, if that is soon read."""
    size = unread_bytes(run)
    try:
        found = goodput.goodput(run) if size <= _LARGEST_RECORD else None
    except UserError as error:  # of the lineage: what the run is made of is not known
        report.problems.append((ALERT, error.cause))
        return
    if found is not None:
        report.facts["damaged"] = found["damaged"]
        report.facts["goodput"] = {key: found[key] for key in ("goodput", "runtime_goodput", "ettr", "tokens_per_day")}
        report.facts["goodput"]["line"] = goodput.headline(found)
    elif size > _LARGEST_RECORD:
        report.facts["goodput"] = {
            "line": f"{human_bytes(size)} of the record are new: `fsdp-pretrain goodput` reads them"
        }


def _look_at_files(report: Report, run: RunDir) -> None:
    """Small files that are damaged: what reads them does without, or refuses; and what is called like no segment."""
    for path, schema in _small_files(run):
        try:
            state_files.read(path, schema)
        except UserError as error:
            report.problems.append((WARN, error.cause))
    known = {path.name for path in run.segments}
    strange = [path.name for path in (run.path / "segments").glob("*") if path.name not in known]
    if strange:
        report.facts["no_segments"] = sorted(strange)


def _small_files(run: RunDir) -> Iterator[tuple[Path, type[StateFile]]]:
    yield run.rollback, lineage.DecidedRollback
    yield run.lock, Held
    for segment in run.segments:
        yield segment / EXIT_INTENT, ExitIntent
        yield segment / ENVIRONMENT, Environment


def _watchdog_line(seen: dict[str, Any]) -> str:
    """What the watchdog saw last, in short."""
    parts = [f"looked {human_time(seen['age_seconds'])} ago"]
    if seen.get("step_drift") is not None:
        parts.append(f"steps {seen['step_drift'] - 1:+.1%} of the baseline")
    if seen.get("disk_full_in") is not None:
        parts.append(f"disk full in {human_time(seen['disk_full_in'])}")
    return ", ".join(parts)


def render(report: Report) -> str:
    """The report on one screen."""
    facts = report.facts
    lines = [f"{facts.get('run', '?')}: {report.state.upper()}"]
    step, total = facts.get("step"), facts.get("total_steps")
    if step is not None and total is not None:
        loss = f", loss {facts['loss']:.4f}" if facts.get("loss") is not None else ""
        lines.append(f"  step        {step:_} of {total:_}, {human_count(facts.get('tokens') or 0)} tokens{loss}")
        if facts.get("iteration_seconds"):
            ending = f", {human_time((total - step) * facts['iteration_seconds'])} to go" if report.running else ""
            lines.append(
                f"  pace        {facts['iteration_seconds']:.3g}s a step, "
                f"{human_count(facts.get('tokens_per_second') or 0)} tokens/s{ending}"
            )
    if "since_last_look" in facts:
        since = facts["since_last_look"]
        done = f"{since['steps']:_} steps" if since["steps"] >= 0 else f"went back {-since['steps']:_} steps"
        lines.append(f"  progress    {done} in the {human_time(since['seconds'])} since the last look")
    if facts.get("heartbeat_age_seconds") is not None:
        lines.append(
            f"  heartbeat   {human_time(facts['heartbeat_age_seconds'])} ago, {facts.get('host')}"
            + (f" pid {facts['pid']}" if facts.get("pid") else "")
        )
    checkpoint = facts.get("verified_checkpoint")
    if checkpoint:
        lines.append(
            f"  checkpoint  step {checkpoint['step']:_} verified {human_time(checkpoint['age_seconds'])} ago, "
            f"{checkpoint['steps_behind']:_} steps behind"
        )
        lines.append(
            f"  disk        {human_bytes(facts['disk_free_bytes'])} free, "
            f"room for {facts['checkpoints_that_fit']:_} checkpoints"
        )
    elif "verified_checkpoint" in facts:
        lines.append("  checkpoint  none verified yet")
    if facts.get("watchdog") and report.running:
        lines.append(f"  watchdog    {_watchdog_line(facts['watchdog'])}")
    if facts.get("goodput"):
        lines.append(f"  time        {facts['goodput']['line']}")
    if facts.get("overrides"):
        lines.append(f"  overrides   {facts['overrides']}")
    if facts.get("damaged", {}).get("lines"):
        lines.append(f"  record      damaged lines, passed over: {facts['damaged']['lines']:_}")
    if facts.get("no_segments"):
        lines.append(f"  segments/   no segment of the run, passed over: {', '.join(facts['no_segments'])}")
    names = {WARN: "WARN", ALERT: "ALERT"}
    lines += [f"  {names[level]:11} {text}" for level, text in sorted(report.problems, reverse=True)]
    return "\n".join(lines)
