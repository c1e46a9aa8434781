"""What the product tells a user to do is done as it is written: the message is gone, and no error follows."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from segapp.commands.check import check_data
from segapp.config.load import config_of
from segapp.errors import SegappError
from segapp.models.weights import read_weights_file
from tests.support import ROOT
from tests.support.cures import compared_words, cures, followed, is_compared, table
from tests.support.fault_runs import finished_run
from tests.support.hostile_files import write_data, write_picture
from tests.support.runs import MODEL, draw_tiny_data, events, segapp, train

BASE: dict[str, Any] = {
    "name": "x",
    "data": {"format": "folder", "classes": ["ground", "box", "disc"], "crop_px": [32, 32], "workers": 0},
    "model": MODEL,
    "train": {"steps": 1, "batch_size": 2},
    "eval": {"every_epochs": 100},
    "log": {"tensorboard": False},
}
Change = Callable[[Path], object]


def test_each_cure_is_followed_compared_or_has_a_reason() -> None:
    """The table names those that a test follows, or the reason for none; a test compares the words of the others."""
    found, lines, known = cures(), list(table()), compared_words()
    listed = [part for _, part in lines]
    assert [text for text in found if not any(part in text for part in listed) and not is_compared(text, known)] == []
    assert [part for part in listed if not any(part in text for text in found)] == []
    for test in {test for test, _ in lines if "::" in test}:
        file, name = test.split("::")
        assert f"def {name}(" in (ROOT / file).read_text(), test


def sentences(root: Path, words: list[str], run: Path) -> Iterator[str]:
    """Yield what a check and a training of one step say about data with a config; the last one is an error, if any."""
    raw = copy.deepcopy(BASE)
    raw["data"]["root"] = str(root)
    try:
        config = config_of(raw, words)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            check_data(config, as_json=True)
        yield from (each["message"] for each in json.loads(out.getvalue())["findings"])
        train(config, run)
        yield from (each["message"] for each in events(run, "alert"))
    except SegappError as error:
        yield f"error: {error}"


def masks(change: Callable[[Any], Any]) -> Change:
    """A change of each mask (H, W); `write_picture` writes colors as blue, green, red."""

    def apply(root: Path) -> None:
        for path in (root / "masks").rglob("*.png"):
            write_picture(path, change(cv2.imread(str(path), cv2.IMREAD_UNCHANGED)).astype(np.uint8))

    return apply


def with_palettes(root: Path) -> None:
    for number, path in enumerate(sorted((root / "masks").rglob("*.png"))):
        picture = Image.fromarray(np.asarray(Image.open(path)) % 255).convert("P")
        picture.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0] if number % 2 else [0, 0, 0, 0, 255, 0, 255, 0, 0])
        picture.save(path)


def in_16_bits(root: Path) -> None:
    for path in (root / "images").rglob("*.png"):
        write_picture(path, cv2.imread(str(path)).astype(np.uint16) * 200)


def linked_from_outside(root: Path) -> None:
    path = root / "images" / "train" / "00.png"
    path.symlink_to(path.rename(root.parent / "outside.png"))


def same(root: Path) -> None:
    """As it is."""


TWO, RGB = "data.classes=[ground,box]; ", "data.rgb_masks=true; data.palette=[[0,0,200],[0,200,0],[200,0,0]"
COLORS = masks(lambda a: np.stack([a == 2, a == 1, a == 0], -1) * 200)
# change of the data, overrides, part of the message, what it says to do, way by way
CASES: list[tuple[Change, str, str, tuple[str, ...]]] = [
    (masks(lambda a: (a > 0) * 255), f"{TWO}data.ignore_index=-1", "black and white", ("data.label_map={255: 1}",)),
    (masks(lambda a: (a > 0) * 255), TWO, "if these are box", ("data.label_map={255: 1}; data.ignore_index=-1",)),
    (masks(lambda a: a % 255 + 1), "", "start at 1", ("data.label_map={1: 0, 2: 1, 3: 2}",)),
    (masks(lambda a: np.minimum(a, 3)), "", "One class more", (
        "data.label_map={0: 255, 1: 0, 2: 1, 3: 2}", "data.classes=[ground,box,disc,more]", "data.label_map={3: 255}")),
    (same, "data.ignore_index=-1", "255 usually", ("data.ignore_index=255", "data.label_map={255: -1}")),
    (masks(lambda a: np.minimum(a, 9)), "data.label_map={0: 0, 1: 1, 2: 2}", "Add them to data.label_map", (
        "data.label_map={0: 0, 1: 1, 2: 2, 9: 255}", "data.label_map={0: 0, 1: 1, 2: 2, 9: 0}")),
    (same, "data.label_map={7: 3}", "maps to 3", (
        "data.classes=[a,b,c,d]", "data.label_map={7: 2}", "data.label_map={7: 255}")),
    (same, "data.classes=[a,b,a]", "a different name", ("data.classes=[a,b,c]",)),
    (COLORS, "", "its colors are the classes", (f"{RGB},[0,0,0]]",)),
    (COLORS, f"{RGB}]", "Add them to data.palette", (f"{RGB},[0,0,0]]",)),
    (with_palettes, "", "the palettes disagree", ("data.rgb_masks=false", f"{RGB.replace('200', '255')},[0,0,0]]")),
    (masks(lambda a: np.minimum(a, 8)), "data.multilabel=bits; loss.name=bce", "bits beyond", (
        "data.classes=[a,b,c,d]", "data.ignore_index=8")),
    (masks(lambda a: np.stack([a == 0, a == 1, a == 2], -1) * 255), "data.multilabel=bits; loss.name=bce",
        "set data.multilabel: channels", ("data.multilabel=channels",)),
    (lambda root: [path.rename(path.with_name(f"{path.stem}_mask.png")) for path in (root / "masks").rglob("*.png")],
        "", "set data.mask_suffix: _mask.png", ("data.mask_suffix=_mask.png",)),
    (lambda root: shutil.copy(root / "images/train/00.png", root / "images/train/00.jpg"),
        "", "set image_suffix", ("data.image_suffix=.png",)),
    (same, "data.mask_dir=images", "would be its own mask", ("data.mask_dir=masks",)),
    (linked_from_outside, "", "set data.allow_outside_root: true", ("data.allow_outside_root=true",)),
    (same, "data.valid_area=fov/*.png", "correct data.valid_area", ("-data.valid_area",)),
    (same, "data.val_split=train", "images of their own", ("data.val_split=val",)),
    (same, "data.value_range=[[0,1]]", "a data.value_range that fits", ("data.value_range=[[30,210]]",)),
    (same, "data.augment=[{Resize: {height: 32, width: 32}}, Blur]", "use data.resize_px", (
        "data.augment=[Blur]; data.resize_px=[32,32]", "data.augment=[ScaledCrop, Blur]")),
    (same, "data.augment=[ScaledCrop, {CLAHE: {p: 1}}]", "use p=0.5", (
        "data.augment=[ScaledCrop, {CLAHE: {p: 0.5}}]",)),
    *((same, f"data.augment=[{name}, ScaledCrop]", "leave it out", ("data.augment=[ScaledCrop]",))
      for name in ("Normalize", "ToTensorV2", "ToFloat", "Mosaic", "{Affine: {mask_interpolation: 1}}")),
    (same, "data.augment=[{Compose: {transforms: [Blur]}}, ScaledCrop]", "use Sequential", (
        "data.augment=[{Sequential: {transforms: [Blur]}}, ScaledCrop]",)),
    (same, "data.augment=[{PadIfNeeded: {min_height: 64, min_width: 64}}]", "put ScaledCrop", tuple(
        f"data.augment=[{{PadIfNeeded: {{min_height: 64, min_width: 64}}}}, {crop}]"
        for crop in ("ScaledCrop", "{RandomCrop: {height: 32, width: 32, pad_if_needed: true}}"))),
    (same, "data.augment=[{RandomCrop: {height: 32, width: 32, p: 0.5}}]", "set its p to 1", (
        "data.augment=[{RandomCrop: {height: 32, width: 32, p: 1}}]",)),
    (same, "data.augment=[{ScaledCrop: {scale: [2, 0.5]}}]", "the smallest factor first", (
        "data.augment=[{ScaledCrop: {scale: [0.5, 2]}}]",)),
    (same, "data.crop_px=[128,160]", "lower data.crop_px", ("data.crop_px=[48,64]",)),
    (same, "data.crop_px=[33,47]", "does not fit PSPNet: use [40, 48]", ("data.crop_px=[40, 48]",)),
    (same, "checkpoint.monitor=iou:bax", "use 'iou:box'", ("checkpoint.monitor='iou:box'",)),
    (same, "train.batch_size=50", "set it to 6 or less", ("train.batch_size=6",)),
    (same, "train.accumulate=9", "set it to 3 or less", ("train.accumulate=3",)),
    (same, "train.batch_size=auto", "to a number", ("train.batch_size=2",)),
    (same, "train.precision=amp-fp16", "set train.precision to fp32", ("train.precision=fp32",)),
    (same, "schedule.warmup_steps=2; train.steps=6", "set it to 5%", ("schedule.warmup_steps=5%", "train.steps=12")),
    (same, "parallel.mode=model; parallel.devices=[cpu]", "list them", ("parallel.devices=[cpu,cpu]",)),
    *((same, f"parallel.devices=[{device}]", "use ", ("parallel.devices=[cpu]",))
      for device in ("gpu", "0", "'cuda:1'")),
    (same, "parallel.devices=[cpu]; parallel.memory_budget_mib=[9]", "leave it out", ("-parallel.memory_budget_mib",)),
    (same, "optim.layer_decay=0.9", "use optim.groups", (
        "-optim.layer_decay; optim.groups=[{pattern: backbone, lr_factor: 0.1}]",)),
    (same, "model.freeze=['*']", "leave some to train", ("model.freeze=[backbone]",)),
    (same, "model.name=PSPNett", "did you mean PSPNet?", ("model.name=PSPNet",)),
    (same, "model={library: torchvision, name: deeplabv3}", "needs a backbone", (
        "model={library: torchvision, name: deeplabv3, encoder: mobilenet_v3_small}",
        "model={library: torchvision, name: deeplabv3_mobilenet_v3_large}")),
    (same, "model.library=python; model.name=PSPNet", "library to torchvision or smp", ("model.library=smp",)),
    (same, "train.recompute=['nothing.*']", "use one of", ("train.recompute=[encoder.model.layer1.0]",)),
    (same, "distill={teacher: gone}", "gone: no such run", ("-distill",)),
]  # fmt: skip


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("change", "words", "says", "ways"), CASES, ids=[f"{i}-{c[2]}" for i, c in enumerate(CASES)])
def test_data_and_start_are_cured_as_the_message_says(
    change: Change, words: str, says: str, ways: tuple[str, ...], tmp_path: Path
) -> None:
    change(write_data(tmp_path / "data"))
    given = [word for word in words.split("; ") if word]
    assert any(says in each for each in sentences(tmp_path / "data", given, tmp_path / "before"))
    for number, way in enumerate(ways):
        cured = list(sentences(tmp_path / "data", followed(given, way.split("; ")), tmp_path / f"run-{number}"))
        assert [each for each in cured if says in each or each.startswith("error: ")] == [], way


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run, its config, and images and files that are none."""
    work = tmp_path_factory.mktemp("work")
    finished_run(work, draw_tiny_data(work / "data"))
    images = work / "images"
    images.mkdir()
    write_picture(images / "a.png", np.full((37, 53, 3), 90, np.uint8))
    Image.fromarray(np.full((37, 53), 0.4, np.float32)).save(work / "float.tif")
    (work / "empty").mkdir()
    (work / "file").touch()
    return work


