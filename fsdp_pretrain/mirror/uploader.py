"""The process of a node that copies checkpoints and record to the mirror, beside training.

    python -m fsdp_pretrain.mirror.uploader RUN ID --segment 3 --node 0 --nodes 2 --local-ranks 8

The configuration comes on standard input, then lines: `saved` (look at once) and `finish` (copy what is left, then
end). It ends at once when its input does, with the job. The first node's process decides what is copied, says so in
`RUN/mirror/current.json`, and writes manifests; each process copies the files that ranks of its node have written.
Whatever fails is reported (`record.mirror_status`) and tried again. No torch.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import threading
import tomllib
from pathlib import Path

from fsdp_pretrain.checkpoint.store import Checkpoint, step_of
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.errors import RunGoneError, UserError
from fsdp_pretrain.record import mirror_status, run_id, state_files
from fsdp_pretrain.record.files import RunDir
from fsdp_pretrain.record.mirror_status import MirrorReport, MirrorTask

from .checkpoint_copy import LocallyGoneError
from .first_node import FirstNode
from .layout import RunMirror
from .sender import Reporter, Sender, UploaderArguments

_PATIENCE = 20.0
"""Seconds for which a call to the storage is repeated before that is a problem."""
_PAUSES = (2.0, 5.0, 15.0, 30.0, 60.0, 120.0)
"""Seconds before a failed pass is repeated; the last one for all later failures."""
_LOOK_SECONDS, _OTHERS_SECONDS = 10.0, 1.0


class Orders:
    """What the rank that started this process says, read by a thread."""

    def __init__(self) -> None:
        self.finish = False
        self._said = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def wait(self, seconds: float) -> None:
        """Wait for a word from the rank, or the time."""
        self._said.wait(seconds)
        self._said.clear()

    def _read(self) -> None:
        for line in sys.stdin:
            self.finish = self.finish or line.strip() == "finish"
            self._said.set()
        os._exit(0)  # the rank is gone: the job goes on elsewhere or later, with an uploader of its own


class OtherNode:
    """The uploader of any other node: sends its files of the checkpoint that the first node names."""

    def __init__(self, config: Config, args: UploaderArguments, mirror: RunMirror, reporter: Reporter) -> None:
        self._run, self._mirror, self._reporter = RunDir(config.run.dir), mirror, reporter
        self._sender = Sender(config, args, mirror, reporter)

    def work(self, *, finish: bool) -> bool:
        """A pass. Returns whether nothing is left to do. Raises UserError, OSError."""
        task = state_files.view(mirror_status.task_file(self._run), MirrorTask)
        if task is None or task.id == self._reporter.report.task:
            return False
        if not task.id:
            return finish
        path = Path(task.path)
        there = self._mirror.remote.list(f"checkpoints/{path.name}")
        sizes = {name.rpartition("/")[2]: info.size for name, info in there.items()}
        with contextlib.suppress(LocallyGoneError):  # the first node sees that, too
            self._sender.send(task, Checkpoint(step_of(path.name) or 0, path, None, True), sizes)
        return False

    def close(self) -> None:
        """Nothing is to be done."""


def main() -> int:
    """Run an uploader to its end."""
    parser = argparse.ArgumentParser(prog="python -m fsdp_pretrain.mirror.uploader", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("id", help="of the run directory")
    for name, text in (("segment", "of this start"), ("node", "number"), ("nodes", "how many")):
        parser.add_argument(f"--{name}", type=int, required=True, help=text)
    parser.add_argument("--local-ranks", type=int, required=True, help="ranks per node")
    args = parser.parse_args(namespace=UploaderArguments())
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):  # requests to stop, to every process of a job
        signal.signal(number, signal.SIG_IGN)
    size = int(sys.stdin.readline())
    config = Config.model_validate(tomllib.loads(sys.stdin.read(size)))
    run_id.bind(args.run, args.id)
    return upload(config, args, Orders())


def upload(config: Config, args: UploaderArguments, orders: Orders) -> int:
    """Copy until the orders say that it ends, and everything is copied."""
    mirror = RunMirror(config, patience=_PATIENCE)
    report = MirrorReport(
        node=args.node, host=socket.gethostname(), pid=os.getpid(), segment=args.segment, url=str(mirror.url)
    )
    reporter = Reporter(RunDir(args.run), report)
    worker: FirstNode | OtherNode | None = None
    failures = 0
    while True:
        finish = orders.finish
        try:
            if worker is None:
                worker = (FirstNode if args.node == 0 else OtherNode)(config, args, mirror, reporter)
            done = worker.work(finish=finish)
            reporter.went_well()
            failures = 0
        except RunGoneError:
            return 0
        except (UserError, OSError) as error:
            reporter.failed(error)
            orders.wait(_PAUSES[min(failures, len(_PAUSES) - 1)])
            failures += 1
            continue
        if done and finish:
            worker.close()
            return 0
        if args.node != 0:
            orders.wait(_OTHERS_SECONDS)
        elif done:
            orders.wait(_LOOK_SECONDS)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads of the storage's library could keep it alive
