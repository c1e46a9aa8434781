"""`data.valid_area`: every reader of masks ignores what lies outside round fields of view, one of them cut off."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from segapp.assembly.data import build_dataset, build_order
from segapp.assembly.pairs import build_scheme
from segapp.commands.check import check_data
from segapp.config import DataConfig, validate_config
from segapp.datasets.augment import TrainTransform
from segapp.datasets.dataset import SegmentationDataset, compute_class_frequencies
from segapp.datasets.files import ImagePair
from segapp.datasets.images import windows as windows_module
from segapp.datasets.images.pixel_format import RGB8
from segapp.datasets.images.windows import Windows, load_missing
from segapp.datasets.layouts.formats import class_scheme
from segapp.datasets.targets import count_files
from segapp.errors import ConfigError, DataError
from segapp.parallel.distributed import Ranks
from segapp.session.build import _frequencies
from tests.support.drawn_folders import exif_of, save, with_orientation

FIELDS = {"04": (61, 47, 30, 23, 19), "07": (53, 71, 20, 44, 18), "s/20": (45, 59, 30, 12, 15)}
"""Name -> height, width, center and radius in pixels; the last field is cut off at two borders."""
COLORS = np.array([(9, 0, 0), (0, 9, 0), (0, 0, 9), (255, 255, 255)], np.uint8)


def field_of(name: str) -> np.ndarray:
    height, width, row, column, radius = FIELDS[name]
    rows, columns = np.ogrid[:height, :width]
    return np.asarray((rows - row) ** 2 + (columns - column) ** 2 < radius**2)


def draw(root: Path, kind: str, split: str = "train") -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Draws a split with its lists, and returns the image and the target of each name, worked out by hand."""
    found, lines = {}, []
    for number, name in enumerate(FIELDS):
        field, rng = field_of(name), np.random.default_rng(number)
        image = rng.integers(1, 255, (*field.shape, 3), np.uint8) * field[..., None]
        save(root / f"images/{split}/{name}.png", image)
        ids = rng.integers(0, 3, field.shape).astype(np.uint8)
        ids[rng.random(field.shape) < 0.1] = 255
        sets = rng.integers(0, 8, field.shape).astype(np.uint8)
        planes = (sets[..., None] >> np.arange(3) & 1).astype(np.uint8)
        planes[ids == 255] = sets[ids == 255] = 255
        mask = {"ids": ids, "colors": COLORS[np.where(ids == 255, 3, ids)], "bits": sets, "channels": planes}.get(kind)
        for bit, word in enumerate("abc" if mask is None else ()):
            save(root / f"masks/{word}/{split}/{name}.png", planes[..., bit])
        if mask is not None:
            save(root / f"masks/{split}/{name}.png", mask)
        area = [field * np.uint8(1), field * np.uint8(255), np.dstack([field * np.uint8(200)] * 3)][number]
        save(root / f"fov/{split}/{name}_fov.png", area)
        target = ids if kind in ("ids", "colors") else np.where(ids == 255, -1, sets.astype(int))
        found[name] = image, np.where(field, target, 255 if kind in ("ids", "colors") else -1)
        masks = (
            [f"masks/{word}/{split}/{name}.png" for word in "abc"] if mask is None else [f"masks/{split}/{name}.png"]
        )
        lines.append("\t".join((f"images/{split}/{name}.png", *masks, f"{split}/{name}")))
    (root / f"{split}.txt").write_text("\n".join(lines))
    return found


def turn(root: Path, name: str, orientation: int) -> None:
    """Stores a photo as a camera on its side does, with masks that were drawn on the stored pixels."""
    exif = exif_of(orientation)
    for path in root.glob(f"*/**/{name}.png"):
        pixels = with_orientation(np.asarray(Image.open(path)), orientation)
        Image.fromarray(pixels).save(path, **({"exif": exif} if path.is_relative_to(root / "images") else {}))


