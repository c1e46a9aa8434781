"""Sees the requests of a process and its children: Python's sockets by an audit hook, those of libraries by a proxy.

This file is also the `sitecustomize.py` of the children, so that it imports nothing of the project.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VARIABLE = "SEGAPP_TEST_REQUESTS"
"""The file in which processes note their requests; there is no hook without it."""

_EVENTS = ("socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname")


def note_requests() -> None:
    """Lets this process note every host beyond this machine that it asks for or connects to."""
    if path := os.environ.get(VARIABLE):
        own = ("", "0.0.0.0", "::", "::1", "localhost", socket.gethostname(), socket.getfqdn())

        def note(event: str, arguments: tuple[Any, ...]) -> None:
            if event not in _EVENTS:
                return
            found = arguments[0] if event.startswith("socket.get") else arguments[1]
            host = found[0] if isinstance(found, tuple) else found
            host = host.decode() if isinstance(host, bytes) else host
            is_unix = event in _EVENTS[:3] and not isinstance(found, tuple)
            if not is_unix and host is not None and host not in own and not host.startswith("127."):
                with open(path, "a", encoding="utf-8") as file:
                    file.write(f"{event} {found} by {sys.argv}\n")

        sys.addaudithook(note)


class Network:
    """What the processes with the variables of `env` ask of other machines.

    Attributes:
        address: a server on this machine, `127.0.0.1:PORT`, that counts connections and answers none.
        env: variables for the processes. The server is also their proxy, for libraries that have sockets of their own.
    """

    def __init__(self, folder: Path) -> None:
        self._notes = folder / "requests"
        modules = folder / "modules"
        modules.mkdir(parents=True)
        shutil.copyfile(__file__, modules / "sitecustomize.py")
        self._server = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address = "{}:{}".format(*self._server.getsockname())
        self._asked: list[str] = []
        names = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
        self.env = dict.fromkeys(names, f"http://{self.address}") | {
            VARIABLE: str(self._notes),
            "PYTHONPATH": os.pathsep.join([str(modules), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
            "no_proxy": "",
            "NO_PROXY": "",
        }
        threading.Thread(target=self._count, daemon=True).start()

    def take(self) -> list[str]:
        """Returns the requests since the last call."""
        notes = self._notes.read_text().splitlines() if self._notes.exists() else []
        self._notes.unlink(missing_ok=True)
        found, self._asked = self._asked + notes, []
        return found

    def close(self) -> None:
        """Ends the server."""
        self._server.close()

    def _count(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(1)
                    self._asked.append(f"connection: {connection.recv(200)!r}")


@contextlib.contextmanager
def network(folder: Path) -> Iterator[Network]:
    """Yields a network without requests, and ends its server."""
    seen = Network(folder)
    try:
        yield seen
    finally:
        seen.close()


if __name__ == "sitecustomize":
    note_requests()
