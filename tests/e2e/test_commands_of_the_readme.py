"""Every command of the shell blocks of README.md and docs/: run in order in one folder, or listed with a reason.

The configs that the commands name are small ones here; everything else is as written.
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
import yaml

from tests.support import ROOT
from tests.support.drawn_folders import draw_image
from tests.support.runs import segapp

NOT_RUN = {
    "python3 -m pip install uv": "sets up an environment from the network: the gate begins with it",
    "torchrun ": "needs four GPUs",
    "segapp train --config cityscapes.yaml parallel.": "needs several GPUs: tests/train/test_parallel_training.py",
    "segapp eval demo --devices 0,1": "needs two GPUs: tests/inference/test_evaluator.py",
    "segapp train --config cityscapes.yaml --detach": "leaves a process behind: tests/tui/test_terminal.py",
    "segapp attach": "needs a terminal: tests/tui/test_terminal.py",
    "segapp ctl ": "needs a live training: tests/commands/test_control.py",
    "segapp sweep ": "trains many networks: tests/commands/sweep/test_sweep_runs.py",
    "segapp init photos/ --folds": "trains ten networks: tests/commands/sweep/test_sweep_runs.py",
    "segapp ls demo-sweep": "needs a sweep and a terminal: tests/commands/sweep/test_sweep_runs.py",
    "uv run --group fuzz": "needs atheris and minutes: tests/fuzz/test_fuzz_targets.py",
}
"""Beginnings of commands that are not run, and why."""

SLOW = {
    "segapp export demo --format onnx": "tests/export/test_export.py",
    "segapp export demo --format pt2": "tests/export/test_export.py",
    "segapp predict demo.onnx": "tests/export/test_export.py",
    "segapp predict fold0 fold1": "tests/inference/test_ensemble.py",
    "segapp plan": "tests/commands/test_plan.py",
    "segapp train --config camvid.yaml --smoke": "tests/commands/test_smoke.py",
}
"""Beginnings of commands that take seconds, run with -m slow alone, and where the default suite runs the like."""

CONFIG = {
    "name": "demo",
    "data": {"format": "cityscapes", "root": "data/demo", "crop_px": [32, 64], "workers": 0},
    "model": {
        "library": "smp",
        "name": "DeepLabV3Plus",
        "encoder": "tu-test_resnet",
        "options": {"decoder_channels": 8, "decoder_atrous_rates": [3, 6, 9]},
    },
    "optim": {"name": "adamw", "lr": 0.001},
    "train": {"epochs": 1, "batch_size": 3},
    "log": {"tensorboard": False},
}
"""Stands for every config that a command names, under its name."""


def commands() -> list[tuple[str, str]]:
    """Return (place, command) of every line of a shell block, without comments; lines that end in \\ are joined."""
    found = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = path.read_text()
        for block in re.finditer(r"^```(?:sh|bash)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            first = text[: block.start(1)].count("\n") + 1
            lines = re.sub(r"\\\n", "  ", block[1]).splitlines()
            for number, line in enumerate(lines, start=first):
                command = re.sub(r"(^|\s)#.*", "", line).strip()
                if command:
                    found.append((f"{path.name}:{number}", command))
    return found


def reason_not_run(command: str) -> str | None:
    return next((reason for start, reason in NOT_RUN.items() if command.startswith(start)), None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with what the commands name: demo data, configs, photos, a video."""
    for kind, ending in (("leftImg8bit", "leftImg8bit"), ("gtFine", "gtFine_labelIds")):
        for split, count in (("train", 6), ("val", 2)):
            source = sorted((ROOT / "data/demo" / kind / split).rglob(f"*_{ending}.png"))[:count]
            place = tmp_path / "data/demo" / kind / split / "town"
            place.mkdir(parents=True)
            for path in source:
                shutil.copy(path, place / path.name)
    teacher = {"teacher": "runs/teacher", "critic": {"width": 8}}
    for name in ("demo", "camvid", "cityscapes", "camvid-distill"):
        config = {**CONFIG, "name": name, **({"distill": teacher} if name == "camvid-distill" else {})}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(config))
    for place in ("photos/a.jpg", "more/below/b.jpg", "big.png"):
        draw_image(tmp_path / place, (64, 96))
    cv2.imwrite(str(tmp_path / "big.tif"), cv2.imread(str(tmp_path / "big.png")))
    writer = cv2.VideoWriter(str(tmp_path / "drive.mp4"), cv2.VideoWriter.fourcc(*"mp4v"), 10, (96, 64))
    for _ in range(3):
        writer.write(np.zeros((64, 96, 3), np.uint8))
    writer.release()
    return tmp_path


def prepare(command: str, folder: Path) -> None:
    """Make the runs that a command names and no command before it has made."""
    for name in re.findall(r"\bfold\d\b", command):
        if not (folder / "runs" / name).exists():
            shutil.copytree(folder / "runs" / "demo", folder / "runs" / name)


def runnable(*, with_slow: bool) -> dict[str, str]:
    """Return the commands that are run, each once, with their places."""
    found: dict[str, str] = {}
    for place, command in commands():
        if reason_not_run(command) is None and (with_slow or not command.startswith(tuple(SLOW))):
            found.setdefault(command, place)
    return found


def test_every_command_is_run_or_has_a_reason() -> None:
    known = commands()
    assert len(known) > 40
    others = [one for one in runnable(with_slow=True) if not one.startswith("segapp ")]
    assert others == [], "add it to NOT_RUN with the reason"
    unused = [start for start in (*NOT_RUN, *SLOW) if not any(command.startswith(start) for _, command in known)]
    assert unused == [], "no such command any more"
    assert [place for place in SLOW.values() if not (ROOT / place).exists()] == []


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("with_slow", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["quick", "all"])
def test_commands_of_the_readme_and_docs_succeed(folder: Path, with_slow: bool) -> None:
    for command, place in runnable(with_slow=with_slow).items():
        prepare(command, folder)
        done = segapp(*shlex.split(command)[1:], cwd=folder)
        assert done.returncode == 0, f"{place}: {command}\n{done.stdout[-2000:]}\n{done.stderr}"
    slow = ["demo.onnx", "demo.pt2"] if with_slow else []
    for made in (*slow, "runs/demo/report.html", "compare.html", "check.html", "result.json", "demo.safetensors"):
        assert (folder / made).stat().st_size > 0, made
    assert (folder / "out" / "overlay" / "drive.mp4").exists()
