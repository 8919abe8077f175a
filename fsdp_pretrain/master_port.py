"""Reserves MASTER_PORT for rank 0's store.

torchrun finds a free port and releases it; rank 0 listens there only after importing torch, seconds later. In between,
the kernel may give the port to any process of the host, and the start fails.
"""

from __future__ import annotations

import errno
import os
import socket
import sys


def hold() -> socket.socket | None:
    """Bind MASTER_PORT without listening while the result lives: the kernel gives it to nobody, the store may listen.

    Returns None on a rank that opens no store. If another process has the port, exits with a message and code 1.
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
        return None  # the store reports any other problem with it
    return held
