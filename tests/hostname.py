"""Gives every node of a job started without torchrun its own host name: node-0, node-1. See `zygote.py`."""

from __future__ import annotations

import ctypes
import os
import socket

_CLONE_NEWUTS = 0x04000000

if "GROUP_RANK" in os.environ:
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWUTS):
        raise PermissionError("host names of their own need root")
    socket.sethostname(f"node-{os.environ['GROUP_RANK']}")
