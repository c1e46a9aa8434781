"""Damage to what was written: noticed, named, and gone round (F06 to F12, F20, F23)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from segapp.run.checkpoints import CheckpointFolder
from segapp.run.files import machine_id
from tests.support.fault_runs import EACH_SAVE, FaultRun, Invariants, case, course, some

NewRun = Callable[..., FaultRun]


KILLED_IN_8 = "train.step=8:kill;ckpt.background=sync"
"""It leaves the checkpoints of step 7, step 6, and epoch 1."""


@case("F06", how="newest checkpoint cut to 0, 1 byte, 25 %, 50 %, size-22, size-1", passes="noticed, falls back, exact")
@case("F09", how="a bit flipped in the newest two", passes="goes back to the third, names both, exact")
@pytest.mark.parametrize("share", some(["0", "1", "25%", "50%", "-22", "-1", "two"], "-1"))
def test_damaged_newest_checkpoints_fall_back(left_by: NewRun, invariants: Invariants, share: str) -> None:
    run = left_by(KILLED_IN_8)
    rows = run.committed()
    assert len(rows) == 3
    newest, second = (run.folder / "checkpoints" / "objects" / row["object"] for row in rows[:2])
    if share == "two":
        damage(newest)
        damage(second)
    else:
        size = newest.stat().st_size
        amount = size * int(share[:-1]) // 100 if share.endswith("%") else int(share)
        os.truncate(newest, amount if amount >= 0 and share != "-1" else size + amount)
    assert run.command("ckpt", "verify", "run").returncode == 4
    invariants.assert_exact(run)
    messages = [alert["message"] for alert in run.events("alert")]
    assert sum("is damaged" in message for message in messages) >= (2 if share == "two" else 1), messages
    assert any(message.startswith("went back to") for message in messages), messages
    assert [path.name for path in run.folder.rglob("*.corrupt")]


@case("F07", how="one bit flipped at 200 offsets of the newest", passes="every one noticed by ckpt verify's reader")
@case("F08", how="each 4 KiB page zeroed once", passes="every one noticed")
@pytest.mark.faults
def test_every_flipped_bit_and_zeroed_page_is_detected(left_by: NewRun) -> None:
    run = left_by(KILLED_IN_8)
    newest, folder = run.newest(), CheckpointFolder(run.folder / "checkpoints")
    whole = newest.read_bytes()
    flips = [(len(whole) * i // 200, 1) for i in range(200)]
    pages = [(start, 4096) for start in range(0, len(whole), 4096) if any(whole[start : start + 4096])]
    missed = []
    with newest.open("r+b") as file:
        for start, length in flips + pages:
            old = whole[start : start + length]
            os.pwrite(file.fileno(), bytes([old[0] ^ 4]) if length == 1 else bytes(len(old)), start)
            if folder.verify()[0].problem is None:
                missed.append((start, length))
            os.pwrite(file.fileno(), old, start)
    assert missed == []
    assert folder.verify()[0].problem is None


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@case("F10", how="a bit flipped in every checkpoint", passes="exit 4, lists all, nothing overwritten, no fresh start")
@pytest.mark.faults
def test_all_damaged_exits_4_and_keeps_everything(left_by: NewRun, invariants: Invariants) -> None:
    run = left_by(KILLED_IN_8)
    objects = sorted((run.folder / "checkpoints" / "objects").iterdir())
    for path in objects:
        damage(path)
    before, events = [path.read_bytes() for path in objects], course(run)
    done = run.train()
    invariants.assert_clear(done, 4, "none of the 3 checkpoints can be used")
    assert [path.read_bytes() for path in objects] == before
    assert course(run) == events


@pytest.mark.sampled(3)
@case(
    "F11",
    how="manifest removed, no JSON, wrong size, a path out of the folder",
    passes="exit 4 or the next; no traversal",
)
@pytest.mark.faults
@pytest.mark.parametrize("how", ["removed", "no-json", "size", "outside"])
def test_false_manifest_exits_4_or_falls_back(left_by: NewRun, invariants: Invariants, how: str) -> None:
    run = left_by(KILLED_IN_8)
    path = run.folder / "checkpoints" / "manifest.json"
    manifest = json.loads(path.read_text())
    if how == "size":
        manifest["entries"][0]["size_bytes"] += 1
    elif how == "outside":
        manifest["entries"][0]["object"] = "../../../config.yaml"
    path.write_text('{"format": 1, "entr' if how == "no-json" else json.dumps(manifest))
    if how == "removed":
        path.unlink()
    done = run.train()
    if how in ("removed", "no-json"):
        invariants.assert_clear(done, 4, "manifest.json" if how == "no-json" else "no checkpoint to resume from")
    else:
        assert done.returncode == 0, done.stderr
        invariants.assert_same(run)


@case(
    "F12",
    how="temporary files of dead and living writers, a 0-byte object of the highest step",
    passes="ignored, tidied",
)
@pytest.mark.faults
def test_temporaries_of_dead_writers_are_removed(left_by: NewRun, invariants: Invariants) -> None:
    run = left_by(KILLED_IN_8)
    objects = run.folder / "checkpoints" / "objects"
    dead = [objects / f".tmp-7-{pid}-0badcafe@{machine_id()}" for pid in (2**22 - 7, 2**22 - 9)]
    alive = objects / f".tmp-7-{os.getpid()}-0badcafe@{machine_id()}"
    for path in (*dead, alive, objects / "99999999-0123456789abcdef.pt"):
        path.write_bytes(b"")
    invariants.assert_exact(run)
    assert [path.exists() for path in (*dead, alive)] == [False, False, True]
    alive.unlink()
    invariants.assert_clean_folder(run)


@case(
    "F18", how="12 saves, keep 2, resumed twice, a crash between publish and retire", passes="2 epochs, best, 2 newest"
)
@pytest.mark.faults_long
def test_retention_over_resumes_and_a_crash_keeps_the_rule(new_run: NewRun, invariants: Invariants) -> None:
    run = new_run(train={"epochs": 6}, checkpoint={"every_steps": 3, "keep": 2})
    for failpoints in ("ckpt.before_retire=3:kill;", "train.step=9:kill;", ""):
        run.train(failpoints=failpoints + EACH_SAVE)
    invariants.check(run)
    names = {path.name for path in (run.folder / "checkpoints").glob("*.pt")}
    assert names == {"last.pt", "best.pt", "epoch_0005.pt", "epoch_0006.pt"}
    assert len(run.committed()) <= 4


@case(
    "F20",
    how="every file written, loaded by torch alone with weights_only",
    passes="all load, with the bare model in them",
)
@pytest.mark.faults
def test_every_file_is_loaded_by_torch_alone(left_by: NewRun) -> None:
    run = left_by("", train={"epochs": 1})
    files = list((run.folder / "checkpoints").glob("*.pt"))
    assert len(files) == 3
    for path in files:
        model = torch.load(path, weights_only=True)["model"]
        assert model
        assert all(torch.is_tensor(tensor) for tensor in model.values())


@case("F23", how="a manifest of a newer format; a checkpoint of other classes", passes="exit 4, says what differs")
@pytest.mark.faults
def test_checkpoint_of_newer_version_or_other_task_exits_4(left_by: NewRun, invariants: Invariants) -> None:
    run = left_by(KILLED_IN_8)
    path = run.folder / "checkpoints" / "manifest.json"
    text = path.read_text()
    path.write_text(text.replace('"format": 1', '"format": 99'))
    invariants.assert_clear(run.train(), 4, "newer segapp")
    path.write_text(text)
    with run.newest().open("rb") as file:
        content = torch.load(file, weights_only=True)
    content["checkpoint"]["format"] = 99
    torch.save(content, run.work / "later.pt")
    for words in (
        ("eval", "later.pt"),
        ("train", "--plain", "--config", "config.yaml", "--run", "b", "--resume", "later.pt"),
    ):
        invariants.assert_clear(
            run.command(*words), 4, "format 99", "this segapp reads up to 1", "install a newer segapp"
        )
    done = run.train("data.classes=[ground,box,disc,sky]")
    invariants.assert_clear(done, 4, "data.classes")
    invariants.check(run)