def data_of(root: Path, kind: str = "ids", **keys: Any) -> DataConfig:
    if kind == "colors":
        keys |= {"rgb_masks": True, "palette": COLORS.tolist()}
    elif kind != "ids":
        keys |= {"multilabel": kind, "ignore_index": 255}
    values = {"format": "folder", "root": str(root), "classes": ["a", "b", "c"], "valid_area": "fov/{split}/*_fov.png"}
    return DataConfig.model_validate({**values, **keys})


def dataset_of(data: DataConfig, **options: Any) -> SegmentationDataset:
    return build_dataset(data, build_scheme(data), "train", **{"is_training": False, "seed": 0, **options})


@pytest.mark.parametrize("kind", ["ids", "colors", "files", "channels", "bits"])
@pytest.mark.parametrize("format", ["folder", "list"])
def test_labels_outside_are_ignored_and_images_are_kept(format: str, kind: str, tmp_path: Path) -> None:
    drawn = draw(tmp_path, kind)
    turn(tmp_path, "04", 6)
    turn(tmp_path, "07", 3)
    keys = {"valid_area": "fov/*_fov.png"} if format == "list" else {}
    keys |= {"mask_dir": "masks/{class}/{split}"} if (format, kind) == ("folder", "files") else {}
    dataset = dataset_of(data_of(tmp_path, kind, format=format, mask_orientation="raw", **keys))
    assert [pair.name.removeprefix("images/train/") for pair in dataset.pairs] == [*drawn]
    assert "1 of 3 photos have the size of their mask or annotation only before" in "".join(dataset.notes)
    for index, (image, target) in enumerate(drawn.values()):
        sample = dataset[(0, index)]
        np.testing.assert_array_equal(sample.image.numpy().transpose(1, 2, 0), image)
        np.testing.assert_array_equal(sample.target.numpy(), target)
    assert dataset.targets is not None
    targets = np.concatenate([target.ravel() for _, target in drawn.values()])
    valid = targets[~np.isin(targets, (-1, 255))]
    sets = 1 << valid if kind in ("ids", "colors") else valid
    assert dataset.targets.frequencies.pixels == tuple(int((sets >> number & 1).sum()) for number in range(3))
    assert dataset.targets.frequencies.ignored_px == targets.size - valid.size
    assert dataset.targets.frequencies.outside_px == sum(int((~field_of(name)).sum()) for name in drawn)


def test_one_file_serves_all_images_of_its_size(tmp_path: Path) -> None:
    draw(tmp_path, "ids")
    for name in ("07", "s/20"):
        for folder in (tmp_path / "images/train", tmp_path / "masks/train"):
            (folder / f"{name}.png").write_bytes((folder / "04.png").read_bytes())
    save(tmp_path / "area.png", field_of("04").T.copy().T * np.uint8(255))
    lines = [f"images/train/{name}.png masks/train/{name}.png\n" for name in FIELDS]
    (tmp_path / "train.txt").write_text("".join(lines))
    for format in ("folder", "list"):
        dataset = dataset_of(data_of(tmp_path, format=format, valid_area="area.png"))
        for index in range(3):
            assert (dataset[(0, index)].target.numpy()[~field_of("04")] == 255).all()
            assert len(np.unique(dataset[(0, index)].target.numpy()[field_of("04")])) == 4


