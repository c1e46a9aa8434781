"""A process that has imported the program and forks for every command: real processes, without the seconds of import.

Commands come as JSON lines on standard input, `{"argv", "cwd", "env", "out", "err"}`; the answer is `{"pid"}` and then
`{"status"}`. Nothing is computed before a fork, so torch has no threads that a child would miss.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from typing import Any


def run(command: dict[str, Any]) -> int:
    """In the child: becomes `python -m segapp ARGV`."""
    os.setsid()
    os.chdir(command["cwd"])
    os.environ.clear()
    os.environ.update(command["env"])
    streams = [(0, os.devnull, os.O_RDONLY), (1, command["out"], os.O_WRONLY), (2, command["err"], os.O_WRONLY)]
    for fd, path, flags in streams:
        source = os.open(path, flags)
        os.dup2(source, fd)
        os.close(source)
    from segapp import failpoints
    from segapp.__main__ import main

    failpoints.arm(os.environ.get(failpoints.VARIABLE, ""))
    sys.argv = ["segapp", *command["argv"]]
    try:
        main()
        return 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()


def serve() -> None:
    """Forks until standard input ends."""
    import segmentation_models_pytorch  # noqa: F401
    import torchvision  # noqa: F401

    import segapp.cli
    import segapp.train.apply
    import segapp.train.check
    import segapp.train.session  # noqa: F401

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        command = json.loads(line)
        pid = os.fork()
        if pid == 0:
            answers.close()
            os._exit(run(command))
        answers.write(json.dumps({"pid": pid}) + "\n")
        _, status = os.waitpid(pid, 0)
        answers.write(json.dumps({"status": os.waitstatus_to_exitcode(status)}) + "\n")


if __name__ == "__main__":
    serve()
