"""The status of a run, from its record alone: works on any machine that sees the run directory."""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from fsdp_pretrain.checkpoint import upcoming
from fsdp_pretrain.checkpoint.evaluations import failed_evaluations
from fsdp_pretrain.checkpoint.manifest import CheckpointManifest
from fsdp_pretrain.checkpoint.missing import missing
from fsdp_pretrain.checkpoint.store import Store
from fsdp_pretrain.checkpoint.upcoming import SAVES, Late, UnsavedTraining, longest_save, unsaved_training
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.resume_rules import load_recorded
from fsdp_pretrain.console import row
from fsdp_pretrain.errors import UserError
from fsdp_pretrain.processes import process_start
from fsdp_pretrain.run import goodput, journal, lineage, state_files
from fsdp_pretrain.run.environment import ENVIRONMENT, Environment
from fsdp_pretrain.run.exit_intent import EXIT_INTENT, ExitIntent
from fsdp_pretrain.run.files import Fetched, RunDir, age, now
from fsdp_pretrain.run.lock import LeaseRecord, holder_died, is_held
from fsdp_pretrain.run.state_files import StateFile
from fsdp_pretrain.run.status import ENDED, Status
from fsdp_pretrain.run.step_columns import recorded_bytes
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.units import counted, human_bytes, human_count, human_time
from fsdp_pretrain.watchdog.notify.alarms import Alarm, alarms_file, read_alarms
from fsdp_pretrain.watchdog.notify.metrics import snapshot_file

OK, WARN, ALERT = 0, 1, 2
_ENDED = (*ENDED, "incomplete")
_SILENT_AT_LEAST = 120.0
_BETWEEN_COPIES = 900.0  # three times what is usual for a run that is elsewhere
_LAST_LOOK = "status-last-look.json"
_LARGEST_RECORD = 32 * 2**20
"""Bytes of metrics that are read for one line: a second or two."""


class _LastLook(StateFile):
    """When the status was last shown, and the run's step then."""

    step: int
    time: str


class _WatchdogSnapshot(StateFile):
    """The values of the watchdog's snapshot that are shown, and its age."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    time: str | None = None
    step_drift: float | None = None
    disk_full_in: float | None = None
    age_seconds: float = math.inf


class Verified(BaseModel):
    """The newest verified checkpoint."""

    step: int
    age_seconds: float
    steps_behind: int
    bytes: int
    path: str


class SinceLastLook(BaseModel):
    """Progress since the status was last shown; negative after a rollback."""

    steps: int
    seconds: float


class StatusReport(BaseModel):
    """What `status` shows; values that are not known are not set."""

    fetched: Fetched | None = None  # of a run that is elsewhere
    status: Status = Status()  # what the job last reported
    # starting, running, saving, paused, complete, incomplete (it was complete, and its last checkpoint is missing),
    # stopped, failed, or unknown
    state: str = "unknown"
    running: bool = False  # whether a job seems to be alive
    untrained: str = ""  # how the newest start ended if it trained no step; the run is then as it was before it
    problems: list[tuple[int, str]] = []  # (level, text)
    heartbeat_age_seconds: float | None = None
    verified_checkpoint: Verified | None = None  # the newest one; None if there is none
    disk_free_bytes: int = 0
    checkpoints_that_fit: int = 0
    since_last_look: SinceLastLook | None = None
    alarms: list[Alarm] = []
    watchdog: _WatchdogSnapshot | None = None
    goodput: str = ""  # one line about it
    evaluated: str = ""  # the newest evaluated checkpoint and its scores
    evaluations: list[str] = []  # texts on evaluations that failed and are retried

    @property
    def level(self) -> int:
        """The worst problem's level: 0 ok, 1 warning, 2 alert."""
        return max((level for level, _ in self.problems), default=OK)

    @property
    def headline(self) -> str:
        """The state of the record, or `not running` where that is a running one and there is no process."""
        alive = self.state in ("starting", "running", "saving", "paused")
        return "not running" if alive and not self.running else self.state

    def as_dict(self) -> dict[str, Any]:
        """The values for `--json`: what the job reported, and what was checked here."""
        return {
            **self.status.entries(),
            **self.model_dump(exclude_unset=True, exclude={"status"}),
            "state": self.state,
            "running": self.running,
            "level": self.level,
            "alarms": [alarm.to_json() for alarm in self.alarms],
            "problems": [{"level": level, "text": text} for level, text in self.problems],
        }


