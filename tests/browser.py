"""Chromium without a window, driven over its DevTools protocol."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sight import until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian's package chromium)")


class Tab:
    """A page in a browser.

    Attributes:
        problems: what its console reported: errors, warnings and uncaught exceptions.
        requests: URLs that it asked for, other than its own file and data in it.
    """

    def __init__(self, address: str) -> None:
        import websocket

        self._socket = websocket.create_connection(address, timeout=120, suppress_origin=True)
        self._numbers = itertools.count(1)
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the protocol, and its result."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while (message := json.loads(self._socket.recv())).get("id") != number:
            self._note(message)
        assert "error" not in message, (method, message["error"])
        result: dict[str, Any] = message["result"]
        return result

    def _note(self, message: dict[str, Any]) -> None:
        match message.get("method"), message.get("params", {}):
            case "Page.loadEventFired", _:
                self._loaded = True
            case "Runtime.exceptionThrown", {"exceptionDetails": details}:
                self.problems.append(json.dumps(details)[:2000])
            case "Runtime.consoleAPICalled", {"type": "error" | "warning" as kind, "args": args}:
                self.problems.append(f"{kind}: {args}")
            case "Log.entryAdded", {"entry": entry}:
                self.problems.append(f"{entry['level']}: {entry['text']}")
            case "Network.requestWillBeSent", {"request": {"url": url}}:
                if not url.startswith(("file:", "data:")):
                    self.requests.append(url)

    def open(self, path: Path, *, width: int = 1600, height: int = 1000, dark: bool = False) -> None:
        """Open a file, and wait until its scripts have run."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 640}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded = False
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not self._loaded:
            self._note(json.loads(self._socket.recv()))

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise."""
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def move(self, x: float, y: float) -> None:
        """Move the pointer."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def drag(self, start: tuple[float, float], stop: tuple[float, float]) -> None:
        """Drag with the left button."""
        self.move(*start)
        for kind, (x, y) in (("mousePressed", start), ("mouseMoved", stop), ("mouseReleased", stop)):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)

    def close(self) -> None:
        self._socket.close()


@contextmanager
def browser() -> Iterator[Tab]:
    """A tab of a fresh browser."""
    import urllib.request

    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
        line = [CHROMIUM, *flags, "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            note = Path(profile) / "DevToolsActivePort"
            port = until(lambda: note.exists() and note.read_text().splitlines(), what="Chromium's port")[0]
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
                f"http://127.0.0.1:{port}/json"
            ) as answer:
                pages = [page for page in json.load(answer) if page["type"] == "page"]
            tab = Tab(pages[0]["webSocketDebuggerUrl"])
            yield tab
            tab.close()
        finally:
            process.terminate()
            process.wait()
