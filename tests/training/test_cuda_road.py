"""Each situation of a training on CUDA's code paths: the loss by Triton's interpreter, SyncBatchNorm by its kernels.

The course is that of the CPU's own code on one device, and the kernels are still on at the end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from segapp.config import RunConfig
from tests.support import ROOT
from tests.support.gpu import on_cuda_road
from tests.support.runs import events, merged, train

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch on Linux")

CPUS = ["cpu"] * 3
EXACT = {"rel": 2e-5, "abs": 1e-6}


def config(tiny: dict[str, Any], **sections: Any) -> RunConfig:
    """Two epochs of two steps of five images, without dropout, so that the losses do not depend on the split.

    The interpreter takes as long for a row of logits as for a short one, so the crops are low and wide.
    """
    network = {"library": "torchvision", "name": "lraspp", "encoder": "mobilenet_v3_large"}
    train = {"epochs": 2, "batch_size": 5, "ema": None, **sections.pop("train", {})}
    return merged(
        {**tiny, "model": network, "optim": {"name": "sgd", "lr": 0.001}, "schedule": {"name": "constant"}},
        data={"crop_px": [16, 64]},
        train=train,
        **sections,
    )


def course(folder: Path) -> list[float]:
    """Return the losses of all steps and evaluations."""
    return [event["loss"] for kind in ("step", "val") for event in events(folder, kind)]


@pytest.mark.slow
def test_situations_of_one_process_take_their_course(tiny: dict[str, Any], tmp_path: Path) -> None:
    dp = {"mode": "dp", "devices": CPUS}
    frozen = {"freeze": ["backbone"], "freeze_epochs": 1}
    once, halved = {"epochs": 1}, {"epochs": 1, "batch_size": 3, "accumulate": 2}
    runs = {  # name: config, failpoints, and the one on one device that it follows
        "resumed": (config(tiny, train=once), "", "plain"),
        "dp 1+2+2 thaws": (config(tiny, model=frozen, parallel={**dp, "gpu0_bsz": 1}), "", "plain thaws"),
        "dp accumulates": (config(tiny, train=halved, parallel={**dp, "gpu0_bsz": 0}), "", "plain accumulates"),
        "dp in pieces": (config(tiny, train=once, parallel=dp), "train.loss=2:oom*2", None),
    }
    plain = {
        "plain": config(tiny),
        "plain thaws": config(tiny, model=frozen),
        "plain accumulates": config(tiny, train=halved),
    }
    cases = [(name, each, points) for name, (each, points, _) in runs.items()]
    cases.insert(1, ("resumed", config(tiny), ""))
    listed = [
        {"config": each.model_dump(mode="json"), "folder": str(tmp_path / name), "failpoints": points}
        for name, each, points in cases
    ]
    (tmp_path / "cases.json").write_text(json.dumps(listed))
    (tmp_path / "facts").mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **on_cuda_road.environment(tmp_path / "facts")}
    command = [sys.executable, "-m", "tests.support.gpu.on_cuda_road", str(tmp_path / "cases.json")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    for name, each in plain.items():
        assert train(each, tmp_path / name) == 0
    for name, (_, _, truth) in runs.items():
        assert events(tmp_path / name, "run_end")[-1]["status"] == "finished", name
        if truth is not None:
            assert course(tmp_path / name) == pytest.approx(course(tmp_path / truth), **EXACT), name
    assert events(tmp_path / "dp accumulates", "run_start")[0]["split"] == [0, 2, 1]
    fallbacks = [event["fallbacks"] for event in events(tmp_path / "dp in pieces", "oom")]
    assert fallbacks == [{"is_recomputed": True}, {"is_recomputed": True, "num_pieces": 2}]
    (found,) = on_cuda_road.facts(tmp_path / "facts")
    assert found["kernels"] == {"cpu": None}, "they stayed on"
    assert found["losses"] > 0
    assert found["layers"] > 0
    assert "warnings" not in found
