"""Errors whose cause is outside this program, and exit codes.

Only the text of a `UserError` is shown. Any other exception is a bug in this program and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    """Base of all errors that are not bugs in this program: the cause, its effect, and the remedy."""

    exit: Exit = Exit.REFUSED
    shared: bool = False
    """Whether it is raised on all ranks, so that only one needs to show it."""

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
        """This error, marked as raised on all ranks."""
        self.shared = True
        return self


class Interrupted(BaseException):
    """A stop was requested before training, when there is nothing to save.

    Not an Exception, so that code that handles failures, such as of unreadable checkpoints, does not catch it.
    """

    exit: Exit = Exit.RESUME


@contextmanager
def naming(path: object) -> Iterator[None]:
    """Add the file name to OSErrors of reading, writing and closing, which lack it."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def install(extra: str) -> str:
    """The command that adds an extra to this program, from its checkout or from the package index."""
    checkout = Path(__file__).resolve().parents[1]
    from_source = (checkout / "pyproject.toml").is_file()
    return f"pip install -e '{checkout}[{extra}]'" if from_source else f"pip install 'fsdp-pretrain[{extra}]'"


def shortened(problems: list[str], limit: int = 20) -> str:
    """The first `limit` problems as indented lines."""
    more = [f"and {len(problems) - limit} more"] if len(problems) > limit else []
    return "\n    ".join([*problems[:limit], *more])


@contextmanager
def raising(kind: type[UserError], cause: str, effect: str = "", remedy: str = "") -> Iterator[None]:
    """Raise an OSError as an error of this kind, whose cause ends with the reason."""
    try:
        yield
    except OSError as error:
        raise kind(f"{cause}: {error.strerror}", effect, remedy) from None


class ConfigError(UserError):
    """The configuration is invalid, or does not fit the run or the machine."""


class DataError(UserError):
    """A corpus, tokenizer or shard is missing, damaged or not the expected one."""


class ReadTimeoutError(DataError):
    """A read took too long. Hanging mounts usually recover, so the run can be resumed."""

    exit = Exit.RESUME


class CheckpointError(UserError):
    """A checkpoint cannot be read, or no valid one exists."""


class BusyError(UserError):
    """Another process holds the run."""


class StorageError(UserError):
    """Storage cannot be read or written."""

    exit = Exit.NEEDS_PERSON


class RunGoneError(UserError):
    """The run directory was unmounted, removed or replaced."""

    exit = Exit.NEEDS_PERSON


class PeerLostError(UserError):
    """The connection to another rank was lost in a collective; that rank, or what ended it, says why."""

    exit = Exit.UNEXPECTED


class NumericError(UserError):
    """Loss or gradients are not finite."""

    exit = Exit.NEEDS_PERSON


class DeviceError(UserError):
    """A device computes wrongly."""

    exit = Exit.RESUME_AVOIDING_HOSTS
    avoid_hosts: Sequence[str] = ()
    """Hosts that the next start should not use."""
