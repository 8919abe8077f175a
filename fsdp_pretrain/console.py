"""Shared parts of the three console commands: verbs with an example in their `--help`, errors as one message.

A module with verbs imports at its top only what their parsers need: the standard library, this module, and others that
import no more. A handler imports what it runs, in its first lines. So a verb does not wait for what only others use.

Exit codes: 78 for invalid arguments (argparse uses 2, which means "errors" for `validate` and `status`), a
`UserError`'s own code, and the codes of `explain` for OSErrors.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import io
import json
import math
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from . import __version__
from .errors import Exit, StorageError, UserError
from .processes import collect_seldom
from .units import Bytes, Progress, Seconds

Handler = Callable[[argparse.Namespace], int]

_STORAGE = frozenset(
    (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EIO,
        errno.EREMOTEIO,
        errno.ESTALE,
        errno.ENODEV,
        errno.ENOTCONN,
        errno.ETIMEDOUT,
    )
)
"""Errors of storage that is full or fails; all others, if they name a path, are mistakes in that path."""


class Parser(argparse.ArgumentParser):
    """A parser that exits with code 78 on invalid arguments."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(int(Exit.REFUSED), f"{self.prog}: error: {message}\n")


class _Version(argparse.Action):
    """Prints the versions that a report of a defect needs, and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the versions of this program and what it runs on")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import PackageNotFoundError, version

        try:
            torch = f"torch {version('torch')}"
        except PackageNotFoundError:
            torch = "no torch"
        where = f"Python {platform.python_version()}, {torch}, {platform.platform()}"
        print(f"{parser.prog} {__version__} ({where})")
        parser.exit()


Argument = Callable[[Any], object]
"""Adds an argument to a parser or to a group of its arguments."""


def argument(*names: str, **options: Any) -> Argument:
    """An argument of a verb; the same parameters as `add_argument`."""
    return lambda parser: parser.add_argument(*names, **options)


def grouped(title: str, *arguments: Argument) -> Argument:
    """Arguments under a heading of their own in the help."""

    def add(parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group(title)
        for add_to in arguments:
            add_to(group)

    return add


JSON = argument("--json", action="store_true", help="print JSON")
CODE = argument(
    "--code",
    action="append",
    default=[],
    metavar="PACKAGE",
    help="trust this package with parts of a model or optimiser: a checkpoint only names it",
)


@dataclass(frozen=True)
class Verb:
    """A verb of a command; the handler's docstring is its summary.

    `example` is the rest of the command line after the name, for `--help`.
    """

    handler: Handler
    name: str
    example: str
    arguments: tuple[Argument, ...]

    @property
    def summary(self) -> str:
        return " ".join((self.handler.__doc__ or "").split())

    def add_to(self, verbs: Any, prefix: str, *, listed: bool = True) -> None:
        """Add it to the subparsers of a command; `prefix` is that command, for the example."""
        parser: argparse.ArgumentParser = verbs.add_parser(
            self.name,
            **({"help": self.summary} if listed else {}),
            description=self.summary,
            epilog=f"example:\n  {prefix} {self.name} {self.example}".rstrip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.set_defaults(handler=self.handler)
        for add in self.arguments:
            add(parser)


def verb(name: str, example: str, *arguments: Argument) -> Callable[[Handler], Verb]:
    """Make a function the handler of a verb; see `Verb`."""
    return lambda handler: Verb(handler, name, example, arguments)


class CommandLine:
    """A console command with verbs, which its help lists by what they are for.

    `meant`: what stands for words that somebody may try instead, such as `control RUN stop` for `stop`.
    """

    def __init__(self, name: str, description: str, meant: Mapping[str, str] | None = None) -> None:
        self._meant = meant or {}
        about = f"{description} Every verb has --help, with an example."
        self._parser = Parser(
            prog=name, description=about, epilog="", formatter_class=argparse.RawDescriptionHelpFormatter
        )
        self._parser.add_argument("--version", action=_Version)
        self._verbs = self._parser.add_subparsers(metavar="VERB", required=True, help="one of those below")
        self._names: list[str] = []

    def add(self, *verbs: Verb, group: str | None = "verbs") -> None:
        """Add verbs. Where one has a default for `passed_on`, `run` sets it to the unknown arguments, in order.

        `group`: their heading in the help; None: they are not listed.
        """
        lines = []
        for verb in verbs:
            verb.add_to(self._verbs, self._parser.prog, listed=False)
            self._names.append(verb.name)
            lines.append(f"  {verb.name:18} {re.split('[.:;] ', verb.summary)[0].rstrip('.')}")
        if group is not None:
            self._parser.epilog = "\n".join([*filter(None, [self._parser.epilog]), f"{group}:", *lines])

    def _check_verb(self, arguments: Sequence[str]) -> None:
        """Exit if the first argument is no verb, with the nearest ones; print the help if there is none."""
        if not arguments:
            self._parser.print_help(sys.stderr)
            self._parser.exit(int(Exit.REFUSED), f"{self._parser.prog}: error: name a verb\n")
        if not arguments[0].startswith("-") and arguments[0] not in self._names:
            near = difflib.get_close_matches(arguments[0], self._names)
            if arguments[0] in self._meant:
                near = [self._meant[arguments[0]]]
            meant = f"; did you mean {' or '.join(near)}?" if near else f"; {self._parser.prog} --help lists all"
            self._parser.error(f"there is no verb {arguments[0]!r}{meant}")

    def run(self, arguments: Sequence[str] | None = None) -> int:
        """Parse and run. Returns the exit code. Raises SystemExit after `--help` and on invalid arguments."""
        collect_seldom()
        return run_guarded(lambda: self._run(arguments))

    def _run(self, arguments: Sequence[str] | None) -> int:
        if isinstance(sys.stdout, io.TextIOWrapper):  # output may have characters that stdout cannot encode
            sys.stdout.reconfigure(errors="backslashreplace")
        if "_ARGCOMPLETE" in os.environ:  # the shell asks for completions; ends here
            import argcomplete

            argcomplete.autocomplete(self._parser)
        self._check_verb(sys.argv[1:] if arguments is None else arguments)
        parsed, unknown = self._parser.parse_known_args(arguments)
        if hasattr(parsed, "passed_on"):  # it belongs to another command
            parsed.passed_on = unknown
        elif unknown and hasattr(parsed, "overrides") and not any(text.startswith("-") for text in unknown):
            parsed.overrides += unknown  # overrides after options: argparse accepts them only before
        elif unknown:
            self._parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        if trusted := getattr(parsed, "code", None):
            from . import extensions

            extensions.trust(trusted)
        code: int = parsed.handler(parsed)
        return code


def run_guarded(act: Callable[[], int]) -> int:
    """Run a command: errors that the user can fix become one message and an exit code, Ctrl-C becomes 130."""
    try:
        code = act()
        _flush_output()
        return code
    except UserError as error:
        return _show(error)
    except BrokenPipeError:  # the reader ended, as in `... | head`
        _drop_output()
        return 0
    except OSError as error:
        explained = explain(error)
        if explained is None:
            raise
        return _show(explained)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def explain(error: OSError) -> UserError | None:
    """The error to show: exit 93 if storage is full or fails, 78 if a path cannot be used, None without a path."""
    number, where = error.errno or 0, error.filename
    if where is None and number in _STORAGE:
        try:
            _flush_output()
        except OSError:
            _drop_output()
            where = "standard output"
    if number not in _STORAGE and where is None:
        return None
    place = "a file or standard output" if where is None else os.fsdecode(where) if isinstance(where, bytes) else where
    cause = f"cannot use {place}: {os.strerror(number)}"
    if number in _STORAGE:
        remedy = "free space there, or look at the storage (quota, kernel log, mount, server)"
        return StorageError(cause, remedy=f"{remedy}, then run the same command again")
    return UserError(cause, remedy="look for a mistake in the path, name another path, or have it made writable")


def _show(error: UserError) -> int:
    if not error.shared or os.environ.get("RANK", "0") == "0":
        print(f"error: {error}", file=sys.stderr)
    return int(error.exit)


def _flush_output() -> None:
    if sys.stdout is not None:  # None if it was closed
        sys.stdout.flush()


def _drop_output() -> None:
    """Discard buffered standard output, or Python would fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def as_json(value: Any, *, indent: int | None = 1) -> str:
    """`value` as JSON for others to read: null for NaN and infinity, which JSON does not have."""
    from pydantic_core import to_jsonable_python

    return json.dumps(to_jsonable_python(value, inf_nan_mode="null"), indent=indent)


def row(name: str, text: str) -> str:
    """A line of a command's output: name and text."""
    return f"  {name:11} {text}"


def byte_count(text: str) -> int:
    """Argument type of a size such as `512MB` or `80GiB`. Raises ArgumentTypeError."""
    try:
        return Bytes.parse(text).value
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is {error}") from None


def progress(text: str) -> Progress:
    """Argument type of an amount of training such as `20B tokens`, not 0. Raises ArgumentTypeError."""
    try:
        amount = Progress.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is {error}") from None
    if not amount.value:
        raise argparse.ArgumentTypeError(f"{text!r} is nothing")
    return amount


def seconds(text: str) -> float:
    """Argument type of a time such as `30min`. Raises ArgumentTypeError."""
    try:
        return float(Seconds.parse(text).value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive(text: str) -> int:
    """Argument type of a positive integer. Raises ArgumentTypeError."""
    if not re.fullmatch(r"[0-9]{1,18}", text.strip()) or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def not_negative(text: str) -> float:
    """Argument type of a finite number of 0 or more. Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return value


def step_number(text: str) -> int:
    """Argument type of a step number, at least 0. Raises ArgumentTypeError."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of a step")
    return int(text)
