"""Stands for Python in the ranks of an agent: `forked_python -P -u -m segapp WORDS` forks a process with the imports.

Its output goes to `rankN.txt` in the folder `SEGAPP_TEST_RANK_LOGS`. torch's agent takes the program from PYTHON_EXEC.
"""

import json
import os
import signal
import socket
import sys


def main() -> None:
    """Let the fork server run the command; pass signals on to it and end as it does."""
    log = os.path.join(os.environ["SEGAPP_TEST_RANK_LOGS"], f"rank{os.environ['RANK']}.txt")
    os.close(os.open(log, os.O_CREAT, 0o600))
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(f"\0{os.environ['SEGAPP_TEST_FORK_SERVER']}")
    words = {
        "argv": sys.argv[sys.argv.index("segapp") + 1 :],
        "cwd": os.getcwd(),
        "env": dict(os.environ),
        "out": log,
        "err": log,
    }
    connection.sendall(json.dumps(words).encode() + b"\n")
    with connection.makefile("r") as answers:
        pid = json.loads(answers.readline())["pid"]
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, lambda number, _frame: os.kill(pid, number))
        status = json.loads(answers.readline())["status"]
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    sys.exit(status)


main()
