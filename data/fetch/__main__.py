"""The fetcher process: `python -m data.fetch`, with its settings in the first line of its input, which stays open.

It ends when its input does: with the rank that started it, however that ends. See `process`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import tomllib
from pathlib import Path

from data.corpus.cached import CachedCopy
from data.packing.opening import open_packer, open_skips
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.errors import UserError
from fsdp_pretrain.fetcher_status import FetcherStatus, status_file

from .fetcher import Fetcher, slowest
from .forecast import Forecast
from .process import FetcherSettings
from .window import Window

_TURN = 0.02


def main() -> None:
    """Run a fetcher."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # requests to stop, to every process of a job
        signal.signal(number, signal.SIG_IGN)
    settings = FetcherSettings(*json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        made = fetcher(settings)
    except UserError as error:  # the ranks fail for the same reason, or the storage has failed since
        said = FetcherStatus(time.time(), error.cause, time.time(), lasting=True)
        said.write(status_file(Path(settings.pages), settings.first))
        raise SystemExit(str(error)) from None
    made.run()


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)  # a thread may wait for an answer of the storage


def fetcher(settings: FetcherSettings) -> Fetcher:
    """The fetcher, once the ranks have said where they are.

    Raises:
        UserError: a corpus cannot be opened.
    """
    config, pages = Config.model_validate(tomllib.loads(settings.config)), Path(settings.pages)
    schedule, cache, ranks = config.schedule, config.data.cache, range(settings.first, settings.stop)
    packer = open_packer(config)
    while (start := slowest(pages, ranks)) is None:
        time.sleep(_TURN)
    copies, cached = dict[str, CachedCopy](), dict[int, str]()
    for number, corpus in enumerate(packer.corpora.values()):
        if corpus.cached is not None:
            cached[number] = fingerprint = corpus.manifest.fingerprint
            copies[fingerprint] = corpus.cached
    beyond = (config.data.prefetch + 2) * schedule.batch.full  # batches that loaders prepare and nobody trains
    forecast = Forecast(
        packer,
        schedule.batch,
        open_skips(config),
        start,
        world=settings.world,
        ranks=ranks,
        until=schedule.total + beyond,
    )
    sizes = {fingerprint: copy.sizes for fingerprint, copy in copies.items()}
    assert cache is not None
    return Fetcher(
        Window(forecast, cached, sizes),
        copies,
        cache=cache.dir,
        size=cache.size.value,
        pages=pages,
        ranks=ranks,
        status=status_file(pages, settings.first),
    )


if __name__ == "__main__":
    main()
