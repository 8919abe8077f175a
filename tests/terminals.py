"""A real terminal for tests: a program in a tmux server of its own, of which the screen is read and keys are sent."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from processes import clean_environment
from sight import until

needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")


class TerminalUnderTest:
    """A shell in a terminal of `width` x `height`, which runs a command and then says `left with CODE`."""

    def __init__(self, command: list[object], width: int, height: int, **environment: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tmux-")  # a short path: it is that of a socket
        self._tmux = ["tmux", "-S", f"{self._folder.name}/server", "-f", "/dev/null"]
        script = f"{shlex.join(map(str, command))}; echo left with $?; stty -a | grep -o -- '[-]*echo ' ; exec cat"
        size = ["-x", str(width), "-y", str(height)]
        done = subprocess.run(
            [*self._tmux, "new-session", "-d", *size, "-s", "test", "bash", "--norc", "-c", script],
            env=clean_environment(LC_ALL="C.UTF-8", **environment),
            cwd="/",
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr

    def _run(self, *arguments: str) -> str:
        done = subprocess.run([*self._tmux, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def screen(self) -> str:
        """What is on the screen."""
        return self._run("capture-pane", "-p", "-t", "test")

    def press(self, *keys: str) -> None:
        """Send keys by their tmux names, such as `q`, `C-c`, `Down`, `Enter`."""
        self._run("send-keys", "-t", "test", *keys)

    def resize(self, width: int, height: int) -> None:
        self._run("resize-window", "-t", "test", "-x", str(width), "-y", str(height))

    def is_clean(self) -> bool:
        """Whether the terminal is as a shell expects it: its own screen and a cursor."""
        return self._run("display", "-p", "-t", "test", "#{alternate_on} #{cursor_flag}").split() == ["0", "1"]

    def shows(self, *texts: str) -> str:
        """Wait until all texts are on the screen; the screen."""

        def found() -> str | None:
            screen = self.screen()
            return screen if all(text in screen for text in texts) else None

        shown: str = until(found, what=lambda: f"{texts} on\n{self.screen()}", every=0.1)
        return shown

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], capture_output=True)
        self._folder.cleanup()


@pytest.fixture
def terminal() -> Iterator[Any]:
    """Starts `fsdp-pretrain` with arguments in a terminal: `terminal("watch", run, width=80, height=24)`."""
    started: list[TerminalUnderTest] = []

    def start(*arguments: object, width: int = 80, height: int = 24, **environment: str) -> TerminalUnderTest:
        command = [sys.executable, "-m", "fsdp_pretrain.cli", *arguments]
        started.append(TerminalUnderTest(command, width, height, **environment))
        return started[-1]

    yield start
    for each in started:
        each.close()
