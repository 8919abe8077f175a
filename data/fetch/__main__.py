"""The fetcher process: `python -m data.fetch`, with its settings in the first line of its input, which stays open.

It ends when its input does: with the rank that started it, however that ends. See `process`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import tomllib

from data.packing.opening import open_packer, open_skips
from data.packing.packer import Packer
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.errors import UserError
from fsdp_pretrain.fetcher_status import FetcherStatus
from fsdp_pretrain.remote import Url

from .fetcher import Fetcher, FetcherPlaces, slowest
from .forecast import Forecast, Upcoming
from .process import FetcherSettings
from .transfers import Copy

_AGAIN_SECONDS, _TURN = 5.0, 0.02


def main() -> int:
    """Run a fetcher to its end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # requests to stop, to every process of a job
        signal.signal(number, signal.SIG_IGN)
    settings = FetcherSettings.from_json(sys.stdin.readline())
    ended = threading.Event()
    threading.Thread(target=_wait_for_end, args=(ended,), daemon=True).start()
    config = Config.model_validate(tomllib.loads(settings.config))
    packer = _open(config, settings, ended)
    fetcher = None if packer is None else _build(config, packer, settings, ended)
    if fetcher is not None:
        fetcher.run()
    _clean(settings)
    return 0


def _wait_for_end(ended: threading.Event) -> None:
    while sys.stdin.readline():
        pass
    ended.set()


def _open(config: Config, settings: FetcherSettings, ended: threading.Event) -> Packer | None:
    """The packer, as soon as the corpora can be opened; None if the rank ended first."""
    since = time.time()
    while not ended.is_set():
        try:
            return open_packer(config)
        except UserError as error:  # the ranks fail for the same reason, or the storage has failed since
            status = FetcherStatus(
                time.time(), socket.gethostname(), settings.node, os.getpid(), error.cause, since, lasting=True
            )
            with contextlib.suppress(OSError):
                status.write(settings.status)
            ended.wait(_AGAIN_SECONDS)
    return None


def _build(config: Config, packer: Packer, settings: FetcherSettings, ended: threading.Event) -> Fetcher | None:
    """The fetcher, once the ranks have said where they are; None if they ended first."""
    while (start := slowest(settings.pages, settings.ranks)) is None:
        if ended.wait(_TURN):
            return None
    copies, cached = dict[str, list[Copy]](), dict[int, str]()
    for number, corpus in enumerate(packer.corpora.values()):
        if isinstance(corpus.directory, Url):
            cached[number] = fingerprint = corpus.manifest.fingerprint
            found = copies.setdefault(fingerprint, [])
            found += [Copy(copy.corpus, copy.blocks) for copy in corpus.copies.values()]
    schedule, cache = config.schedule, config.data.cache
    beyond = (config.data.prefetch + 2) * schedule.batch.full  # batches that loaders prepare and nobody trains
    forecast = Forecast(
        packer,
        schedule.batch,
        open_skips(config),
        start,
        world=settings.world,
        ranks=settings.ranks,
        until=schedule.total + beyond,
    )
    assert cache is not None
    return Fetcher(
        Upcoming(forecast, cached),
        copies,
        FetcherPlaces(settings.pages, settings.status, settings.record),
        cache=cache.dir,
        size=cache.size.value,
        ranks=settings.ranks,
        node=settings.node,
        stop=ended,
    )


def _clean(settings: FetcherSettings) -> None:
    with contextlib.suppress(OSError):
        settings.status.unlink(missing_ok=True)
        settings.pages.rmdir()  # unless it is also that of a watchdog, or of another rank


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a thread may wait for an answer of the storage