def inspect(run: RunDir, *, brief: bool = False) -> StatusReport:
    """Inspect a run directory; `brief`: leave out goodput, scores and progress since the last look; do not note it."""
    report = StatusReport() if run.fetched is None else StatusReport(fetched=run.fetched)
    try:
        status = state_files.read(run.status, Status)
        if status is None:
            text = f"{run.status} is missing: no job was started here, or it failed early"
            report.problems.append((ALERT, text))
        else:
            report.status, report.state = status, status.state
            _check_start(report, run, status)
    except UserError as error:
        report.running = is_held(run)
        report.problems.append((WARN, f"{error.cause}; a job that runs writes it again"))
    if run.rollback.exists():
        report.problems.append((WARN, "a rollback is under way; if it was killed, repeat it or start training"))
    checks = [_check_checkpoints, _add_alarms, _check_evaluations, _check_watchdog, _check_files]
    if not brief:
        checks += [_add_progress, _add_scores, _add_goodput]
    for check in checks:
        check(report, run)
    return report


def _check_start(report: StatusReport, run: RunDir, status: Status) -> None:
    """Add whether the newest start runs, or how it ended."""
    silent = age(status.heartbeat)
    report.heartbeat_age_seconds = round(silent, 1)
    allowed = max(_SILENT_AT_LEAST, 10 * (status.iteration_seconds or 0.0)) + _BETWEEN_COPIES * bool(run.fetched)
    if (ending := _ending(run, status, silent, allowed)) is not None:
        last_trained, endings = status.of_run, [ending]
        report.state = last_trained.state
        if last_trained is not status:
            report.untrained = f"{status.segment} trained nothing: {ending[1]}"
            endings = [_reported_end(last_trained), (ending[0], f"start {report.untrained}")]
            if status.was_complete:
                endings = []
        report.problems += [problem for problem in endings if problem[0] > OK]
        return
    report.running = True
    if (held := status.paused) is not None:
        since = f"paused for {human_time(age(held.since))}, since {held.since[:19].replace('T', ' ')}, by {held.by}"
        report.problems.append((WARN, since + (f": {held.reason}" if held.reason else "")))
    if silent > allowed:  # long while it loads or saves
        works = status.state in ("starting", "saving") or silent <= 3 * allowed
        report.problems.append((WARN if works else ALERT, f"no heartbeat for {human_time(silent)}"))


def _ending(run: RunDir, status: Status, silent: float, allowed: float) -> tuple[int, str] | None:
    """How the newest start ended, with a level; None if it seems to run. `silent`: seconds since the last heartbeat,
    of which `allowed` are normal."""
    if status.state in ENDED:
        return _reported_end(status)
    gone = run.fetched is None and status.host == socket.gethostname() and process_start(status.pid or -1) is None
    if (gone and not is_held(run)) or holder_died(run):  # in another container of this host it may well be alive
        return ALERT, f"its process {status.pid} exited without reporting a reason"
    alive = run.fetched is None and status.paused is None and is_held(run)  # its lock is renewed beside long work
    if not alive and silent > (1 if status.paused is not None else 3) * allowed:  # paused ranks have nothing else to do
        return ALERT, f"no heartbeat for {human_time(silent)}"
    return None


def _reported_end(status: Status) -> tuple[int, str]:
    """The end that a start reported, with a level."""
    code, reason = (status.exit_intent.code, status.exit_intent.reason) if status.exit_intent else (None, None)
    if status.state == "failed":
        return ALERT, f"ended with exit {code}: {reason}"
    return (WARN, f"stopped before its end: {reason}") if status.state == "stopped" else (OK, "complete")


def _check_checkpoints(report: StatusReport, run: RunDir) -> None:
    try:
        missing_checkpoint = None if run.rollback.exists() or run.fetched else missing(run)
        checkpoints = Store(run.checkpoints).scan()
    except UserError as error:
        report.problems.append((ALERT, error.cause))
        return
    if missing_checkpoint is not None:
        report.state = "incomplete" if report.state == "complete" else report.state
        report.problems.append((ALERT, f"{missing_checkpoint.text}: is a mount missing, or were checkpoints deleted?"))
    verified = [checkpoint for checkpoint in checkpoints if checkpoint.problem is None and checkpoint.verified]
    for checkpoint in checkpoints:
        if checkpoint.problem is not None:
            report.problems.append((WARN, f"{checkpoint.path.name} is damaged: {checkpoint.problem}"))
    report.verified_checkpoint, newest = None, verified[-1].manifest() if verified else None
    if newest is not None:
        report.verified_checkpoint = Verified(
            step=newest.step,
            age_seconds=round(age(newest.committed), 1),
            steps_behind=(report.status.step or 0) - newest.step,
            bytes=sum(entry.bytes for entry in newest.files),
            path=f"{run.fetched.url if run.fetched else run.path}/checkpoints/{verified[-1].path.name}",
        )
    if run.fetched is None and (newest is not None or run.config.exists()):  # else training has not started
        _check_next_checkpoint(report, run, newest)


