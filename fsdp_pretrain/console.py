"""Shared by the three console commands: verbs with an example in their `--help`, errors as one message.

A module with verbs imports at its top only what their parsers need: the standard library, this module, and others that
import no more. A handler imports what it runs, in its first lines. So a verb does not wait for what only others use.

Exit codes: 78 for invalid arguments (argparse uses 2, which means "errors" for `validate` and `status`), that of a
`UserError`, and those of `explain` for OSErrors.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from . import __version__
from .errors import Exit, StorageError, UserError
from .units import Bytes

Handler = Callable[[argparse.Namespace], int]

_WRONG_PATH = "look for a mistake in the path"
_STORAGE_FAILS = "look at the storage (kernel log, mount, server), then run the same command again"
_STORAGE = {
    errno.ENOSPC: "free space there, then run the same command again",
    errno.EDQUOT: "free space there or have the quota raised, then run the same command again",
    errno.EFBIG: "this file system, or a limit (`ulimit -f`), allows no file so large: raise it or use another place",
    **dict.fromkeys((errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.ENODEV), _STORAGE_FAILS),
}
_PATHS = {
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG), _WRONG_PATH),
    **dict.fromkeys((errno.EEXIST, errno.ENOTEMPTY, errno.EBUSY, errno.ETXTBSY), "name another path"),
    errno.ENXIO: "name a file on disk, not a socket or a device",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "name another path, or have the permission granted"),
    errno.ELOOP: "symbolic links lead in a circle: look for a mistake in the path or in the links",
    errno.EROFS: "name another path, or have the file system mounted for writing",
}


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


def add_verb(verbs: Any, name: str, handler: Handler, summary: str, example: str) -> argparse.ArgumentParser:
    """Add a verb to the subparsers `verbs`. Returns its parser, to which the caller adds arguments."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=summary,
        description=summary,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(handler=handler)
    return parser


Argument = Callable[[argparse.ArgumentParser], object]
"""Adds an argument to a parser."""


def argument(*names: str, **options: Any) -> Argument:
    """An argument of a verb; the same parameters as `add_argument`."""
    return lambda parser: parser.add_argument(*names, **options)


JSON = argument("--json", action="store_true", help="print JSON")


@dataclass(frozen=True)
class Verb:
    """A verb of a command; the handler's docstring is its summary.

    `example` is the rest of the command line after the name, for `--help`.
    """

    handler: Handler
    name: str
    example: str
    arguments: tuple[Argument, ...]

    def add_to(self, verbs: Any, prefix: str) -> argparse.ArgumentParser:
        """Add it to the subparsers of a command; `prefix` is that command, for the example."""
        summary = " ".join((self.handler.__doc__ or "").split())
        parser = add_verb(verbs, self.name, self.handler, summary, f"{prefix} {self.name} {self.example}".rstrip())
        for add in self.arguments:
            add(parser)
        return parser


def verb(name: str, example: str, *arguments: Argument) -> Callable[[Handler], Verb]:
    """Make a function the handler of a verb; see `Verb`."""
    return lambda handler: Verb(handler, name, example, arguments)


class CommandLine:
    """A console command with verbs."""

    def __init__(self, name: str, description: str) -> None:
        self._parser = Parser(prog=name, description=description)
        self._parser.add_argument("--version", action=_Version)
        self._verbs = self._parser.add_subparsers(metavar="VERB", required=True)

    def add(self, *verbs: Verb) -> argparse.ArgumentParser:
        """Add verbs. Returns the parser of the last."""
        return [each.add_to(self._verbs, self._parser.prog) for each in verbs][-1]

    def verb(self, name: str, handler: Handler, summary: str, example: str) -> argparse.ArgumentParser:
        """Add a verb. Returns its parser, to which the caller adds arguments.

        If the parser has a default for `passed_on`, that is set to the unknown arguments, in order.
        """
        return add_verb(self._verbs, name, handler, summary, example)

    def run(self, arguments: Sequence[str] | None = None) -> int:
        """Parse and run. Returns the exit code. Raises SystemExit after `--help` and on invalid arguments."""
        return run_guarded(lambda: self._run(arguments))

    def _run(self, arguments: Sequence[str] | None) -> int:
        if isinstance(sys.stdout, io.TextIOWrapper):  # output may have characters that stdout cannot encode
            sys.stdout.reconfigure(errors="backslashreplace")
        if "_ARGCOMPLETE" in os.environ:  # a shell asks what may follow; ends here
            import argcomplete

            argcomplete.autocomplete(self._parser)
        parsed, unknown = self._parser.parse_known_args(arguments)
        if hasattr(parsed, "passed_on"):  # for another command
            parsed.passed_on = unknown
        elif unknown and hasattr(parsed, "overrides") and not any(text.startswith("-") for text in unknown):
            parsed.overrides += unknown  # after options; argparse wants all of them before
        elif unknown:
            self._parser.error(f"unrecognized arguments: {' '.join(unknown)}")
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
    """The error to show: exit 93 if storage is full or fails, 78 if a path cannot be used, None for other errors."""
    number, where = error.errno or 0, error.filename
    if where is None and number in _STORAGE:
        try:
            _flush_output()
        except OSError:
            _drop_output()
            where = "standard output"
    remedies = _PATHS | _STORAGE if where is not None else _STORAGE
    if number not in remedies:
        return None
    place = "a file or standard output" if where is None else os.fsdecode(where) if isinstance(where, bytes) else where
    cause = f"cannot use {place}: {os.strerror(number)}"
    kind = StorageError if number in _STORAGE else UserError
    return kind(cause, remedy=remedies[number])


def _show(error: UserError) -> int:
    if not error.shared or os.environ.get("RANK", "0") == "0":
        print(f"error: {error}", file=sys.stderr)
    return int(error.exit)


def _flush_output() -> None:
    if sys.stdout is not None:  # None where it was closed
        sys.stdout.flush()


def _drop_output() -> None:
    """Discard buffered standard output, or Python would fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def row(name: str, text: str) -> str:
    """A line of a command's output: name and text."""
    return f"  {name:11} {text}"


def byte_count(text: str) -> int:
    """Argument type of a size such as `512MB` or `80GiB`. Raises ArgumentTypeError."""
    try:
        return Bytes.parse(text).value
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is {error}") from None


def positive(text: str) -> int:
    """Argument type of a positive integer. Raises ArgumentTypeError."""
    if not re.fullmatch(r"[0-9]{1,18}", text.strip()) or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)
