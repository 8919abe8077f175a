"""Handles a run without progress: finds the cause, opens the alarm, and finally ends it for a restart.

Progress is any beat of any rank. At the soft deadline all stacks are dumped and the suspect is named; a while later
they are dumped again; at the hard deadline the ranks are ended if the suspects have not moved. A hung step is never
saved.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fsdp_pretrain.config.operations import WatchdogSection
from fsdp_pretrain.heartbeat import Phase
from fsdp_pretrain.run.files import make_directory
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.units import human_time
from fsdp_pretrain.watchdog.notify.alarms import Alarms

from .deadlines import LONG_PHASES, LONGEST, PhaseHistory
from .diagnosis import HangDiagnosis, diagnose
from .peers import PeerNodes
from .rank_monitor import RankMonitor, RankSnapshot

_BETWEEN_DUMPS = 30.0
_RECORDER_SECONDS = 5.0
"""Time for NCCL's flight recorders to answer: torch looks for a request once a second."""
_ASK_SECONDS = 1.0
"""Time for a rank to dump its stacks before it is forced to; it needs milliseconds."""
_DUMP_SECONDS = 3.0
"""Time for ranks to dump their stacks before they are ended."""


@dataclass
class _Stall:
    """A stall in progress. Times are seconds without progress, except `began` (`time.monotonic()`)."""

    began: float
    dumped: float  # this and the next: when stacks were last requested, and how often
    dumps: int = 1
    # when the first stacks could be read, and the recorders had answered or not in time; None before
    read: float | None = None
    verdict: HangDiagnosis | None = None  # the last verdict in the alarm; None before it was opened
    seen: dict[int, Any] = field(default_factory=dict)  # the first stack of each rank
    patience: float = 0.0  # extension of the hard deadline


