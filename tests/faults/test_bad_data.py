"""Data as people have it: damaged, mislabelled, oddly named, hostile (D01 to D16)."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import yaml
from PIL import Image

from segapp.commands.check import check_data
from segapp.config import RunConfig, validate_config
from segapp.errors import ConfigError, DataError
from segapp.run.words import printable
from tests.support import ROOT
from tests.support.fault_runs import case
from tests.support.hostile_files import CONTROL, MARKUP, is_inert, png_bomb, write_data, write_picture
from tests.support.programs import start
from tests.support.runs import MODEL, events, segapp, train
from tests.support.terminals import peak_mib

pytestmark = pytest.mark.faults

TINY = {
    "name": "data",
    "data": {"format": "folder", "classes": ["ground", "box", "disc"], "crop_px": [32, 32], "workers": 0},
    "model": MODEL,
    "train": {"epochs": 1, "batch_size": 2},
    "log": {"tensorboard": False, "every_steps": 1},
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_data(tmp_path / "data")


def config_of(root: Path, sections: dict[str, Any] | None = None, **data: Any) -> RunConfig:
    """The config of a small training on a data set."""
    parts = {name: {**TINY[name], **part} for name, part in (sections or {}).items()}  # type: ignore[dict-item]
    return validate_config({**TINY, **parts, "data": {**TINY["data"], "root": str(root), **data}})  # type: ignore[dict-item]


def check(root: Path, *, as_json: bool = True, **data: Any) -> tuple[int, Any]:
    """Exit code and findings of `segapp check`, or its text."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = check_data(config_of(root, **data), as_json=as_json)
    assert is_inert(out.getvalue())
    return code, json.loads(out.getvalue())["findings"] if as_json else out.getvalue()


def steps_of(root: Path, **sections: Any) -> list[int]:
    """Trains, and returns the images of each step; every loss must be finite."""
    run = root.parent / f"run-{len(list(root.parent.iterdir()))}"
    assert train(config_of(root, sections), run) == 0
    assert all(event["loss"] is not None for event in events(run, "step"))
    return [sum(event["split"]) for event in events(run, "step")]


def refused(root: Path, *words: str, sections: dict[str, Any] | None = None, **data: Any) -> None:
    """A training is refused before its first step, in words that a terminal can be shown."""
    run = root.parent / "refused"
    with pytest.raises(DataError) as caught:  # exit code 3
        train(config_of(root, sections, **data), run)
    assert not (run / "events.jsonl").exists() or not events(run, "step")
    for word in words:
        assert word in printable(str(caught.value))


