"""`stacks.log`: complete on SIGUSR2, harmless to the process, and there only if something was written."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from segapp.training.watchdog import StackLog
from tests.support import ROOT

CROWDED = """
import os, signal, sys, threading, time
from pathlib import Path
from segapp.training.watchdog import StackLog

def short_lived():
    while True:
        thread = threading.Thread(target=time.sleep, args=(0.0001,))
        thread.start()
        thread.join()

def in_worker():
    threading.Thread(target=short_lived, daemon=True).start()
    time.sleep(60)

def in_trainer(until_s):
    while time.monotonic() < until_s:
        time.sleep(0.001)

signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # as `segapp train` does: a signal may come after the end
with StackLog(Path(sys.argv[1])):
    pid = os.fork()
    if pid == 0:
        in_worker()
    threading.Thread(target=short_lived, daemon=True).start()
    print(pid, flush=True)
    in_trainer(time.monotonic() + 3)
    os.kill(pid, 0)  # it lives
    os.kill(pid, signal.SIGKILL)
"""


@pytest.mark.slow
def test_signals_never_crash_a_process_whose_threads_come_and_go(tmp_path: Path) -> None:
    """faulthandler's handler for all threads crashed such a process after 2 to 10 signals."""
    words = [sys.executable, "-c", textwrap.dedent(CROWDED), str(tmp_path / "stacks.log")]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        worker = int(trainer.stdout.readline())
        num_signals = 0
        while trainer.poll() is None:
            for pid in (trainer.pid, worker):
                subprocess.run(["kill", "-USR2", str(pid)], check=False, stderr=subprocess.DEVNULL)
            num_signals += 1
        assert trainer.returncode == 0
    assert num_signals > 50
    text = (tmp_path / "stacks.log").read_text()
    assert text.count("Stack (most recent call first)") > 50
    assert "in in_worker" in text
    assert "in in_trainer" in text


def test_stacks_are_kept_only_where_there_are_some(tmp_path: Path) -> None:
    for folder, text in ((tmp_path / "quiet", ""), (tmp_path / "earlier", "stacks of an earlier process\n")):
        folder.mkdir()
        (folder / "stacks.log").write_text(text)
        with StackLog(folder / "stacks.log"):
            pass
        assert (folder / "stacks.log").exists() == bool(text)
    with StackLog(tmp_path / "stacks.log") as stacks:
        stacks.write("rank 0\n")
    text = (tmp_path / "stacks.log").read_text()
    assert text.startswith("rank 0\n")
    assert "test_stacks.py" in text


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_signals_are_handled_as_before_at_the_end(tmp_path: Path, handler: signal.Handlers) -> None:
    before = signal.signal(signal.SIGUSR2, handler)
    try:
        with StackLog(tmp_path / "stacks.log"):
            signal.raise_signal(signal.SIGUSR2)
        assert signal.getsignal(signal.SIGUSR2) is handler
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_in_another_thread_the_stack_of_the_main_one_is_written(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        with ThreadPoolExecutor(1) as pool:
            stacks = pool.submit(StackLog(tmp_path / "stacks.log").__enter__).result()
            signal.raise_signal(signal.SIGUSR2)
            pool.submit(stacks.__exit__).result()
        signal.raise_signal(signal.SIGUSR2)  # ignored as before
    finally:
        signal.signal(signal.SIGUSR2, before)
    text = (tmp_path / "stacks.log").read_text()
    assert text.count("most recent call first") == 1
    assert "in test_in_another_thread_the_stack_of_the_main_one_is_written" in text
