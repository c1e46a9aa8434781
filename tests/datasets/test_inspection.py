"""The inspection of a data set finds what was planted, names it, and finds nothing in sound data."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from segapp.datasets.dataset import SegmentationDataset, compute_class_frequencies
from segapp.datasets.files import ImagePair
from segapp.datasets.inspection import _of_targets, examine, find_copies
from segapp.datasets.layouts.formats import DataLocation, class_scheme, find_pairs
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.datasets.masks import read_masks, summary_of_ids
from segapp.datasets.own_data import OwnData
from segapp.datasets.targets import ClassFrequencies, MaskCounts, Targets, class_frequencies, read_targets
from segapp.errors import DataError
from tests.support.runs import draw_scene, segapp

CLASSES = ["ground", "box", "disc"]
SCHEME = class_scheme("folder", classes=CLASSES)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 4)):
        for kind in ("images", "masks"):
            (tmp_path / kind / split).mkdir(parents=True)
        for i in range(count):
            image, mask = draw_scene(rng, 48, 64)
            mask[:4, -4:] = 2  # every class occurs
            mask[-4:, -4:] = 1
            mask[-4:, 4:8] = 0
            write(tmp_path / "images" / split / f"{i:02}.png", image)
            write(tmp_path / "masks" / split / f"{i:02}.png", mask)
    return tmp_path


def write(path: Path, pixels: np.ndarray[Any, Any]) -> None:
    assert cv2.imwrite(str(path), pixels)


def read(path: Path) -> np.ndarray[Any, Any]:
    return np.asarray(cv2.imread(str(path), cv2.IMREAD_UNCHANGED))


def findings(root: Path, crop_px: tuple[int, int] = (32, 32)) -> list[tuple[str, str, str, str]]:
    splits = {name: find_pairs(DataLocation("folder", str(root)), name) for name in ("train", "val")}
    reports = examine(splits, SCHEME, crop_px=crop_px, threads=2)
    return [(f.severity, f.kind, f.split, f.message) for report in reports for f in report.findings]


def test_sound_data_has_no_findings_and_exact_counts(root: Path) -> None:
    assert findings(root) == []
    report, _ = examine(
        {name: find_pairs(DataLocation("folder", str(root)), name) for name in ("train", "val")},
        SCHEME,
        crop_px=(32, 32),
    )
    masks = np.stack([read(path) for path in sorted((root / "masks" / "train").iterdir())])
    assert report.targets.frequencies.pixels == tuple(int((masks == c).sum()) for c in range(3))
    assert report.targets.frequencies.ignored_px == int((masks == 255).sum())
    present = np.stack([(masks == c).any((1, 2)) for c in range(3)])
    valid_px = (masks != 255).sum((1, 2))
    assert report.targets.frequencies.images == tuple(present.sum(1).tolist())
    assert report.targets.frequencies.pixels_where_present == tuple((present * valid_px).sum(1).tolist())
    assert report.targets.frequencies.classes_of_masks == tuple(tuple(np.flatnonzero(row)) for row in present.T)
    assert (report.targets.frequencies.num_images, report.targets.valid_px) == (8, valid_px.sum())
    assert report.sizes == {(48, 64): 8}
    assert (report.num_pairs, report.num_masks) == (8, 8)


def truncate(root: Path) -> None:
    path = root / "images" / "train" / "00.png"
    path.write_bytes(path.read_bytes()[:-200])


def flip_bits(root: Path) -> None:
    path = root / "images" / "val" / "01.png"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))


def make_empty(root: Path) -> None:
    (root / "masks" / "train" / "02.png").write_bytes(b"")


def black_and_white(root: Path) -> None:
    path = root / "masks" / "train" / "03.png"
    write(path, np.where(read(path) == 1, 254, 0).astype(np.uint8))


def one_class_more(root: Path) -> None:
    path = root / "masks" / "val" / "00.png"
    mask = read(path)
    mask[:2, 10:20] = 3
    write(path, mask)


def colours(root: Path) -> None:
    path = root / "masks" / "train" / "04.png"
    write(path, cv2.cvtColor(read(path), cv2.COLOR_GRAY2BGR))


def other_size(root: Path) -> None:
    path = root / "masks" / "train" / "05.png"
    write(path, read(path)[:40])


def all_ignored(root: Path) -> None:
    write(root / "masks" / "train" / "06.png", np.full((48, 64), 255, np.uint8))


def leak(root: Path) -> None:
    for kind in ("images", "masks"):
        (root / kind / "val" / "09.png").write_bytes((root / kind / "train" / "07.png").read_bytes())


def leak_as_jpeg(root: Path) -> None:
    (root / "images" / "val" / "00.png").unlink()
    scene = cv2.resize(textured(1), (64, 48), interpolation=cv2.INTER_AREA)
    write(root / "images" / "train" / "07.png", scene)
    write(root / "images" / "val" / "00.jpg", cv2.resize(scene, (128, 96), interpolation=cv2.INTER_LINEAR))
    mask = read(root / "masks" / "val" / "00.png")
    write(root / "masks" / "val" / "00.png", cv2.resize(mask, (128, 96), interpolation=cv2.INTER_NEAREST))


def duplicate(root: Path) -> None:
    for kind in ("images", "masks"):
        (root / kind / "train" / "20.png").write_bytes((root / kind / "train" / "07.png").read_bytes())


def not_an_image(root: Path) -> None:
    (root / "images" / "train" / "01.png").write_text("<html>404</html>")


@pytest.mark.parametrize(
    ("plant", "severity", "kind", "split", "words"),
    [
        (truncate, "error", "unreadable", "train", "00.png"),
        (flip_bits, "error", "unreadable", "val", "01.png"),
        (make_empty, "error", "mask", "train", "0 bytes"),
        (black_and_white, "error", "ids", "train", "254 ("),
        (one_class_more, "error", "ids", "val", "3 (20 px)"),
        (colours, "error", "mask", "train", "rgb_masks"),
        (other_size, "error", "size", "train", "64x40"),
        (all_ignored, "warning", "all_ignored", "train", "every pixel is ignored"),
        (leak, "error", "leak", "val", "the same pixels as"),
        (leak_as_jpeg, "warning", "leak", "val", "looks like"),
        (duplicate, "warning", "duplicate", "train", "counts twice"),
        (not_an_image, "error", "unreadable", "train", "01.png"),
    ],
)
def test_one_planted_fault_gives_one_finding(
    root: Path, plant: Any, severity: str, kind: str, split: str, words: str
) -> None:
    plant(root)
    found = findings(root)
    assert [each[:3] for each in found] == [(severity, kind, split)]
    assert words in found[0][3]


def test_missing_class_and_small_images_are_warnings(root: Path) -> None:
    for path in (root / "masks" / "val").iterdir():
        mask = read(path)
        mask[mask == 2] = 0
        write(path, mask)
    assert [(f[0], f[1], f[2]) for f in findings(root, crop_px=(64, 64))] == [
        ("warning", "crop", "train"),
        ("warning", "class", "val"),
    ]


def test_small_images_are_counted_and_the_smallest_named(root: Path) -> None:
    for name, height in (("02.png", 30), ("05.png", 20), ("06.png", 32)):
        for kind in ("images", "masks"):
            path = root / kind / "train" / name
            write(path, read(path)[:height])
    assert (
        "train: 2 of 8 images are smaller than data.crop_px [32, 64] (the smallest [20, 64]): their crops are padded "
        "with ignored pixels" in findings(root, (32, 64))[0][3]
    )
    assert findings(root, (20, 64)) == []
    splits = {"train": find_pairs(DataLocation("folder", str(root)), "train")}
    (report,) = examine(splits, SCHEME, crop_px=(20, 64), resize_px=(64, 63))
    assert "8 of 8 images" in report.findings[0].message
    assert "(the smallest [64, 63], by data.resize_px)" in report.findings[0].message


def test_classes_below_a_ten_thousandth_are_rare() -> None:
    frequencies = ClassFrequencies((0, 9, 10, 99_900), (0, 1, 1, 1), (0, 9, 10, 99_900), 0, 2, ((1, 2), (3,)))
    scheme = class_scheme("folder", classes=["a", "b", "c", "d"])
    targets = Targets("train", frequencies, 100_000, 2, 2)
    messages = [found.message for found in _of_targets(targets, scheme, is_training=True)]
    assert messages == [
        "class without a pixel in the 2 masks of split train: a",
        "train: rare classes, by share of the pixels: b (9.0e-05): consider loss.class_weights",
    ]
    assert len(_of_targets(targets, scheme, is_training=False)) == 1


@pytest.mark.parametrize(("plant", "severity"), [(leak, "error"), (leak_as_jpeg, "warning")])
def test_overlap_names_both_files_and_the_split(root: Path, plant: Any, severity: str) -> None:
    plant(root)
    splits = {name: find_pairs(DataLocation("folder", str(root)), name) for name in ("train", "val")}
    reports = examine(splits, SCHEME, crop_px=(32, 32))
    found = [finding for report in reports for finding in report.findings]
    assert [(each.severity, each.kind, each.split) for each in found] == [(severity, "leak", "val")]
    assert (found[0].pair, found[0].other) != (None, None)
    assert "of split train: scores on val would be too good" in found[0].message


def read_split(pairs: Sequence[ImagePair], px_of_mask: int = 48 * 64, *, is_training: bool = True) -> Targets:
    total_px = len(pairs) * px_of_mask
    return read_targets(pairs, "train", SCHEME, total_px=total_px, is_training=is_training)


def config_of(root: Path, folder: Path) -> None:
    (folder / "data.yaml").write_text(
        f"name: data\ndata: {{format: folder, root: {root}, classes: [{', '.join(CLASSES)}], crop_px: [32, 32]}}\n"
    )


def test_check_command_lists_all_findings_and_exits_3(root: Path, tmp_path: Path) -> None:
    config_of(root, tmp_path)
    sound = segapp("check", "--config", "data.yaml", cwd=tmp_path)
    assert sound.returncode == 0, sound.stderr
    assert "no problems found" in sound.stdout
    leak(root)
    truncate(root)
    found = segapp("check", "--config", "data.yaml", "--json", cwd=tmp_path)
    assert found.returncode == 3
    report = json.loads(found.stdout)
    assert (report["errors"], report["warnings"]) == (2, 0)
    assert {f["kind"] for f in report["findings"]} == {"leak", "unreadable"}
    assert len(report["class_weights"]["enet"]) == 3
    text = segapp("check", "--config", "data.yaml", cwd=tmp_path)
    assert "2 errors" in text.stdout
    assert "Traceback" not in text.stderr


def textured(seed: int) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(seed)
    return np.asarray(
        cv2.resize(rng.integers(0, 255, (40, 52, 3), np.uint8), (416, 320), interpolation=cv2.INTER_CUBIC)
    )


def test_frame_like_a_training_image_is_a_warning(root: Path, tmp_path: Path) -> None:
    scene, mask = textured(0), np.tile(np.repeat([0, 1, 2], 80).astype(np.uint8), (240, 1))
    for split, name, rows in (("train", "patient07_1", slice(0, 240)), ("val", "patient07_2", slice(3, 243))):
        write(root / "images" / split / f"{name}.png", scene[rows, :240])
        write(root / "masks" / split / f"{name}.png", mask)
    code, report = check(root, tmp_path)
    assert code == 0
    (found,) = [f for f in report["findings"] if f["kind"] == "lookalike"]
    assert (found["severity"], found["split"]) == ("warning", "val")
    assert [Path(found[key]).name for key in ("image", "other")] == ["patient07_2.png", "patient07_1.png"]
    assert "patient07_1.png of train: " in found["message"]
    assert "of their structure agree" in found["message"]
    page = segapp("check", "--config", "data.yaml", cwd=tmp_path).stdout
    assert "1 of 5 images (20%) look like a training image: scores on val are too good" in page


def test_patients_in_both_splits_are_a_warning(root: Path, tmp_path: Path) -> None:
    for split, count in (("train", 8), ("val", 4)):
        for kind in ("images", "masks"):
            for i in range(count):
                path = root / kind / split / f"{i:02}.png"
                path.rename(path.with_name(f"patient{i // 2 + (split == 'val')}_{split}{i}.png"))
    code, report = check(root, tmp_path)
    assert code == 0
    (found,) = report["findings"]
    assert (found["severity"], found["kind"], found["split"]) == ("warning", "group", "val")
    assert "2 of the 2 groups of val (patient in the name) are in train too" in found["message"]
    assert "scores on val are too good; divide anew with segapp init --folds 5 --group" in found["message"]


def test_hostile_names_are_inert_in_the_terminal(root: Path, tmp_path: Path) -> None:
    name = b"[red]\x1b]0;owned\x07<script>\xff.png"
    for kind in ("images", "masks"):
        folder = os.fsencode(root / kind / "train")
        os.rename(os.path.join(folder, b"00.png"), os.path.join(folder, name))
    image = os.path.join(os.fsencode(root / "images" / "train"), name)
    with open(image, "r+b") as file:
        file.truncate(300)
    config_of(root, tmp_path)
    found = segapp("check", "--config", "data.yaml", cwd=tmp_path)
    assert found.returncode == 3, found.stderr
    assert "\x1b]" not in found.stdout
    assert "[red]" in found.stdout


def test_unknown_ids_are_counted_over_all_masks_with_cause(root: Path) -> None:
    for path in (root / "masks" / "train").iterdir():
        mask = read(path)
        write(path, np.where(mask == 255, 255, mask + 1).astype(np.uint8))
    report, _ = examine(
        {name: find_pairs(DataLocation("folder", str(root)), name) for name in ("train", "val")},
        SCHEME,
        crop_px=(32, 32),
    )
    unknown = report.unknown_ids
    assert unknown is not None
    masks = np.stack([read(path) for path in sorted((root / "masks" / "train").iterdir())])
    assert unknown.pixels == {3: int((masks == 3).sum())}
    assert (unknown.masks, unknown.num_masks) == ({3: 8}, 8)
    assert "start at 1" in unknown.cause
    count = int((masks == 3).sum())
    assert summary_of_ids(unknown) == f"8 masks hold ids outside the classes: 3 ({count} px). {unknown.cause}"
    pairs = find_pairs(DataLocation("folder", str(root)), "train")
    with pytest.raises(DataError, match=r"so do 7 more of the 8 masks read: The ids seem to start at 1"):
        read_split(pairs)


def test_hashes_are_alike_up_to_5_of_256_bits() -> None:
    """Distinct frames of CamVid differ in 6 bits or more."""

    def of_bits(count: int) -> bytes:
        return np.packbits(np.arange(256) < count).tobytes()

    assert list(find_copies([of_bits(0), of_bits(6)])) == [(0, 1)]
    assert list(find_copies([of_bits(0), of_bits(7)])) == []
    assert list(find_copies([None, of_bits(0), of_bits(256), None, of_bits(5)])) == [(1, 4)]
    hashes = [np.random.default_rng(seed).bytes(32) for seed in range(1030)]
    assert list(find_copies([*hashes, hashes[3], hashes[1027]])) == [(3, 1030), (1027, 1031)]
    assert list(find_copies([])) == []


def test_frequencies_count_the_pixels_of_images_with_a_class() -> None:
    counted = [MaskCounts(np.array(counts), 2, (9, 9)) for counts in ([5, 0, 0], [2, 3, 0])]
    assert class_frequencies(counted, 3, num_images=3) == ClassFrequencies(
        (7, 3, 0), (2, 1, 0), (10, 5, 0), 4, 3, ((0,), (0, 1))
    )
    assert class_frequencies([], 2, num_images=0) == ClassFrequencies((0, 0), (0, 0), (0, 0), 0, 0, ())


class OwnMasks:
    """Own data of two images; the second mask holds three pixels of an id that is no class."""

    def __len__(self) -> int:
        return 2

    def image_and_mask(self, index: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        mask = np.arange(16, dtype=np.int64).reshape(4, 4) % 3
        mask[0, : 3 * index] = 7
        return np.full((4, 4, 3), 100 * index, np.uint8), mask


def test_masks_of_own_data_are_counted_by_train_ids() -> None:
    dataset = SegmentationDataset(OwnData(OwnMasks(), "my:data", "train").pairs([0]), SCHEME)
    assert compute_class_frequencies(dataset).pixels[:3] == (6, 5, 5)


def test_unknown_ids_of_own_data_are_found() -> None:
    pairs = OwnData(OwnMasks(), "my:data", "train").pairs()
    (report,) = examine({"train": pairs}, SCHEME, crop_px=(4, 4))
    assert report.unknown_ids is not None
    assert report.unknown_ids.pixels == {7: 3}
    (found,) = [each for each in report.findings if each.kind == "ids"]
    assert "train[1]" in found.message


def check(root: Path, tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    config_of(root, tmp_path)
    result = segapp("check", "--config", "data.yaml", "--json", *arguments, cwd=tmp_path)
    assert "Traceback" not in result.stderr
    return result.returncode, json.loads(result.stdout)


def test_unpaired_files_are_listed_and_the_rest_checked(root: Path, tmp_path: Path) -> None:
    (root / "masks" / "val" / "02.png").unlink()
    write(root / "masks" / "train" / "99.png", np.zeros((48, 64), np.uint8))
    (root / "images" / "train" / "Thumbs.db").write_bytes(b"x")
    (root / "images" / "train" / "._00.png").write_bytes(b"x")
    away = tmp_path.parent / "away.png"
    away.write_bytes((root / "images" / "train" / "03.png").read_bytes())
    (root / "images" / "train" / "03.png").unlink()
    (root / "images" / "train" / "03.png").symlink_to(away)
    code, report = check(root, tmp_path)
    assert code == 3
    found = [(f["severity"], f["kind"], f["split"]) for f in report["findings"]]
    assert found.count(("error", "pairs", "val")) == 1
    assert ["masks/train/03.png", "masks/train/99.png"] in report["files"]["not_used"]
    assert report["files"]["hidden"] == ["images/train/._00.png", "images/train/Thumbs.db"]
    assert found.count(("error", "link", "train")) == 1
    assert (report["splits"]["train"]["pairs"], report["splits"]["val"]["pairs"]) == (7, 3)


@pytest.mark.parametrize("plant", [black_and_white, one_class_more, all_ignored])
def test_training_refuses_wrong_ids_before_the_first_step(root: Path, plant: Any) -> None:
    plant(root)
    for split in ("train", "val"):
        pairs = find_pairs(DataLocation("folder", str(root)), split)
        if plant is not all_ignored and split == {black_and_white: "train", one_class_more: "val"}[plant]:
            with pytest.raises(DataError, match="ids outside the 3 classes"):
                read_split(pairs)
        else:
            read_split(pairs)


def test_training_refuses_masks_without_any_class(root: Path) -> None:
    for path in (root / "masks" / "train").iterdir():
        all_ignored_mask = np.full((48, 64), 255, np.uint8)
        write(path, all_ignored_mask)
    pairs = find_pairs(DataLocation("folder", str(root)), "train")
    with pytest.raises(DataError, match="every pixel is ignored"):
        read_split(pairs)


def test_training_checks_a_sample_of_a_large_data_set(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = find_pairs(DataLocation("folder", str(root)), "train")
    read_names: list[str] = []

    def count(paths: Sequence[Path], scheme: ClassScheme) -> Any:
        read_names.append(paths[0].name)
        return [read_masks(paths, scheme)]

    monkeypatch.setattr("segapp.datasets.targets.mask_blocks", count)
    assert read_split(pairs, 2**26).num_read == 1
    assert read_names == ["00.png"]
    read_names.clear()
    assert read_split(pairs, 2**24).num_read == 4
    assert read_names == ["00.png", "02.png", "04.png", "06.png"]
