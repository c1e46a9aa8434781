"""Trainings whose ranks divide the optimizer's state and the average, against ranks that all hold them, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from segapp.build import step
from segapp.build.numerics import with_precision
from segapp.build.pairs import build_scheme
from segapp.build.step import StepAssembler, StepLayout
from segapp.config import RunConfig, dump_config
from segapp.errors import ConfigError
from segapp.parallel.distributed import Ranks
from segapp.parallel.shards import Shards
from segapp.training.step.engine import StepEngine
from tests.support import ROOT
from tests.support.rank_runs import ranks_of, trained_by_ranks
from tests.support.runs import differing, events, merged, train

CPUS: list[str | int] = ["cpu", "cpu"]


def state(folder: Path) -> dict[str, Any]:
    return dict(torch.load(folder / "checkpoints" / "last.pt", weights_only=True))


def course(folder: Path) -> list[float]:
    """Return the losses of all steps and evaluations."""
    return [event["loss"] for kind in ("step", "val") for event in events(folder, kind)]


def run_ranks(config: RunConfig, folder: Path, name: str, *words: str) -> str:
    """Start or continue a run, and return what it prints."""
    (folder / "ddp.yaml").write_text(dump_config(config))
    resume = "--resume" if (folder / name).exists() else "--run"
    return trained_by_ranks("--plain", "--config", "ddp.yaml", resume, name, *words, cwd=folder).stdout


def sharded(tiny: dict[str, Any], *, is_sharded: bool) -> RunConfig:
    """Return two uneven ranks with AdamW, an average, and a backbone that thaws after the first epoch."""
    config = ranks_of(tiny, 3, CPUS, shares=[1, 4], shard_optimizer=is_sharded)
    return merged(
        config.model_dump(mode="json"),
        model={"freeze": ["backbone"], "freeze_epochs": 1},
        train={"ema": 0.9},
        schedule={"name": "constant", "warmup_steps": 0},
    )


@pytest.mark.slow
def test_sharded_ranks_train_and_resume_as_whole_ones(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Bit for bit; the checkpoints are the same, so they resume in every mode and on any number of ranks."""
    run_ranks(sharded(tiny, is_sharded=False), tmp_path, "whole")
    for epochs in (2, 3):
        output = run_ranks(sharded(tiny, is_sharded=True), tmp_path, "sharded", f"train.epochs={epochs}")
        assert "the optimizer's state and the average of the weights are divided over 2 ranks" in output
    assert course(tmp_path / "sharded") == course(tmp_path / "whole")
    states = [state(tmp_path / name) for name in ("whole", "sharded")]
    of_config = ("/config", "/memory", "/checkpoint/config_hash")
    assert [path for path in differing(*states) if not path.startswith(of_config)] == []


@given(st.lists(st.integers(1, 1000), max_size=30), st.integers(1, 5))
def test_shards_differ_by_at_most_the_largest_tensor(sizes: list[int], num_shards: int) -> None:
    tensors = [torch.empty(size) for size in sizes]
    shards = Shards(tensors, num_shards, Ranks())
    owned = [sum(t.nbytes for t in tensors if shards.owner(t) == rank) for rank in range(num_shards)]
    assert max(owned) - min(owned) <= max((t.nbytes for t in tensors), default=0)
    assert owned[shards.rank] == max(owned), "a plan takes the fullest rank"


def test_auto_divides_large_states_of_known_optimizers(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepAssembler, "_wrapped", lambda _, inner, *__: inner)  # DDP would need a process group
    monkeypatch.setenv("SEGAPP_TRUST_PARTS", "1")
    ranks = {"mode": "ddp"}
    assert engine_of(merged(tiny, parallel=ranks)).shards is None, "a few MiB"
    monkeypatch.setattr(step, "SHARDED_FROM_BYTES", 2**20)
    assert engine_of(merged(tiny, parallel=ranks)).shards is not None
    assert engine_of(merged(tiny, parallel={**ranks, "shard_optimizer": False})).shards is None
    optim = {"name": "torch.optim:NAdam", "momentum": 0.0}
    config = merged(tiny, optim=optim, parallel={"mode": "ddp", "shard_optimizer": True})
    with pytest.raises(ConfigError, match="NAdam may update parameters together") as caught:
        engine_of(config)
    assert caught.value.key == "parallel.shard_optimizer"
    assert engine_of(merged(tiny, optim=optim, parallel=ranks)).shards is None


def engine_of(config: RunConfig) -> StepEngine:
    """Return the engine of a plan's rank, one of two, without DDP."""
    assembler = StepAssembler(with_precision(config, (torch.device("cpu"),)), build_scheme(config.data))
    layout = StepLayout("ddp", (torch.device("cpu"),), num_ranks=2)
    parts = assembler.build_parts(layout, lambda _: [1.0] * assembler.scheme.num_classes, with_weights=False)
    return assembler.assemble(parts, layout)


@pytest.mark.slow
def test_plan_divides_state_and_average_over_the_ranks() -> None:
    """By the peaks of the idle phase: what a rank holds between two steps."""
    command = [sys.executable, "-m", "tests.support.simulated_cases", "sharded"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    whole, divided = json.loads(done.stdout.splitlines()[-1]).values()
    for kind in ("optimizer", "average"):
        before, after = (phases[0]["step"][1][kind] for phases in (whole, divided))
        assert after == pytest.approx(before / 3, rel=0.05), kind
    assert divided[0]["step"][0] < whole[0]["step"][0]


def test_true_is_refused_outside_ddp(tiny: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"parallel\.shard_optimizer: does not support parallel\.mode: single"):
        train(merged(tiny, parallel={"mode": "single", "shard_optimizer": True}), tmp_path / "run")
