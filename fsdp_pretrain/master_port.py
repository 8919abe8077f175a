"""Keeps MASTER_PORT for rank 0's store.

torchrun looks for a free port and lets it go again; rank 0 listens there only when torch is imported, seconds later. In
between the kernel may give it to any process of the host, and the start is lost.
"""

from __future__ import annotations

import errno
import os
import socket
import sys


def hold() -> socket.socket | None:
    """Bind MASTER_PORT without listening, while the result lives: no other process is given it, the store may listen.

    None for a rank that opens no store. A port that another process has ends this one with a message and exit code 1.
    """
    port, shared = os.environ.get("MASTER_PORT", ""), os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if os.environ.get("RANK") != "0" or shared or not port.isdecimal():
        return None
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the store does; two that do not listen can share
    try:
        held.bind(("", int(port)))
    except OSError as error:
        held.close()
        if error.errno == errno.EADDRINUSE:
            sys.exit(f"error: another process uses MASTER_PORT {port}: the ranks cannot meet. Start again")
        return None  # what else is wrong with it, the store reports
    return held
