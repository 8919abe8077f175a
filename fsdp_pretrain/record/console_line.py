"""The line of a step on the console, and its colours. No torch.

Colours are for terminals: never in a file or a pipe, unless FORCE_COLOR asks for them; NO_COLOR turns them off.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from fsdp_pretrain.units import human_bytes, human_count, human_time

from .step_record import StepRecord

WIDTH = 100
_LEFT_OUT = ("data", "tokens", "mem", "mfu")
"""What is left out of a line that would be too long, in this order; the metrics record has everything."""
Tone = Literal["good", "warning", "bad", ""]
_TONES: dict[str, Tone] = {
    **dict.fromkeys(("checkpoint", "eval", "milestone", "ready"), "good"),
    **dict.fromkeys(("alarm", "checkpoint-late", "eval-late", "fresh", "health", "health-again"), "warning"),
    **dict.fromkeys(("health-rollback", "health-skip", "restart", "rollback", "avoid-hosts"), "warning"),
    **dict.fromkeys(("checkpoint-failed", "checkpoint-missing", "checkpoint-rejected", "checkpoint-room"), "bad"),
    **dict.fromkeys(("eval-failed", "eval-refused", "eval-verdict"), "bad"),
}
_INKS = {"good": "32", "warning": "33", "bad": "1;31", "": "36"}
_FIELD = re.compile(r"(\S+?=)(\S+)")
_WRONG = ("nan", "inf", "overflow")


def tone(kind: str, code: int | None = None) -> Tone:
    """Whether a journal entry of a kind is good or bad news; `code` is the exit code of a stop."""
    if kind == "stop":
        return "good" if code == 0 else "warning" if code in (75, 76) else "bad"
    return _TONES.get(kind, "")


def console_lines(record: StepRecord, target: int) -> Iterator[str]:
    """One step as `key=value` in a fixed order, in at most 100 columns where names and numbers have usual lengths.

    The held-out loss, if measured, is on lines of its own.
    """
    norm, step = record.grad_norm, f"step={record.step}/{target}"
    fields = {
        "tokens": human_count(record.tokens),
        "loss": f"{record.loss.mean:.4f}",
        "gnorm": "overflow" if record.overflow else "nan" if norm is None else f"{norm:.3f}",
        **({} if record.loss_scale is None else {"scale": f"{record.loss_scale:g}"}),
        "lr": f"{record.lr:.2e}",
        "tok/s": human_count(record.tokens_per_second),
        **({} if record.mfu is None else {"mfu": f"{record.mfu:.1%}"}),
        **({"mem": human_bytes(record.memory_bytes).replace(" ", "")} if record.memory_bytes else {}),
        "iter": _seconds(record.seconds.iteration),
        "data": _seconds(record.seconds.data),
        "eta": human_time((target - record.step) * record.seconds.training),
    }
    for name in _LEFT_OUT:
        if len(_joined(step, fields)) > WIDTH:
            fields.pop(name, None)
    yield _joined(step, fields)
    yield from _heldout_lines(record, step)


def _seconds(value: float) -> str:
    return f"{value:.3f}s" if value < 10 else f"{value:.1f}s"


def _joined(step: str, fields: dict[str, str]) -> str:
    return " ".join([step, *(f"{key}={value}" for key, value in fields.items())])


def _heldout_lines(record: StepRecord, step: str) -> Iterator[str]:
    line = step
    for name, loss in (record.heldout or {}).items():
        field = f" heldout/{name}={loss.mean:.4f}"
        if line != step and len(line) + len(field) > WIDTH:
            yield line
            line = step
        line += field
    if line != step:
        yield line


def paint_step(line: str) -> str:
    """The line with colours: names faint, the losses bold, what is not finite red."""

    def paint(field: re.Match[str]) -> str:
        name, value = field[1], field[2]
        ink = "1;31" if value.startswith(_WRONG) else "1" if name == "loss=" or name.startswith("heldout/") else ""
        return f"\x1b[2m{name}\x1b[0m" + (f"\x1b[{ink}m{value}\x1b[0m" if ink else value)

    return _FIELD.sub(paint, line)


def paint_event(kind: str, text: str, code: int | None = None) -> str:
    """The line of a journal entry with colours."""
    return f"\x1b[{_INKS[tone(kind, code)]}m[{kind}]\x1b[0m {text}"
