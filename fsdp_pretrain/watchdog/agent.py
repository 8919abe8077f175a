"""The agent: one small process per node beside the ranks, which sees what they cannot see themselves. No torch.

    python -m fsdp_pretrain.watchdog.agent RUN --pages DIR --node 0 --nodes 1 --ranks 0:8 --launcher PID < config.toml

It is started by a rank of the node (`heart`), outlives it, and ends with what started the ranks. It looks once a
second: pages, processes, the record. It acts by the control inbox, by stack dumps and, as the last resort, by ending
its own node's ranks. The agent of the first node speaks for the job; another takes over if it falls silent.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import socket
import sys
import time
import tomllib
import traceback
from pathlib import Path
from typing import Any, cast

from ..config import Config
from ..errors import Exit, StorageError
from ..record import claim, exit_intent, run_id
from ..record.claim import Holder
from ..record.exit_intent import ExitIntent
from ..record.files import RunDir, make_directory
from ..record.journal import Journal
from ..severity import Severity
from .alarms import Alarm, Alarms
from .blind import Blind
from .desk import keeper
from .detector import Detector
from .hang import Hang
from .heart import root, sweep
from .leader import Leader, take_the_lead
from .nodes import Nodes, Relay
from .page import Beat, Phase
from .ranks import Rank, Ranks
from .sensors import sensors

_STALLED = 0.5
"""Seconds between two looks while nothing moves."""
_ABSENT = 10.0
"""Seconds for which a run directory may be gone, as when it is mounted again, before the ranks are asked to stop."""
_GIVE_UP = 60.0
"""Seconds in which no rank shows itself, or after a takeover the earlier agent does not end."""


class Agent:
    """One node's agent.

    Args:
        config: the run.
        pages: folder of the ranks' pages.
        ranks: their numbers.
        node, nodes: this node, and how many there are.
        launcher: process id of what started the ranks.
        attempt: what all nodes of a start have in common.
    """

    def __init__(
        self, config: Config, *, pages: Path, ranks: range, node: int, nodes: int, launcher: int, attempt: str
    ) -> None:
        self.config, self.run = config, RunDir(config.run.dir)
        self.directory = self.run.path / "watchdog"
        self._pages = pages
        self.ranks = Ranks(ranks, pages, launcher)
        beat, silent = config.watchdog.beat.value, config.watchdog.silent.value
        self.nodes = Nodes(self.directory, node, nodes, attempt, beat=beat, silent=silent)
        self._keeper = keeper(self.run, silent if nodes > 1 else 0.0)
        self.segment = 0
        self._relay = Relay()
        self._leader: Leader | None = None
        self._local: list[Detector] | None = None
        self._died: list[Rank] = []
        self._ended = False
        self._asked_to_end = False
        self._stalled: list[dict[str, Any]] = []
        self._absent_since: float | None = None
        self._stop_asked = False
        self._bind()
        self.hang = Hang(config.watchdog.hang, self.ranks, self.nodes, keep=self._keep_stack, end=self._end_ranks)

    # ------------------------------------------------------------------ life

    def live(self) -> None:
        """Look until the ranks and what started them are gone."""
        signal.signal(signal.SIGTERM, self._on_signal)
        interval, begun = self.config.watchdog.interval.value, time.monotonic()
        guard = Blind(self.ranks, interval, self.hang.hard, self._tell_at_once)
        guard.start()
        while True:
            start = time.monotonic()
            try:
                self._look()
            except Exception:  # a defect in one pass must not end the watch
                traceback.print_exc()
                sys.stderr.flush()
            if (alarm := guard.passed()) is not None:  # sent; now it can be written down
                self.alarms.open(alarm.key, alarm.severity, alarm.summary, effect=alarm.effect, remedy=alarm.remedy)
                self.alarms.resolve(alarm.key, "the run directory answers again")
            if self._finished(begun):
                break
            pause = min(interval, _STALLED) if self.hang.is_stalled else interval
            self._died += self.ranks.wait(pause - (time.monotonic() - start))
        self._finish()
        shutil.rmtree(self._pages, ignore_errors=True)

    def _finish(self) -> None:
        """The last words, and those of the other nodes: what brought the run down may be told there."""
        self.nodes.write(self._report(ended=True), news="ended")
        if self._leader is not None:
            self._leader.look()
        if self.nodes.count > 1 and self.segment and not self._asked_to_end:
            self._hear_the_others()
        if self._leader is not None:
            self._leader.tell_the_end()
            self._leader.close()

    def _hear_the_others(self) -> None:
        """Wait for the last words of the other nodes. One without any, when ranks just fail, is the reason."""
        intent = self._intent()
        if intent is not None and intent.code == Exit.COMPLETE:
            return
        patience, begun = self.nodes.patience, time.monotonic()
        self._keeper = Holder(self._keeper.path, patience - self.nodes.beat)
        while not self.nodes.all_ended and time.monotonic() - begun < patience:
            self._watch_the_leader()
            time.sleep(self.nodes.beat / (4 if self._leader is not None else 1))
            self.nodes.read(all_=True, at_once=True)
        lost = self.nodes.quiet()
        if self._leader is None and all(self.nodes.name(node) in lost for node in range(self.nodes.node)):
            self._lead()
        if self._leader is None:
            return
        self._leader.look()
        intent = self._intent()
        if lost and (intent is None or intent.code == Exit.UNEXPECTED):
            for host, seconds in lost.items():
                self._leader.open_silence(host, seconds, "the ranks of the other nodes lost their connection to it")
            text = f"{', '.join(lost)} is lost: nothing has been heard of it since the ranks failed"
            self._write_intent(Exit.RESUME, text, {"suspects": [], "hosts": list(lost), "lost": list(lost)})

    def _tell_at_once(self, alarm: Alarm) -> None:
        if self._leader is not None:
            self._leader.tell_at_once(alarm)

    def _on_signal(self, number: int, frame: Any) -> None:
        del number, frame
        self._asked_to_end = True

    def _finished(self, begun: float) -> bool:
        if self._asked_to_end or (not self.ranks.seen and time.monotonic() - begun > _GIVE_UP):
            return True
        return self.ranks.seen and not self.ranks.alive and not self._died

    def _look(self) -> None:
        self.ranks.look()
        if run_id.bound_to(self.run.path) is None:
            self._bind()
        if (segment := self.ranks.segment) and segment != self.segment:
            self.segment = segment
            run_id.bind(self.run.checkpoints, run_id.read(self.run.checkpoints))
        died = self._take_the_dead()
        # The kernel kills the ranks of a torchrun that is killed, and all may be seen at once. When one dies by itself,
        # the others fail and say so.
        if self.ranks.launcher_gone and not self._ended and (self.ranks.alive or len(died) == len(self.ranks.all)):
            reason = "what started the ranks is gone" + (f"; {_deaths(died)}" if died else "")
            self._end_ranks(reason, {}, restart=False)
        self._look_at_nodes()
        self._look_at_the_dead(died)
        if not self._ended:
            self.hang.check()
        if not self._ended:  # ranks that were ended stand where they stood before: the others may still ask why
            self._stalled = [standing.to_json() for standing in self.hang.stalled]
        self.nodes.write(self._report(), news=(self.segment, bool(self._stalled), set(self._relay.open_)))
        if self._leader is not None:
            self._leader.look()
            self.hang.learn(self._leader.step_seconds)
        elif self.segment:
            self._look_locally()
        self._look_at_the_directory()

    def _bind(self) -> None:
        """Take the id of the run directory from the ranks; until they know it, nothing is written there."""
        known = run_id.read(self._pages)
        run_id.bind(self.run.path, known)
        if known is None:
            return
        with contextlib.suppress(OSError):
            make_directory(self.directory)
            with (self.directory / "agent.log").open("ab") as log:
                for stream in (sys.stdout, sys.stderr):
                    os.dup2(log.fileno(), stream.fileno())

    def _look_at_the_directory(self) -> None:
        """No save can succeed without the run directory: when it stays away it is told, and the ranks asked to stop."""
        try:
            directory = run_id.lost()
        except StorageError:  # it does not answer, which is told of mounts
            return
        if directory is None:
            self._absent_since = None
            self.alarms.resolve("run-directory", f"{self.run.path} is there again")
            return
        if self._absent_since is None:
            self._absent_since = time.monotonic()
        if time.monotonic() - self._absent_since < _ABSENT:
            return
        act = self.config.watchdog.storage.act
        error = run_id.gone(directory)
        self.alarms.open(
            "run-directory",
            Severity.CRIT,
            error.cause,
            effect="nothing can be saved or recorded; a save that is due ends the run with exit 93",
            remedy=error.remedy,
            action="asked the ranks to stop" if act else "",
        )
        if act and not self._stop_asked and not self._ended and Phase.END not in self.ranks.phases:
            self._stop_asked = True
            for rank in self.ranks.alive[:1]:
                rank.signal(signal.SIGUSR1)

    def _look_at_nodes(self) -> None:
        """What the others say, who leads, and whether the run went on without this node, which was frozen then."""
        leader, stalled = self._leader, bool(self.hang.stalled)
        if self.nodes.read(all_=leader is not None or stalled, at_once=leader is not None and stalled):
            self._look_for_a_later_start()
        if leader is not None and not leader.holds:
            self.log(
                "another node's watchdog speaks for the job: this one was frozen, or cut off from the run directory"
            )
            leader.close()
            self._leader = self.hang.alarms = None
        if self._leader is None and self.segment and not self._ended:
            if self.nodes.leads:
                self._lead()
            else:
                self._watch_the_leader()

    def _look_for_a_later_start(self) -> None:
        segments = self.run.segments
        newest = int(segments[-1].name) if segments else 0
        if not self.segment or newest <= self.segment or self._ended:
            return
        self._ended = True
        self.log(f"start {newest} went on without these ranks of start {self.segment}: they were ended")
        self.ranks.kill()

    def log(self, text: str) -> None:
        """A line of the chronicle."""
        Journal(self.run, self.segment or None).write("watchdog", f"{socket.gethostname()}: {text}")

    def _watch_the_leader(self) -> None:
        """See its claim beat, so that it need not be waited for when it has become silent."""
        with contextlib.suppress(OSError):
            self._keeper.lives(claim.read(self._keeper.path))

    def _lead(self) -> None:
        claim = take_the_lead(self.config, self._keeper)
        if claim is None:
            return  # of an earlier agent, or of a command, for a moment
        self._leader = Leader(self.config, claim, self.ranks, self.nodes, self.segment)
        self._relay.forward(self._leader.alarms)
        self.hang.alarms = self._leader.alarms
        if self.nodes.node:
            before = ", ".join(self.nodes.name(node) for node in range(self.nodes.node))
            self.log(f"the watchdog of this node speaks for the job now: {before} silent")

    def _look_locally(self) -> None:
        """The detectors of a node that does not lead."""
        if self._local is None:
            host, relay = socket.gethostname(), cast(Alarms, self._relay)
            self._local = sensors(
                self.config, self.run, relay, segment=self.segment, host=host, leads=False, pids=self.ranks.pids
            )
        for detector in self._local:
            detector.tick(time.monotonic())

    @property
    def alarms(self) -> Alarms:
        """Where this node's detectors say what they find."""
        return self._leader.alarms if self._leader is not None else cast(Alarms, self._relay)

    def _report(self, *, ended: bool = False) -> dict[str, Any]:
        windows = {
            str(rank.number): [rank.beat.window, rank.beat.own] for rank in self.ranks.all if rank.beat is not None
        }
        report = {"segment": self.segment, "stalled": self._stalled, "findings": self._relay.open_, "windows": windows}
        return {**report, "ended": ended}

    # ------------------------------------------------------------------ ranks that end

    def _take_the_dead(self) -> list[Beat]:
        """The last beats of the ranks that have ended since this was last asked, and did not say why."""
        died, self._died = [(rank, rank.beat) for rank in self._died if rank.beat is not None], []
        return [
            beat
            for rank, beat in died
            if beat.segment != 0 and beat.phase is not Phase.END and not self._explained(rank)
        ]

    def _look_at_the_dead(self, died: list[Beat]) -> None:
        """Ranks that ended without saying why: told, and the run's intent is to be resumed."""
        if self._ended or not died:
            return
        host, ranks, text = socket.gethostname(), [beat.rank for beat in died], _deaths(died)
        broken = sorted(self._leader.broken_hosts()) if self._leader is not None else []
        code = Exit.RESUME_AVOIDING_HOSTS if broken else Exit.RESUME
        facts = {"suspects": ranks, "hosts": [host], **({"avoid_hosts": broken} if broken else {})}
        self._write_intent(code, text, facts)
        self.alarms.open(
            "rank-died",
            Severity.CRIT,
            text + _killed_for_memory(),
            effect="the other ranks cannot go on",
            remedy="the job starts again from the last checkpoint; look at the kernel's log of that host",
            step=max(beat.step for beat in died),
            facts={"ranks": ranks, "host": host},
        )

    def _explained(self, rank: Rank) -> bool:
        """Whether the run has said why it ends, other than by what its death did to another rank."""
        intent = self._intent()
        return intent is not None and (intent.code != Exit.UNEXPECTED or intent.rank == rank.number)

    def _intent(self) -> ExitIntent | None:
        return exit_intent.read(self.run.segment(self.segment)) if self.segment else None

    def _write_intent(self, code: Exit, reason: str, facts: dict[str, Any], *, restart: bool = True) -> None:
        if self.segment:
            segment = self.run.segment(self.segment)
            exit_intent.write(
                self.run, segment, int(code), reason, is_cause=True, by="watchdog", restart=restart, **facts
            )

    def _end_ranks(self, reason: str, facts: dict[str, Any], *, restart: bool = True) -> None:
        """Write down why, let stopped ranks say where they stand, and end all of this node."""
        self._ended = True
        self._write_intent(Exit.RESUME, reason, facts, restart=restart)
        self.hang.last_words()
        self.ranks.kill()

    def _keep_stack(self, rank: int, text: str) -> None:
        """Add a dump to `RUN/watchdog/stacks`."""
        path = self.directory / "stacks" / f"{self.segment:04d}-rank-{rank:05d}.txt"
        with contextlib.suppress(OSError):
            make_directory(path.parent)
            with path.open("a", encoding="utf-8") as file:
                file.write(f"# {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())}Z\n{text}\n")


