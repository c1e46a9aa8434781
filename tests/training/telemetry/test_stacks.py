"""`stacks.log`: complete on SIGUSR2, harmless to the process, and there only if something was written."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from segapp.training.watchdog import StackLog


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