def _check_next_checkpoint(report: StatusReport, run: RunDir, newest: CheckpointManifest | None) -> None:
    """Add whether the next checkpoint fits or is late, by the watchdog's rules; `newest`: the last verified one."""
    try:
        config = load_recorded(run.config)
    except UserError as error:
        report.problems.append((WARN, f"{run.config} cannot be read: {error.cause.splitlines()[0]}"))
        return
    try:
        fit, late = upcoming.next_fit(run, config), _unsaved_training(run, config, report.status, newest)
    except (UserError, OSError) as error:
        cause = error.cause if isinstance(error, UserError) else error
        report.problems.append((WARN, f"whether the next checkpoint fits is not known: {cause}"))
        return
    if fit is not None:
        report.disk_free_bytes, report.checkpoints_that_fit = fit.room.free, fit.count
    if report.state in _ENDED:
        return
    if fit is not None and fit.severity is not None:
        report.problems.append((int(fit.severity), fit.text))
    if level := late.late():
        report.problems.append((WARN if level is Late.LATE else ALERT, str(late)))


def _unsaved_training(
    run: RunDir, config: Config, status: Status, newest: CheckpointManifest | None
) -> UnsavedTraining:
    """What the run has trained since its newest verified checkpoint, or without one, since its start."""
    step, consumed, tokens = (newest.step, newest.consumed, newest.tokens) if newest is not None else (0, 0, 0)
    saves = journal.of_kind(journal.read(run), "checkpoint")
    return unsaved_training(
        (config.schedule.save_every(consumed + 1), config.schedule.save_every(status.consumed or 0)),
        steps=(status.step or 0) - step,
        samples=(status.consumed or 0) - consumed,
        tokens=(status.tokens or 0) - tokens,
        age=min(age(newest.committed if newest is not None else None), age(status.started)),
        step_seconds=status.iteration_seconds or 0.0,
        save_seconds=longest_save([entry["seconds"] for entry in saves[-SAVES:]]),
    )


def _add_alarms(report: StatusReport, run: RunDir) -> None:
    """Add the open alarms of the watchdog."""
    try:
        report.alarms = [alarm for alarm in read_alarms(alarms_file(run)) if alarm.state != "resolved"]
    except OSError as error:
        report.problems.append((ALERT, f"which alarms are open is not known: {error}"))
    for alarm in report.alarms:
        if alarm.severity is not Severity.INFO:
            acknowledged = alarm.state == "acknowledged"
            level = ALERT if alarm.severity is Severity.CRIT and not acknowledged else WARN
            since = f"since {human_time(age(alarm.opened))}{', acknowledged' if acknowledged else ''}"
            report.problems.append((level, f"{alarm.key}: {alarm.summary} ({since})"))


def _check_evaluations(report: StatusReport, run: RunDir) -> None:
    """Add evaluations that failed: as problems if they were given up."""
    try:
        failed = failed_evaluations(run, load_recorded(run.config)) if run.config.exists() else []
    except UserError:
        return  # reported elsewhere
    report.problems += [(WARN, text) for text, given_up in failed if given_up]
    if retried := [text for text, given_up in failed if not given_up]:
        report.evaluations = retried


def _check_watchdog(report: StatusReport, run: RunDir) -> None:
    """Add the last snapshot of the watchdog, and whether it makes its passes."""
    snapshot = state_files.view(snapshot_file(run), _WatchdogSnapshot)
    silent = age(snapshot.time) if snapshot is not None else math.inf
    if snapshot is not None:
        report.watchdog = snapshot.model_copy(update={"age_seconds": round(silent, 1)})
    if run.fetched or not report.running or age(report.status.started) < _SILENT_AT_LEAST:
        return
    try:
        wanted = load_recorded(run.config).watchdog.enabled
    except UserError:
        return  # reported elsewhere
    if wanted and silent > _SILENT_AT_LEAST:
        ago = f"has made no pass for {human_time(silent)}" if snapshot is not None else "has made no pass yet"
        report.problems.append(
            (WARN, f"the watchdog {ago}: see {run.path / 'watchdog/agent.log'}, and the output of the job")
        )


def _add_progress(report: StatusReport, run: RunDir) -> None:
    """Add the steps since the status was last shown."""
    last, step = state_files.view(run.path / _LAST_LOOK, _LastLook), report.status.step or 0
    if last is not None:
        report.since_last_look = SinceLastLook(steps=step - last.step, seconds=round(age(last.time), 1))
    with contextlib.suppress(OSError):  # must work on a full or read-only disk too
        state_files.write(run.path / _LAST_LOOK, {"step": step, "time": now()})