def _deaths(died: list[Beat]) -> str:
    host = socket.gethostname()
    return "; ".join(
        f"rank {beat.rank} ({host}, pid {beat.pid}) died in step {beat.step} without a word" for beat in died
    )


def _killed_for_memory() -> str:
    """Whether the kernel says that it killed something in this container for its memory."""
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        with contextlib.suppress(OSError):
            for line in Path(path).read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill" and int(count) > 0:
                    return f" (the kernel has killed {count} processes here for lack of memory)"
    return ""


def main(arguments: list[str] | None = None) -> int:
    """Run an agent to its end."""
    parser = argparse.ArgumentParser(prog="python -m fsdp_pretrain.watchdog.agent", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--pages", type=Path, required=True)
    parser.add_argument("--node", type=int, required=True)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--ranks", required=True)
    parser.add_argument("--launcher", type=int, required=True)
    parser.add_argument("--attempt", default="")
    parser.add_argument("--again", type=int, default=0, help="how often it was started before")
    args = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = Config.model_validate(tomllib.loads(sys.stdin.read()))
    first, stop = map(int, args.ranks.split(":"))
    sweep(root(), args.pages)
    name = hashlib.sha256(f"{args.run} {socket.gethostname()} {args.node}".encode()).hexdigest()[:16]
    with _alone(args.pages.parent / f"{name}.lock"):
        agent = Agent(
            config,
            pages=args.pages,
            ranks=range(first, stop),
            node=args.node,
            nodes=args.nodes,
            launcher=args.launcher,
            attempt=args.attempt,
        )
        if args.again:
            agent.log(f"the agent had ended and was started again, for the {args.again}. time")
        agent.live()
    return 0


@contextlib.contextmanager
def _alone(path: Path) -> Any:
    """One agent per run and node: the one of an earlier attempt ends first."""
    with path.open("w") as file:
        deadline = time.monotonic() + _GIVE_UP
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(0.1)
        yield


if __name__ == "__main__":
    sys.exit(main())
