"""A real S3 server on loopback, and between it and its clients a proxy with the faults of real object storage.

    store.put("corpus/manifest.json", content)            past the proxy
    config: path = f"{store.url}/corpus"                  or store.http_url, to read only
    store.faults = Faults(failing=0.05, corrupt=0.01)     from now on; Faults() heals
    store.log[-1]                                         every request as the storage answered it

The fixture `object_store` sets the variables by which s3fs finds server and credentials.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import random
import re
import socket
import subprocess
import sys
import threading
import urllib.parse
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from processes import free_port, spawn
from sight import until

from fsdp_pretrain.remote import Url

NODE = "AWS_SDK_UA_APP_ID"
"""The variable that names a client's node in the log; a process that sets it gives it to its children."""
_CODES = {
    400: "ExpiredToken",
    403: "ExpiredToken",
    429: "TooManyRequests",
    500: "InternalError",
    503: "SlowDown",
}
_SIGNED = "AWS4-HMAC-SHA256 Credential=AKIATEST/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
"""The server checks no signature, but refuses requests without one."""
_CHECKSUM = re.compile(r"x-amz-(checksum|sdk-checksum|trailer)", re.IGNORECASE)
_HOP = {"connection", "keep-alive", "transfer-encoding", "expect", "content-length"}


@dataclass(frozen=True)
class Faults:
    """What is wrong with the storage. Shares are of requests, drawn by `seed`, object, range and how often it was asked
    for: the same in every run, whatever the order.
    """

    objects: str = ""  # a regular expression for the start of their names; requests for others are answered as usual
    failing: float = 0.0  # share answered with `status`: 503 SlowDown, 429 TooManyRequests or 500 InternalError
    status: int = 503
    cut: float = 0.0  # share of GET answers that end in the middle of their bytes
    corrupt: float = 0.0  # share of GET answers with one wrong byte
    spoiled: float = 0.0  # share of PUT requests of which one byte is stored wrong
    unanswered: float = 0.0  # share of PUT and DELETE requests that are carried out, and get no answer
    expired: int = 0  # every answer is 400 (as of S3) or 403 (as of others), ExpiredToken
    hang: bool = False  # no answer, until this is changed
    refuse: bool = False  # nobody listens; open connections are closed
    seed: int = 0


@dataclass(frozen=True)
class Request:
    """One request and its answer."""

    method: str
    name: str  # of the object in the bucket; empty for the bucket itself (a listing)
    sent: int  # bytes of the answer's body that were sent
    fault: str  # failing, cut, corrupt, spoiled, unanswered, expired or hang; empty for a true answer
    node: str  # see `NODE`; empty if the client did not set it
    checksums: tuple[str, ...]  # headers by which the client sent a checksum or asked for one


