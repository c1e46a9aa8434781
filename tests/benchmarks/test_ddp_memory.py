"""DDP's parameters + gradients + buckets in units of the parameters, measured in fresh processes (VmData, Linux)."""

import json
import sys

import pytest

from segapp.parallel.launch import launch_local

pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.skipif(sys.platform != "linux", reason="reads VmData from /proc"),
]

MEASURE = """
import gc, json, sys, threading, time, warnings
from inspect import signature
from pathlib import Path
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from segapp.parallel.distributed import init_from_env, shutdown, wrap_ddp

def used_bytes():
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmData:")[1].split()[0])

class Peak(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.top, self.ends = 0, threading.Event()
        self.start()
    def run(self):
        while not self.ends.is_set():
            status = Path("/proc/self/status").read_text()
            self.top = max(self.top, 1024 * int(status.split("VmData:")[1].split()[0]))
            time.sleep(0.001)
    def stop(self):
        self.ends.set()
        self.join()
        return self.top

warnings.simplefilter("ignore")
torch.set_num_threads(1)
info = init_from_env(device="cpu")
options = json.loads(sys.argv[1])
if "lazy_bucket_allocation" not in signature(DistributedDataParallel.__init__).parameters:
    options.pop("lazy_bucket_allocation", None)
x = torch.randn(2, 1024)
warm = nn.Linear(1024, 1024, bias=False)
ddp = wrap_ddp(warm)
ddp(x).sum().backward()
Peak().stop()
del ddp, warm
start = used_bytes()
net = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(24)])
size = sum(p.numel() * 4 for p in net.parameters())
ddp = wrap_ddp(net, **options)
wrapped = used_bytes() - start
optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
peaks = []
for _ in range(3):
    peak = Peak()
    ddp(x).square().mean().backward()
    peaks.append(peak.stop() - start)
    optimizer.step()
    optimizer.zero_grad()
if info.is_main:
    figures = {"wrapped": wrapped / size, "backward": max(peaks) / size, "zeroed": (used_bytes() - start) / size}
    Path(sys.argv[2]).write_text(json.dumps(figures))
shutdown()
"""

OFF = {"gradient_as_bucket_view": False, "lazy_bucket_allocation": False}
CASES = {
    "neither": OFF,
    "gradient_as_bucket_view": {**OFF, "gradient_as_bucket_view": True},
    "lazy_bucket_allocation": {**OFF, "lazy_bucket_allocation": True},
    "both, as wrap_ddp chooses": {},
}


def test_gradient_as_bucket_view_saves_one_parameter_copy(tmp_path, capsys):
    script = tmp_path / "measure.py"
    script.write_text(MEASURE)
    figures = {}
    for name, options in CASES.items():
        out = tmp_path / "figures.json"
        # Every tensor is mapped on its own, so that VmData follows allocation and release at once.
        environ = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
        assert launch_local([str(script), json.dumps(options), str(out)], 2, env=environ) == 0
        figures[name] = json.loads(out.read_text())
    with capsys.disabled():
        print("\nDDP, 2 ranks, in units of the parameters' size:")
        for name, row in figures.items():
            print(f"  {name:28s} " + "  ".join(f"{key} {value:.2f}" for key, value in row.items()))
    assert figures["neither"]["backward"] > 2.9
    assert figures["gradient_as_bucket_view"]["backward"] < 2.3
    assert figures["both, as wrap_ddp chooses"]["backward"] < 2.3
