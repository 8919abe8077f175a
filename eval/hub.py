"""Whether the data of public tasks may come from the Hugging Face Hub. No torch, and nothing that imports its tools.

They read at their import whether they may use the network, and then wait long for a network that is not there. So it is
decided before: nothing is asked for if it need not be, and a Hub that does not answer at once is left alone.
"""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request

_SWITCHES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
_FALSE = ("", "0", "false", "off", "no")
_SECONDS = 5.0
"""For the Hub to answer."""


def choose_network(*, wanted: bool) -> str:
    """Let the libraries use the Hub if that is `wanted`, the environment does not forbid it, and it answers.

    Returns why they will not; "" if they will.
    """
    forbidden = [f"{name}={os.environ[name]}" for name in _SWITCHES if os.environ.get(name, "0").lower() not in _FALSE]
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    reason = ""
    if not wanted:
        reason = "eval.offline"
    elif forbidden:
        reason = forbidden[0]
    elif not _answers(endpoint):
        reason = f"{endpoint} does not answer"
        print(f"{reason}: the data of tasks is taken from the cache", file=sys.stderr, flush=True)
    if reason:
        os.environ["HF_HUB_OFFLINE"] = "1"
    return reason


def _answers(url: str) -> bool:
    """Whether a web server answers anything."""
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=_SECONDS).close()
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False
    return True
