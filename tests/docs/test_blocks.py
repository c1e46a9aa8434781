"""The code blocks of README.md and of the pages: each is run on drawn data, or marked on its page with the reason.

By default the Python blocks and the cheap commands run, in this process; `-m slow` runs all commands of every page in
order, each page in a folder of its own with small configs under the names that the page uses. What a page shows as the
output of a command is compared with what the command prints, by the kinds of its lines (`tests/support/page_blocks`).
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import torchvision
import yaml

import segapp as package
from segapp.__main__ import main
from tests.support import ROOT
from tests.support.drawn_folders import draw_image
from tests.support.page_blocks import Block, blocks, difference
from tests.support.page_folders import draw_folders
from tests.support.recorded_runs import RecordedRun
from tests.support.runs import segapp

CHEAP = ("segapp docs", "segapp --", "segapp schema", "segapp ls", "segapp status", "segapp init")
"""Beginnings of commands that take a few milliseconds, or tenths of a second."""

BACKBONE = "segapp train --config cityscapes.yaml --plain model.weights_backbone=resnet50.pth"
ONCE = ("segapp plan", "segapp doctor", "segapp models", BACKBONE)
"""Beginnings of commands that take long and change nothing for others: run once, with the shipped configs."""

FAILS = {"segapp doctor": (0, 1), "segapp attach": (2,), "segapp ctl": (1,)}
"""Exit codes of commands that depend on the machine, or need a terminal or a running training."""

_printed: dict[str, tuple[str, str]] = {}
"""Output of each command of `ONCE` that has run."""

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
"""Stands for the configs that a command trains, under their names; `demo.yaml` is the shipped one with one epoch."""

SHELL = [block for block in blocks() if block.language in ("sh", "bash") and block.mark != "not run"]
SLOW_PYTHON = [block for block in blocks() if block.language == "python" and block.mark == "slow"]
PYTHON = [block for block in blocks() if block.language == "python" and not block.mark]
TEXTS = [block for block in blocks() if block.language == "text"]
TRANSCRIPTS = [block for block in TEXTS if block.is_transcript]
CHEAP_ERRORS = ("data.crop_px=500",)
"""Parts of commands that are refused before they do anything."""


def test_most_commands_are_run() -> None:
    commands = [command for block in blocks() if block.language in ("sh", "bash") for command in block.commands()]
    run = [command for block in SHELL for command in block.commands()]
    own, own_run = ([command for command in each if command.startswith("segapp ")] for each in (commands, run))
    assert len(own_run) > max(100, 0.6 * len(own))
    example = r"uv run python (-m torch.distributed.run --nproc-per-node 2 )?segapp/docs/examples/\w+.py"
    others = [command for command in run if command not in own_run and not re.fullmatch(example, command)]
    assert [command for command in others if not command.startswith("python3 -m pip install uv && ")] == []


def test_each_text_is_a_transcript_or_says_that_it_is_none() -> None:
    unmarked = [block for block in TEXTS if not block.mark and not block.is_transcript]
    assert [block.place for block in unmarked if not (block.source and block.source.language == "python")] == []
    assert len(TRANSCRIPTS) > 30


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with demo data, a small demo.yaml, drawn folders and two recorded runs, as the current one."""
    (tmp_path / "data").symlink_to(ROOT / "data")
    (tmp_path / "demo.yaml").write_text(yaml.safe_dump(CONFIG))
    for name in ("demo", "demo-2"):
        classes = [f"class_{i}" for i in range(19)]  # one of which occurs nowhere
        run = RecordedRun(tmp_path / "runs" / name, classes=classes, num_devices=1, device="cpu", epochs=1)
        run.epoch()
        run.end()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_cheap_commands_succeed(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw_folders(small)
    shown = [block for block in TRANSCRIPTS if all(is_cheap(command) for command in block.commands())]
    assert len(shown) >= 10
    commands = dict.fromkeys(command for block in [*SHELL, *shown] for command in block.commands() if is_cheap(command))
    printed = {}
    for command in commands:
        with pytest.raises(SystemExit) as ended:
            main(shlex.split(command)[1:])
        printed[command] = capsys.readouterr()
        refused = any(part in command for part in CHEAP_ERRORS)
        assert (ended.value.code in (0, None)) != refused, f"{command}: {printed[command].err}"
    problems = [problem for block in shown if (problem := stale(block, printed))]
    assert not problems, "\n".join(problems)


def is_cheap(command: str) -> bool:
    """Return if a command runs in the default suite."""
    return command.startswith(CHEAP) or any(part in command for part in CHEAP_ERRORS)


def stale(block: Block, printed: Mapping[str, tuple[str, str]]) -> str:
    """Return how a transcript differs from the output or the errors of its commands; empty if it does not."""
    if "segapp doctor" in block.commands() and torch.cuda.is_available():
        return ""  # the page shows a machine without a GPU
    streams = ["".join(printed[command][i] for command in block.commands()) for i in (0, 1)]
    found = [difference(stream, block.text) for stream in streams]
    if "" in found:
        return ""
    nearest = min(found, key=lambda lines: lines.count("\n- "))
    return f"{block.place} shows another output of {' && '.join(block.commands())}:\n{nearest}"


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.place)
def test_python_blocks_run(block: Block, small: Path) -> None:
    shutil.rmtree(small / "runs")
    check_output(block, run_python(block))


