"""The fetcher process: `python -m fsdp_pretrain.data.fetch`, with its settings in the first line of its input.

It ends when its input does: with the rank that started it, however that ends. See `process`.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from pathlib import Path

from fsdp_pretrain.errors import UserError
from fsdp_pretrain.fetcher_status import FetcherStatus, status_file
from fsdp_pretrain.processes import exit_now

from .fetcher import Fetcher
from .process import FetcherSettings


def main() -> None:
    """Run a fetcher."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # requests to stop, to every process of a job
        signal.signal(number, signal.SIG_IGN)
    settings = FetcherSettings(*json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        made = Fetcher(settings)
    except UserError as error:  # the ranks fail for the same reason, or the storage has failed since
        said = FetcherStatus(time.time(), error.cause, time.time(), lasting=True)
        said.write(status_file(Path(settings.pages), settings.first))
        raise SystemExit(str(error)) from None
    made.run()


def _end_with_input() -> None:
    sys.stdin.read()
    exit_now(0)


if __name__ == "__main__":
    main()
