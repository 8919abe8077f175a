"""A web server for notification tests, with the faults of real ones."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SECRET = "T0P-s3cret"
"""In the address of the webhook that tests configure."""


class Endpoint:
    """A web server that can be down, slow or broken.

    Attributes:
        port: fixed; `down` closes it.
        answers: status of every answer.
        delay: seconds before an answer.
        requests: (path, headers, body) of requests answered with 200, in order.
        seen: number of requests.
    """

    def __init__(self, port: int) -> None:
        self.port, self.answers, self.delay = port, 200, 0.0
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.seen = 0
        self._server: ThreadingHTTPServer | None = None

    def up(self) -> None:
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                endpoint.seen += 1
                login = self.path == "/login"
                answer = 200 if login else endpoint.answers
                time.sleep(endpoint.delay)
                if answer == 200 and not login:
                    endpoint.requests.append((self.path, dict(self.headers), body))
                self.send_response(answer)
                self.send_header("Location", "/login")
                self.end_headers()
                self.wfile.write(f"no {self.path}".encode())

            do_GET = do_POST  # noqa: N815

            def log_message(self, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            allow_reuse_address = True
            daemon_threads = True

            def handle_error(self, *args: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def down(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def bodies(self) -> list[Any]:
        return [json.loads(body) for _, _, body in self.requests]
