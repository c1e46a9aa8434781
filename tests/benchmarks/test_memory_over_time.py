"""A picture of memory over time, of the loss and its gradient: the whole upsampled logits against bands.

uv run pytest -m benchmark -n 0 -s tests/benchmarks/test_memory_over_time.py
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

pytestmark = [pytest.mark.benchmark, pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")]

SCRIPT = """
import ctypes, json, os, sys, threading, time
import torch
from tests.support.small_loss_cases import make, run_once
from tests.support import ROOT
case, way = sys.argv[1:]
torch.set_num_threads(2)
logits, target = make(case)
run_once(way, logits, target)
ctypes.CDLL(None).malloc_trim(0)
page, samples, is_over = os.sysconf("SC_PAGE_SIZE"), [], False

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * page / 2**20

def watch():
    while not is_over:
        samples.append((time.perf_counter(), resident()))
        time.sleep(0.001)

before, began = resident(), time.perf_counter()
thread = threading.Thread(target=watch)
thread.start()
run_once(way, logits, target)
ended, is_over = time.perf_counter(), True
thread.join()
print(json.dumps([ended - began, [(t - began, mib - before) for t, mib in samples]]))
"""
WIDTH, HEIGHT = 72, 8


def course(case: str, way: str) -> tuple[float, list[tuple[float, float]]]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-W", "ignore", "-c", SCRIPT, case, way]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    seconds, samples = json.loads(done.stdout)
    return seconds, samples


def picture(samples: list[tuple[float, float]], seconds: float, top_mib: float) -> list[str]:
    """Rows of blocks: the largest sample of each column of time."""
    columns = [0.0] * WIDTH
    for t, mib in samples:
        place = int(t / seconds * WIDTH)
        if 0 <= place < WIDTH:
            columns[place] = max(columns[place], mib)
    eighths = [max(0, round(8 * HEIGHT * value / top_mib)) for value in columns]
    return [
        "".join(" ▁▂▃▄▅▆▇█"[min(8, max(0, height - 8 * row))] for height in eighths).rstrip()
        for row in reversed(range(HEIGHT))
    ]


def test_memory_of_a_step_over_time() -> None:
    whole_s, whole = course("cityscapes", "naive")
    bands_s, bands = course("cityscapes", "sums")
    top_mib = max(mib for _, mib in whole)
    for name, samples, seconds in (("interpolate + cross_entropy", whole, whole_s), ("bands", bands, bands_s)):
        print(f"\n{name}: {1e3 * seconds:.0f} ms, {max(mib for _, mib in samples):.0f} MiB above the start")
        for row, line in enumerate(picture(samples, whole_s, top_mib)):
            print(f"{top_mib * (HEIGHT - row) / HEIGHT:6.0f} MiB |{line}")
        print(" " * 11 + "+" + "-" * WIDTH)
        print(" " * 12 + f"0 ms{1e3 * whole_s:>{WIDTH - 7}.0f} ms")
