"""Time and memory of the small loss over interpolate + cross-entropy; run with `-m benchmark -s`.

Times are interleaved: every way runs once in a round, and the median of the rounds' ratios is printed. A round in which
the rest of the machine took more than a tenth of the processors is dropped while there are others; how many were kept
is printed. Each memory figure comes from a fresh process.
"""

import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.support import ROOT
from tests.support.small_loss_cases import (
    EVALUATIONS,
    make,
    naive_prediction,
    naive_scores,
    seconds,
    small_prediction,
    small_scores,
)

pytestmark = [pytest.mark.benchmark, pytest.mark.skipif(not Path("/proc/stat").exists(), reason="reads /proc")]

ROUNDS = int(os.environ.get("BENCHMARK_ROUNDS", "7"))
WARM_HEAP = {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=8589934592:glibc.malloc.trim_threshold=17179869184"}


def busy_seconds():
    """Seconds that all processors spent on anything, and those of this process."""
    numbers = [int(n) for n in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    everything = sum(numbers) - numbers[3] - numbers[4]
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return everything / os.sysconf("SC_CLK_TCK"), usage.ru_utime + usage.ru_stime


def interleave(ways, run, rounds=ROUNDS):
    """Seconds of each way by round, and how many rounds were quiet; loud rounds only where under 3 are quiet."""
    quiet, loud = [], []
    for way in ways:
        run(way)
    for _ in range(3 * rounds):
        everything, own = busy_seconds()
        start = time.perf_counter()
        times = {way: run(way) for way in ways}
        wall = time.perf_counter() - start
        after, own_after = busy_seconds()
        foreign = (after - everything - (own_after - own)) / (wall * (os.cpu_count() or 1))
        (quiet if foreign < 0.1 else loud).append(times)
        if len(quiet) == rounds or (len(loud) >= rounds and len(quiet) < 3 <= rounds):
            break
    return (quiet if len(quiet) >= 3 else quiet + loud), len(quiet)


def report(name, kept, num_quiet, baseline):
    cells = []
    for way in kept[0]:
        ratio = statistics.median(times[way] / times[baseline] for times in kept)
        cells.append(f"{way} {1e3 * statistics.median(times[way] for times in kept):.1f} ms (x {ratio:.3f})")
    print(f"\n{name}: " + ", ".join(cells) + f"; {len(kept)} rounds, {num_quiet} of them quiet")


@pytest.mark.parametrize(
    "case", ["cityscapes", "crop-769", "ade20k", "camvid", "tiny-64", "crop-256", "stride-4", "stride-2", "binary"]
)
def test_time_of_loss_and_gradient(case):
    torch.set_num_threads(2)
    logits, target = make(case)
    ways = ["naive", "auto", "sums"] if case in ("tiny-64", "crop-256", "stride-2", "binary") else ["naive", "auto"]
    kept, num_quiet = interleave(ways, lambda way: seconds(way, logits, target))
    report(case, kept, num_quiet, "naive")


def fresh_process(arguments, extra_environment=None):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **(extra_environment or {})}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.small_loss_cases", *arguments],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.parametrize("case", ["cityscapes", "crop-769", "ade20k", "camvid", "stride-2"])
def test_memory_of_loss_and_gradient(case):
    mib = {way: fresh_process([case, way]) for way in ("naive", "auto")}
    print(f"\n{case}: " + ", ".join(f"{way} {m:.1f} MiB (x {m / mib['naive']:.3f})" for way, m in mib.items()))


def test_time_of_loss_with_kept_heap():
    """The same against a naive loss without page faults: half of its time is memory that glibc keeps giving back."""
    script = (
        "import torch; torch.set_num_threads(2)\n"
        "from tests.benchmarks.test_small_loss import interleave, report\n"
        "from tests.support.small_loss_cases import make, seconds\n"
        "for case in ('cityscapes', 'crop-769', 'ade20k', 'camvid'):\n"
        "    kept = interleave(['naive', 'sums'], lambda way: seconds(way, *make(case)))\n"
        "    report(case + ', heap kept', *kept, 'naive')\n"
    )
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env={**os.environ, **WARM_HEAP},
        cwd=ROOT,
        check=True,
    )


def test_time_and_memory_of_evaluation_at_1024_by_2048():
    torch.set_num_threads(2)
    logits, target = make("evaluation")
    kept, num_quiet = interleave(list(EVALUATIONS), lambda way: seconds(way, logits, target))
    report("scores", [{k: t[k] for k in t if "scores" in k} for t in kept], num_quiet, "naive-scores")
    report("prediction", [{k: t[k] for k in t if "prediction" in k} for t in kept], num_quiet, "naive-prediction")
    mib = {way: fresh_process(["evaluation", way]) for way in EVALUATIONS}
    print(", ".join(f"{way} {m:.1f} MiB" for way, m in mib.items()))
    for kind in ("scores", "prediction"):
        print(f"{kind}: memory x {mib['small-' + kind] / mib['naive-' + kind]:.3f}")
    confusion, loss = small_scores(logits, target)
    naive_confusion, naive_loss = naive_scores(logits, target)
    differing = int((small_prediction(logits, target) != naive_prediction(logits, target)).sum())
    print(
        f"pixels predicted otherwise (float32 ties): {differing} of {target.numel()}; confusion matrices differ in "
        f"{int((confusion - naive_confusion).abs().sum()) // 2} pixels; loss by {float(loss - naive_loss):.1e}"
    )
