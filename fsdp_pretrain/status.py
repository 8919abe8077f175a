"""One look at a run from outside, from its record alone: works on any machine that sees the run directory."""

from __future__ import annotations

import contextlib
import shutil
import socket
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import psutil

from .checkpoint.expected import missing
from .checkpoint.stores import stores
from .config import load
from .errors import UserError
from .record import goodput
from .record.attempts import unread_bytes
from .record.files import RunDir, now, read_json, replace_file
from .units import human_bytes, human_count, human_time
from .watchdog.alarms import Severity, read_alarms
from .watchdog.desk import alarms_file, snapshot_file

OK, WARN, ALERT = 0, 1, 2
_ENDED = ("complete", "incomplete", "stopped", "failed")
_SILENT_AT_LEAST = 120.0
_LAST_LOOK = "status-last-look.json"
_LARGEST_RECORD = 32 * 2**20
"""Bytes of new metrics that are read for one line: a second or two."""


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
    status = read_json(run.status)
    if status is None:
        return Report("unknown", False, [(ALERT, f"{run.status} is missing or damaged: the job never got far")])
    report = Report(str(status.get("state", "unknown")), False, facts=dict(status))
    _look_at_life(report, status)
    if run.rollback.exists():
        report.problems.append((WARN, "a rollback is under way; if it was killed, repeat it or start training"))
    _look_at_checkpoints(report, run, status)
    _look_at_progress(report, run, status)
    _look_at_alarms(report, run)
    _look_at_watchdog(report, run)
    _look_at_goodput(report, run)
    return report


def _age(stamp: Any) -> float:
    """Seconds since a time of the record; infinite if it is none."""
    try:
        return max(0.0, (datetime.now(UTC) - datetime.fromisoformat(stamp)).total_seconds())
    except (TypeError, ValueError):
        return float("inf")


def _look_at_life(report: Report, status: dict[str, Any]) -> None:
    age = _age(status.get("heartbeat"))
    report.facts["heartbeat_age_seconds"] = round(age, 1)
    if report.state in _ENDED:
        intent = status.get("exit_intent") or {}
        if report.state == "failed":
            report.problems.append((ALERT, f"ended with exit {intent.get('code')}: {intent.get('reason')}"))
        elif report.state == "stopped":
            report.problems.append((WARN, f"stopped before its end: {intent.get('reason')}"))
        return
    if status.get("host") == socket.gethostname() and not psutil.pid_exists(int(status.get("pid", -1))):
        report.problems.append((ALERT, f"its process {status.get('pid')} is gone without saying why"))
        return
    report.running = True
    allowed = max(_SILENT_AT_LEAST, 10 * (status.get("iteration_seconds") or 0.0))
    if age > 3 * allowed:
        report.running = False
        report.problems.append((ALERT, f"no sign of life for {human_time(age)}"))
    elif age > allowed:
        report.problems.append((WARN, f"no sign of life for {human_time(age)}"))


