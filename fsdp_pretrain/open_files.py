"""The limit on open files of a rank: gloo keeps a socket to every peer, in every group, and so does the store."""

from __future__ import annotations

import resource

from .errors import ConfigError

_OTHERS = 256
"""Other files and sockets: shards, the record, NCCL, libraries."""


def files_needed(world: int, shards: int) -> int:
    """Files and sockets that a rank may have open at once.

    Three gloo groups span all ranks: the default group, the group of background saves, and its replacement after such a
    save was given up. Each axis of the mesh has one group. Rank 0 may hold the store, to which each rank connects once,
    and three times more for each axis, whose gloo, NCCL and group are split off those of the default group.
    """
    return (3 + 7) * world + shards + world // shards + _OTHERS


def hard_limit() -> int | None:
    """The largest limit that this process may set; None: any number."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return None if hard == resource.RLIM_INFINITY else hard


def check_limit(needed: int) -> None:
    """Raise ConfigError if this host does not allow `needed` open files."""
    hard = hard_limit()
    if hard is not None and hard < needed:
        raise ConfigError(
            f"this host allows {hard} open files in a process, and a rank of this world needs {needed}",
            effect="ranks could not connect to each other",
            remedy="raise the hard limit: LimitNOFILE of the service, nofile in limits.conf, docker run --ulimit",
        )


def raise_limit(needed: int) -> None:
    """Raise this process's limit as far as the host allows. Raises ConfigError if that is not `needed`."""
    check_limit(needed)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else hard, hard))
