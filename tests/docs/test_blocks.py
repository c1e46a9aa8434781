"""The code blocks of README.md and of the pages: each is run on drawn data, or marked on its page with the reason.

By default the Python blocks and the cheap commands run, in this process; `-m slow` runs all commands of every page in
order, each page in a folder of its own with small configs under the names that the page uses.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
import yaml

from segapp.__main__ import main
from tests.support import ROOT
from tests.support.drawn_folders import BINARY, draw, draw_image
from tests.support.page_blocks import Block, blocks
from tests.support.recorded_runs import RecordedRun
from tests.support.runs import segapp

CHEAP = ("segapp docs", "segapp --", "segapp schema", "segapp completion", "segapp ls", "segapp status")
"""Beginnings of commands that take a few milliseconds."""

ONCE = ("segapp plan", "segapp doctor", "segapp models", "segapp profile")
"""Beginnings of commands that write nothing and take long: run once, also where several pages have them."""

_succeeded: set[str] = set()

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
"""Stands for every config of the shipped ones that a command names, under its name."""

SHELL = [block for block in blocks() if block.language in ("sh", "bash") and block.mark != "not run"]
SLOW_PYTHON = [block for block in blocks() if block.language == "python" and block.mark == "slow"]
PYTHON = [block for block in blocks() if block.language == "python" and not block.mark]


def test_blocks_are_counted() -> None:
    commands = [command for block in blocks() if block.language in ("sh", "bash") for command in block.commands()]
    run = [command for block in SHELL for command in block.commands()]
    num_python = len(PYTHON) + len(SLOW_PYTHON)
    print(f"{len(blocks())} blocks; {len(run)} of {len(commands)} commands and {num_python} Python blocks are run")
    assert len(run) > 100
    own, own_run = ([command for command in each if command.startswith("segapp ")] for each in (commands, run))
    assert len(own_run) > 0.6 * len(own)
    others = [command for command in run if not command.startswith(("segapp ", "uv run python segapp/docs/examples/"))]
    assert [command for command in others if not command.startswith("python3 -m pip install uv && ")] == []


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with demo data, a small demo.yaml and two recorded runs, as the current one."""
    (tmp_path / "data").symlink_to(ROOT / "data")
    (tmp_path / "demo.yaml").write_text(yaml.safe_dump(CONFIG))
    for name in ("demo", "demo-2"):
        run = RecordedRun(tmp_path / "runs" / name, num_devices=1, device="cpu", epochs=1)
        run.epoch()
        run.end()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_cheap_commands_succeed(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = dict.fromkeys(command for block in SHELL for command in block.commands() if command.startswith(CHEAP))
    assert len(commands) >= 8
    for command in commands:
        with pytest.raises(SystemExit) as ended:
            main(shlex.split(command)[1:])
        assert ended.value.code in (0, None), f"{command}: {capsys.readouterr().err}"


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
    """Compare what a block has printed with the text below it on the page, unless that is cut by dots."""
    after = block.page.read_text().split(block.text, 1)[1]
    promised = re.match(r"```\n\n```text\n(.*?)```", after, re.S)
    if promised and "..." not in promised[1]:
        assert shown == promised[1]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the commands of the pages name: demo data, configs, photos, a video, trained runs."""
    folder = tmp_path_factory.mktemp("pages")
    for kind, ending in (("leftImg8bit", "leftImg8bit"), ("gtFine", "gtFine_labelIds")):
        for split, count in (("train", 6), ("val", 2)):
            for path in sorted((ROOT / "data/demo" / kind / split).rglob(f"*_{ending}.png"))[:count]:
                place = folder / path.relative_to(ROOT)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, place)
    (folder / "segapp").symlink_to(ROOT / "segapp")
    teacher = {"teacher": "runs/teacher", "critic": {"width": 8}}
    for name in ("demo", "camvid", "cityscapes", "cityscapes-pspnet", "camvid-distill"):
        config = {**CONFIG, "name": name, **({"distill": teacher} if name == "camvid-distill" else {})}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    (folder / "configs").mkdir()
    shutil.copy(folder / "demo.yaml", folder / "configs/demo.yaml")
    draw(folder / "photos", [f"{number:04}" for number in range(10)], "images/{}.jpg", "masks/{}_mask.png", BINARY)
    for place in ("photo.jpg", "more/below/b.jpg", "big.png"):
        draw_image(folder / place, (64, 96))
    cv2.imwrite(str(folder / "big.tif"), cv2.imread(str(folder / "big.png")))
    writer = cv2.VideoWriter(str(folder / "drive.mp4"), cv2.VideoWriter.fourcc(*"mp4v"), 10, (96, 64))
    for _ in range(3):
        writer.write(np.zeros((64, 96, 3), np.uint8))
    writer.release()
    done = segapp("train", "--config", "demo.yaml", "--plain", cwd=folder)
    assert done.returncode == 0, done.stderr
    for name in ("demo-2", "fold0", "fold1", "fold2"):
        shutil.copytree(folder / "runs/demo", folder / "runs" / name)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", sorted({block.page for block in [*SHELL, *SLOW_PYTHON]}), ids=lambda path: path.stem)
def test_commands_of_a_page_succeed(page: Path, prepared: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(prepared, folder, symlinks=True)
    fails = {"doctor": (0, 1)}  # what this machine lacks is none of the page's business
    for block in blocks():
        if block.page != page or block.mark == "not run":
            continue
        if block.language == "python" and block.mark == "slow":
            with contextlib.chdir(folder):
                check_output(block, run_python(block))
        for command in block.commands() if block.language in ("sh", "bash") else ():
            words = shlex.split(command)
            if words[:3] == ["uv", "run", "python"]:
                exec(compile(Path(words[3]).read_text(), words[3], "exec"), {"__name__": "example"})
                continue
            if words[0] != "segapp":
                continue  # the two commands of the README: the gate begins with one, the other is this suite
            if command in _succeeded:
                continue
            done = segapp(*words[1:], cwd=folder, timeout_s=600, XDG_STATE_HOME=str(folder / "state"))
            assert done.returncode in fails.get(words[1], (0,)), (
                f"{block.place}: {command}\n{done.stdout[-2000:]}\n{done.stderr}"
            )
            if words[1] == "init":  # its configs train for as long as the data need
                for config in folder.glob("photos*.yaml"):
                    config.write_text(re.sub(r"epochs: \d+", "epochs: 1", config.read_text()))
            if command.startswith(ONCE):
                _succeeded.add(command)
