"""Seconds of a save by part: check and copy, for which training waits, then serialize with the hash, and sync.

The state is weights, their average and the two moments of AdamW, in 160 tensors each. It is written by the product and,
in turn, as plain `torch.save` and fsync write it; the ratio of the whole saves is printed, and the best of three rounds
of each part. SEGAPP_STATE_GB sets the sizes: 0.7,2.7 needs 9 GB of memory and as much of the disk. By default the state
is small.
"""

from __future__ import annotations

import os
import posix
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from segapp.checkpoint.snapshot import snapshot
from segapp.checkpoint.training_state import require_finite, save_checkpoint
from segapp.run import checkpoints as store
from segapp.run.checkpoints import CheckpointFacts

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(1200)]

ROUNDS = 3
SIZES_GB = [float(size) for size in os.environ.get("SEGAPP_STATE_GB", "0.05").split(",")]


def state_of(size_gb: float) -> dict[str, Any]:
    """A state of this size: weights, their average and two moments."""
    numbers = int(size_gb * 1e9 / 4 / 4 / 160)
    model, ema, first, second = ({f"layer{i}.weight": torch.rand(numbers) for i in range(160)} for _ in range(4))
    moments = {
        i: {"exp_avg": a, "exp_avg_sq": b} for i, (a, b) in enumerate(zip(first.values(), second.values(), strict=True))
    }
    return {"model": model, "ema": {"module": ema}, "optimizer": {"state": moments}}


def plain_save(state: dict[str, Any], path: Path) -> None:
    """Save as a plain loop does."""
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        posix.fsync(file.fileno())  # the tests replace `os.fsync`
    path.unlink()


@pytest.mark.parametrize("size_gb", SIZES_GB)
def test_save_costs(size_gb: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts: dict[str, list[float]] = {}

    def timed(name: str, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        began_s = time.perf_counter()
        result = function(*arguments, **keywords)
        parts.setdefault(name, []).append(time.perf_counter() - began_s)
        return result

    def timed_call(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: timed(name, function, *arguments)

    state = state_of(size_gb)
    for step in range(1, ROUNDS + 1):
        timed("check", require_finite, state)
        copied = timed("copy", snapshot, state)
        with monkeypatch.context() as patch:
            patch.setattr(store, "_write_content", timed_call("serialize and hash", store._write_content))
            patch.setattr(store.os, "fsync", timed_call("each sync", posix.fsync))
            syncs = parts["each sync"] = []
            timed("write", save_checkpoint, tmp_path, copied, CheckpointFacts(step=step, epoch=1), keep=1)
        parts.setdefault("sync", []).append(sum(syncs))  # of the file, the folders and the manifest
        timed("torch.save and fsync", plain_save, copied, tmp_path / "plain.pt")
        assert (tmp_path / "last.pt").stat().st_size > 0.99 * size_gb * 1e9
        del copied
    del parts["each sync"]
    best = {name: min(seconds) for name, seconds in parts.items()}
    ratio = (best["check"] + best["copy"] + best["write"]) / (best["copy"] + best["torch.save and fsync"])
    said = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in best.items())
    print(f"\nsave of {size_gb:g} GB: {said}; check, copy and write over copy, torch.save and fsync: {ratio:.2f}")
