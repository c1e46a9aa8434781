"""Seconds and memory of a resume on several ranks: objects sent from rank 0, as before, and the file mapped by each.

Peaks are of memory that is a process's own (RssAnon and RssShmem, Linux): pages of a mapped file belong to the page
cache, which every machine has once and can free. SEGAPP_STATE_MIB sets the size of the state: weights, and their
average and the two moments of AdamW. By default it is small; 2048 needs 14 GiB for the objects on 2 ranks.
"""

import json
import os
import sys
from pathlib import Path

import pytest

from segapp.parallel.launch import launch_local
from tests.support import ROOT

pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(sys.platform != "linux", reason="reads RssAnon from /proc"),
]

MEASURE = """
import json, sys, threading, time, warnings
from pathlib import Path
import torch
from segapp.checkpoint.snapshot import hold_own_state
from segapp.checkpoint.training_state import load_checkpoint, load_to_resume
from segapp.parallel.distributed import Ranks, init_from_env, shutdown
from segapp.run.folder import RunFolder
from segapp.session.ranks import exchanged_classes

def own_mib():
    words = Path("/proc/self/status").read_text().split()
    return (int(words[words.index("RssAnon:") + 1]) + int(words[words.index("RssShmem:") + 1])) / 1024

class Peak(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.top, self.ends = 0, threading.Event()
        self.start()
    def run(self):
        while not self.ends.wait(0.005):
            self.top = max(self.top, own_mib())

warnings.simplefilter("ignore")
torch.set_num_threads(1)
how, folder, out = sys.argv[1:]
info = init_from_env(device="cpu")
ranks = Ranks(info, classes=exchanged_classes())
with torch.device("meta"):
    num_layers = int(Path(folder, "layers").read_text())
    net = torch.nn.ModuleList(torch.nn.Linear(2048, 2048, bias=False) for _ in range(num_layers))
net = net.to_empty(device="cpu")
optimizer = torch.optim.AdamW(net.parameters())
start_mib, peak, start_s = own_mib(), Peak(), time.monotonic()
if how == "objects":
    checkpoint = ranks.from_main(load_checkpoint(folder) if ranks.is_main else None)
else:
    checkpoint = load_to_resume(ranks, RunFolder(Path(folder).parent), is_resumed=True)
got_s = time.monotonic() - start_s
net.load_state_dict(checkpoint.state["model"])
average = {name: tensor.clone() for name, tensor in checkpoint.state["ema"].items()}
optimizer.load_state_dict(checkpoint.state["optimizer"])
if how != "objects":
    hold_own_state(optimizer)
    checkpoint.state.clear()
assert all(float(p[0, 0]) == float(p[-1, -1]) == i for i, p in enumerate(net.parameters()))
ranks.any_of(False)
seconds = time.monotonic() - start_s
peak.ends.set()
rows = ranks.gather([got_s, seconds, max(peak.top, own_mib()) - start_mib, own_mib() - start_mib])
if ranks.is_main:
    Path(out).write_text(json.dumps(rows))
shutdown()
"""

SAVE = """
import sys
from pathlib import Path
import torch
from segapp.checkpoint.training_state import save_checkpoint
from segapp.run.checkpoints import CheckpointFacts
folder, layers = sys.argv[1], int(sys.argv[2])
net = torch.nn.ModuleList(torch.nn.Linear(2048, 2048, bias=False) for _ in range(layers))
for i, parameter in enumerate(net.parameters()):
    parameter.data.fill_(i)
optimizer = torch.optim.AdamW(net.parameters())
for p in net.parameters():
    optimizer.state[p] = {"step": torch.tensor(1.0), "exp_avg": torch.ones_like(p), "exp_avg_sq": torch.ones_like(p)}
state = {"model": net.state_dict(), "ema": net.state_dict(), "optimizer": optimizer.state_dict()}
state["ema"] = {name: tensor + 1 for name, tensor in state["model"].items()}
save_checkpoint(folder, state, CheckpointFacts(step=1, epoch=1))
Path(folder, "layers").write_text(str(layers))
"""


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_map_a_state_instead_of_receiving_it(tmp_path, capsys, num_ranks):
    state_mib = int(os.environ.get("SEGAPP_STATE_MIB", 256))
    (tmp_path / "save.py").write_text(SAVE)
    (tmp_path / "measure.py").write_text(MEASURE)
    folder = tmp_path / "checkpoints"
    environ = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    assert launch_local([str(tmp_path / "save.py"), str(folder), str(max(state_mib // 64, 1))], 1, env=environ) == 0
    size_mib = (folder / "last.pt").stat().st_size / 2**20
    objects_mib = size_mib * 4 * num_ranks
    rows = {}
    for how in ("objects", "mapped"):
        if how == "objects" and objects_mib > free_mib():
            with capsys.disabled():
                print(f"\nobjects on {num_ranks} ranks need {objects_mib:.0f} MiB, {free_mib():.0f} are free: left out")
            continue
        out = tmp_path / "figures.json"
        assert launch_local([str(tmp_path / "measure.py"), how, str(folder), str(out)], num_ranks, env=environ) == 0
        rows[how] = json.loads(out.read_text())
    with capsys.disabled():
        print(f"\nA state of {size_mib:.0f} MiB on {num_ranks} ranks (peak and end: own memory above the start):")
        for how, ranks in rows.items():
            for name, chosen in (("rank 0", ranks[:1]), ("others", ranks[1:])):
                got_s, all_s, peak_mib, end_mib = (max(values) for values in zip(*chosen, strict=True))
                print(
                    f"  {how:8} {name}  {got_s:6.1f} s to the state, {all_s:6.1f} s in all, peak"
                    f" {peak_mib / size_mib:5.2f}, end {end_mib / size_mib:5.2f} of the state"
                )
    assert max(row[2] for row in rows["mapped"]) < 1.15 * size_mib + 160


def free_mib():
    words = Path("/proc/meminfo").read_text().split()
    return int(words[words.index("MemAvailable:") + 1]) / 1024
