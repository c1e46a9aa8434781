"""The inspection of a data set finds what was planted, names it, and finds nothing in sound data."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from segapp.__main__ import main
from segapp.datasets.dataset import SegmentationDataset, compute_class_frequencies
from segapp.datasets.files import ImagePair
from segapp.datasets.images.pixel_format import PixelFormat
from segapp.datasets.images.windows import compare_ranges
from segapp.datasets.inspection import SplitReport, check_ranges, examine
from segapp.datasets.layouts.formats import DataLocation, class_scheme, find_pairs
from segapp.datasets.masks import summary_of_ids
from segapp.datasets.own_data import OwnData
from segapp.datasets.targets import read_targets
from segapp.errors import DataError
from tests.support.runs import draw_scene

CLASSES = ["ground", "box", "disc"]
SCHEME = class_scheme("folder", classes=CLASSES)


TRAIN = ["03", "04", "07", "10", "11", "19", "20", "32", "41", "55", "56", "90"]
VAL = ["02", "05", "33", "34", "70"]
SIZE = (37, 53)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng, root = np.random.default_rng(0), tmp_path_factory.mktemp("drawn")
    for split, names in (("train", TRAIN), ("val", VAL)):
        for kind in ("images", "masks"):
            (root / kind / split).mkdir(parents=True)
        for name in names:
            image, mask = draw_scene(rng, *SIZE)
            mask[:4, -4:] = 2  # every class occurs
            mask[-4:, -4:] = 1
            mask[-4:, 4:8] = 0
            write(root / "images" / split / f"{name}.png", image)
            write(root / "masks" / split / f"{name}.png", mask)
    return root


@pytest.fixture
def root(drawn: Path, tmp_path: Path) -> Path:
    return shutil.copytree(drawn, tmp_path / "data")


def write(path: Path, pixels: np.ndarray[Any, Any]) -> None:
    assert cv2.imwrite(str(path), pixels)


def read(path: Path) -> np.ndarray[Any, Any]:
    return np.asarray(cv2.imread(str(path), cv2.IMREAD_UNCHANGED))


def examined(root: Path, crop_px: tuple[int, int] = (32, 32), **how: Any) -> list[SplitReport]:
    splits = {name: find_pairs(DataLocation("folder", str(root)), name) for name in ("train", "val")}
    return examine(splits, SCHEME, crop_px=crop_px, threads=2, **how)


def findings(root: Path, crop_px: tuple[int, int] = (32, 32)) -> list[tuple[str, str, str, str]]:
    return [(f.severity, f.kind, f.split, f.message) for report in examined(root, crop_px) for f in report.findings]


def test_sound_data_has_no_findings(root: Path) -> None:
    report, val = examined(root)
    assert (*report.findings, *val.findings) == ()
    assert (report.sizes, report.num_pairs, report.num_masks) == ({SIZE: 12}, 12, 12)
    assert (val.split, val.num_pairs) == ("val", 5)


def textured(seed: int) -> np.ndarray[Any, Any]:
    coarse = np.random.default_rng(seed).integers(0, 255, (40, 52, 3), np.uint8)
    return np.asarray(cv2.resize(coarse, (416, 320), interpolation=cv2.INTER_CUBIC))


def change_mask(root: Path, name: str, change: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> None:
    path = root / "masks" / f"{name}.png"
    write(path, change(read(path)).astype(np.uint8))


def one_class_more(mask: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    mask[:2, 10:20] = 3
    mask[1, 12:15] = 7
    return mask


def copy(root: Path, name: str, other: str) -> None:
    for kind in ("images", "masks"):
        shutil.copy(root / kind / f"{name}.png", root / kind / f"{other}.png")


def copy_as_jpeg(root: Path, name: str, other: str) -> None:
    """Replace a pair by one of the double size of another pair."""
    scene = cv2.resize(textured(1), (53, 37), interpolation=cv2.INTER_AREA)
    write(root / "images" / f"{name}.png", scene)
    (root / "images" / f"{other}.png").unlink()
    write(root / "images" / f"{other}.jpg", cv2.resize(scene, (106, 74), interpolation=cv2.INTER_LINEAR))
    change_mask(root, other, lambda mask: cv2.resize(mask, (106, 74), interpolation=cv2.INTER_NEAREST))


def test_each_of_many_faults_gives_one_finding(root: Path) -> None:
    """Each in a file of its own: severity, kind, image, the other image, and words of the message."""
    os.truncate(root / "images" / "train" / "41.png", 300)
    (root / "images" / "val" / "05.png").write_bytes(b"<html>404</html>")
    (root / "masks" / "train" / "07.png").write_bytes(b"")
    change_mask(root, "train/10", lambda mask: np.where(mask == 1, 254, np.where(mask == 2, 9, 0)))
    change_mask(root, "val/33", one_class_more)
    change_mask(root, "train/11", lambda mask: cv2.cvtColor(mask, cv2.COLOR_GRAY2BGR))
    change_mask(root, "train/19", lambda mask: mask[:30])
    change_mask(root, "train/20", lambda mask: np.full_like(mask, 255))
    copy(root, "train/32", "val/99")
    copy(root, "train/55", "train/57")
    copy_as_jpeg(root, "train/56", "val/70")
    expected = [
        ("error", "mask", "train/07.png", None, "0 bytes"),
        ("error", "ids", "train/10.png", None, "9 ("),
        ("error", "mask", "train/11.png", None, "rgb_masks"),
        ("error", "size", "train/19.png", None, "53x30"),
        ("warning", "all_ignored", "train/20.png", None, "every pixel is ignored"),
        ("error", "unreadable", "train/41.png", None, "truncated"),
        ("warning", "duplicate", "train/57.png", "train/55.png", "counts twice"),
        ("error", "unreadable", "val/05.png", None, "05.png"),
        ("error", "ids", "val/33.png", None, "3 (17 px), 7 (3 px)"),
        ("warning", "lookalike", "val/70.jpg", "train/56.png", "looks like"),
        ("error", "leak", "val/99.png", "train/32.png", "of split train: scores on val would be too good"),
    ]
    found = [finding for report in examined(root) for finding in report.findings]

    def named(pair: ImagePair | None) -> str | None:
        return pair and f"{pair.image.parent.name}/{pair.image.name}"

    by_image = sorted(found, key=lambda each: named(each.pair) or "")
    assert [(f.severity, f.kind, named(f.pair), named(f.other)) for f in by_image] == [row[:4] for row in expected]
    assert [each.num_px for each in found if (each.kind, each.split) == ("ids", "val")] == [17 + 3]
    assert [row for row, each in zip(expected, by_image, strict=True) if row[4] not in each.message] == []
    assert all(each.split == (named(each.pair) or "").partition("/")[0] for each in found)


def test_small_images_are_counted_and_the_smallest_named(root: Path) -> None:
    heights = (("07.png", 30), ("55.png", 20), ("20.png", 32), ("41.png", 31))
    for name, height in heights:
        for kind in ("images", "masks"):
            path = root / kind / "train" / name
            write(path, read(path)[:height])
    assert (
        "train: 3 of 12 images are smaller than data.crop_px [32, 53] (the smallest [20, 53]): their crops are padded "
        "with ignored pixels" in findings(root, (32, 53))[0][3]
    )
    assert findings(root, (31, 53)) == [], "two of twelve are a crop that `init` proposes"
    assert findings(root, (20, 53)) == []
    message = examined(root, (20, 53), resize_px=(64, 52))[0].findings[0].message
    assert "12 of 12 images" in message
    assert "(the smallest [64, 52], by data.resize_px)" in message


@pytest.mark.parametrize(
    ("counts_pixels", "said"),
    [
        (False, "b has 0.009 % of the pixels: a model that never predicts so few is almost right: add data.sampling="),
        (True, "b has 0.009 %, c has 0.01 %, e has 0.99 % of the pixels: a model that never predicts so few is almost"),
    ],
)
def test_classes_with_few_pixels_are_rare(tmp_path: Path, counts_pixels: bool, said: str) -> None:
    """Shares of 9, 10, 990 and 1000 in 100 000 pixels; of a validation split, only what is missing is said."""
    mask = np.full((250, 400), 3, np.uint8)
    mask[0, :9], mask[1, :10] = 1, 2
    mask[10:13, :330], mask[20:24, :250] = 4, 5
    write(tmp_path / "mask.png", mask)
    write(tmp_path / "image.png", textured(2)[:250, :400])
    pair = ImagePair(tmp_path / "image.png", tmp_path / "mask.png", "image")
    scheme = class_scheme("folder", classes=["a", "b", "c", "d", "e", "f"])
    reports = examine({"train": [pair], "val": [pair]}, scheme, crop_px=(32, 32), counts_pixels=counts_pixels)
    train, val = ([f.message for f in report.findings if f.kind == "class"] for report in reports)
    assert train[0] == "class without a pixel in the 1 mask of split train: a"
    assert train[1].startswith(f"train: {said}")
    assert len(train) == 2
    assert val == ["class without a pixel in the 1 mask of split val: a"]


Said = Callable[..., tuple[int, str]]


@pytest.fixture
def said(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Said:
    """Return the exit code and the output of `segapp check` of the data, in this process."""
    data = f"{{format: folder, root: {root}, classes: [{', '.join(CLASSES)}], crop_px: [32, 32]}}"
    (tmp_path / "data.yaml").write_text(f"name: data\ndata: {data}\n")

    def run(*words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(["check", "--config", str(tmp_path / "data.yaml"), *words])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return int(str(ended.value.code)), out or err

    return run


def test_check_command_lists_all_findings_and_exits_3(root: Path, said: Said) -> None:
    code, out = said()
    assert (code, "no problems found" in out) == (0, True)
    copy(root, "train/32", "val/99")
    os.truncate(root / "images" / "train" / "03.png", 300)
    code, out = said("--json")
    report = json.loads(out)
    assert (code, report["errors"], report["warnings"]) == (3, 2, 0)
    assert [f["kind"] for f in report["findings"]] == ["unreadable", "leak"]
    assert len(report["class_weights"]["enet"]) == 3
    code, out = said("data.value_range=[[-40, -3]]")
    assert out.count("100.0% of the values are clipped to [-40, -3] (measured: ") == 6, "3 bands of 2 splits"
    assert "4 errors" in out


def test_range_of_a_rare_class_fits_the_other_values() -> None:
    """120 pixels of 60,000 widened it; 60 bright dots did not."""
    pixels = PixelFormat((1,), "uint16", ((0.0, 60_000.0),))
    background = [number % 200 for number in range(60_000)]
    for number, expected in ((120, []), (60, ["warning"])):
        samples = [np.array([*background, *[59_000] * number])[:, None]]
        assert [severity for severity, _ in compare_ranges(samples, pixels)] == expected


FITTING = {
    (-8, 7): [-9, 7] * 499 + [-8, 7],
    (0.1, 0.7): [0.1, 0.7] * 500,
    (0, 255): [0] * 999 + [90],
    (0, 1e4): [0, 200] * 500,
}


@pytest.mark.parametrize(
    ("values", "ends", "expected"),
    [
        ([9] * 505 + [0] * 485 + [5] * 10, (4, 6), "error: band 9: 99.0% of the values are clipped to [4, 6] (mea"),
        ([9] * 989 + [5] * 11, (4, 6), "warning: band 9: 98.9% of the values are clipped to [4, 6] (measured: 5 to 9)"),
        ([-9] * 500 + [7] * 500, (-8, 7), "warning: band 9: 50.0% of the values are clipped to [-8, 7]"),
        ([math.nan] * 990 + [3] * 9 + [math.inf], (0, 1), "error: band 9: 100.0% of the values are clipped"),
        ([0, 199] * 500, (0, 10_000), "warning: band 9: the values fill under 2% of [0, 10000] (measured: 0 to 199)"),
        ([7] * 1000, (0, 255), "warning: band 9: the values fill under 2% of [0, 255] (measured: 7 to 7)"),
    ],
)
def test_band_that_does_not_fit_its_range_is_named(
    values: list[float], ends: tuple[float, float], expected: str
) -> None:
    """Other bands are silent: 49.9 % clipped, all values at the ends, a bright dot, 2 % filled, only NaN."""
    bands = [*FITTING.values(), [math.nan] * 1000, values]
    pixels = PixelFormat((3, 1, 2, 4, 8, 9), "float32", (*FITTING, (0, 1), ends))
    (found,) = compare_ranges(np.array_split(np.array(bands, np.float32).T, 3), pixels)
    assert ": ".join(found).startswith(expected)


@pytest.mark.parametrize(("side", "names"), [(8, range(0, 160, 10)), (3400, [0]), (1900, [0, 10, 20, 30])])
def test_few_images_are_compared_with_the_range(
    side: int, names: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    read_names: list[str] = []

    def count(path: Path, pixels: PixelFormat, **_: int) -> tuple[np.ndarray[Any, Any], None]:
        read_names.append(path.name)
        return np.broadcast_to(np.uint8(3), (side, side, 3)), None

    monkeypatch.setattr("segapp.datasets.images.windows.read_with_nodata", count)
    pairs = [ImagePair(Path(str(number)), None, "") for number in range(160)]
    pixels = PixelFormat((1, 2, 3), "uint8", ((100.0, 255.0),) * 3)
    (found,) = check_ranges("train", pairs, SCHEME, pixels)
    severity = "error" if len(names) >= 8 else "warning"  # a few may be empty, and the others right
    assert (read_names, found.severity) == ([*map(str, names)], severity)


def test_lists_that_do_not_fit_the_data_are_errors_of_check(said: Said) -> None:
    code, text = said("data.crop_px=[32, 40]", "data.augment=[ScaledCrop, {Transpose: {p: 0.1}}]")
    assert code == 2
    assert "data.augment[1]: Transpose can give images of 40 x 32 px" in text


def test_frame_like_a_training_image_is_counted(root: Path, said: Said) -> None:
    scene, mask = textured(0), np.tile(np.repeat([0, 1, 2], 80).astype(np.uint8), (240, 1))
    for split, name, rows in (("train", "patient07_1", slice(0, 240)), ("val", "patient07_2", slice(3, 243))):
        write(root / "images" / split / f"{name}.png", scene[rows, :240])
        write(root / "masks" / split / f"{name}.png", mask)
    code, out = said()
    assert code == 0
    assert "1 of 6 images (17%) look like a training image: scores on val are too good" in out


def test_patient_in_both_splits_is_a_warning(root: Path, said: Said) -> None:
    for kind in ("images", "masks"):
        for split, names in (("train", TRAIN), ("val", VAL)):
            for i, name in enumerate(names):
                path = root / kind / split / f"{name}.png"
                path.rename(path.with_name(f"patient{i // 2 + 5 * (split == 'val')}_{split}{i}.png"))
    code, out = said("--json")
    (found,) = json.loads(out)["findings"]
    assert (code, found["severity"], found["kind"], found["split"]) == (0, "warning", "group", "val")
    assert "1 of the 3 groups of val (patient in the name) are in train too" in found["message"]


def test_unknown_ids_are_counted_over_all_masks_with_cause(root: Path) -> None:
    """The cause follows from all masks together: some have no 3."""
    counts = {}
    for name in TRAIN:
        change_mask(root, f"train/{name}", lambda mask: np.where(mask == 255, 255, mask + 1))
        if name in ("10", "20"):
            change_mask(root, f"train/{name}", lambda mask: np.where(mask == 3, 1, mask))
        counts[name] = int((read(root / "masks" / "train" / f"{name}.png") == 3).sum())
    unknown = examined(root)[0].unknown_ids
    assert unknown is not None
    total = sum(counts.values())
    assert (unknown.pixels, unknown.masks, unknown.num_masks) == ({3: total}, {3: 10}, 10)
    assert summary_of_ids(unknown) == f"10 masks hold ids outside the classes: 3 ({total} px). {unknown.cause}"
    assert "start at 1" in unknown.cause
    pairs = find_pairs(DataLocation("folder", str(root)), "train")
    with pytest.raises(DataError, match=r"so do 9 more of the 12 masks read: The ids seem to start at 1"):
        read_targets(pairs, "train", SCHEME, total_px=len(pairs) * SIZE[0] * SIZE[1], is_training=True)


class OwnMasks:
    """Own data of two images; the second mask holds three pixels of an id that is no class."""

    def __len__(self) -> int:
        return 2

    def image_and_mask(self, index: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        mask = np.arange(16, dtype=np.int64).reshape(4, 4) % 3
        mask[0, : 3 * index] = 7
        return np.full((4, 4, 3), 100 * index, np.uint8), mask


def test_masks_of_own_data_are_counted_and_their_ids_checked() -> None:
    data = OwnData(OwnMasks(), "my:data", "train")
    assert compute_class_frequencies(SegmentationDataset(data.pairs([0]), SCHEME)).pixels == (6, 5, 5)
    (report,) = examine({"train": data.pairs()}, SCHEME, crop_px=(4, 4))
    assert report.unknown_ids is not None
    assert report.unknown_ids.pixels == {7: 3}
    (found,) = [each for each in report.findings if each.kind == "ids"]
    assert "train[1]" in found.message
