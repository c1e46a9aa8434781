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

from segapp.config import RunConfig, dump_config
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


def check_kernels(found: list[dict[str, Any]]) -> None:
    """Check that every process used the kernels, and that they stayed on without a warning."""
    for each in found:
        assert each["kernels"] == {"cpu": None}
        assert each["losses"] > 0
        assert each["layers"] > 0
        assert "warnings" not in each


def started(*words: str, folder: Path, **variables: str) -> str:
    """Run a module in a new process on the road and return its output; Triton chooses its interpreter at the import."""
    (folder / "facts").mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **on_cuda_road.environment(folder / "facts"), **variables}
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


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
    started("tests.support.gpu.on_cuda_road", str(tmp_path / "cases.json"), folder=tmp_path)
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
    check_kernels([found])


@pytest.mark.slow
def test_situations_of_ranks_take_their_course(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Uneven shares, a thaw, and a start again in pieces, where the rank of one image has an empty piece."""
    frozen = {"freeze": ["backbone"], "freeze_epochs": 1}
    ranks = config(
        tiny,
        model=frozen,
        train={"recompute": "all"},
        checkpoint={"every_steps": 1},
        eval={"every_epochs": 2},
        parallel={"mode": "ddp", "devices": CPUS[:2], "shares": [1, 4]},
    )
    (tmp_path / "ddp.yaml").write_text(dump_config(ranks))
    words = ["segapp", "train", "--plain", "--config", str(tmp_path / "ddp.yaml"), "--run", str(tmp_path / "run")]
    output = started(*words, folder=tmp_path, SEGAPP_FAILPOINTS="train.backward.rank1=4:oom")
    assert "the ranks start again" in output
    run = tmp_path / "run"
    starts = events(run, "run_start")
    assert [(event["split"], event.get("resumed_from_step")) for event in starts] == [([1, 4], None), ([1, 4], 3)]
    assert train(config(tiny, model=frozen), tmp_path / "alone") == 0
    in_one_piece = [[event["loss"] for event in events(folder, "step")][:3] for folder in (run, tmp_path / "alone")]
    assert in_one_piece[0] == pytest.approx(in_one_piece[1], **EXACT)
    found = on_cuda_road.facts(tmp_path / "facts")
    assert sorted(each["rank"] for each in found) == ["0", "0", "1", "1"]
    check_kernels(found)
