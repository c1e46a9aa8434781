"""The process around the command line: standard streams, errors as one line with an exit code, shell completion."""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # the current folder, in which `python -m` looks before the standard library

import contextlib
import errno
import io
import json
import locale
import os
import shlex
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, cast

from segapp.custom.trust import UnknownCodeError, accept_code, trusting
from segapp.errors import ConfigError, SegappError, StorageError, closest_words, free_or, storage_errors
from segapp.run.files import remove_unfinished, write_atomic
from segapp.run.words import ESCAPED, announce_torch, printable
from segapp.waiting import lines_while, watch_signals

_STORAGE_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG}
_UNWIND_S = 1.2
_WITH_OWN_LINES = ("train", "sweep", "launch", "attach", "docs")
_NAME_ERRNOS = {errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM}

_interrupts: list[int] = []
"""The signals for which `_interrupt` has raised KeyboardInterrupt."""


def main(arguments: list[str] | None = None) -> None:
    """Run segapp with the process's arguments (or those given) and exit."""
    _use_utf8_for_files()
    _open_closed_streams()
    with _interrupts_end(is_program=arguments is None):
        _run(arguments)


@contextlib.contextmanager
def _interrupts_end(*, is_program: bool) -> Iterator[None]:
    """Exit with one line when SIGINT, SIGTERM or SIGHUP arrives within the body; `is_program`: Python exits next."""
    stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    earlier = {number: signal.getsignal(number) for number in stops}
    try:
        for number, handler in earlier.items():
            if handler in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(number, _interrupt)
        yield
    except KeyboardInterrupt as error:
        number = next(iter(error.args), signal.SIGINT)
        _say_stopped(number)
        sys.exit(128 + number)
    finally:
        for number in stops:
            if signal.getsignal(number) is _interrupt:
                # A KeyboardInterrupt in Python's own exit would be a traceback.
                signal.signal(number, signal.SIG_DFL if is_program else earlier[number])


def _run(arguments: list[str] | None) -> None:
    if threading.current_thread() is threading.main_thread():
        watch_signals()
    os.umask(os.umask(0o022) | 0o022)  # whatever writes a file, in this process or a child: others cannot change it
    from segapp.cli import app, with_resume_value  # takes a while: an interrupt must be handled by then

    arguments = [_with_home(word) for word in (sys.argv[1:] if arguments is None else arguments)]
    if "_SEGAPP_COMPLETE" in os.environ:
        with contextlib.suppress(Exception):  # a traceback would appear in the user's prompt
            app(prog_name="segapp")
        sys.exit(0)
    arguments = with_resume_value(arguments)
    is_debug = "--debug" in arguments
    os.environ["PYTHONSAFEPATH"] = "1"  # for the processes that libraries start
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read at the import: no stacks of C++ if a store is gone
    if os.environ.get("COLUMNS") == "0":  # as some terminals say; tables would have no width
        del os.environ["COLUMNS"]
    announce_torch()
    is_json = any(word.partition("=")[0] == "--json" for word in arguments)
    words, json_file = _split_json_file([word for word in arguments if word not in ("--debug", "--trust-parts")])
    doing = "" if not words or words[0] in _WITH_OWN_LINES else f"segapp {words[0]}: still running"
    with (
        trusting("--trust-parts" in arguments),
        _one_line_errors(words, is_debug, as_json=is_json),
        lines_while(lambda: doing),
        _printing_to(json_file),
    ):
        if words[:1] != ["sweep"] and sum(word.partition("=")[0] == "--config" for word in words) > 1:
            raise ConfigError("--config is given more than once: name one config, and change its keys with KEY=VALUE")
        while True:
            try:
                code = app(words, standalone_mode=False) or 0
                if code == 130 and _interrupts:  # typer returns it for every KeyboardInterrupt
                    raise KeyboardInterrupt(*_interrupts)
                sys.exit(code)
            except UnknownCodeError as error:  # raised before the command has changed anything
                if not _is_accepted(error):
                    raise


def _split_json_file(words: list[str]) -> tuple[list[str], Path | None]:
    """Return the words without the NAME.json that follows `--json`, which is a flag to every command, and that file."""
    at = words.index("--json") + 1 if "--json" in words else len(words)
    if not words[at : at + 1] or not words[at].endswith(".json"):
        return words, None
    return [*words[:at], *words[at + 1 :]], Path(words[at])


@contextlib.contextmanager
def _printing_to(path: Path | None) -> Iterator[None]:
    """Write what the body prints into a file, whole or not at all; nothing if the body fails."""
    if path is None:
        yield
        return
    printed = io.StringIO()
    with storage_errors(path, "choose another file after --json"):
        path.parent.mkdir(parents=True, exist_ok=True)  # before the work
    try:
        with contextlib.redirect_stdout(printed):
            yield
    except SystemExit:  # a code may be a finding, as of `check`
        if printed.getvalue():
            with storage_errors(path, "choose another file after --json"):
                write_atomic(path, printed.getvalue())
            print(f"written: {printable(str(path))}", file=sys.stderr)
        raise


