"""Long waits: lines and bars about them, repeated calls, the signals that arrive meanwhile, and processes to wait for.

Python calls the handler of a signal in the main thread, between two instructions. A call into C++ that waits for
another rank, a store or a GPU delays it until the call returns (pytorch issue 63802), and a file system that does not
answer delays it forever. `watch_signals` starts a thread that calls the handler instead.
"""

import contextlib
import itertools
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

STOPS = (signal.SIGINT, signal.SIGTERM)
FIRST_S = 10.0
EVERY_S = 30.0
_LOOK_S = 0.3
"""Seconds between two looks for a signal, and for the main thread's answer."""


_texts: list[Callable[[], str]] = []
"""The texts of all running `lines_while`, the innermost last."""


@contextlib.contextmanager
def repeated(name: str, call: Callable[[], float], first_s: float = 0.0, join_s: float | None = None) -> Iterator[None]:
    """Call `call` in a thread while the body runs; it returns the seconds from its begin until the next call.

    Its errors are logged, and end neither the body nor the thread. At the end, the thread has `join_s`; None: no limit.
    """
    is_over = threading.Event()

    def run() -> None:
        began_s, wait_s = time.monotonic(), first_s
        while not is_over.wait(max(0.0, began_s + wait_s - time.monotonic())):
            began_s = time.monotonic()
            try:
                wait_s = call()
            except Exception:
                wait_s = max(wait_s, 1.0)
                logging.getLogger("segapp").exception(name)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(join_s)


@contextlib.contextmanager
def lines_while(text: Callable[[], str], first_s: float = FIRST_S) -> Iterator[None]:
    """Print a line on stderr when the body has taken `first_s`, and then every 30 s, with the time so far.

    If `first_s` is less than 10, the second line comes 10 s later. Nothing is printed while the text is empty, or
    another `lines_while` runs within the body.
    """
    began_s, waits_s = time.monotonic(), itertools.chain([FIRST_S] * (first_s < FIRST_S), itertools.repeat(EVERY_S))

    def say() -> float:
        if _texts[-1:] == [text] and (line := text()):
            with contextlib.suppress(OSError, ValueError):  # a terminal that is gone, a closed stream
                print(f"{line} ({time.monotonic() - began_s:.0f} s so far)", file=sys.stderr, flush=True)
        return next(waits_s)

    _texts.append(text)
    try:
        with repeated("lines", say, first_s, join_s=1.0):  # a thread that writes to a full terminal never ends
            yield
    finally:
        _texts.remove(text)


def has_progress_bar() -> bool:
    """Return True if progress bars are shown: stderr is a terminal, or a Jupyter kernel runs this process."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return sys.stderr.isatty() or hasattr(shell, "kernel")


@contextlib.contextmanager
def progress_bar(
    total: int, label: str, unit: str = "image", *, is_shown: bool | None = None
) -> Iterator[Callable[[int], None]]:
    """Show a progress bar, and yield a function that takes the number of units.

    If `is_shown` is None, a terminal or a notebook shows a bar, and other outputs get lines. False shows neither.
    """
    from tqdm.auto import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]
        monitor_interval = 0  # tqdm's thread would outlive the bar

    Bar.set_lock(threading.RLock())  # tqdm's own fixes the start method of processes of the caller

    has_bar, num_done = has_progress_bar() if is_shown is None else is_shown, 0

    def line() -> str:
        units = unit if total == 1 else f"{unit}s"
        return "" if has_bar or is_shown is False else f"{label}: {num_done:,} of {total} {units}"

    with Bar(total=total, desc=label, unit=unit, disable=not has_bar, leave=False) as bar, lines_while(line):

        def progress(done: int) -> None:
            nonlocal num_done
            num_done = done
            bar.update(done - bar.n)

        yield progress


def watch_signals() -> None:
    """Let a thread call the handlers of SIGINT and SIGTERM if the main thread, which calls this, does not.

    The frame is then None, and the main thread calls the handler again when it can. A handler that raises in the thread
    ends the process, with the `code` of the exception or 128 + signal number.
    """
    main, answers = threading.get_ident(), list[bool]()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # a child's signals are its own
    signal.signal(signal.SIGURG, lambda *_: answers.append(True))

    def watch() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        while True:
            arrived = os.read(reading, 64) if select.select([reading], [], [], _LOOK_S)[0] else b""
            # In a call of the kernel that only a fatal signal ends, the main thread does not even take the signal.
            taken = signal.sigtimedwait(STOPS, 0)
            for number in {*arrived, *([taken.si_signo] if taken else [])} & {*STOPS}:
                answers.clear()
                signal.pthread_kill(main, signal.SIGURG)
                time.sleep(_LOOK_S)
                if not answers and callable(handler := signal.getsignal(number)):
                    try:
                        handler(number, None)
                    except BaseException as error:
                        os._exit(getattr(error, "code", 128 + number))
                if taken:
                    signal.pthread_kill(main, number)

    threading.Thread(target=watch, name="signals", daemon=True).start()


def is_pid_alive(pid: int) -> bool:
    """Return True if a process of this host has this id; a zombie has it until it is waited for."""
    if not 0 < pid < 2**31:
        return False
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)  # a process of another user
    return True
