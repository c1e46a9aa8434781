"""`segapp plan`: how long a plan takes."""

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
