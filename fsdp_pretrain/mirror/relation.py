"""Which is ahead, a run directory or its mirror. No torch.

By the starts: each has an `environment.json` of its own. A directory that lacks a start of the mirror is an older copy;
one that has another start of the same number went another way. With the same starts, by the newest checkpoint.
"""

from __future__ import annotations

import re
from enum import StrEnum

import xxhash

from fsdp_pretrain.record.environment import ENVIRONMENT
from fsdp_pretrain.record.files import RunDir
from fsdp_pretrain.remote import Url

from .layout import MirroredRecord, MirrorError

_BEGINNING = re.compile(rf"segments/(\d+)/{re.escape(ENVIRONMENT)}")


class Relation(StrEnum):
    """Of the record in a run directory to that in the mirror."""

    CURRENT = "current"
    BEHIND = "behind"
    """The mirror has starts that the run directory lacks."""
    APART = "apart"
    """Starts of the same number differ."""


def compare(run: RunDir, record: MirroredRecord) -> Relation:
    """Raises OSError."""
    relation = Relation.CURRENT
    for name, file in record.newest.items():
        found = _BEGINNING.fullmatch(name)
        segment = None if found is None else run.segment(int(found[1]))
        if segment is None:
            continue
        if not segment.is_dir():
            relation = Relation.BEHIND
            continue
        try:
            content = (segment / ENVIRONMENT).read_bytes()
        except FileNotFoundError:  # it was lost in the mirror when the run directory was restored
            continue
        if xxhash.xxh3_128_hexdigest(content) != file.xxh3:
            return Relation.APART
    return relation


def refuse_if_not_ours(run: RunDir, record: MirroredRecord, url: Url) -> None:
    """Raise MirrorError if the record in the mirror is not an earlier state of that in the run directory."""
    relation = compare(run, record)
    if relation is not Relation.CURRENT:
        raise MirrorError(
            f"{url} holds a later state of this run than {run.path} had when it was started"
            if relation is Relation.BEHIND
            else f"{url} and {run.path} went different ways: starts of the same number differ",
            effect="nothing is copied: it would replace what is in the mirror",
            remedy="stop the run; to go on from the mirror, move the run directory aside and start with --from-mirror; "
            "to go on without it, move the mirror aside",
        )