def damages(data: bytes) -> dict[str, bytes]:
    half = len(data) // 2
    return {
        "empty": b"",
        "64 bytes": data[:64],
        "30 %": data[: len(data) * 3 // 10],
        "60 %": data[: len(data) * 6 // 10],
        "99 %": data[: len(data) * 99 // 100],
        "bit": data[:half] + bytes([data[half] ^ 16]) + data[half + 1 :],
        "zeros": data[:half] + bytes(len(data) - half),
        "html": b"<html>404</html>",
        "elf": b"\x7fELF" + bytes(200),
    }


@case("D01", how="images cut, a bit flipped, zeroed, replaced; PNG and JPEG", passes="check lists each; train exits 3")
@case("D02", how="masks damaged in the same ways", passes="each is listed, none gives wrong labels")
@pytest.mark.parametrize(("kind", "suffix"), [("images", ".png"), ("images", ".jpg"), ("masks", ".png")])
def test_damaged_images_and_masks_are_each_named(root: Path, kind: str, suffix: str) -> None:
    whole = cv2.imread(str(root / kind / "train" / "01.png"), cv2.IMREAD_UNCHANGED)
    names = list(damages(bytes(9)))
    for name in names:
        for folder in ("images", "masks"):
            (root / folder / "train" / f"{name}.png").write_bytes((root / folder / "train" / "00.png").read_bytes())
        (root / kind / "train" / f"{name}.png").unlink()
        path = root / kind / "train" / f"{name}{suffix}"
        write_picture(path, whole)
        path.write_bytes(damages(path.read_bytes())[name])
    code, findings = check(root)
    assert code == 3
    undetectable = {"bit", "zeros"} if suffix == ".jpg" else set()  # a JPEG has no checksums: see D03
    found = {Path(f[kind[:-1]]).stem for f in findings if f["kind"] == ("unreadable" if kind == "images" else "mask")}
    assert set(names) - undetectable <= found <= set(names)
    if kind == "images":
        refused(root, "30 %")


@case("D03", how="a bit of a JPEG flipped after the sums were taken", passes="the page's sha256sum names the file")
def test_changed_pixel_in_jpeg_is_found_by_its_checksum(root: Path) -> None:
    path = root / "images" / "train" / "00.png"
    jpeg = path.with_suffix(".jpg")
    write_picture(jpeg, cv2.imread(str(path)))
    path.unlink()
    page = (ROOT / "segapp" / "docs" / "tasks" / "check-data.md").read_text()
    take, compare = next(block for block in page.split("```sh\n") if "sha256sum" in block).splitlines()[:2]
    subprocess.run(take, shell=True, check=True, cwd=root)
    assert subprocess.run(compare, shell=True, check=False, cwd=root).returncode == 0
    data = bytearray(jpeg.read_bytes())
    data[len(data) // 2] ^= 4
    jpeg.write_bytes(bytes(data))
    done = subprocess.run(compare, shell=True, check=False, cwd=root, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == "./images/train/00.jpg: FAILED\n"


@case("D04", how="400 mutated PNGs and JPEGs through check", passes="the process lives; no mask decodes to other ids")
def test_mutated_images_are_read_or_refused(root: Path) -> None:
    rng = random.Random(0)
    good = {}
    for i in range(200):
        for kind, suffix in (("images", rng.choice((".png", ".jpg"))), ("masks", ".png")):
            pixels = cv2.imread(str(root / kind / "train" / f"{i % 6:02}.png"), cv2.IMREAD_UNCHANGED)
            path = root / kind / "train" / f"m{i:03}{suffix}"
            write_picture(path, pixels)
            good[path] = pixels
            data = bytearray(path.read_bytes())
            for _ in range(rng.randint(1, 8)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            path.write_bytes(data[: rng.randrange(len(data))] if rng.random() < 0.25 else data)
    code, findings = check(root)
    assert code == 3
    named = {f["mask"] for f in findings if f["kind"] in {"mask", "ids", "size"}}
    for path, pixels in good.items():
        if path.parent.parent.name == "masks" and str(path) not in named:
            assert np.array_equal(np.asarray(Image.open(path)), pixels), path


@case("D05", how="ids = classes, 254, 255, one pixel of one mask", passes="exit 3 with file, value and count")
@pytest.mark.parametrize(("value", "count"), [(3, 1), (254, 40), (255, 7)])
def test_ids_outside_the_classes_are_named(root: Path, value: int, count: int) -> None:
    for path in (root / "masks").rglob("*.png"):
        mask = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
        mask[mask == 255] = 250
        if path.name == "04.png" and path.parent.name == "train":
            mask[-1, -count:] = value
        write_picture(path, mask)
    refused(root, "04.png", f"{value} ({count} px)", ignore_index=250)


def with_palette(ids: np.ndarray[Any, Any]) -> Image.Image:
    picture = Image.fromarray(ids, "P")
    picture.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0])
    return picture


MODES: dict[str, tuple[Callable[[np.ndarray[Any, Any]], Image.Image], str, bool]] = {
    "L": (Image.fromarray, ".png", True),
    "P": (with_palette, ".png", True),
    "I;16": (lambda a: Image.fromarray(a.astype(np.uint16)), ".png", True),
    "1": (lambda a: Image.fromarray((a > 0).astype(np.uint8) * 255).convert("1"), ".png", True),
    "RGBA": (lambda a: Image.fromarray(a).convert("RGBA"), ".png", False),
    "LA": (lambda a: Image.fromarray(a).convert("LA"), ".png", False),
    "I;16 x 257": (lambda a: Image.fromarray(a.astype(np.uint16) * 257), ".png", False),
    "JPEG": (Image.fromarray, ".jpg", False),
    "float": (lambda a: Image.fromarray(a.astype(np.float32)), ".tif", True),
}


@case("D06", how="masks as P, I;16, 1-bit, RGB, RGBA, LA, x257, JPEG, float, pages", passes="ids exact, or refused")
@pytest.mark.parametrize("mode", [*MODES, "pages"])
def test_mask_mode_gives_exact_ids_or_is_refused(root: Path, mode: str) -> None:
    ids = np.tile(np.arange(3, dtype=np.uint8), (48, 22))[:, :64]
    old = root / "masks" / "train" / "00.png"
    old.unlink()
    if mode == "pages":
        is_fine = False
        Image.fromarray(ids).save(old.with_suffix(".tif"), save_all=True, append_images=[Image.fromarray(ids + 1)])
    else:
        make, suffix, is_fine = MODES[mode]
        make(ids).save(old.with_suffix(suffix))
    code, findings = check(root)
    if not is_fine:
        assert code == 3
        assert [Path(f["mask"]).stem for f in findings if f["severity"] == "error"] == ["00"]
        return
    assert code == 0, findings
    with contextlib.redirect_stdout(io.StringIO()) as out:
        check_data(config_of(root), as_json=True)
    others = [cv2.imread(str(p), -1) for p in sorted(old.parent.iterdir()) if p.stem != "00"]
    stored = (ids > 0).astype(np.uint8) if mode == "1" else ids
    expected = [int(sum((m == c).sum() for m in [*others, stored])) for c in range(3)]
    assert json.loads(out.getvalue())["splits"]["train"]["pixels"] == expected


@case("D07", how="mask of another size, turned, 1x1, 7x5000, 16k x 16k, 20k x 20k of 12 KB", passes="named; < 2 GB")
def test_bad_image_and_mask_sizes_are_named(root: Path, record_property: Callable[[str, object], None]) -> None:
    masks, images = root / "masks" / "train", root / "images" / "train"
    write_picture(masks / "00.png", np.zeros((20, 20), np.uint8))
    write_picture(masks / "01.png", np.zeros((64, 48), np.uint8))
    write_picture(images / "02.png", np.zeros((1, 1, 3), np.uint8))
    write_picture(masks / "02.png", np.zeros((1, 1), np.uint8))
    write_picture(images / "03.png", np.random.default_rng(0).integers(0, 255, (7, 5000, 3), np.uint8))
    write_picture(masks / "03.png", np.zeros((7, 5000), np.uint8))
    (images / "04.png").write_bytes(png_bomb(16_384, 16_384))
    (masks / "05.png").write_bytes(png_bomb(20_000, 20_000))
    refused(root, "04.png", "too large")
    (root.parent / "data.yaml").write_text(yaml.safe_dump({**TINY, "data": {**TINY["data"], "root": str(root)}}))  # type: ignore[dict-item]
    program, peak = start("check", "--config", "data.yaml", "--json", cwd=root.parent, logs=root.parent), 0.0
    while program.returncode is None:
        peak = max(peak, peak_mib(program.pid))
        time.sleep(0.01)
    findings = json.loads(program.stdout)["findings"]
    assert program.returncode == 3
    by_kind = {kind: {Path(f["image"]).stem for f in findings if f["kind"] == kind} for kind in ("size", "unreadable")}
    assert by_kind == {"size": {"00", "01"}, "unreadable": {"04"}}
    assert [Path(f["mask"]).stem for f in findings if f["kind"] == "mask"] == ["05"]
    assert all("too large" in f["message"] for f in findings if f["kind"] in {"unreadable", "mask"})
    assert "EXIF" in next(f["message"] for f in findings if f["kind"] == "size" and Path(f["image"]).stem == "01")
    record_property("figure", f"check {peak:.0f} MiB")
    assert peak < 2048


@case("D08", how="EXIF orientation 1 to 8, masks upright", passes="fits; what no size tells is said; else it is named")
@pytest.mark.parametrize("orientation", [1, 3, 4, 6])
def test_exif_orientation_is_applied_or_size_named(root: Path, orientation: int) -> None:
    upright = Image.open(root / "images" / "train" / "00.png")
    back = {3: 3, 4: 1, 6: 2}  # the transposition that the viewer undoes
    stored = upright.transpose(Image.Transpose(back[orientation])) if orientation > 1 else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    (root / "images" / "train" / "00.png").unlink()
    stored.save(root / "images" / "train" / "00.jpg", exif=exif, quality=95)
    code, findings = check(root)
    assert (code, [f["kind"] for f in findings]) == (0, ["orientation"] * (orientation in (2, 3, 4)))
    assert all(f["message"].startswith("1 of 6 photos") and f["image"].endswith("00.jpg") for f in findings)
    bare = Image.open(root / "images" / "train" / "00.jpg")
    bare.save(root / "images" / "train" / "00.jpg", exif=b"", quality=95)
    code, findings = check(root)
    assert (code, [f["kind"] for f in findings]) == ((3, ["size"]) if orientation >= 5 else (0, []))


@case("D09", how="grey, LA, RGBA, P with transparency, CMYK, webp images", passes="a run trains on all of them")
def test_run_trains_on_every_image_mode(root: Path) -> None:
    folder = root / "images" / "train"
    forms = [("L", ".png"), ("LA", ".png"), ("RGBA", ".png"), ("P", ".png"), ("CMYK", ".jpg"), ("RGB", ".webp")]
    for i, (mode, suffix) in enumerate(forms):
        image = Image.open(folder / f"{i:02}.png").convert(mode)
        (folder / f"{i:02}.png").unlink()
        image.save(folder / f"{i:02}{suffix}", **({"transparency": 0} if mode == "P" else {}))
        with Image.open(folder / f"{i:02}{suffix}") as stored:
            assert stored.mode == mode
    assert check(root)[0] == 0
    assert steps_of(root) == [2, 2, 2]


POOLED = {"name": "DeepLabV3", "options": {"encoder_depth": 4}}
"""A network that pools an image to one value per channel, and normalises these: torch refuses one image."""


@case("D10", how="5 images, 2 a batch; a BatchNorm after global pooling", passes="the last batch, of one, is left out")
@case("D10", how="one image; one image and a BatchNorm after global pooling", passes="steps of one; exit 2, says why")
def test_last_batch_of_one_is_left_out(root: Path) -> None:
    (root / "images" / "train" / "05.png").unlink()
    assert steps_of(root, model=POOLED) == [2, 2]
    for i in range(1, 5):
        (root / "images" / "train" / f"{i:02}.png").unlink()
    assert steps_of(root) == [1]
    with pytest.raises(ConfigError, match=r"train\.batch_size.*BatchNorm.*at least 2 images"):
        steps_of(root, model=POOLED)


@case("D11", how="unpaired, hidden, Thumbs.db, two of one stem, upper case, NFD", passes="each listed with its count")
def test_unpaired_and_odd_names_are_each_listed(root: Path) -> None:
    images, masks = root / "images" / "train", root / "masks" / "train"
    (images / "00.png").rename(images / "00.PNG")
    (images / "01.png").rename(images / "u\u0308.png")
    (masks / "01.png").rename(masks / "\u00fc.png")
    (images / "02.png").rename(images / "Two.png")
    (masks / "02.png").rename(masks / "two.png")
    (masks / "03.png").unlink()
    write_picture(masks / "alone.png", np.zeros((48, 64), np.uint8))
    for name in ("._a.png", "Thumbs.db", "photo.heic"):
        (images / name).write_bytes(b"x")
    code, findings = check(root)
    assert code == 3
    pairs = [f["message"] for f in findings if f["kind"] == "pairs"]
    assert len(pairs) == 1
    assert pairs[0].startswith("1 of 6 images have no mask")
    said = check(root, as_json=False)[1].splitlines()
    assert {"not used: images/train/photo.heic", "not used: masks/train/alone.png"} <= {*said}
    assert "1 files of other kinds (.heic) not read: convert them, or install pillow-heif" in said
    assert "2 hidden files and folders not read, such as images/train/._a.png" in said
    write_picture(images / "04.jpg", np.zeros((48, 64, 3), np.uint8))
    assert "have the same name" in str(check(root)[1])


NAMES = [b"a b", b"a\nb", b"a\tb", b"-rf", b"$(id)", b"\xff\xfe", b"x" * 250, "\u202egnp".encode()]


@case("D12", how="names: newline, -rf, $(id), markup, escapes, RTL, 255 bytes, not UTF-8", passes="trained; inert")
def test_hostile_file_names_train_and_are_inert(root: Path) -> None:
    names = [*NAMES, *(text.replace("/", "_").encode() for text in (*CONTROL, *MARKUP))]
    for split in ("train", "val"):
        for i, name in enumerate(names):
            for kind in (b"images", b"masks"):
                folder = os.path.join(os.fsencode(root), kind, split.encode())
                with open(os.path.join(folder, b"00.png"), "rb") as file:
                    data = file.read()
                with open(os.path.join(folder, name[:250] + b".png"), "wb") as file:
                    file.write(data if kind == b"masks" else data + bytes([i]))
    (root.parent / "data.yaml").write_text(yaml.safe_dump({**TINY, "data": {**TINY["data"], "root": str(root)}}))  # type: ignore[dict-item]
    words = ["train", "--plain", "--run", "run", "--config", "data.yaml"]
    programs = [segapp("check", "--config", "data.yaml", cwd=root.parent), segapp(*words, cwd=root.parent)]
    assert "counts twice" in programs[0].stdout
    assert programs[1].returncode == 0, programs[1].stderr
    assert is_inert((root.parent / "run" / "events.jsonl").read_text())
    victim = os.path.join(os.fsencode(root), b"masks", b"train", CONTROL[0].encode() + b".png")
    with open(victim, "r+b") as file:
        file.truncate(40)
    programs.append(segapp(*words, "--resume", "train.epochs=2", cwd=root.parent))
    assert programs[2].returncode == 3
    assert r"\x1b[2J" in programs[2].stderr
    assert all(is_inert(done.stdout + done.stderr) and "Traceback" not in done.stderr for done in programs)


@case("D13", how="link loop, link away, broken link, FIFO, socket, device, folder x.png", passes="no hang; named")
@pytest.mark.parametrize("what", ["loop", "broken", "fifo", "device", "folder"])
def test_odd_file_is_named_without_hanging(root: Path, what: str) -> None:
    path = root / "masks" / "train" / "03.png"
    path.unlink()
    if what == "loop":
        path.symlink_to(path.name)
        (root / "images" / "train" / "again").symlink_to(root / "images" / "train")
    elif what == "broken":
        path.symlink_to("nowhere")
    elif what == "fifo":
        os.mkfifo(path)
    elif what == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    code, findings = check(root)
    assert code == 3
    if what == "folder":
        assert [f["kind"] for f in findings if f["severity"] == "error"] == ["pairs"]
    else:
        kind = "link" if what == "device" else "mask"
        assert ["03.png" in str(f) for f in findings if f["kind"] == kind] == [True]
    refused(root, "03.png")


@case(
    "D14",
    how="lists: absolute, .., link out, NUL, CRLF, BOM, comments, 3000 lines",
    passes="refused or read; bounded",
)
def test_list_file_is_read_or_refused(root: Path) -> None:
    lines = [f"images/train/{i:02}.png masks/train/{i:02}.png" for i in range(6)]
    (root / "val.txt").write_text("images/val/00.png masks/val/00.png\n")
    (root / "train.txt").write_bytes(b"\xef\xbb\xbf# pairs\r\n\r\n" + "\r\n".join(lines).encode())
    assert check(root, format="list") == (0, [])
    (root / "out").symlink_to("/etc")
    for bad in ("/etc/hostname masks/train/00.png", "../x.png masks/train/00.png", "out/hostname masks/train/00.png"):
        (root / "train.txt").write_text("\n".join([*lines, bad]))
        refused(root, "data.root", "data.allow_outside_root", format="list")
    (root / "train.txt").write_bytes(b"a\0b c\n")
    refused(root, "not a text file", format="list")
    (root / "train.txt").write_text("\n".join(f"images/train/{i}.png masks/train/{i}.png" for i in range(3000)))
    refused(root, "the file does not exist", "and 2995 more", format="list")
    (root / "train.txt").write_text("\n".join([*lines, "images/val/00.png masks/val/00.png"]))
    code, findings = check(root, format="list")
    assert (code, [f["kind"] for f in findings]) == (3, ["leak"])


@case("D15", how="one mask ignored; a class absent in train or val; all masks ignored", passes="finite; exit 3")
def test_ignored_masks_and_absent_classes_stay_finite(root: Path) -> None:
    write_picture(root / "masks" / "train" / "00.png", np.full((48, 64), 255, np.uint8))
    for path in (root / "masks" / "val").iterdir():
        mask = cv2.imread(str(path), -1)
        write_picture(path, np.where(mask == 2, 255, mask).astype(np.uint8))
    assert len(steps_of(root)) == 3
    [run] = root.parent.glob("run-*")
    [val] = events(run, "val")
    assert val["miou"] is not None
    assert val["iou"][2] is None
    for path in (root / "masks" / "train").iterdir():
        write_picture(path, np.full((48, 64), 255, np.uint8))
    refused(root, "every pixel is ignored")


@case("D16", how="class weights: too few, 0, negative, NaN, inf, an unknown rule", passes="exit 2")
def test_bad_class_weights_exit_2(root: Path) -> None:
    for weights in ([1, 2], [0, 0, 0], [1, -1, 1], [1, float("nan"), 1], [1, float("inf"), 1], "best"):
        with pytest.raises(ConfigError, match="class_weights"):
            train(validate_config({**config_of(root).model_dump(), "loss": {"class_weights": weights}}), root / "run")