def _look_at_checkpoints(report: Report, run: RunDir, status: dict[str, Any]) -> None:
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
    size = sum(entry.bytes for entry in good[-1].files())
    free = shutil.disk_usage(run.path).free
    report.facts["verified_checkpoint"] = {
        "step": good[-1].step,
        "age_seconds": round(_age(manifest["committed"]), 1),
        "steps_behind": int(status.get("step") or 0) - good[-1].step,
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


def _look_at_interval(report: Report, run: RunDir, manifest: dict[str, Any], status: dict[str, Any]) -> None:
    """Whether the newest verified checkpoint is older than the configured interval allows."""
    try:
        config = load(run.config)
    except UserError as error:
        report.problems.append((WARN, f"{run.config} cannot be read: {error.cause.splitlines()[0]}"))
        return
    interval = config.schedule.samples(config.checkpoint.every)
    behind = int(status.get("consumed") or 0) - manifest["consumed"]
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
            since = f"since {human_time(_age(alarm.opened))}{', acknowledged' if known else ''}"
            report.problems.append((level, f"{alarm.key}: {alarm.summary} ({since})"))


def _look_at_watchdog(report: Report, run: RunDir) -> None:
    """Whether anybody watches, and what was seen last."""
    seen = read_json(snapshot_file(run))
    if seen is not None:
        report.facts["watchdog"] = {**seen, "age_seconds": round(_age(seen.get("time")), 1)}
    if not report.running or _age(report.facts.get("started")) < _SILENT_AT_LEAST:
        return
    try:
        wanted = load(run.config).watchdog.enabled
    except UserError:
        return  # said elsewhere
    age = _age(seen.get("time")) if seen is not None else float("inf")
    if wanted and age > _SILENT_AT_LEAST:
        ago = f"has not looked for {human_time(age)}" if seen is not None else "has never looked"
        report.problems.append((WARN, f"the watchdog {ago}: see {run.path / 'watchdog/agent.log'}"))


def _look_at_progress(report: Report, run: RunDir, status: dict[str, Any]) -> None:
    """Steps since the last time somebody asked."""
    last = read_json(run.path / _LAST_LOOK) or {}
    step = int(status.get("step") or 0)
    if "step" in last:
        report.facts["since_last_look"] = {
            "steps": step - int(last["step"]),
            "seconds": round(_age(last.get("time")), 1),
        }
    with contextlib.suppress(OSError):  # looking must work on a full or read-only disk too
        replace_file(run.path / _LAST_LOOK, f'{{"step": {step}, "time": "{now()}"}}\n')


def _look_at_goodput(report: Report, run: RunDir) -> None:
    """Where the time went, if that is soon read."""
    size = unread_bytes(run)
    found = goodput.goodput(run) if size <= _LARGEST_RECORD else None
    if found is not None:
        report.facts["goodput"] = {key: found[key] for key in ("goodput", "runtime_goodput", "ettr", "tokens_per_day")}
        report.facts["goodput"]["line"] = goodput.headline(found)
    elif size > _LARGEST_RECORD:
        report.facts["goodput"] = {
            "line": f"{human_bytes(size)} of the record are new: `fsdp-pretrain goodput` reads them"
        }


def _watchdog_line(seen: dict[str, Any]) -> str:
    """What the watchdog saw last, in short."""
    parts = [f"looked {human_time(seen['age_seconds'])} ago"]
    if "step_drift" in seen:
        parts.append(f"steps {seen['step_drift'] - 1:+.1%} of the baseline")
    if "disk_full_in" in seen:
        parts.append(f"disk full in {human_time(seen['disk_full_in'])}")
    return ", ".join(parts)


def render(report: Report) -> str:
    """The report on one screen."""
    facts = report.facts
    lines = [f"{facts.get('run', '?')}: {report.state.upper()}"]
    if facts.get("step") is not None:
        loss = f", loss {facts['loss']:.4f}" if facts.get("loss") is not None else ""
        lines.append(
            f"  step        {facts['step']:_} of {facts['total_steps']:_}, {human_count(facts['tokens'])} tokens{loss}"
        )
    if facts.get("iteration_seconds"):
        left = (facts["total_steps"] - facts["step"]) * facts["iteration_seconds"]
        ending = f", {human_time(left)} to go" if report.running else ""
        lines.append(
            f"  pace        {facts['iteration_seconds']:.3g}s a step, "
            f"{human_count(facts['tokens_per_second'])} tokens/s{ending}"
        )
    if "since_last_look" in facts:
        since = facts["since_last_look"]
        lines.append(
            f"  progress    {since['steps']:_} steps in the {human_time(since['seconds'])} since the last look"
        )
    if facts.get("heartbeat_age_seconds") is not None:
        lines.append(
            f"  heartbeat   {human_time(facts['heartbeat_age_seconds'])} ago, "
            f"{facts.get('host')} pid {facts.get('pid')}"
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
    names = {WARN: "WARN", ALERT: "ALERT"}
    lines += [f"  {names[level]:11} {text}" for level, text in sorted(report.problems, reverse=True)]
    return "\n".join(lines)
