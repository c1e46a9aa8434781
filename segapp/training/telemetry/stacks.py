"""`stacks.log` of a run: where each thread stood, on SIGUSR2 or when the watchdog asks."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
from pathlib import Path
from typing import Any, BinaryIO


class StackLog:
    """Context manager: while it is entered, SIGUSR2 writes the stacks of this process, and the training goes on.

    A signal handler can only write the stack of the thread that it interrupts: the other threads run on meanwhile, and
    the process crashes if one of them starts or ends while its stack is read. The handler does that, which shows
    the training thread even if it holds the interpreter lock for ever. A thread that the signal wakes then writes the
    stacks of all threads under the lock. Data workers are forked from this process and inherit only the handler: they
    call `signal.set_wakeup_fd(-1)`.

    Python handles signals in the main thread alone: entered in another one, there is only the handler.

    Args:
        path: The file; the stacks are appended, and a file that stays empty is removed at the end.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> StackLog:
        with contextlib.ExitStack() as exits:
            exits.callback(self._remove_if_empty)
            self._file = exits.enter_context(self.path.open("ab"))
            in_main = threading.current_thread() is threading.main_thread()
            if in_main:
                self._listen_for_signals(exits)
            faulthandler.register(signal.SIGUSR2, self._file, all_threads=False, chain=in_main)
            exits.callback(faulthandler.unregister, signal.SIGUSR2)
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *_: Any) -> None:
        self._exits.close()

    def _listen_for_signals(self, exits: contextlib.ExitStack) -> None:
        """Start the thread that writes all stacks; Python's own handler writes the signal's number into its pipe."""
        reading, writing = os.pipe()
        exits.callback(os.close, reading)
        exits.callback(os.close, writing)
        os.set_blocking(writing, False)
        listener = threading.Thread(target=self._listen, args=(reading,), name="stacks", daemon=True)
        listener.start()
        exits.callback(listener.join)
        exits.callback(os.write, writing, b"\0")
        exits.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(writing, warn_on_full_buffer=False))
        previous = signal.signal(signal.SIGUSR2, lambda *_: None)  # called by faulthandler's
        exits.callback(signal.signal, signal.SIGUSR2, previous or signal.SIG_DFL)

    def write(self, header: str = "") -> None:
        """Append a header and the stacks of all threads; a full disk is ignored."""
        with contextlib.suppress(OSError, ValueError):
            self._file.write(header.encode())
            self._file.flush()
            faulthandler.dump_traceback(self._file, all_threads=True)

    def _listen(self, reading: int) -> None:
        while 0 not in (numbers := os.read(reading, 4096)):
            if signal.SIGUSR2 in numbers:
                self.write()

    def _remove_if_empty(self) -> None:
        with contextlib.suppress(OSError):
            if self.path.stat().st_size == 0:
                self.path.unlink()