def run_python(block: Block) -> str:
    """Run a Python block in this process, and return what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(block.text, block.place, "exec"), {"__name__": "__main__"})
    return printed.getvalue()


def check_output(block: Block, shown: str) -> None:
    """Compare the output of a Python block with the text below it: exactly, or by kinds of lines if it is cut."""
    (promised,) = [each.text for each in TEXTS if each.source == block and not each.mark] or [""]
    if promised and "..." in promised:
        assert difference(shown, promised) == "", block.place
    elif promised:
        assert shown == promised


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the commands of the pages name: demo data, configs, photos, trained runs."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "data").symlink_to(ROOT / "data")
    (folder / "segapp").symlink_to(ROOT / "segapp")
    teacher = {"teacher": "runs/teacher", "critic_width": 8}
    for name in ("camvid", "cityscapes", "cityscapes-pspnet", "camvid-distill"):
        config = {**CONFIG, "name": name, **({"distill": teacher} if name == "camvid-distill" else {})}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    demo = (ROOT / "configs/demo.yaml").read_text()
    (folder / "demo.yaml").write_text(re.sub(r"\bepochs: \d+", "epochs: 1", demo))
    (folder / "configs").mkdir()
    shutil.copy(folder / "demo.yaml", folder / "configs/demo.yaml")
    draw_folders(folder)
    for place in ("photo.jpg", "more/below/b.jpg", "big.png"):
        draw_image(folder / place, (64, 96))
    cv2.imwrite(str(folder / "big.tif"), cv2.imread(str(folder / "big.png")))
    for words in (["--run", "runs/demo-2", "optim.lr=0.002"], []):  # the newest is the one that --resume continues
        done = segapp("train", "--config", "demo.yaml", "--plain", *words, cwd=folder)
        assert done.returncode == 0, done.stderr
    for name in ("fold0", "fold1", "fold2"):
        shutil.copytree(folder / "runs/demo", folder / "runs" / name)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "page", sorted({block.page for block in [*SHELL, *SLOW_PYTHON, *TRANSCRIPTS]}), ids=lambda path: path.stem
)
def test_commands_of_a_page_succeed(page: Path, prepared: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(prepared, folder, symlinks=True)
    printed: dict[str, tuple[str, str]] = {}
    problems = []
    if page.stem in ("first-run", "train"):  # begin with the first run
        shutil.rmtree(folder / "runs")
    if page.stem == "tune":  # begins with the config that another page makes
        run_command("segapp init photos/", folder, SHELL[0])
    for block in blocks():
        if block.page != page or block.mark in ("not run", "not output"):
            continue
        if block.language == "python" and block.mark == "slow":
            with contextlib.chdir(folder):
                check_output(block, run_python(block))
        for command in block.commands():
            if block.language in ("sh", "bash") or command not in printed:
                printed[command] = run_command(command, folder, block)
        if block.is_transcript and (problem := stale(block, printed)):
            problems.append(problem)
    assert not problems, "\n".join(problems)


def run_command(command: str, folder: Path, block: Block) -> tuple[str, str]:
    """Run a command of a page as a process, and return what it prints and its errors."""
    words = shlex.split(command)
    if words[0] == "pytest" or words[:3] == ["uv", "run", "python"]:
        program = ["-m", *words] if words[0] == "pytest" else words[3:]
        done = subprocess.run([sys.executable, *program], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout, done.stderr
    if words[0] != "segapp":
        return "", ""  # the two commands of the README: the gate begins with one, the other is this suite
    if command in _printed:
        return _printed[command]
    is_once = command.startswith(ONCE)
    place = folder
    if is_once:
        place = folder / "shipped"
        place.mkdir(exist_ok=True)
        if not (place / "data").exists():
            (place / "data").symlink_to(ROOT / "data")
            torch.save(torchvision.models.resnet50().state_dict(), place / "resnet50.pth")
    done = segapp(*words[1:], cwd=place, timeout_s=600, COLUMNS="160", XDG_STATE_HOME=str(folder / "state"))
    accepted = FAILS.get(" ".join(words[:2]), (0,))
    is_refused = block.language == "text" and block.text.startswith("error:")
    assert (done.returncode in accepted) != is_refused, (
        f"{block.place}: {command}\n{done.stdout[-2000:]}\n{done.stderr}"
    )
    if words[1] == "init":  # its configs train for as long as the data need
        for config in folder.glob("*.yaml"):
            config.write_text(re.sub(r"\bepochs: \d+", "epochs: 1", config.read_text()))
    if is_once:
        _printed[command] = done.stdout, done.stderr
    return done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_plain_pytorch_predicts_what_segapp_predicts(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(prepared)
    (block,) = [block for block in SLOW_PYTHON if "import segmentation_models_pytorch" in block.text]
    done = segapp("export", "demo", "--format", "safetensors", "--out", "demo.safetensors", cwd=prepared)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = {}
    exec(compile(block.text, block.place, "exec"), found)
    expected = package.load("demo", device="cpu").predict("photo.jpg")
    assert len(np.unique(expected)) > 1
    assert np.array_equal(found["labels"].numpy(), expected)


@pytest.mark.slow
def test_out_of_memory_report_is_the_one_on_its_page(
    small: Path, logical_budgets: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = [block for block in TEXTS if block.mark == "not output" and "budgets" in block.reason]
    with pytest.raises(SystemExit) as ended:
        main(["train", "--config", str(ROOT / "configs/demo.yaml"), "--plain", "parallel.memory_budget_mib=[20]"])
    assert ended.value.code == 6
    assert difference(capsys.readouterr().err, block.text) == ""