class HangMonitor:
    """Watches the ranks of this node.

    Args:
        stacks: folder for stack dumps in the run directory.
        end: records the reason and facts, and ends the ranks of this node.

    Attributes:
        alarms: the alarms of the run; None on nodes that do not lead.
    """

    def __init__(
        self,
        section: WatchdogSection,
        ranks: RankMonitor,
        nodes: PeerNodes,
        stacks: Path,
        *,
        end: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self._act, self._soft = section.act, section.hang.soft.value
        self._ranks, self._nodes = ranks, nodes
        self._stacks, self._end = stacks, end
        self.alarms: Alarms | None = None
        self.history = PhaseHistory(section.hang)
        self._progress = 0
        self._stall: _Stall | None = None

    @property
    def stalled(self) -> list[RankSnapshot]:
        """The positions of this node's ranks during a stall, once their stacks could be read; else empty."""
        return self._ranks.snapshots() if self._stall is not None and self._stall.read is not None else []

    @property
    def is_stalled(self) -> bool:
        """Whether the soft deadline has passed without progress since."""
        return self._stall is not None

    def hard_deadline(self) -> float | None:
        """Seconds without progress after which the ranks are ended; None: never."""
        phases = self._ranks.phases
        return self.history.deadlines(phases).hard if phases and self._act else None

    def check(self) -> None:
        """Check for progress; once per pass."""
        progress, phases = self._ranks.progress, self._ranks.phases
        if progress == self._progress:
            if phases:
                self._check_stall(phases, self._ranks.still())
            return
        self._progress = progress
        if self._stall is not None and Phase.END in phases:
            return  # a rank fails because its peers were ended: the hang is not over
        if (beat := self._ranks.all[0].beat) is not None:
            self.history.observe(beat, phases)
        if self._stall is not None:
            self._stall = None
            if self.alarms is not None:
                self.alarms.resolve("hang", "the ranks make progress again", step=self._ranks.reached())

    # ------------------------------------------------------------------ no progress

    def _check_stall(self, phases: set[Phase], seconds: float) -> None:
        if self._is_one_stopped():  # a stopped process is no long phase: use the deadlines of steps
            phases = phases - {*LONG_PHASES} or {Phase.COMPUTE}
        due, stall = self.history.deadlines(phases), self._stall
        if stall is None:
            # A newly started agent has observed no step time; then rely on the leader, which has.
            if seconds >= due.soft or (self._nodes.leader_stalls and seconds >= self._soft):
                for rank in self._ranks.all:
                    rank.stack, rank.recorder.progress = None, ()  # they are from an earlier stall
                self._dump()
                self._ask_recorders()
                self._stall = _Stall(began=time.monotonic() - seconds, dumped=seconds)
            return
        self._read()
        since = seconds - stall.dumped
        if since >= _ASK_SECONDS:
            self._force_stacks()
        if stall.read is None:  # the passes after the dumps were requested
            owed = any(rank.owes_stack for rank in self._ranks.alive)
            awaited = any(rank.recorder.awaited for rank in self._ranks.alive)
            if (owed and since < 2 * _ASK_SECONDS) or (awaited and since < _RECORDER_SECONDS):
                return
            stall.read = seconds
        if stall.dumps == 1:
            stall.seen = self._signatures() | stall.seen
        if stall.verdict is None:
            patience = min(self._nodes.patience, (due.hard - due.soft) / 3)
            is_known = not self._diagnose(stall).unknown or seconds - stall.read > patience
            if self.alarms is not None and is_known:
                self._open(stall, seconds, "stacks of all ranks are in watchdog/stacks/")
        elif stall.verdict.unknown or not stall.verdict.suspects:
            self._open(stall, seconds)  # more may be known by now
        if stall.dumps == 1 and seconds - stall.dumped >= min(_BETWEEN_DUMPS, (due.hard - due.soft) / 2):
            stall.dumps, stall.dumped = 2, seconds
            self._dump()
            self._ask_recorders()
        elif seconds >= due.hard + stall.patience:
            self._last_resort(stall, seconds, due.hard)

    def _is_one_stopped(self) -> bool:
        """Whether the process of a rank is stopped, here or as its node reports."""
        return any(rank.state == "T" for rank in self._ranks.all) or any(
            snapshot.state == "T" for snapshot in self._nodes.snapshots()
        )

    def _last_resort(self, stall: _Stall, seconds: float, hard: float) -> None:
        now, verdict = self._signatures(), self._diagnose(stall)
        guilty = [rank for rank in stall.seen if rank in verdict.suspects] or list(stall.seen)
        moved = stall.dumps >= 2 and any(now.get(rank) != stall.seen[rank] for rank in guilty)
        if moved and seconds < LONGEST:
            stall.seen = now  # something moves although no beat comes: extend the deadline
            stall.patience += hard
            stall.dumps, stall.dumped = 1, seconds
        elif not self._act:
            self._open(stall, seconds, "not ended: watchdog.act is off")
            stall.patience += hard
        else:
            self._open(stall, seconds, "ended the ranks, to be started again")
            facts = verdict.facts | ({"lost": list(verdict.silent)} if verdict.silent else {})
            self._end(f"no progress for {human_time(seconds)}: {verdict.text}", facts)

    def _open(self, stall: _Stall, seconds: float, action: str = "") -> None:
        verdict = stall.verdict = self._diagnose(stall)
        if self.alarms is None:
            return
        phases, step = "/".join(sorted(phase.name.lower() for phase in self._ranks.phases)), self._ranks.reached()
        known = next((alarm.facts for alarm in self.alarms if alarm.key == "hang"), verdict.facts)
        self.alarms.open(
            "hang",
            Severity.CRIT,
            f"no progress for {human_time(seconds)} in step {step} ({phases}): {verdict.text}",
            revised={**known, **verdict.facts} != known,
            effect="nothing is trained",
            remedy="the ranks are ended at the hard deadline and start again from the last checkpoint; "
            "if it recurs, read the stacks and take the named host out",
            step=step,
            **({"action": action} if action else {}),
            facts=verdict.facts | {"seconds": round(seconds, 1), "ranks": list(map(asdict, self._snapshots(stall)))},
        )

    def _diagnose(self, stall: _Stall) -> HangDiagnosis:
        return diagnose(self._snapshots(stall), self._nodes.quiet(), self._nodes.unreported(stall.began))

    def _snapshots(self, stall: _Stall) -> list[RankSnapshot]:
        return [*self._ranks.snapshots(), *self._nodes.snapshots(stall.began)]

    def _dump(self) -> None:
        for rank in self._ranks.alive:
            rank.ask_stack()

    def _force_stacks(self) -> None:
        for rank in self._ranks.alive:
            if rank.owes_stack:
                rank.force_stack()

    def _ask_recorders(self) -> None:
        for rank in self._ranks.alive:
            rank.recorder.ask()

    def take_last_stacks(self) -> None:
        """Let all ranks dump their stacks before they are ended, even stopped ones (continued only briefly)."""
        self._dump()
        for rank in self._ranks.alive:
            rank.signal(signal.SIGCONT)
        begun, forced = time.monotonic(), False
        waiting = {rank.number for rank in self._ranks.alive}
        while waiting and time.monotonic() < begun + _DUMP_SECONDS:
            time.sleep(0.005)
            waiting -= set(self._read())
            if not forced and time.monotonic() > begun + _ASK_SECONDS:
                forced = True
                self._force_stacks()

    def _read(self) -> list[int]:
        """Read the dumps written since they were requested. Returns the ranks that have one."""
        dumped = []
        for rank in self._ranks.all:
            if (stack := rank.dumps.latest()) is not None:
                rank.stack = stack
                self._keep(rank.number, rank.dumps.text)
                dumped.append(rank.number)
        self.keep_recordings()
        return dumped

    def keep_recordings(self) -> None:
        """Read and keep what the flight recorders have written; NCCL also writes it when it ends a rank itself."""
        for rank in self._ranks.all:
            if rank.recorder.update():
                with contextlib.suppress(OSError):
                    make_directory(self._stacks)
                    name = f"{self._ranks.segment:04d}-nccl-{rank.number:05d}"  # torchfrtrace wants the rank last
                    shutil.copyfile(rank.recorder.path, self._stacks / name)

    def _keep(self, rank: int, text: str) -> None:
        path = self._stacks / f"{self._ranks.segment:04d}-rank-{rank:05d}.txt"
        with contextlib.suppress(OSError):
            make_directory(path.parent)
            with path.open("a", encoding="utf-8") as file:
                file.write(f"# {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())}Z\n{text}\n")

    def _signatures(self) -> dict[int, Any]:
        return {rank.number: rank.stack.signature for rank in self._ranks.all if rank.stack is not None}
