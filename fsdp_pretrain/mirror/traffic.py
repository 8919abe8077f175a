"""What a mirror costs: bytes and requests per day, for `plan`. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.units import human_bytes

_DAY = 86400.0
_PART = 50 << 20
"""Bytes of a part of an upload, as s3fs sends them."""
_CHUNK = 16 << 20
_RECORD_REQUESTS = 25
"""Of a copy of the record: about seven files have grown; each is sent, read back, and deleted later."""


@dataclass(frozen=True)
class MirrorTraffic:
    """Per day.

    Attributes:
        sent, read: bytes of checkpoints, to the mirror and read back.
        requests: of both, and of the record.
        held: bytes of the checkpoints in the mirror, without permanent ones.
    """

    sent: float
    read: float
    requests: float
    held: float

    def __str__(self) -> str:
        back = f" and {human_bytes(self.read)} back" if self.read else ""
        return (
            f"{human_bytes(self.sent)}{back} a day, about {self.requests:,.0f} requests; {human_bytes(self.held)} stay "
            "there, and permanent checkpoints"
        )


def mirror_traffic(config: Config, *, checkpoint_bytes: float, files: int, days: float) -> MirrorTraffic:
    """What the mirror of a run costs.

    Args:
        config: of a run with `checkpoint.mirror`.
        checkpoint_bytes, files: of one checkpoint; a rank writes at least one file.
        days: of the whole run.
    """
    policy, schedule = config.checkpoint, config.schedule
    saves = schedule.samples(config.train.duration) / max(1, schedule.samples(config.save_every(0))) / days
    sent = checkpoint_bytes * saves
    read = sent if policy.mirror_read_back else 0.0
    of_files = saves * files * (4 if policy.mirror_read_back else 3)  # sent, its size, read, deleted later
    of_parts = sent / _PART + read / _CHUNK
    record = (_DAY / policy.mirror_record_every.value + saves) * _RECORD_REQUESTS
    return MirrorTraffic(sent, read, of_files + of_parts + record, checkpoint_bytes * policy.mirror_keep_last)
