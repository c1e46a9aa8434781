"""Damage to what was written: noticed, named, and gone round (F06 to F12, F20, F23)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from harness import FaultRun, Invariants, case

pytestmark = pytest.mark.faults

NewRun = Callable[..., FaultRun]


def killed_at(run: FaultRun, step: int) -> FaultRun:
    """A run that was killed when it began a step."""
    run.train(failpoints=f"train.step={step}:kill;ckpt.background=sync")
    return run


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


@case("F06", how="newest checkpoint cut to 0, 1 byte, 25 %, 50 %, size-22, size-1", passes="noticed, falls back, exact")
@pytest.mark.parametrize("share", ["0", "1", "25%", "50%", "-22", "-1"])
def test_a_truncated_newest_checkpoint(new_run: NewRun, invariants: Invariants, share: str) -> None:
    run = killed_at(new_run(), 8)
    newest = run.newest()
    size = newest.stat().st_size
    amount = size * int(share[:-1]) // 100 if share.endswith("%") else int(share)
    cut(newest, amount if amount >= 0 and share != "-1" else size + amount)
    assert run.command("ckpt", "verify", "run").returncode == 4
    invariants.assert_exact(run)
    messages = [alert["message"] for alert in run.events("alert")]
    assert any("is damaged" in message for message in messages), messages
    assert any(message.startswith("went back to") for message in messages), messages
    assert [path.name for path in run.folder.rglob("*.corrupt")]
