"""What the three console commands share: verbs with an example in their `--help`, errors as one message."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .errors import UserError

Handler = Callable[[argparse.Namespace], int]


def add_verb(verbs: Any, name: str, handler: Handler, summary: str, example: str) -> argparse.ArgumentParser:
    """Add a verb to the subparsers `verbs`; returns its parser, to which the caller adds arguments."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=summary,
        description=summary,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(handler=handler)
    return parser


class Command:
    """A console command made of verbs.

    Args:
        name: as typed.
        description: what it is for.
    """

    def __init__(self, name: str, description: str) -> None:
        self._parser = argparse.ArgumentParser(prog=name, description=description)
        self._verbs = self._parser.add_subparsers(metavar="VERB", required=True)

    def verb(self, name: str, handler: Handler, summary: str, example: str) -> argparse.ArgumentParser:
        """Add a verb; returns its parser, to which the caller adds arguments.

        A verb with a default for `passed_on` gets there, in order, what its parser does not know.
        """
        return add_verb(self._verbs, name, handler, summary, example)

    def run(self, arguments: Sequence[str] | None = None) -> int:
        """Parse and run; the exit code."""
        parsed, unknown = self._parser.parse_known_args(arguments)
        if hasattr(parsed, "passed_on"):  # a verb that gives them to another command
            parsed.passed_on = unknown
        elif unknown:
            self._parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        return run_guarded(lambda: parsed.handler(parsed))


def run_guarded(act: Callable[[], int]) -> int:
    """Run a command: user errors become one message and their exit code, Ctrl-C becomes 130."""
    try:
        return act()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.exit)
    except BrokenPipeError:  # `... | head`: nobody reads any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def byte_count(text: str) -> int:
    """An amount of bytes on the command line: `512MB`, `80GiB`. Raises ArgumentTypeError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?", text.strip().upper())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 512MB or 80GiB")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " "))
