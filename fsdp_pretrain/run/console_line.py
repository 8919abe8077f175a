"""The console lines of a run: those of steps, and the time before each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from fsdp_pretrain.units import human_bytes, human_count, human_time

from .step_record import StepRecord, pace

WIDTH = 100
_LEFT_OUT = ("data", "tokens", "mem", "mfu")
"""Fields that are dropped, in this order, from a line that would be too long; the metrics record has all."""
_WIDTHS = {"tokens": 5, "loss": 6, "gnorm": 5, "tok/s": 5, "mfu": 5, "mem": 6, "iter": 6, "data": 6}
"""Widths of values, so that fields of successive lines are below each other."""


def console_lines(records: Sequence[StepRecord], target: int, seconds_left: float) -> Iterator[str]:
    """The last of these steps as `key=value` in fixed columns, at most 100 wide where names and numbers have usual
    lengths; times and rates are means over all of them.

    The held-out loss, if measured, is on a line of its own.
    """
    record, mean = records[-1], pace(records)
    norm, step = record.grad_norm, f"step={record.step}/{target}".ljust(len(f"step={target}/{target}"))
    fields = {
        "tokens": human_count(record.tokens),
        "loss": f"{record.loss.mean:.4f}",
        "gnorm": "overflow" if record.overflow else "nan" if norm is None else f"{norm:.3f}",
        **({} if record.loss_scale is None else {"scale": f"{record.loss_scale:g}"}),
        "lr": f"{record.lr:.2e}",
        "tok/s": human_count(mean.tokens_per_second),
        **({} if mean.mfu is None else {"mfu": f"{mean.mfu:.1%}"}),
        **({"mem": human_bytes(record.memory_bytes).replace(" ", "")} if record.memory_bytes else {}),
        "iter": _seconds(mean.seconds),  # like tok/s, without the held-out loss
        "data": _seconds(fmean(each.seconds.data for each in records)),
        "eta": human_time(seconds_left),
    }
    for name in _LEFT_OUT:
        if len(_joined(step, fields)) > WIDTH:
            fields.pop(name, None)
    line = _joined(step, fields)
    yield line if len(line) <= WIDTH else " ".join(line.split())
    if record.heldout:
        yield _joined(step, {f"heldout/{name}": f"{loss.mean:.4f}" for name, loss in record.heldout.items()})


def _seconds(value: float) -> str:
    return f"{value:.3f}s" if value < 10 else f"{value:.1f}s"


def _joined(step: str, fields: dict[str, str]) -> str:
    padded = (f"{key}={value.ljust(_WIDTHS.get(key, 0))}" for key, value in fields.items())
    return " ".join([step, *padded]).rstrip()
