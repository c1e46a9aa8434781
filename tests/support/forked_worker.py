"""Stands for Python in the workers of pytest-xdist: `forked_worker.py -u -c CODE` forks one with the imports done.

A worker of its own would import torch and the libraries for 20 seconds, and there are several for each core. The server
runs already (`conftest.pytest_configure`).
"""

import json
import os
import socket
import sys


def main() -> None:
    """Let the fork server run the code at the streams of this process, and end when it has ended."""
    words = {"code": sys.argv[-1], "cwd": os.getcwd(), "env": dict(os.environ)}
    server = socket.socket(socket.AF_UNIX)
    server.connect(f"\0{os.environ['SEGAPP_TEST_FORK_SERVER']}")
    socket.send_fds(server, [json.dumps(words).encode() + b"\n"], [0, 1, 2])
    with server.makefile("r") as answers:
        sys.exit(json.loads(list(answers)[-1])["status"] != 0)


main()