def _is_accepted(error: UnknownCodeError) -> bool:
    """Ask in a terminal whether code may run, and record the answer yes."""
    from segapp.commands.spawn import is_interactive

    lines = [printable(f"  {key} = {code}, {code.shown_source}") for key, code in error.named.items()]
    if not is_interactive() or sum(map(len, lines)) > 2000:  # what is not read must not be accepted
        return False
    text = "\n".join([f"{printable(str(error.origin))} names code:", *lines, "Run it? [y/N] "])
    print(text, end="", file=sys.stderr, flush=True)
    is_accepted = sys.stdin.readline().strip().lower() in ("y", "yes")
    if is_accepted:
        accept_code(error.named.values(), error.origin)
    return is_accepted


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; exit after `_UNWIND_S`, which a thread that hangs may delay; immediately in an import.

    Libraries turn a KeyboardInterrupt in their import into other errors.
    """
    timer = threading.Timer(_UNWIND_S, _leave, (number,))
    timer.daemon = True
    timer.start()
    if frame is None:  # called by `watch_signals`; this process may have been suspended in a call of C++
        return
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            _leave(number)
        frame = frame.f_back
    _interrupts.append(number)
    raise KeyboardInterrupt(number)


def _leave(number: int) -> None:
    """End a process that a signal has not ended in time, as if it had."""
    remove_unfinished()
    _say_stopped(number)
    os._exit(128 + number)


def _say_stopped(number: int) -> None:
    with contextlib.suppress(OSError):  # a terminal that is gone
        os.write(2, f"stopped by {signal.Signals(number).name}\n".encode())


def _use_utf8_for_files() -> None:
    """Start this process again with UTF-8 names of files, as in configs, if its locale has another encoding."""
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        os.environ.setdefault("PYTHONIOENCODING", locale.getencoding())
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _with_home(word: str) -> str:
    """Return a word of the command line with its `~` expanded, also in `--out=~/maps`, which shells leave as it is."""
    option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    return f"{option}{equals}{os.path.expanduser(value)}"


def _open_closed_streams() -> None:
    """Open closed standard streams (`>&-`) on /dev/null, so that no file takes their number; escape what they lack."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, "w" if fd else "r", closefd=False))  # noqa: SIM115
        if fd and isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors=ESCAPED)


@contextlib.contextmanager
def _one_line_errors(words: list[str], is_debug: bool, *, as_json: bool) -> Iterator[None]:
    """Print an error that a user can act on as one line, or also as JSON, and exit with the exit code of its class."""
    import typer

    # click's UsageError, of which some versions of typer have a copy of their own
    usage_error = cast("type[typer.BadParameter]", typer.BadParameter.__base__)
    try:
        yield
    except usage_error as error:
        if meant := _meant_override(error, words):
            _fail(ConfigError(meant), as_json)
        if as_json:
            _print_json(ConfigError(error.format_message()))
        error.message = "\n".join(map(printable, error.message.split("\n")))
        error.show()
        sys.exit(ConfigError.exit_code)
    except SegappError as error:
        if is_debug:
            raise
        _fail(error, as_json)
    except ImportError as error:
        if is_debug or (error.name or "").startswith("segapp"):
            raise
        _fail(SegappError(f"a package cannot be imported ({error}): segapp doctor says what to install"), as_json)
    except OSError as error:
        if is_debug or error.errno not in _STORAGE_ERRNOS | _NAME_ERRNOS:
            raise
        name = str(error.filename or "a file")
        shown = f"{name[:100]}{'...' if len(name) > 100 else ''}: {error.strerror}"
        if error.errno in _NAME_ERRNOS:
            _fail(ConfigError(f"{shown}: use another file or folder", path=name), as_json)
        _fail(StorageError(f"{shown}: {free_or('choose another folder', error)}", path=name), as_json)


def _meant_override(error: Any, words: list[str]) -> str | None:
    """Return a sentence with the override for an option that is a key of the config, as `--epochs 5`; else None."""
    option = getattr(error, "option_name", None)
    command = None if error.ctx is None else error.ctx.command
    if option is None or command is None or not (command.name == "sweep" or command.params[0].name == "overrides"):
        return None
    from segapp.config.words import keys_like

    if option in ("--cfg-options", "--opts", "--override"):
        given = [word.removeprefix(f"{option}=") for word in words]
        given = [shlex.quote(word) for word in given if "=" in word and not word.startswith("-")]
        return f"{option} is no option of segapp: write {' '.join(given) or 'KEY=VALUE'} without it"
    path = option.lstrip("-").replace("-", "_").split(".")
    keys, options = keys_like(path), [name.lstrip("-") for each in command.params for name in each.opts]
    closest = closest_words(path[-1], [*(key.split(".")[-1] for key in keys), *options])
    if closest and closest[0] in options:
        return None  # typer suggests the option
    at = next((at for at, word in enumerate(words) if word.partition("=")[0] == option), None)
    if not keys or at is None:
        return None
    value = words[at].partition("=")[2] or "".join(word for word in words[at + 1 : at + 2] if word[:1] != "-")
    written = " or ".join(f"{key}={value or 'VALUE'}" for key in keys)
    return f"{option} is no option of this command: keys of the config are written as {written}"


def _print_json(error: SegappError) -> None:
    print(json.dumps({"error": error.as_json()}, indent=2, default=str), flush=True)


def _fail(error: SegappError, as_json: bool) -> NoReturn:
    if as_json:
        _print_json(error)
    lines = "\n".join(printable(line) for line in str(error).splitlines())
    more = f"\nmore: segapp docs {error.topic}" if error.topic else ""
    print(f"error: {lines}{more}", file=sys.stderr, flush=True)
    sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
