"""The fetcher process: `python -m fsdp_pretrain.data.fetch`.

It ends when its input is closed, and so with the rank that started it, however that ends. See `process`.
"""

from __future__ import annotations

import time
from pathlib import Path

from fsdp_pretrain.errors import UserError
from fsdp_pretrain.fetcher_status import FetcherStatus, status_file
from fsdp_pretrain.helper_process import end_with_input, read_settings

from .fetcher import Fetcher
from .process import FetcherSettings


def main() -> None:
    """Run a fetcher."""
    settings = read_settings(FetcherSettings)
    end_with_input()
    try:
        fetcher = Fetcher(settings)
    except UserError as error:  # the ranks fail for the same reason, or the storage has failed since
        status = FetcherStatus(time.time(), error.cause, time.time(), lasting=True)
        status.write(status_file(Path(settings.pages), settings.first))
        raise SystemExit(str(error)) from None
    fetcher.run()


if __name__ == "__main__":
    main()
