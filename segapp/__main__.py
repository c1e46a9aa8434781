"""The process around the command line: standard streams, errors as one line with an exit code, shell completion."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn, cast

from segapp.custom.trust import trust_parts
from segapp.errors import ConfigError, SegappError, StorageError
from segapp.run.starting import announce_torch

_STORAGE_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG}
_NAME_ERRNOS = {errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM}


def main(arguments: list[str] | None = None) -> None:
    """Run segapp with the process's arguments (or those given) and exit."""
    _open_closed_streams()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    from segapp.cli import app, with_resume_value  # takes a while: an interrupt must be handled by then

    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if "_SEGAPP_COMPLETE" in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]

        completion_init()
        with contextlib.suppress(Exception):  # a traceback would appear in the user's prompt
            app(prog_name="segapp")
        sys.exit(0)
    arguments = with_resume_value(arguments)
    is_debug = "--debug" in arguments
    if "--trust-parts" in arguments:
        trust_parts()
    announce_torch()
    with _one_line_errors(is_debug, as_json=any(word.partition("=")[0] == "--json" for word in arguments)):
        words = [word for word in arguments if word not in ("--debug", "--trust-parts")]
        sys.exit(app(words, standalone_mode=False) or 0)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; while a module is being imported, exit immediately.

    Nothing needs to be cleaned up then, and libraries turn a KeyboardInterrupt in their import into other errors.
    """
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def _open_closed_streams() -> None:
    """Open closed standard streams (`>&-`) on /dev/null, so that no opened file takes their number."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, "w" if fd else "r", closefd=False))  # noqa: SIM115


@contextlib.contextmanager
def _one_line_errors(is_debug: bool, *, as_json: bool) -> Iterator[None]:
    """Print an error that a user can act on as one line, or also as JSON, and exit with the exit code of its class."""
    import typer

    # click's UsageError, of which some versions of typer have a copy of their own
    usage_error = cast("type[typer.BadParameter]", typer.BadParameter.__base__)
    try:
        yield
    except usage_error as error:
        if as_json:
            _print_json(ConfigError(error.format_message()))
        error.show()
        sys.exit(ConfigError.exit_code)
    except SegappError as error:
        if is_debug:
            raise
        _fail(error, as_json)
    except OSError as error:
        if is_debug or error.errno not in _STORAGE_ERRNOS | _NAME_ERRNOS:
            raise
        name = str(error.filename or "a file")
        shown = f"{name[:100]}{'...' if len(name) > 100 else ''}: {error.strerror}"
        if error.errno in _NAME_ERRNOS:
            _fail(ConfigError(f"{shown}: use another file or folder", path=name), as_json)
        _fail(StorageError(f"{shown}: free space or choose another folder", path=name), as_json)
    except KeyboardInterrupt:
        sys.exit(130)


def _print_json(error: SegappError) -> None:
    print(json.dumps({"error": error.as_json()}, indent=2, default=str), flush=True)


def _fail(error: SegappError, as_json: bool) -> NoReturn:
    from segapp.run.words import printable

    if as_json:
        _print_json(error)
    lines = "\n".join(printable(line) for line in str(error).splitlines())
    more = f"\nmore: segapp docs {error.topic}" if error.topic else ""
    print(f"error: {lines}{more}", file=sys.stderr, flush=True)
    sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
