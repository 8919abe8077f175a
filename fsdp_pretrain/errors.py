"""Errors a person can act on, and the exit codes they end in.

A `UserError` is shown as its text alone: what is wrong, what that means, what to do. Anything else that escapes
is a defect of ours and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path


class Exit(IntEnum):
    """Exit codes of the main job (design, section 4)."""

    COMPLETE = 0
    UNEXPECTED = 1
    RESUME = 75
    RESUME_AVOIDING_HOSTS = 76
    REFUSED = 78
    NEEDS_PERSON = 93


class UserError(Exception):
    """Base of every error that is not a defect of this program.

    Args:
        cause: what was found.
        effect: what that means for the run, if it is not obvious.
        remedy: what to do about it.
    """

    exit: Exit = Exit.REFUSED
    shared: bool = False
    """Raised on every rank alike, so that one of them is enough to show it."""

    def __init__(self, cause: str, *, effect: str = "", remedy: str = "") -> None:
        self.cause, self.effect, self.remedy = cause, effect, remedy
        super().__init__(cause, effect, remedy)

    def __str__(self) -> str:
        lines = [self.cause]
        if self.effect:
            lines.append(f"  effect: {self.effect}")
        if self.remedy:
            lines.append(f"  remedy: {self.remedy}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Callable[..., UserError], tuple[type[UserError], str, str, str, Exit]]:
        return _rebuild, (type(self), self.cause, self.effect, self.remedy, self.exit)

    def on_all_ranks(self) -> UserError:
        """This error, marked as raised on every rank alike."""
        self.shared = True
        return self


class Interrupted(BaseException):
    """A start was asked to end before it trained, when there is nothing to save.

    No Exception: whoever gets around failures, as a resume does around checkpoints that cannot be read, must not get
    around this.

    Args:
        cause: who asked.
    """

    exit: Exit = Exit.RESUME

    def __init__(self, cause: str) -> None:
        self.cause = cause
        super().__init__(cause)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give errors of the operating system the file they concern; those of reading, writing and closing lack it."""
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


def _rebuild(kind: type[UserError], cause: str, effect: str, remedy: str, code: Exit) -> UserError:
    error = kind(cause, effect=effect, remedy=remedy)
    error.exit = code
    return error


class ConfigError(UserError):
    """The configuration contradicts itself, the schema or the machine."""


class DataError(UserError):
    """A corpus, tokenizer or shard is missing, damaged or not the one that was declared."""


class ReadTimeoutError(DataError):
    """A file did not answer in time. Mounts that hang mostly come back, so the run is one to resume."""

    exit = Exit.RESUME


class CheckpointError(UserError):
    """A checkpoint cannot be read, or none is valid where one must be."""


class BusyError(UserError):
    """Another process holds the run."""


class StorageError(UserError):
    """Storage failed so often or so long that going on would be unprotected training."""

    exit = Exit.NEEDS_PERSON


class RunGoneError(UserError):
    """The run directory is not where it was: its mount is gone, or somebody removed or replaced it."""

    exit = Exit.NEEDS_PERSON


class NumericError(UserError):
    """Loss or gradients are not finite."""

    exit = Exit.NEEDS_PERSON
