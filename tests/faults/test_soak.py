"""An hour of training with a screen that stays, one that comes and goes, and commands at random: nothing grows.

`SEGAPP_SOAK_MINUTES` sets the length (default 60).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import random
import signal
import statistics
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from segapp.run.commands import parse_command, send_command
from tests.support.fault_runs import FaultRun, Invariants, case

MINUTES = float(os.environ.get("SEGAPP_SOAK_MINUTES", "60"))
COMMANDS = ("checkpoint", "pause", "resume", "set lr_factor=0.9", "set lr_factor=1", "set gpu0_bsz=99", "cancel")


@dataclass
class Samples:
    """What a process holds, sampled: KiB of its own, threads, file descriptors.

    The memory is what it shares with no other process and no file, in RAM and in swap. The mapped files, which the
    kernel drops when memory is short and reads again, are not in it.
    """

    own_kib: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)

    def take(self, pid: int) -> None:
        """One more sample; none where the process is gone."""
        with contextlib.suppress(OSError, KeyError):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            facts = dict(line.split(":", 1) for line in lines)
            self.own_kib.append(sum(int(facts[name].split()[0]) for name in ("RssAnon", "VmSwap")))
            self.threads.append(int(facts["Threads"]))
            self.fds.append(len(os.listdir(f"/proc/{pid}/fd")))

    def growth(self) -> float:
        """By which part the memory of the last third is above that of the middle one."""
        third = max(1, len(self.own_kib) // 3)
        return statistics.median(self.own_kib[-third:]) / statistics.median(self.own_kib[third : 2 * third]) - 1

    def range(self, what: str) -> str:
        """From the least to the most of `threads` or `fds`, after the warm-up."""
        values = getattr(self, what)[len(self.own_kib) // 3 :]
        return f"{min(values)}-{max(values)}"

    def is_flat(self) -> bool:
        """Whether threads and descriptors of the last third are at most as many as they were before."""
        third = max(1, len(self.own_kib) // 3)
        return all(max(values[-third:]) <= max(values[:-third]) + 1 for values in (self.threads, self.fds))


@contextlib.contextmanager
def screen(run: FaultRun) -> Iterator[int]:
    """The screen of a run in a terminal of its own; its process id."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(run.work)
        os.environ.update(TERM="xterm-256color")
        os.execv(sys.executable, [sys.executable, "-m", "segapp", "attach", "run"])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))

    def drain() -> None:
        with contextlib.suppress(OSError):
            while os.read(terminal, 2**16):
                pass

    reader = threading.Thread(target=drain, daemon=True)
    reader.start()
    try:
        yield pid
    finally:
        deadline_s = time.monotonic() + 60
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline_s:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                pytest.fail("the screen did not end when it was asked to")
            with contextlib.suppress(OSError):  # again: a screen that still starts drops what was typed before
                os.write(terminal, b"q")
            time.sleep(1)
        os.close(terminal)


@case(
    "W04",
    how="training with a screen attached and detached every minute, commands at random",
    passes="memory, threads, files flat",
)
@pytest.mark.faults_long
@pytest.mark.timeout(MINUTES * 60 + 300)
def test_soak_keeps_memory_threads_and_files_flat(
    new_run: Callable[..., FaultRun], invariants: Invariants, record_property: Callable[[str, object], None]
) -> None:
    rng = random.Random(0)
    run = new_run(
        train={"epochs": 100_000},
        data={"workers": 1},
        checkpoint={"every_steps": 50, "every_epochs": None},
        log={"every_steps": 5},
    )
    program = run.start(failpoints="train.step=sleep:0.2")
    run.wait_for_step(5, program)
    trainer, staying, screens, num_screens = Samples(), Samples(), Samples(), 0
    end_s = time.monotonic() + 60 * MINUTES
    with screen(run) as stays:
        while time.monotonic() < end_s:
            num_screens += 1
            with screen(run) as pid:
                for _ in range(20):
                    time.sleep(1)
                    trainer.take(program.pid)
                    staying.take(stays)
                    if rng.random() < 0.2:
                        send_command(run.folder, parse_command(rng.choice(COMMANDS)), "soak")
                screens.take(pid)
            for _ in range(20 if MINUTES < 20 else 38):
                time.sleep(1)
                trainer.take(program.pid)
                staying.take(stays)
            send_command(run.folder, parse_command("resume"), "soak")
    program.send(signal.SIGTERM)
    assert run.ended(program).returncode == 75, program.stderr
    figures = [
        f"{name} {each.own_kib[-1] / 1024:.0f} MiB {100 * each.growth():+.2f} %, threads {each.range('threads')}, "
        f"files {each.range('fds')}"
        for name, each in (("trainer", trainer), ("a screen that stays", staying), ("screens that come", screens))
    ]
    num_steps, num_commands = run.events("step")[-1]["step"], len(run.events("command"))
    words = f"{MINUTES:g} min, {num_steps} steps, {num_screens} screens, {num_commands} answers"
    record_property("figure", "; ".join([words, *figures]))
    for each in (trainer, staying, screens):
        assert abs(each.growth()) < 0.01
        assert each.is_flat(), "threads or file descriptors grew"
    invariants.assert_clean_processes(run)
    invariants.assert_nothing_lost(run)
