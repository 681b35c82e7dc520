"""Servers of metrics pages for tests: right ones, and wrong in many ways."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

PAGES = Path(__file__).with_name("pages")

Answer = Callable[[socket.socket, bytes], None]


class PageServer:
    """Answers each request on a socket of its own; what the answer is, a test says."""

    def __init__(self, answer: Answer | bytes | str):
        self.answer = answer
        self.requests: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/metrics"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            request = b""
            while b"\r\n\r\n" not in request:
                received = connection.recv(4096)
                if not received:
                    return
                request += received
            self.requests.append(request)
            answer = self.answer
            if isinstance(answer, bytes | str):
                connection.sendall(page(answer))
            else:
                answer(connection, request)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()


def page(body: bytes | str, kind: str = "text/plain; version=0.0.4", **headers: str) -> bytes:
    """An HTTP answer with a page, whole and with its length."""
    body = body.encode() if isinstance(body, str) else body
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    head = [
        "HTTP/1.1 200 OK",
        f"Content-Type: {kind}",
        *(lines or [f"Content-Length: {len(body)}"]),
    ]
    return "\r\n".join([*head, "", ""]).encode() + body


def sends(data: bytes) -> Answer:
    """An answer of these bytes, after which the connection ends."""
    return lambda connection, _: connection.sendall(data)


@contextlib.contextmanager
def serving(answer: Answer | bytes | str) -> Iterator[PageServer]:
    """A server for the length of a block."""
    server = PageServer(answer)
    try:
        yield server
    finally:
        server.close()
