"""Seconds a training step with freed memory kept and given back, in turn, each in a fresh process.

uv run pytest -m benchmark -n 0 -s tests/benchmarks/test_heap_time.py
"""

import json
import os
import statistics
import subprocess
import sys

import pytest

from tests.support import ROOT

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(1800)]

SCRIPT = """
import json, resource, sys, time, torch, torchvision
from segapp.losses import CriterionCE
from segapp.assembly.devices import keep_freed_memory
from tests.support import ROOT
kept, batch, height, width = int(sys.argv[1]), *map(int, sys.argv[2:])
if kept:
    keep_freed_memory()
torch.set_num_threads(2)
torch.manual_seed(0)
model = torchvision.models.segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=19)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
images, criterion = torch.randn(batch, 3, height, width), CriterionCE()
target = torch.randint(0, 19, (batch, height, width)).to(torch.uint8)
seconds = []
for _ in range(5):
    began = time.perf_counter()
    loss = criterion((model.classifier(model.backbone(images)),), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    seconds.append(time.perf_counter() - began)
usage = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps([sorted(seconds[1:])[1], usage.ru_minflt, usage.ru_maxrss / 1024]))
"""


@pytest.mark.parametrize("shape", [(4, 769, 769), (8, 360, 480)], ids=["4x769x769", "8x360x480"])
def test_step_time_with_and_without_kept_heap(shape: tuple[int, int, int]) -> None:
    found: dict[bool, list[list[float]]] = {True: [], False: []}
    for turn in range(6):
        kept = turn % 2 == 0
        words = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(int(kept)), *map(str, shape)]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(words, capture_output=True, text=True, check=True, env=env)
        found[kept].append(json.loads(done.stdout))
    (kept_s, kept_faults, kept_mib), (s, faults, mib) = (
        [statistics.median(column) for column in zip(*found[kept], strict=True)] for kept in (True, False)
    )
    print(
        f"\nLR-ASPP step {shape}: given back {s:.2f} s, {faults / 1e6:.2f} M page faults, peak {mib:.0f} MiB; kept "
        f"{kept_s:.2f} s (x {kept_s / s:.2f}), {kept_faults / 1e6:.2f} M, {kept_mib:.0f} MiB (x {kept_mib / mib:.2f})"
    )