# command, part of the message, the commands that it tells the user to write instead; "": the one in the message
COMMANDS: list[tuple[str, str, tuple[str, ...]]] = [
    ("predict run images --out file", "Not a directory: choose another --out", ("predict run images --out new",)),
    ("predict empty images --out o", "this folder has no run.json (`segapp ls` lists all runs)", ("ls .",)),
    ("predict run float.tif --out o", "convert it as the training images were", ("predict run images/a.png --out o",)),
    ("predict run images --out o --simplify 2", "add --polygons", (
        "predict run images --out o --simplify 2 --polygons geojson",)),
    ("predict run images --out o --batch 0", "a positive number nor auto", (
        "predict run images --out o --batch 3", "predict run images --out o --batch auto")),
    ("export run --out model.bin", "or add --format", ("export run --out model.bin --format safetensors",)),
    ("export run --out model.safetensors --argmax", "leave it out", ("export run --out model.safetensors",)),
    ("eval run --json file/x.json", "choose another file", ("eval run --json scores.json",)),
    ("eval run --devices ,", "such as 0 or cpu", ("eval run --devices cpu",)),
    ("sweep --config config.yaml seed=1 seed=2 --dry-run", "write all of its values into one word", (
        "sweep --config config.yaml seed=1,2 --dry-run",)),
    ("sweep --config config.yaml seed=0..9999 optim.lr=1..99 --dry-run", "name fewer values", (
        "sweep --config config.yaml seed=0..3 --dry-run",)),
    ("sweep --config config.yaml seed=1,2 --json", "add --dry-run", (
        "sweep --config config.yaml seed=1,2 --json --dry-run",)),
    ("train --config config.yaml --plain --run run", "add --resume to continue it, or choose another folder", (
        "train --config config.yaml --plain --run run --resume", "train --config config.yaml --plain --run other")),
    ("train --config config.yaml --plain --resume run optim.lr=0.5", "set them back, or continue the run", (
        "train --config config.yaml --plain --resume run optim.lr=0.001", "")),
    ("train --config config.yaml --plain --resume run --run else", "leave --run out", (
        "train --config config.yaml --plain --resume run",)),
    ("train --config config.yaml --plain --detach", "use one of them", ("train --config config.yaml --plain --run p",)),
    ("train config.yaml --plain --run q", "write --config", ("train --config config.yaml --plain --run q",)),
    ("train --config config.yaml --cfg-options train.epochs=1 --plain --run s", "write train.epochs=1 without it", (
        "train --config config.yaml train.epochs=1 --plain --run s",)),
]  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("command", "says", "ways"), COMMANDS, ids=[row[0] for row in COMMANDS])
def test_command_is_cured_as_the_message_says(command: str, says: str, ways: tuple[str, ...], work: Path) -> None:
    done = segapp(*command.split(), cwd=work)
    assert done.returncode != 0
    assert says in done.stderr.partition("error: ")[2], done.stderr
    for way in ways:
        words = way or re.findall(r": segapp (train .+)", done.stderr)[0]
        cured = segapp(*shlex.split(words), cwd=work)
        assert (cured.returncode, "error: " in cured.stderr) == (0, False), cured.stderr


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_program_of_torchscript_gives_its_weights_as_told(work: Path) -> None:
    layer, old, new = torch.nn.Conv2d(3, 2, (1, 5)), work / "program.pt", work / "weights.pt"
    torch.jit.script(layer).save(old)
    done = segapp("predict", "program.pt", "images", "--config", "config.yaml", "--out", "ts", cwd=work)
    (code,) = re.findall(r"TorchScript: save its weights with (torch\.save\(.*\))$", done.stderr, re.M)
    exec(code, {"torch": torch, "path": str(old), "new_path": str(new)})
    saved = read_weights_file(new)
    assert {name: saved[name].tolist() for name in saved} == {k: v.tolist() for k, v in layer.state_dict().items()}
