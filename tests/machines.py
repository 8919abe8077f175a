"""Private file systems that a test can fill and remove, and nodes of its own. All need root."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

Disk = Callable[[str], Path]
"""Type of the fixture `small_disk`."""


def mount_tmpfs(path: Path, options: str) -> None:
    """Mount a tmpfs with options such as `size=4m`; without root the test is skipped."""
    path.mkdir(parents=True, exist_ok=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")


@contextlib.contextmanager
def tmpfs(path: Path, options: str = "size=64m") -> Iterator[Path]:
    """A temporary file system."""
    mount_tmpfs(path, options)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


class Removable:
    """A mounted file system that disappears while in use, and comes back with its contents.

    Args:
        path: where it is mounted.
        kept: a second mount, which keeps it alive while the first is gone.
    """

    def __init__(self, path: Path, kept: Path) -> None:
        self.path, self._kept = path, kept
        path.mkdir(parents=True, exist_ok=True)
        mount_tmpfs(kept, "size=64m")
        self.bring_back()

    def take_away(self) -> None:
        """Unmount it while busy: an empty directory is left."""
        subprocess.run(["umount", "-l", str(self.path)], check=True)

    def bring_back(self) -> None:
        subprocess.run(["mount", "--bind", str(self._kept), str(self.path)], check=True)

    def close(self) -> None:
        for place in (self.path, self._kept):
            while subprocess.run(["umount", "-l", str(place)], capture_output=True).returncode == 0:
                pass


class Node(NamedTuple):
    """One of two nodes that share a cable and this machine's files."""

    prefix: list[str]  # what to put before a command to run it there
    options: list[str]  # for the launcher
    environment: dict[str, str]  # for its ranks

    @property
    def name(self) -> str:
        return self.prefix[3]


@contextlib.contextmanager
def joined_nodes() -> Iterator[Callable[..., list[Node]]]:
    """A function that makes two network namespaces joined by a cable, with `nnodes` and `ranks` for the launcher."""
    names, hosts = [f"fsdp{os.getpid()}{end}" for end in "ab"], ["10.77.0.1", "10.77.0.2"]
    cable = [f"fp{os.getpid() % 10**6}{end}" for end in "ab"]

    def ip(*arguments: str) -> int:
        return subprocess.run(["ip", *arguments], capture_output=True).returncode

    if ip("netns", "add", names[0]):
        pytest.skip("network namespaces need root and iproute2")

    def make(*, nnodes: str = "2", ranks: int = 2) -> list[Node]:
        ip("netns", "add", names[1])
        assert ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1]) == 0
        for name, host, end in zip(names, hosts, cable, strict=True):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"{host}/24", "dev", end)
            assert ip("-n", name, "link", "set", end, "up") == ip("-n", name, "link", "set", "lo", "up") == 0
        common = ["--nnodes", nnodes, "--nproc-per-node", str(ranks), "--rdzv-endpoint", hosts[0]]
        return [
            Node(
                ["ip", "netns", "exec", name, "unshare", "-u", "sh", "-c", f'hostname {name}; exec "$@"', "sh"],
                [*common, "--local-addr", host],
                {"GLOO_SOCKET_IFNAME": end},
            )
            for name, host, end in zip(names, hosts, cable, strict=True)
        ]

    try:
        yield make
    finally:
        for name in names:
            ip("netns", "del", name)