def _add_scores(report: StatusReport, run: RunDir) -> None:
    """Add the scores of the newest evaluated checkpoint that no rollback or fork has left behind."""
    scored = journal.of_kind(lineage.drop_abandoned(journal.read(run)), "eval")
    if scored:
        newest = max(reversed(scored), key=lambda entry: int(entry["step"]))
        report.evaluated = f"step {newest['step']:_}, {newest['text']}"


def _add_goodput(report: StatusReport, run: RunDir) -> None:
    """Add goodput, unless reading the record takes too long."""
    if (size := recorded_bytes(run)) > _LARGEST_RECORD:
        report.goodput = f"`fsdp-pretrain goodput` reads the {human_bytes(size)} of the record"
        return
    try:
        account = goodput.goodput(run)
    except UserError as error:  # damaged lineage
        report.problems.append((ALERT, error.cause))
        return
    if account is not None:
        report.goodput = goodput.headline(account)


def _check_files(report: StatusReport, run: RunDir) -> None:
    """Add damaged small files, which their readers ignore or refuse."""
    for path, schema in _small_files(run):
        try:
            state_files.read(path, schema)
        except UserError as error:
            report.problems.append((WARN, error.cause))


def _small_files(run: RunDir) -> Iterator[tuple[Path, type[StateFile]]]:
    yield run.rollback, lineage.DecidedRollback
    yield run.lock, LeaseRecord
    for segment in run.segments:
        yield segment / EXIT_INTENT, ExitIntent
        yield segment / ENVIRONMENT, Environment


def _watchdog_line(snapshot: _WatchdogSnapshot) -> str:
    parts = [f"last pass {human_time(snapshot.age_seconds)} ago"]
    if snapshot.step_drift is not None:
        parts.append(f"steps {snapshot.step_drift - 1:+.1%} of the baseline")
    if snapshot.disk_full_in is not None:
        parts.append(f"disk full in {human_time(snapshot.disk_full_in)}")
    return ", ".join(parts)


def render(report: StatusReport) -> str:
    """The report as text for one screen."""
    names = {WARN: "WARN", ALERT: "ALERT"}
    rows = [*facts(report), *((names[level], text) for level, text in sorted(report.problems, reverse=True))]
    return "\n".join([f"{report.status.run}: {report.headline.upper()}", *(row(*cells) for cells in rows)])


def facts(report: StatusReport) -> Iterator[tuple[str, str]]:
    """All facts of a report except its problems, as (name, text)."""
    status = report.status
    if status.step is not None and status.total_steps is not None:
        loss = f", loss {status.loss:.4f}" if status.loss is not None else ""
        yield "step", f"{status.step:_} of {status.total_steps:_}, {human_count(status.tokens or 0)} tokens{loss}"
        if pace := status.iteration_seconds:
            left = f", {human_time(status.seconds_left)} to go" if report.running and status.seconds_left else ""
            yield "pace", f"{pace:.3g}s a step, {human_count(status.tokens_per_second or 0)} tokens/s{left}"
    if (heldout := status.heldout) is not None:
        means = ", ".join(
            f"{name} {'unknown' if mean is None else f'{mean:.4f}'}" for name, mean in heldout.loss.items()
        )
        yield "held-out", f"{means}, loss after step {heldout.step:_}"
    if (since := report.since_last_look) is not None:
        done = counted(since.steps, "step") if since.steps >= 0 else f"went back {counted(-since.steps, 'step')}"
        yield "progress", f"{done} in the {human_time(since.seconds)} since the last status"
    if report.heartbeat_age_seconds is not None and report.state not in _ENDED:
        process = f" pid {status.pid}" if status.pid else ""
        yield "heartbeat", f"{human_time(report.heartbeat_age_seconds)} ago, {status.host}{process}"
    if report.untrained:
        yield "last start", report.untrained
    if (checkpoint := report.verified_checkpoint) is not None:
        ago = f"verified {human_time(checkpoint.age_seconds)} ago"
        yield "checkpoint", f"step {checkpoint.step:_}, {ago}, {counted(checkpoint.steps_behind, 'step')} behind"
    elif "verified_checkpoint" in report.model_fields_set:
        yield "checkpoint", "none verified yet"
    if "disk_free_bytes" in report.model_fields_set:
        room = f", room for {report.checkpoints_that_fit:_} checkpoints" if report.running else ""
        yield "disk", f"{human_bytes(report.disk_free_bytes)} free{room}"
    if report.evaluated:
        yield "evaluated", report.evaluated
    yield from (("evaluation", text) for text in report.evaluations)
    if report.watchdog is not None and report.running:
        yield "watchdog", _watchdog_line(report.watchdog)
    if report.goodput:
        yield "goodput", report.goodput
    if status.overrides:
        yield "settings", f"changed, {status.overrides}"