@pytest.mark.parametrize("suffix", ["tif", "png"])
def test_windows_and_blocks_ignore_what_the_whole_does(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with nodata in images and areas, which the readers of TIFFs fill."""
    pytest.importorskip("rasterio", reason="the extra geo is not installed")
    tifffile = pytest.importorskip("tifffile")
    for name, value in {"_BLOCK_ROWS": 17, "_BLOCK_PX": 1}.items():
        monkeypatch.setattr(windows_module, name, value)
    monkeypatch.setattr("segapp.datasets.images.tiff_tags.LARGE_PX", 1)
    has_nodata = suffix == "tif"
    tags = [(42113, "s", 0, "0", True)] if has_nodata else []
    pairs, targets = [], []
    for name, (image, target) in draw(tmp_path, "ids").items():
        stem = name.replace("/", "_")
        own = [tmp_path / f"image{stem}.tif", tmp_path / f"mask{stem}.tif", tmp_path / f"area{stem}.{suffix}"]
        image[:, 20:24] = 0
        tifffile.imwrite(own[0], image, photometric="rgb", tile=(16, 16), extratags=tags)
        tifffile.imwrite(own[1], np.asarray(Image.open(tmp_path / f"masks/train/{name}.png")), tile=(32, 16))
        if has_nodata:
            tifffile.imwrite(own[2], field_of(name) * np.uint8(7), tile=(16, 32), extratags=tags)
        else:
            save(own[2], field_of(name) * np.uint8(7))
        pairs.append(ImagePair(own[0], own[1], name, valid_area=own[2]))
        targets.append(np.where((image == 0).all(2) & has_nodata, 255, target))
    scheme = class_scheme("folder", classes=["a", "b", "c"])
    dataset = SegmentationDataset(pairs, scheme)
    cropped, whole = (SegmentationDataset(pairs, scheme, TrainTransform((16, 24)), seed=3) for _ in range(2))
    monkeypatch.setattr(whole, "_windows", lambda index: None)
    for index, (pair, target) in enumerate(zip(pairs, targets, strict=True)):
        large = dataset.large_batch(index).target
        assert isinstance(large.pixels, Windows)
        np.testing.assert_array_equal(large[..., 5:40, 3:31][0].numpy(), target[5:40, 3:31])
        np.testing.assert_array_equal(dataset.read(index)[1], target)
        counts = count_files(pair, scheme, load_missing(pair.image, RGB8))
        assert counts.pixels.tolist() == [(target == number).sum() for number in range(3)]
        assert (counts.ignored_px, counts.outside_px) == ((target == 255).sum(), (~field_of(pair.name)).sum())
        for epoch in range(4):
            assert torch.equal(cropped[(epoch, index)].target, whole[(epoch, index)].target)


def test_a_changed_area_is_read_again_from_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("segapp.datasets.cache.RESERVE_BYTES", 0)
    drawn = draw(tmp_path / "set", "ids")
    data = data_of(tmp_path / "set", cache="disk")
    plain = data.model_copy(update={"valid_area": None})

    def counted(section: DataConfig) -> tuple[list[int], tuple[int, ...]]:
        dataset = dataset_of(section, ranks=Ranks())
        assert dataset.cache is not None
        for index in (0, 1, 2, 0, 1, 2):
            dataset.read(index)
        assert dataset.cache.state().num_stored == 3
        dataset.targets = None
        valid = [int((dataset.read(index)[1] != 255).sum()) for index in range(3)]
        return valid, _frequencies(dataset, dataset.scheme).pixels

    everywhere, first = counted(plain), counted(data)
    assert first[0] == [int((target != 255).sum()) for _, target in drawn.values()]
    assert everywhere[0] > first[0]
    assert (sum(everywhere[1]), sum(first[1])) == (sum(everywhere[0]), sum(first[0]))
    save(tmp_path / "set/fov/train/07_fov.png", np.eye(53, 71, dtype=np.uint8))
    second = counted(data)
    assert second[0][::2] == first[0][::2]
    assert second[0][1] <= 53 < first[0][1]
    assert sum(second[1]) == sum(second[0])


def test_crops_do_not_aim_outside(tmp_path: Path) -> None:
    draw(tmp_path, "ids")
    for name in FIELDS:
        ids = np.zeros(field_of(name).shape, np.uint8)
        ids[0, -2:] = 2  # in a corner, outside each field
        ids[FIELDS[name][2], FIELDS[name][3]] = 1 if name == "07" else 2 if name == "s/20" else 0
        save(tmp_path / f"masks/train/{name}.png", ids)
    data = data_of(tmp_path, crop_px=(16, 16), scale=(1, 1), sampling="class-balanced", hflip=0, photometric=False)
    dataset = dataset_of(data, is_training=True)
    order = build_order(data, dataset, compute_class_frequencies(dataset), 0)
    keys = [key for epoch in range(4) for key in order(epoch)]
    assert {(key.image, key.aim) for key in keys} == {(0, 0), (1, 0), (2, 0), (1, 1), (2, 2)}
    assert all((dataset[key].target == key.aim).any() for key in keys)


def test_check_says_the_share_outside(tmp_path: Path, tiny: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    drawn = draw(tmp_path, "ids")
    draw(tmp_path, "ids", "val")
    config = validate_config({**tiny, "data": data_of(tmp_path).model_dump(exclude_unset=True)})
    check_data(config, as_json=True)
    report = json.loads(capsys.readouterr().out)
    outside = sum(int((~field_of(name)).sum()) for name in drawn)
    num_px = sum(target.size for _, target in drawn.values())
    ignored = sum(int((target == 255).sum()) for _, target in drawn.values())
    assert [report["splits"][split]["outside_px"] for split in ("train", "val")] == [outside] * 2
    assert report["splits"]["train"]["ignored"] == (
        f"{ignored / num_px:.1%} of the pixels of the 3 masks of split train are ignored: outside data.valid_area "
        f"({outside / num_px:.1%}), value 255 (data.ignore_index)"
    )
    assert not [path for group in report["files"]["not_used"] for path in group if path.startswith("fov")]
    (tmp_path / "images/val/04.png").write_bytes(b"damaged")
    check_data(config, as_json=True)
    found = json.loads(capsys.readouterr().out)["findings"]
    assert [each["kind"] for each in found if "val/04.png" in each["message"]] == ["unreadable"]


Change = Callable[[Path], object]


def masks_beside(area: Path) -> list[Path]:
    return sorted(area.parents[2].glob("masks/train/**/*.png"))


@pytest.mark.parametrize(
    ("change", "keys", "message"),
    [
        (lambda area: area.unlink(), {}, r"07_fov\.png does not exist: .* data\.valid_area"),
        (lambda area: save(area, np.ones((53, 70), np.uint8)), {}, "07_fov.png: .* 70x53 pixels"),
        (
            lambda area: (turn(area.parents[2], "07", 6), save(area, np.ones((71, 53), np.uint8))),
            {},
            "07_fov.png: .* 53x71 pixels.* has 71x53 .*EXIF orientation",
        ),
        (
            lambda area: [save(each, np.zeros(np.shape(Image.open(each)), np.uint8)) for each in masks_beside(area)],
            {},
            r"only one class has pixels, a \(value 0\), and a model",
        ),
        (lambda area: save(area, np.zeros((53, 71), np.uint8)), {}, "07_fov.png: .* every pixel is 0"),
        (lambda area: Image.open(area).save(area, "JPEG"), {}, "07_fov.png: .* JPEG"),
        (lambda area: None, {"format": "list", "valid_area": "*"}, "/train/04 does not exist"),
        (
            lambda area: None,
            {"format": "list", "valid_area": None},
            r"train\.txt: images/train/04\.png.* is not an image and a mask: write both on",
        ),
        (
            lambda area: (area.parents[2] / "train.txt").write_text("images/train/04.png masks/train/04.png"),
            {"format": "list"},
            r"train\.txt: .* is not an image and a mask: write both, and then what \* in data.valid_area",
        ),
        (lambda area: None, {"valid_area": "../fov.png"}, "fov.png is outside data.root"),
    ],
)
def test_an_area_that_cannot_be_used_is_named(
    change: Change, keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    draw(tmp_path, "ids")
    change(tmp_path / "fov/train/07_fov.png")
    with pytest.raises(DataError, match=message):
        dataset_of(data_of(tmp_path, **keys), is_training=True)


def test_formats_with_published_masks_refuse_an_area(tiny: dict[str, Any]) -> None:
    data = {"format": "voc", "root": "voc", "valid_area": "fov/*.png"}
    with pytest.raises(ConfigError, match=r"data\.valid_area: is for the formats folder and list, not voc"):
        validate_config({**tiny, "data": data})