class ObjectStore:
    """A bucket of its own in an S3 server, behind a proxy of its own.

    Attributes:
        url: of the bucket, for s3fs.
        http_url: of the bucket, to be read without credentials.
        environment: variables for clients, the address of the proxy among them.
        log: what the proxy has answered, in the order of the answers.
    """

    def __init__(self, server: int) -> None:
        bucket = f"bucket-{uuid.uuid4().hex[:12]}"
        self._server, self._port, self._bucket = server, free_port(), bucket
        self.url, self.http_url = Url(f"s3://{bucket}"), Url(f"http://127.0.0.1:{self._port}/{bucket}")
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}",
            "AWS_ACCESS_KEY_ID": "AKIATESTTESTTESTTEST",
            "AWS_SECRET_ACCESS_KEY": "of-a-test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }
        self.log: list[Request] = []
        self._faults, self._changed = Faults(), threading.Event()
        self._asked: Counter[tuple[Any, ...]] = Counter()
        self._connections: set[socket.socket] = set()
        self._listener: ThreadingHTTPServer | None = None
        self._listen()
        status, _, text = self._direct("PUT", f"/{bucket}")
        assert status == 200, text

    # ------------------------------------------------------------ past the proxy

    def put(self, name: str, content: bytes) -> None:
        """Create or replace an object."""
        status, _, text = self._direct("PUT", self._path(name), content)
        assert status == 200, text

    def put_folder(self, path: Path, name: str) -> Url:
        """Copy all files below a directory; the URL of the copy."""
        for file in sorted(path.rglob("*")):
            if file.is_file():
                self.put(f"{name}/{file.relative_to(path)}", file.read_bytes())
        return self.url / name

    def get(self, name: str) -> bytes:
        status, _, content = self._direct("GET", self._path(name))
        assert status == 200, f"{name}: {content!r}"
        return content

    def delete(self, name: str) -> None:
        status, _, text = self._direct("DELETE", self._path(name))
        assert status == 204, text

    def names(self, below: str = "") -> list[str]:
        """Of all objects whose names begin with a text, sorted."""
        query = urllib.parse.urlencode({"list-type": "2", "prefix": below})
        status, _, text = self._direct("GET", f"/{self._bucket}?{query}")
        assert status == 200, text
        page = ElementTree.fromstring(text)
        assert page.findtext("{*}IsTruncated") == "false", "more than a page"
        return [element.text or "" for element in page.findall("{*}Contents/{*}Key")]

    # ------------------------------------------------------------ faults and counts

    @property
    def faults(self) -> Faults:
        return self._faults

    @faults.setter
    def faults(self, faults: Faults) -> None:
        self._faults = faults
        self._changed.set()
        self._changed = threading.Event()
        if faults.refuse:
            self._stop_listening()
        elif self._listener is None:
            self._listen()

    def requests(self, name: str = "", method: str = "GET", node: str | None = None) -> list[Request]:
        """Those logged for objects whose names match the start of a regular expression."""
        return [
            request
            for request in list(self.log)
            if request.method == method and re.match(name, request.name) and node in (None, request.node)
        ]

    def bytes_read(self, name: str = "", node: str | None = None) -> int:
        """Bytes sent by GET for objects whose names match the start of a regular expression."""
        return sum(request.sent for request in self.requests(name, node=node))

    def close(self) -> None:
        self.faults = Faults(refuse=True)

    # ------------------------------------------------------------ the proxy

    def _path(self, name: str) -> str:
        return f"/{self._bucket}/{urllib.parse.quote(name)}"

    def _direct(
        self, method: str, target: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        """Ask the server itself; status, headers, body."""
        connection = http.client.HTTPConnection("127.0.0.1", self._server, timeout=120)
        try:
            connection.request(method, target, body, {"Authorization": _SIGNED, **(headers or {})})
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def _listen(self) -> None:
        class Listener(ThreadingHTTPServer):
            allow_reuse_address = True
            daemon_threads = True
            block_on_close = False
            request_queue_size = 128

            def handle_error(self, *args: Any) -> None:
                pass  # a client that is gone

        handler = type("Handler", (_Handler,), {"store": self})
        self._listener = Listener(("127.0.0.1", self._port), handler)
        threading.Thread(target=self._listener.serve_forever, args=(0.02,), daemon=True).start()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.shutdown()
            self._listener.server_close()
            self._listener = None
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    """Passes requests of one connection on and their answers back, unless a fault is due."""

    protocol_version = "HTTP/1.1"
    store: ObjectStore

    def setup(self) -> None:
        super().setup()
        self.store._connections.add(self.connection)

    def finish(self) -> None:
        self.store._connections.discard(self.connection)
        super().finish()

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        body = self._body()
        self._name = (
            urllib.parse.unquote(self.path.partition("?")[0]).removeprefix(f"/{self.store._bucket}").lstrip("/")
        )
        faults = self._faults()
        if faults.hang:
            self.store._changed.wait()
            self.close_connection = True
            self._log(0, "hang")
            return
        draw, times = self._draw(faults)
        if faults.expired or draw.random() < faults.failing:
            self._refuse(faults.expired or faults.status, "expired" if faults.expired else "failing")
            return
        passed = {key: value for key, value in self.headers.items() if key.lower() not in _HOP}
        fault = ""
        if self.command == "PUT" and body and draw.random() < faults.spoiled:
            fault, body = "spoiled", _with_a_wrong_byte(body, draw.random(), times)
        status, headers, content = self.store._direct(self.command, self.path, body, passed)
        if self.command in ("PUT", "DELETE") and draw.random() < faults.unanswered:
            self.close_connection = True
            self._log(0, "unanswered")
            return
        if self.command == "GET" and self._name and content and status < 300:
            cut, corrupt, place = draw.random() < faults.cut, draw.random() < faults.corrupt, draw.random()
            fault = "cut" if cut else "corrupt" if corrupt else ""
            if fault == "corrupt":
                content = _with_a_wrong_byte(content, place, times)
        length = next((value for key, value in headers if key.lower() == "content-length"), "0")
        self.send_response_only(status)
        for key, value in headers:
            if key.lower() not in _HOP:
                self.send_header(key, value)
        if status not in (204, 304):
            self.send_header("Content-Length", length if self.command == "HEAD" else str(len(content)))
        if fault == "cut":
            content, self.close_connection = content[: len(content) // 2], True
        self._log(len(content), fault)
        self.end_headers()
        self.wfile.write(content)

    do_PUT = do_POST = do_HEAD = do_DELETE = do_GET  # noqa: N815

    def _faults(self) -> Faults:
        faults = self.store.faults
        return faults if re.match(faults.objects, self._name) else Faults()

    def _draw(self, faults: Faults) -> tuple[random.Random, int]:
        """What is drawn for a request, and how often it was asked for."""
        what = (self.command, self._name, self.path.partition("?")[2], self.headers.get("Range", ""))
        self.store._asked[what] += 1
        times = self.store._asked[what]
        text = repr((faults.seed, *what, times))
        return random.Random(hashlib.sha256(text.encode()).digest()), times

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _refuse(self, status: int, fault: str) -> None:
        code = _CODES[status]
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>of a test</Message></Error>".encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        body = b"" if self.command == "HEAD" else body
        self._log(len(body), fault)
        self.end_headers()
        self.wfile.write(body)

    def _log(self, sent: int, fault: str) -> None:
        """Before the answer, so that a client that has it finds it in the log."""
        node = re.search(r"\bapp/(\S+)", self.headers.get("User-Agent", ""))
        self.store.log.append(
            Request(
                method=self.command,
                name=self._name,
                sent=sent,
                fault=fault,
                node=node[1] if node else "",
                checksums=tuple(name for name in self.headers if _CHECKSUM.match(name)),
            )
        )


def _with_a_wrong_byte(content: bytes, place: float, times: int) -> bytes:
    """Wrong in another way each time: what comes twice is taken as what is stored."""
    at = int(place * len(content))
    return content[:at] + bytes([content[at] ^ (1 + times % 255)]) + content[at + 1 :]


@contextlib.contextmanager
def s3_server(log: Path) -> Iterator[int]:
    """An S3 server that keeps its objects in memory; its port."""
    port = free_port()
    server = spawn((sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", port), log)

    def answers() -> bool:
        assert server.poll() is None, log.read_text()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return True
        return False

    try:
        until(answers, what=lambda: f"the S3 server:\n{log.read_text()}")
        yield port
    finally:
        server.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(30)
