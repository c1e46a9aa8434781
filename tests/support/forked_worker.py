"""Stands for Python in the workers of pytest-xdist: `forked_worker.py -u -c CODE` forks one with the imports done.

A worker of its own would import torch and the libraries for 20 seconds, and there are several for each core. The server
runs already (`conftest.pytest_configure`).
"""

import json
import os
import socket
import sys


def main() -> None:
    """Let the fork server run the code at the pipes of this process, and end when it has ended."""
    pipes = [f"/proc/{os.getpid()}/fd/{number}" for number in range(3)]
    words = {"code": sys.argv[-1], "cwd": os.getcwd(), "env": dict(os.environ)}
    server = socket.socket(socket.AF_UNIX)
    server.connect(f"\0{os.environ['SEGAPP_TEST_FORK_SERVER']}")
    server.sendall(json.dumps({**words, "in": pipes[0], "out": pipes[1], "err": pipes[2]}).encode() + b"\n")
    with server.makefile("r") as answers:
        sys.exit(json.loads(list(answers)[-1])["status"] != 0)


main()
