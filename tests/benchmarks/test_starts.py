"""Seconds to the first line of every command on a terminal, and to the first step of the runs of a sweep.

Forked runs of a sweep are compared with runs that are new processes, on the same machine one after the other.

uv run pytest -m benchmark -n 0 -s tests/benchmarks/test_starts.py
"""

from __future__ import annotations

import os
import pty
import select
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import segapp.commands.sweep
from segapp.commands.sweep import SweepOptions, run_sweep
from segapp.config import dump_config
from segapp.run.folder import RunFolder
from tests.support.runs import events, merged
from tests.test_first_lines import COMMANDS

pytestmark = pytest.mark.benchmark


def first_line_s(words: list[str]) -> float:
    """Return the seconds from the start of the program to the first byte on its terminal."""
    ours, theirs = pty.openpty()
    began_s = time.perf_counter()
    program = subprocess.Popen([sys.executable, "-m", "segapp", *words], stdin=theirs, stdout=theirs, stderr=theirs)
    try:
        assert select.select([ours], [], [], 120)[0], words
        return time.perf_counter() - began_s
    finally:
        program.kill()
        program.wait()
        os.close(ours)
        os.close(theirs)


def test_seconds_to_the_first_line() -> None:
    first_line_s(["--help"])  # the files are read from memory then
    found = {name: min(first_line_s(line.split()) for _ in range(3)) for name, line in COMMANDS.items()}
    for name, seconds in sorted(found.items(), key=lambda item: -item[1]):
        print(f"{name:12} {seconds:.2f} s")


def start_s(run: RunFolder) -> float:
    """Return the seconds from the start of a trainer's process to its first event of the training."""
    holder = run.read_holder()
    assert holder is not None
    return float(events(run.path, "run_start")[0]["t"]) - holder.start_s


def test_start_of_forked_runs_over_new_processes(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config = merged(tiny, train={"epochs": 4})
    Path("tiny.yaml").write_text(dump_config(config))
    wall_s, starts_s = {}, {}
    for kind in ("new", "forked"):
        monkeypatch.setattr(segapp.commands.sweep, "can_fork", lambda kind=kind: kind == "forked")
        began_s = time.perf_counter()
        assert run_sweep([kind, "seed=0..3"], SweepOptions(["tiny.yaml"])) == 0
        wall_s[kind] = time.perf_counter() - began_s
        starts_s[kind] = [start_s(RunFolder(f"runs/{kind}/seed{seed}")) for seed in range(4)]
    for kind in ("new", "forked"):
        start = statistics.median(starts_s[kind])
        print(f"{kind:6} 4 runs of 20 steps {wall_s[kind]:.1f} s, start of a run {start:.2f} s")
    print(f"ratio {wall_s['new'] / wall_s['forked']:.2f} of the whole, ", end="")
    print(f"{statistics.median(starts_s['new']) / statistics.median(starts_s['forked']):.2f} of a start")
