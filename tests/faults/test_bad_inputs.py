"""What `predict`, `eval`, `export`, `report`, `compare` and `init` are given: one clear error, or it works (S13)."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support.fault_runs import FaultRun, Invariants, case
from tests.support.hostile_files import CONTROL, MARKUP, is_inert, pickles, png_bomb, write_picture

pytestmark = pytest.mark.faults
NewRun = Callable[..., FaultRun]


@pytest.fixture
def run(left_by: NewRun) -> FaultRun:
    return left_by("", train={"epochs": 1})


def refused(run: FaultRun, code: int, *words: str, says: tuple[str, ...] = ()) -> None:
    done = run.command(*words, timeout_s=60)
    Invariants.assert_clear(done, code, *says)
    assert is_inert(done.stdout + done.stderr)


@case("S13", how="predict: odd paths, globs, links in a ring, damaged pictures", passes="exit 3, one error")
def test_predict_names_inputs_that_are_no_images(run: FaultRun, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name, data in (("empty.png", b""), ("cut.png", png_bomb(64, 64)[:60]), ("html.jpg", b"<html>")):
        (folder / name).write_bytes(data)
        refused(run, 3, "predict", "run", str(folder / name), "--out", str(tmp_path / "out"), says=(name,))
    (folder / "v.avi").write_bytes(b"RIFF\xff\xff\xff\xffAVI LIST" + b"\xff" * 4000)
    refused(
        run, 3, "predict", "run", str(folder / "v.avi"), "--out", str(tmp_path / "out"), says=("v.avi", "ffmpeg -i")
    )
    os.mkfifo(folder / "pipe.png")
    (folder / "ring.png").symlink_to("ring.png")
    for path in ("pipe.png", "ring.png", "nothing.png", "*.tiff", "[.png", "**/**/**/x.png"):
        refused(run, 3, "predict", "run", str(folder / path), "--out", str(tmp_path / "out"))
    for text in (CONTROL[1], CONTROL[4], MARKUP[2]):
        refused(run, 3, "predict", "run", text, "--out", str(tmp_path / "out"))


@case("S13", how="predict: folders linked in rings, hostile names, a glob over them", passes="each picture once; inert")
def test_predict_does_not_follow_link_loops(run: FaultRun, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "a").mkdir(parents=True)
    for name in ("one", "two", "three"):
        (folder / "a" / name).symlink_to("..")
    pictures = [CONTROL[0].replace("/", ""), "[@click=app.quit]x[", "-rf", "$(id)"]
    for name in pictures:
        write_picture(folder / f"{name}.png", np.zeros((32, 32, 3), np.uint8))
    done = run.command("predict", "run", str(folder), "--out", str(tmp_path / "out"), "--save", "labels")
    assert done.returncode == 0, done.stderr
    assert is_inert(done.stdout + done.stderr)
    assert len(list((tmp_path / "out" / "labels").iterdir())) == len(pictures)
    done = run.command("predict", "run", str(folder / "**" / "*.png"), "--out", str(tmp_path / "b"), timeout_s=30)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "b" / "labels").iterdir())) == len(pictures)


@case("S13", how="predict, eval, export on checkpoints and exported files that are none", passes="exit 4; inert")
def test_hostile_model_file_is_refused_without_running_it(run: FaultRun, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    evil = dict(pickles(canary))
    picture = tmp_path / "x.png"
    write_picture(picture, np.zeros((32, 32, 3), np.uint8))
    files = {"a.pt": evil["archive of torch.save"], "b.pt": b"", "c.pt": b"PK\x03\x04" + b"\xff" * 99}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        refused(run, 4, "export", str(tmp_path / name), "--out", str(tmp_path / "o.pt2"), says=(name,))
        refused(run, 4, "eval", str(tmp_path / name), says=(name,))
    (tmp_path / "d.pt2").write_bytes(evil["archive of torch.save"])
    (tmp_path / "f.safetensors").write_bytes(evil["bare pickle"])
    (tmp_path / "g.safetensors").write_bytes(b"\x08\x07" + b"\xff" * 1000)
    for name in ("d.pt2", "f.safetensors", "g.safetensors", "none.safetensors"):
        target = str(tmp_path / name)
        refused(run, 4, "predict", target, str(picture), "--out", str(tmp_path / "out"), says=(name,))
    assert not canary.exists()


@case("S13", how="report, compare, init, status of damaged runs and odd folders", passes="one error, exit 1 to 3")
def test_damaged_run_is_one_clear_error_in_every_command(run: FaultRun, tmp_path: Path) -> None:
    for name in ("nothing", "\x1b[2J", "[/]", "x" * 300):
        refused(run, 2, "report", name)
        refused(run, 2, "compare", name, "run")
    damaged = run.work / "damaged"
    shutil.copytree(run.folder, damaged)
    events = (damaged / "events.jsonl").read_bytes()
    (damaged / "config.yaml").write_bytes(b"a: &a [*a]\n\0")
    (damaged / "events.jsonl").write_bytes(
        b"\0" * 5000 + b"\n" + events.replace(b'"loss"', b'"miou"')[: len(events) // 2]
    )
    for words in (("report", "damaged"), ("compare", "damaged", "run"), ("status", "damaged"), ("eval", "damaged")):
        done = run.command(*words)
        assert done.returncode in (0, 1, 2, 4), done.stderr
        assert "Traceback" not in done.stdout + done.stderr
        assert is_inert(done.stdout + done.stderr)
    (damaged / "events.jsonl").write_bytes(b"")
    refused(run, 1, "report", "damaged")
    (tmp_path / "d" / "images").mkdir(parents=True)
    (tmp_path / "d" / "masks").mkdir()
    (tmp_path / "d" / "images" / "a.png").write_bytes(b"x")
    (tmp_path / "d" / "masks" / "a.png").symlink_to("/dev/zero")
    refused(run, 3, "init", str(tmp_path / "d"), "--out", str(tmp_path / "c.yaml"))
    refused(run, 2, "init", str(tmp_path / "none"), "--out", str(tmp_path / "c.yaml"))
    assert json.loads(run.command("status", "run", "--json").stdout)["state"] == "finished"
