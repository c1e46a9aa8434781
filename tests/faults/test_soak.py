"""An hour of training with a screen that stays, one that comes and goes, and commands at random: nothing grows.

`SEGAPP_SOAK_MINUTES` sets the length (default 60).
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from segapp.run.commands import parse_command, send_command
from tests.support.fault_runs import FaultRun, Invariants, case
from tests.support.terminals import terminal

MINUTES = float(os.environ.get("SEGAPP_SOAK_MINUTES", "60"))
COMMANDS = ("checkpoint", "pause", "resume", "set lr_factor=0.9", "set lr_factor=1", "set gpu0_bsz=99", "cancel")


class Samples:
    """What a process holds: KiB that it shares with no process and no file, threads and file descriptors, sampled."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int]] = []

    def take(self, pid: int) -> None:
        """One more sample; none where the process is gone."""
        with contextlib.suppress(OSError, KeyError):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            facts = dict(line.split(":", 1) for line in lines)
            own_kib = sum(int(facts[name].split()[0]) for name in ("RssAnon", "VmSwap"))
            self.rows.append((own_kib, int(facts["Threads"]), len(os.listdir(f"/proc/{pid}/fd"))))

    def assert_flat(self, name: str) -> str:
        """The last third has the memory of the middle one, and no more threads and descriptors than those before."""
        third = max(1, len(self.rows) // 3)
        own_kib, *others = zip(*self.rows, strict=True)
        growth = statistics.median(own_kib[-third:]) / statistics.median(own_kib[third : 2 * third]) - 1
        ranges = [f"{min(values[third:])}-{max(values[third:])}" for values in others]
        figure = f"{name} {own_kib[-1] / 1024:.0f} MiB {100 * growth:+.2f} %, threads, files {', '.join(ranges)}"
        assert abs(growth) < 0.01, figure
        assert all(max(values[-third:]) <= max(values[:-third]) + 1 for values in others), figure
        return figure


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
    with terminal("attach", "run", cwd=run.work, is_fresh=True) as stays:
        while time.monotonic() < end_s:
            num_screens += 1
            with terminal("attach", "run", cwd=run.work, is_fresh=True) as comes:
                for second in range(40 if MINUTES < 20 else 58):
                    for shown in (stays, comes):
                        shown.read(0.5)
                        shown.output = b""
                    trainer.take(program.pid)
                    staying.take(stays.pid)
                    if second < 20 and rng.random() < 0.2:
                        send_command(run.folder, parse_command(rng.choice(COMMANDS)), "soak")
                    if second == 20:
                        screens.take(comes.pid)
                        comes.type("q")
            send_command(run.folder, parse_command("resume"), "soak")
        stays.type("q")
        assert stays.wait() == 0
    program.send(signal.SIGTERM)
    assert run.ended(program).returncode == 75, program.stderr
    num_steps, num_commands = run.events("step")[-1]["step"], len(run.events("command"))
    sampled = {"trainer": trainer, "a screen that stays": staying, "screens that come": screens}
    figures = [each.assert_flat(name) for name, each in sampled.items()]
    words = f"{MINUTES:g} min, {num_steps} steps, {num_screens} screens, {num_commands} answers"
    record_property("figure", "; ".join([words, *figures]))
    invariants.assert_clean_processes(run)
    invariants.assert_nothing_lost(run)
