"""Errors a person can act on, and the exit codes they end in.

A `UserError` is shown as its text only. Any other exception is a defect of this program and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path


class Exit(IntEnum):
    """Exit codes of the main job, see docs/launch.md."""

    COMPLETE = 0
    UNEXPECTED = 1
    RESUME = 75
    RESUME_AVOIDING_HOSTS = 76
    REFUSED = 78
    NEEDS_PERSON = 93


class UserError(Exception):
    """Base of every error that is not a defect of this program: what was found, what that means, what to do."""

    exit: Exit = Exit.REFUSED
    shared: bool = False
    """Raised on every rank alike, so that it is enough if one of them shows it."""

    def __init__(self, cause: str, effect: str = "", remedy: str = "") -> None:
        self.cause, self.effect, self.remedy = cause, effect, remedy
        super().__init__(cause, effect, remedy)

    def __str__(self) -> str:
        lines = [self.cause]
        if self.effect:
            lines.append(f"  effect: {self.effect}")
        if self.remedy:
            lines.append(f"  remedy: {self.remedy}")
        return "\n".join(lines)

    def on_all_ranks(self) -> UserError:
        """This error, marked as raised on every rank alike."""
        self.shared = True
        return self


class Interrupted(BaseException):
    """A start was asked to end before it trained, when there is nothing to save.

    Not an Exception: code that works around failures, as a resume does with unreadable checkpoints, must let it pass.
    """

    exit: Exit = Exit.RESUME


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the name of the file to errors of the operating system; those of reading, writing and closing lack it."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def shortened(problems: list[str], limit: int = 20) -> str:
    """Problems as lines of a report, the first `limit` of them."""
    more = [f"and {len(problems) - limit} more"] if len(problems) > limit else []
    return "\n    ".join([*problems[:limit], *more])


class ConfigError(UserError):
    """The configuration contradicts itself, the schema or the machine."""


class DataError(UserError):
    """A corpus, tokenizer or shard is missing, damaged or not the declared one."""


class ReadTimeoutError(DataError):
    """A read took too long. Mounts that hang mostly come back, so the run can be resumed."""

    exit = Exit.RESUME


class CheckpointError(UserError):
    """A checkpoint cannot be read, or none is valid where one must be."""


class BusyError(UserError):
    """Another process holds the run."""


class StorageError(UserError):
    """Storage failed so often or for so long that training would continue unprotected."""

    exit = Exit.NEEDS_PERSON


class RunGoneError(UserError):
    """The run directory is gone: its mount is, or somebody removed or replaced it."""

    exit = Exit.NEEDS_PERSON


class NumericError(UserError):
    """Loss or gradients are not finite."""

    exit = Exit.NEEDS_PERSON
