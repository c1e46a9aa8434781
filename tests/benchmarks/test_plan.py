"""`segapp plan`: what the small loss saves by model family, and how long a plan takes."""

import json
import os
import resource
import subprocess
import sys
import time

import pytest

from tests.support import ROOT

pytestmark = [
    pytest.mark.benchmark,
]


def said():
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.plan_cases"], capture_output=True, text=True, cwd=ROOT, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(1000)
def test_memory_saved_by_small_loss_per_model_family(capsys):
    """Share of a training step's peak; nothing, or a band more, where the model itself ends at full resolution."""
    rows = said()
    with capsys.disabled():
        print("\npeak of one device, MiB of tensors; saved: share of the peak with the model's upsampling")
        print(f"  {'family':24s} {'precision':9s} crop C  upsampled  small  saved")
        for row in rows:
            print(
                f"  {row['family']:24s} {row['precision']:9s} {row['crop']:4d} {row['classes']:3d}"
                f" {row['upsampled']:8.0f} {row['small']:8.0f}  {100 * (1 - row['small'] / row['upsampled']):5.1f} %"
            )
    assert len(rows) >= 12
    assert all(row["small"] <= 1.03 * row["upsampled"] for row in rows)


@pytest.mark.timeout(400)
def test_cityscapes_plan_takes_under_30_s(capsys):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_before_s = before.ru_utime + before.ru_stime
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "segapp", "plan", "--config", "cityscapes.yaml", "--gpus", "3x24220MiB", "--json"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
    )
    took_s = time.perf_counter() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = used.ru_utime + used.ru_stime - cpu_before_s
    assert done.returncode == 0, done.stderr
    assert [row["gpu0_bsz"] for row in json.loads(done.stdout)["rows"]] == list(range(9))
    with capsys.disabled():
        print(f"\nsegapp plan --config cityscapes.yaml --gpus 3x24220MiB: {took_s:.1f} s, {cpu_s:.1f} s of processors,")
        print(f"at a load of {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    assert cpu_s < 60  # two processes at work: under 30 s on two processors that nobody else uses
