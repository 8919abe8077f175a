"""The run makes no progress: find out why, tell, and at last end it so that it can be started again. No torch.

Progress is any beat of any rank. At the soft deadline all stacks are collected and the suspect is named; a while later
they are collected again; at the hard deadline, if the suspects have not moved meanwhile, the ranks are ended. A hung
step is never saved.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any

from ..severity import Severity
from ..units import human_time
from ..watchdog_sections import HangSection
from .alarms import Alarms
from .nodes import Nodes
from .page import Phase
from .ranks import Ranks, Standing
from .stalls import History
from .verdict import Verdict, judge

_BETWEEN_DUMPS = 30.0
_LAST_WORDS = 3.0
"""Seconds that ranks have to say where they stand before they are ended; they take milliseconds."""


@dataclass
class _Stall:
    """A stall under way. Times in seconds without progress, but `began`, of `time.monotonic()`. `read`: dumps were;
    `told`: the alarm was opened; `seen`: where each rank first stood."""

    began: float
    dumped: float
    dumps: int = 1
    read: bool = False
    told: bool = False
    seen: dict[int, Any] = field(default_factory=dict)
    patience: float = 0.0
    since: float = 0.0


class Hang:
    """Watches the ranks of this node.

    Args:
        section: deadlines.
        ranks: of this node.
        nodes: where the ranks of the other nodes stand, as far as known.
        keep: called with a rank and the text of its dump, to be kept in the run directory.
        end: ends the ranks of this node, after the reason and facts were written down.

    Attributes:
        alarms: where it is told; None on nodes whose standings another node's agent judges.
    """

    def __init__(
        self,
        section: HangSection,
        ranks: Ranks,
        nodes: Nodes,
        *,
        keep: Callable[[int, str], None],
        end: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self._section, self._ranks, self._nodes = section, ranks, nodes
        self._keep, self._end = keep, end
        self.alarms: Alarms | None = None
        self._history = History(section)
        self._progress = 0
        self._steps: dict[int, tuple[int, int]] = {}
        self._long: dict[Phase, int] = {}
        self._stall: _Stall | None = None
        self.verdict: Verdict | None = None

    @property
    def stalled(self) -> list[Standing]:
        """Where this node's ranks stand while there is a stall; else empty."""
        if self._stall is None or not self._stall.read:
            return []
        return self._standings()

    @property
    def is_stalled(self) -> bool:
        """Whether the soft deadline has passed without progress since."""
        return self._stall is not None

    def hard(self) -> float | None:
        """Seconds without progress after which the ranks are ended; None: they are not."""
        due = [self._history.deadlines(phase).hard for phase in self._ranks.phases]
        return max(due) if due and self._section.act else None

    def check(self) -> None:
        """Once a pass."""
        progress, since = self._ranks.progress
        if progress == self._progress and self._ranks.seen:
            self._still((monotonic_ns() - since) / 1e9)
            return
        self._progress = progress
        if self._stall is not None and Phase.END in self._ranks.phases:
            return  # a rank that lost its peers, which were ended a moment earlier: the hang is not over
        self._learn()
        if self._stall is not None:
            self._stall, self.verdict = None, None
            if self.alarms is not None:
                self.alarms.resolve("hang", "the ranks go on", step=self._step)

    @property
    def _step(self) -> int | None:
        return max((rank.beat.step for rank in self._ranks.all if rank.beat is not None), default=None)

    def learn(self, seconds: float | None) -> None:
        """How long a step took by the record: it counts as long as this agent, which may be new, has seen none."""
        if seconds is not None and not self._history.knows_steps:
            self._history.add_step(seconds)

    def _learn(self) -> None:
        """From the first rank's page: how long steps, saves and loads take."""
        rank = self._ranks.all[0]
        beat = rank.beat
        if beat is None:
            return
        last = self._steps.get(rank.number)
        long = bool(self._ranks.phases & {Phase.SAVE, Phase.LOAD})
        if last is not None and beat.step > last[0] and not long and not self._long and last[0] > 0:
            self._history.add_step((beat.step_at - last[1]) / 1e9 / (beat.step - last[0]))
        if last is None or beat.step > last[0]:
            self._steps[rank.number] = (beat.step, beat.step_at)
        for phase in (Phase.SAVE, Phase.LOAD):
            if beat.phase is phase:
                self._long[phase] = beat.phase_at
            elif phase in self._long:
                self._history.add(phase, (beat.phase_at - self._long.pop(phase)) / 1e9)

    # ------------------------------------------------------------------ no progress

    def _still(self, seconds: float) -> None:
        due = [self._history.deadlines(phase) for phase in self._ranks.phases]
        soft, hard = max(d.soft for d in due), max(d.hard for d in due)
        if self._stall is None:
            # An agent that began a moment ago has seen no step, and does not know how long they take: the leader does.
            if seconds < soft and not (self._nodes.leader_stalls and seconds >= self._section.soft.value):
                return
            for rank in self._ranks.all:
                rank.stack = None  # of an earlier stall
            self._dump()
            self._stall = _Stall(began=time.monotonic() - seconds, dumped=seconds)
            return
        stall = self._stall
        self.read()
        if not stall.read:  # the pass after the dumps were asked for
            stall.read, stall.since = True, seconds
        if stall.dumps == 1:
            stall.seen |= {rank: place for rank, place in self._signatures().items() if rank not in stall.seen}
        if not stall.told:
            waited, patience = seconds - stall.since, min(self._nodes.patience, (hard - soft) / 3)
            stall.told = self.alarms is not None and (not self._judge(stall).unknown or waited > patience)
            if stall.told:
                self._tell(stall, seconds, "stacks of all ranks are in watchdog/stacks/")
        elif self.verdict is not None and (self.verdict.unknown or not self.verdict.suspects):
            self._tell(stall, seconds, "")  # more may be known by now
        gap = min(_BETWEEN_DUMPS, (hard - soft) / 2)
        if stall.dumps == 1 and seconds - stall.dumped >= gap:
            stall.dumps, stall.dumped = 2, seconds
            self._dump()
        elif seconds >= hard + stall.patience:
            self._last_resort(stall, seconds, hard)

    def _last_resort(self, stall: _Stall, seconds: float, hard: float) -> None:
        now, verdict = self._signatures(), self._judge(stall)
        guilty = [rank for rank in stall.seen if rank in verdict.suspects] or list(stall.seen)
        moved = stall.dumps >= 2 and any(now.get(rank) != stall.seen[rank] for rank in guilty)
        if moved and seconds < self._section.longest.value:
            stall.seen = now  # something moves although nothing is said: once more, and longer
            stall.patience += hard
            stall.dumps, stall.dumped = 1, seconds
            return
        if not self._section.act:
            self._tell(stall, seconds, "not ended: watchdog.hang.act is off")
            stall.patience += hard
            return
        self._tell(stall, seconds, "ended the ranks, to be started again")
        facts = verdict.facts | ({"lost": list(verdict.silent)} if verdict.silent else {})
        self._end(f"no progress for {human_time(seconds)}: {verdict.text}", facts)

    def _tell(self, stall: _Stall, seconds: float, action: str) -> None:
        self.verdict = self._judge(stall)
        if self.alarms is None:
            return
        phases = "/".join(sorted(phase.name.lower() for phase in self._ranks.phases))
        facts = self.verdict.facts
        told = next((alarm.facts for alarm in self.alarms if alarm.key == "hang"), facts)
        self.alarms.open(
            "hang",
            Severity.CRIT,
            f"no progress for {human_time(seconds)} in step {self._step} ({phases}): {self.verdict.text}",
            revised={**told, **facts} != told,
            effect="nothing is trained",
            remedy="the ranks are ended at the hard deadline and start again from the last checkpoint; "
            "if it comes back, look at the stacks and take the named host out",
            step=self._step,
            **({"action": action} if action else {}),
            facts=facts | {"seconds": round(seconds, 1), "ranks": [each.to_json() for each in self._everywhere(stall)]},
        )

    def _judge(self, stall: _Stall) -> Verdict:
        return judge(self._everywhere(stall), self._nodes.quiet(), self._nodes.untold(stall.began))

    def _everywhere(self, stall: _Stall) -> list[Standing]:
        return [*self._standings(), *self._nodes.standings(stall.began)]

    def _standings(self) -> list[Standing]:
        found = [rank.standing() for rank in self._ranks.all]
        return [standing for standing in found if standing is not None]

    def _dump(self) -> None:
        for rank in self._ranks.alive:
            rank.ask_stack()

    def last_words(self) -> None:
        """Let all ranks say where they stand before they are ended, stopped ones too, which must not get far."""
        self._dump()
        for rank in self._ranks.alive:
            rank.signal(signal.SIGCONT)
        until = time.monotonic() + _LAST_WORDS
        waiting = {rank.number for rank in self._ranks.alive}
        while waiting and time.monotonic() < until:
            time.sleep(0.005)
            waiting -= set(self.read())

    def read(self) -> list[int]:
        """Take in the dumps that have been written since they were asked for; whose there were."""
        found = []
        for rank in self._ranks.all:
            stack = rank.dumps.latest()
            if stack is not None:
                rank.stack = stack
                self._keep(rank.number, rank.dumps.text)
                found.append(rank.number)
        return found

    def _signatures(self) -> dict[int, Any]:
        return {rank.number: rank.stack.signature for rank in self._ranks.all if rank.stack is not None}
