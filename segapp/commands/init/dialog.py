"""`segapp init` on a terminal: what is printed, and the question which layout a folder has."""

from __future__ import annotations

import sys
from dataclasses import replace

from segapp.commands.init import InitRequest, InitResult, propose_config
from segapp.commands.init.candidates import AmbiguousLayoutError
from segapp.run.text import printable


def init_folder(request: InitRequest) -> None:
    """Write the configs of a request; print what is believed, and the next commands."""
    result = asked(request)
    print(*map(printable, result.lines), sep="\n")
    first = result.configs[0]
    print(f"written: {', '.join(map(str, result.configs))}")
    train = f"segapp train --config {first}"
    if len(result.configs) > 1:
        train = f"segapp sweep {' '.join(map(str, result.configs))}"
    print(f"next: segapp check --config {first}; {train}")


def asked(request: InitRequest) -> InitResult:
    """Return the result of a request; where several layouts are possible and somebody is there to ask, ask.

    Raises:
        AmbiguousLayoutError: there is no terminal, or no answer.
    """
    try:
        return propose_config(request)
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
        return propose_config(replace(request, layout=error.names[int(answer) - 1]))
