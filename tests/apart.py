"""Gives every node of a job started without torchrun its own host name, its own local disk and its own name in the log of
`object_store.py`. See `zygote.py`.

`LOCAL_DISK` is a directory that each node sees differently: as its subdirectory `node-0`, `node-1`.
"""

from __future__ import annotations

import ctypes
import os
import runpy
from pathlib import Path

_CLONE_NEWNS, _MS_BIND, _MS_REC_PRIVATE = 0x00020000, 4096, 16384 | (1 << 18)

runpy.run_path(str(Path(__file__).with_name("hostname.py")))
if "GROUP_RANK" in os.environ:
    node, disk = f"node-{os.environ['GROUP_RANK']}", Path(os.environ["LOCAL_DISK"])
    (disk / node).mkdir(parents=True, exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    if (
        libc.unshare(_CLONE_NEWNS)
        or libc.mount(None, b"/", None, _MS_REC_PRIVATE, None)
        or libc.mount(bytes(disk / node), bytes(disk), None, _MS_BIND, None)
    ):
        raise PermissionError("a disk of its own needs root")
    os.environ["AWS_SDK_UA_APP_ID"] = node
