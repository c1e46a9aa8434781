"""The question which layout a folder has, on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

from segapp.commands.init import InitRequest, InitResult
from segapp.commands.init.candidates import AmbiguousLayoutError
from segapp.run.text import printable


def asked(request: InitRequest, propose: Callable[[InitRequest], InitResult]) -> InitResult:
    """Return the result of a request; where several layouts are possible and somebody is there to ask, ask.

    Raises:
        AmbiguousLayoutError: there is no terminal, or no answer.
    """
    try:
        return propose(request)
    except AmbiguousLayoutError as error:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise
        print(printable(str(error)), file=sys.stderr)
        for number, name in enumerate(error.names, start=1):
            print(f"  {number}  {printable(name)}", file=sys.stderr)
        print("number of the layout (none: stop): ", end="", file=sys.stderr, flush=True)
        answer = sys.stdin.readline().strip()
        if not answer.isdigit() or not 1 <= int(answer) <= len(error.names):
            raise
        return propose(replace(request, layout=error.names[int(answer) - 1]))
